"""The folder of a run: its files, its lock, and the settings.

```text
runs/digits-20300131-120000/
├── run.json             settings, and the step they apply from; read to resume
├── run.lock             host and process id of the newest session, which holds a lock on it
├── events.jsonl         rank 0's log; events-rank-1.jsonl is rank 1's
├── losses.png           drawn at the end of a session, with matplotlib; also losses.svg
├── tensorboard/         with TensorBoard
└── checkpoints/
    └── step-00000120
```
"""

import dataclasses
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from anybatch.core.run_config import RunConfig
from anybatch.errors import CheckpointError, MissingCheckpointError, UserError

_VERSION = 1
Origin = Mapping[str, str | int]
NO_ORIGIN: Origin = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Stretch:
    """Part of a run with the same settings; `schedule_steps` is the length of its schedule, None if unknown."""

    first_step: int
    settings: RunConfig
    schedule_steps: int | None


@dataclass(frozen=True, slots=True)
class RunHeader:
    """The request that started a run, and the settings of each stretch.

    `origin` has the recipe and the number of ranks of the command; `stretches` are sorted by first step.
    `largest_micro_batch_size` is the limit that was set because larger micro-batches ran out of memory in a step that
    could not be repeated; None without a limit.
    """

    origin: Origin
    stretches: tuple[Stretch, ...]
    largest_micro_batch_size: int | None = None

    def before(self, step: int) -> Stretch:
        """Return the stretch before a checkpoint of `step`; a stretch that begins at `step` starts after it."""
        earlier = [stretch for stretch in self.stretches if stretch.first_step < step]
        return earlier[-1] if earlier else self.stretches[0]

    def with_change(self, change: Stretch) -> "RunHeader":
        """Return this header with `change` as last stretch, which replaces all stretches that do not begin earlier."""
        earlier = [each for each in self.stretches if each.first_step < change.first_step]
        return dataclasses.replace(self, stretches=(*earlier, change))


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    @property
    def header(self) -> Path:
        """The file with the settings of the run."""
        return self.path / "run.json"

    @property
    def lock(self) -> Path:
        """The file that the session locks."""
        return self.path / "run.lock"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def plots(self) -> tuple[Path, Path]:
        """The pictures of the losses."""
        return self.path / "losses.png", self.path / "losses.svg"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's files."""
        return self.path / "tensorboard"

    def log(self, rank: int) -> Path:
        """Return the log of a rank."""
        return self.path / (f"events-rank-{rank}.jsonl" if rank else "events.jsonl")

    def check_unused(self) -> None:
        """Raise `UserError` if the folder has content, so that a new run cannot mix with it."""
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return
        kind = "a folder that is not empty" if self.path.is_dir() else "a file"
        hint = (
            "To resume the run in it, add --resume; for a new run choose another folder."
            if self.header.exists()
            else "Choose another folder."
        )
        message = f"{self.path} is {kind}. {hint}"
        raise UserError(message, code="folder_in_use")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against training by other processes of this host.

        The system releases the lock when the process ends, even if it is killed. A lock held on another host is
        ignored, because a shared file system may keep it for minutes after that host failed. Windows has no such lock.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with self.lock.open("a+", encoding="utf-8") as file:
            holder = _lock(file)
            if holder is not None:
                message = (
                    f"process {holder} is training in {self.path}. Wait until it ends, or stop it, before you "
                    "resume this run; for a new run choose another folder."
                )
                raise UserError(message, code="folder_in_use")
            yield

    def read(self) -> RunHeader:
        """Return the header of the run."""
        try:
            text = self.header.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            message = (
                f"there is no run to resume in {self.path}: {self.header.name} is missing. "
                "Pass the folder of a run, or start a new one without --resume."
            )
            raise MissingCheckpointError(message, path=self.header, code="no_run") from None
        try:
            found = json.loads(text)
            stretches = [
                Stretch(each["first_step"], RunConfig.from_json(each["settings"]), each["schedule_steps"])
                for each in found["stretches"]
            ]
            # With a default, because older runs do not have this field.
            largest = found.get("largest_micro_batch_size")
            return RunHeader(found["origin"], (stretches[0], *stretches[1:]), largest)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            message = (
                f"{self.header} was not written by this version of anybatch ({error!r}). "
                "Start a new run, or use the version that started this one."
            )
            raise CheckpointError(message, path=self.header, code="not_a_header") from error

    def write(self, header: RunHeader) -> None:
        """Write the header atomically."""
        content: dict[str, Any] = {
            "version": _VERSION,
            "origin": dict(header.origin),
            "stretches": [
                {
                    "first_step": stretch.first_step,
                    "settings": stretch.settings.as_json(),
                    "schedule_steps": stretch.schedule_steps,
                }
                for stretch in header.stretches
            ],
            "largest_micro_batch_size": header.largest_micro_batch_size,
        }
        partial = self.header.with_name(f"{self.header.name}.saving")
        self.path.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2) + "\n")
            file.flush()
            # Flushed before the rename, so that a power failure cannot leave an empty file with the new name.
            os.fsync(file.fileno())
        # A rename is atomic on one file system: a killed run leaves the old header or the new one.
        partial.replace(self.header)

    def clear(self, rank: int) -> None:
        """Remove the files that a rank wrote before the first step, and the folder if it is then empty."""
        # Errors are ignored: a folder with files of the user stays.
        with suppress(OSError):
            self.log(rank).unlink(missing_ok=True)
            if rank == 0:
                self.header.unlink(missing_ok=True)
                self.lock.unlink(missing_ok=True)
                shutil.rmtree(self.tensorboard, ignore_errors=True)
            self.path.rmdir()


def _lock(file: TextIO) -> str | None:
    """Lock a file and write this process's id to it; if another process has the lock, return that process's id."""
    if sys.platform == "win32":
        return None
    import fcntl  # noqa: PLC0415 (missing on Windows)

    host = platform.node()
    try:
        # A POSIX lock: data workers that outlive a killed rank do not inherit it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows either
        file.seek(0)
        holder_host, _, holder = file.read().partition(" ")
        return holder if holder_host == host else None
    except OSError:  # a file system without locks
        return None
    file.truncate(0)
    file.write(f"{host} {os.getpid()}")
    file.flush()
    return None
