"""File systems that fail, crash or lose power at a chosen operation. Run as a module, a process that is killed."""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import NoReturn

import torch

from anybatch.checkpoints import save
from anybatch.checkpoints.files import LOCAL_DISK, Disk


class Crash(BaseException):
    """Simulates the end of the process; never handled."""


def crash() -> NoReturn:
    """Raise Crash."""
    raise Crash


def failing(error_number: int) -> Callable[[], NoReturn]:
    """Return a fault that raises an error of the operating system."""

    def fail() -> NoReturn:
        raise OSError(error_number, os.strerror(error_number))

    return fail


def kill() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


class FaultyDisk(Disk):
    """The local file system with one faulty operation: a write fails half-way, others before they begin.

    After a crash no operation works, as for a dead process. Syncing is only recorded, which saves time.

    Args:
        fault_at: number of the operation, from 0; None for none.
        fault: the fault.
        lasting: whether all later operations of the same name fail too.
    """

    def __init__(
        self, fault_at: int | None = None, fault: Callable[[], object] = crash, *, lasting: bool = False
    ) -> None:
        self.operations: list[str] = []
        self._fault_at = fault_at
        self._fault = fault
        self._lasting = lasting
        self._dead = False
        self._unsynced_files: set[Path] = set()
        self._unsynced_names: set[Path] = set()
        self._unsynced_renames: list[tuple[Path, Path]] = []

    @property
    def num_unsynced_renames(self) -> int:
        """Number of renames that a power failure may undo."""
        return len(self._unsynced_renames)

    def make_folder(self, path: Path, /) -> None:
        self._begin("make_folder")
        LOCAL_DISK.make_folder(path)
        self._unsynced_names.add(path)

    def create(self, path: Path, /) -> FileIO:
        self._begin("create")
        self._unsynced_names.add(path)
        return LOCAL_DISK.create(path)

    def write(self, file: FileIO, block: bytes | memoryview, /) -> None:
        self._unsynced_files.add(Path(str(file.name)))
        try:
            self._begin("write")
        except BaseException:
            LOCAL_DISK.write(file, block[: len(block) // 2])
            raise
        LOCAL_DISK.write(file, block)

    def sync(self, file: FileIO, /) -> None:
        self._begin("sync")
        self._unsynced_files.discard(Path(str(file.name)))

    def sync_folder(self, path: Path, /) -> None:
        self._begin("sync_folder")
        self._unsynced_names = {name for name in self._unsynced_names if name.parent != path}
        self._unsynced_renames = [pair for pair in self._unsynced_renames if pair[0].parent != path]

    def rename(self, path: Path, new: Path, /) -> None:
        self._begin("rename")
        LOCAL_DISK.rename(path, new)
        self._unsynced_renames.append((path, new))
        self._follow(path, new)
        self._unsynced_names.discard(new)  # its name is as safe as the rename

    def remove_file(self, path: Path, /) -> None:
        self._begin("remove_file")
        LOCAL_DISK.remove_file(path)

    def remove_folder(self, path: Path, /) -> None:
        self._begin("remove_folder")
        LOCAL_DISK.remove_folder(path)

    def free_bytes(self, path: Path, /) -> int:
        return LOCAL_DISK.free_bytes(path)

    def lose_power(self, num_renames: int) -> None:
        """Lose everything unsynced: bytes, names, and the last `num_renames` renames."""
        for _ in range(num_renames):
            old, new = self._unsynced_renames.pop()
            if new.exists():
                new.rename(old)
                self._follow(new, old)
        for path in self._unsynced_files:
            if path.exists():
                path.write_bytes(b"")
        for path in sorted(self._unsynced_names, reverse=True):
            if path.is_file():
                path.unlink()
            elif path.is_dir():
                shutil.rmtree(path)

    def _begin(self, name: str) -> None:
        if self._dead:
            raise Crash
        number = len(self.operations)
        self.operations.append(name)
        due = number == self._fault_at
        if self._lasting and self._fault_at is not None and number > self._fault_at:
            due = name == self.operations[self._fault_at]
        if due:
            self._dead = self._fault is crash
            self._fault()

    def _follow(self, path: Path, new: Path) -> None:
        """Update the names of files in a renamed folder."""
        for paths in (self._unsynced_files, self._unsynced_names):
            for old in [each for each in paths if each == path or path in each.parents]:
                paths.discard(old)
                paths.add(new / old.relative_to(path))


def state_of(number: int) -> dict[str, object]:
    """Return a small state that differs for every number."""
    values = torch.arange(6, dtype=torch.float32) + number
    return {"number": number, "optimizer": {0: {"average": values, "step": torch.tensor(float(number))}}}


def save_and_be_killed(folder: Path, step: int, fault_at: int) -> int:
    """Save state 2 in a separate process, replacing or removing the old state; return its exit status."""
    child = os.fork()
    if not child:
        save(folder, step, state_of(2), keep_last=1, disk=FaultyDisk(fault_at, kill))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    for place in sorted(Path(sys.argv[1]).iterdir(), key=lambda place: int(place.name)):
        assert save_and_be_killed(place, int(sys.argv[2]), int(place.name)) == -signal.SIGKILL
