"""Saves a checkpoint: each process writes its parts under a temporary name, and the first one renames the folder.

```text
all      SharedSave(...)           packs the state of the process; refuses values that cannot be restored
first    begin()                   creates the folder, under a temporary name
all      assign(...)               with several processes: keeps the parts that this process writes
all      write()                   writes this process's file, and returns its digest
first    finish(digests)           writes state and digests, renames the folder atomically, removes old checkpoints
```

If one process saves, its parts are whole tensors. If several save, the caller synchronises them between calls.
"""

import errno
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from anybatch.checkpoints.files import (
    DIGESTS,
    LOCAL_DISK,
    SAVING,
    STATE,
    Digest,
    Disk,
    access_error,
    digests_bytes,
    folder_name,
    json_bytes,
    list_checkpoints,
    make_folders,
    part_name,
    prune,
    put_in_place,
    remove,
    step_of,
    tidy,
    write_file,
)
from anybatch.checkpoints.structure import TensorPart, pack
from anybatch.checkpoints.tensors import TensorFile, file_layout
from anybatch.core.geometry import checked_int
from anybatch.errors import CheckpointError, DiskFullError

_DISK_FULL: Final = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint, synced to survive a power failure.

    Attributes:
        path: its folder.
        num_bytes: total length of its files.
        warnings: messages for the user: failed removals, and checkpoints that `load_latest` would prefer.
    """

    path: Path
    num_bytes: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LocalPart:
    """The part of a tensor in one process's memory; `whole` is the shape of the whole tensor."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    num_bytes: int


def save(
    folder: str | os.PathLike[str],
    step: int,
    state: Mapping[Any, Any],
    *,
    keep_last: int = 2,
    disk: Disk = LOCAL_DISK,
) -> SavedCheckpoint:
    """Save `state` as the checkpoint of `step`, and keep only the `keep_last` newest checkpoints up to that step.

    If the process is killed at any moment, `load_latest` finds the earlier checkpoints, with or without this one.
    `torch.save(state, path)` may leave half a file, without a digest.

    Only one process at a time may save into a folder. Tensors must not change while they are written.

    Args:
        folder: folder of this run's checkpoints; created if it is missing.
        step: number of steps that led to this state. A checkpoint of the same step is replaced.
        state: nested dicts (also `OrderedDict` and `Counter`) with text or integer keys, lists, tuples, None, booleans,
            integers, floats, text, bytes, and dense tensors of any dtype on any device.
        keep_last: number of checkpoints to keep, including this one. Later steps are kept and not counted.
        disk: the file system; tests pass a `Disk` that fails.

    Raises:
        UserError: `state` cannot be restored unchanged, or `step` or `keep_last` is not a count; nothing was written.
        DiskFullError: the disk is full. Here and below, earlier checkpoints are unchanged.
        CheckpointAccessError: no permission to write to `folder`.
        CheckpointError: another failure of the file system.
    """
    saving = SharedSave(folder, step, state, keep_last=keep_last, disk=disk)
    try:
        saving.begin()
        return saving.finish([saving.write()])
    except BaseException:
        saving.abandon()
        raise


@final
class SharedSave:
    """One process's share in saving a checkpoint; arguments as for `save`.

    With several processes, `folder` is on a shared file system. In `state`, a `TensorPart` is this process's part of a
    tensor, and a tensor without data (device "meta") belongs to other processes. Process 0, the first, writes names and
    other values.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        step: int,
        state: Mapping[Any, Any],
        *,
        process: int = 0,
        num_processes: int = 1,
        keep_last: int = 2,
        disk: Disk = LOCAL_DISK,
    ) -> None:
        checked_int("step", step, minimum=0)
        checked_int("keep_last", keep_last)
        packed = pack(state, has_others=num_processes > 1)
        self._state = json_bytes({"step": step, "state": packed.structure})
        self._parts: Mapping[str, TensorPart] = packed.parts
        self._process, self._num_processes = process, num_processes
        self._step, self._keep_last, self._disk = step, keep_last, disk
        self.path = Path(folder) / folder_name(step)
        self._partial = self.path.with_name(self.path.name + SAVING)
        self._warnings: list[str] = []

    @property
    def local_parts(self) -> list[LocalPart]:
        """The parts of this process, for `assign` on all processes; empty parts only if the tensor is empty."""
        return [
            LocalPart(name, local.offset, tuple(local.part.shape), local.shape, local.part.nbytes)
            for name, local in self._parts.items()
            if local.part.numel() or not math.prod(local.shape)
        ]

    def begin(self) -> None:
        """Make the folder that all processes write into."""
        folder = self.path.parent
        with file_errors_explained(self.path, self._num_bytes(), self._disk):
            make_folders(folder, disk=self._disk)
            # Cleaned up first, because half-written folders of a killed run use space.
            self._warnings += tidy(folder, disk=self._disk)
            self._disk.make_folder(self._partial)
            self._disk.sync_folder(folder)

    def assign(self, parts_by_process: Sequence[Sequence[LocalPart]]) -> None:
        """Keep only the parts that this process writes, given the parts of all processes."""
        self._parts = {name: self._parts[name] for name in assign_parts(parts_by_process)[self._process]}

    def stage(self) -> None:
        """Copy the parts that this process writes to host memory, so that training can change the tensors."""
        self._parts = {
            name: TensorPart(local.part.detach().to("cpu", copy=True), local.shape, local.offset)
            for name, local in self._parts.items()
        }

    def write(self) -> Digest:
        """Write this process's file, and return its digest."""
        with file_errors_explained(self.path, self._num_bytes(), self._disk):
            if not self._partial.is_dir():
                message = (
                    f"{self.path} could not be saved: process {self._process} cannot see the folder that the first "
                    "process has made. Use a folder that all processes share, or let the first process save whole "
                    "tensors: engine.save(folder, sharded=False)."
                )
                raise CheckpointError(message, path=self.path)
            path = self._partial / part_name(self._process, self._num_processes)
            return write_file(path, self._tensor_file().blocks(), disk=self._disk)

    def finish(self, digests: Sequence[Digest]) -> SavedCheckpoint:
        """Write the state and the digests, rename the folder, and remove the oldest checkpoints."""
        parts = {part_name(process, len(digests)): digest for process, digest in enumerate(digests)}
        num_bytes = len(self._state) + sum(part.num_bytes for part in parts.values())
        with file_errors_explained(self.path, num_bytes, self._disk):
            state = write_file(self._partial / STATE, [self._state], disk=self._disk)
            digests_file = digests_bytes({STATE: state, **parts})
            # Written last, so that its presence proves that all other files are complete.
            write_file(self._partial / DIGESTS, [digests_file], disk=self._disk)
            self._disk.sync_folder(self._partial)
            put_in_place(self._partial, self.path, disk=self._disk)
        folder = self.path.parent
        # Old checkpoints are removed last, so that an earlier failure keeps them.
        failures = prune(folder, step=self._step, keep_last=self._keep_last, disk=self._disk)
        later = [
            f"{path} is from a later step than {self._step}, so load_latest would load it. Remove it if you do not "
            "want to resume from it."
            for path in list_checkpoints(folder)
            if step_of(path) > self._step
        ]
        return SavedCheckpoint(self.path, num_bytes + len(digests_file), (*self._warnings, *failures, *later))

    def abandon(self) -> None:
        """Remove the written files if possible; the next save removes remaining files."""
        with suppress(OSError):
            remove(self._partial, disk=self._disk)

    def _tensor_file(self) -> TensorFile:
        offsets = {name: local.offset for name, local in self._parts.items()} if self._num_processes > 1 else None
        return file_layout({name: local.part for name, local in self._parts.items()}, offsets=offsets)

    def _num_bytes(self) -> int:
        """Return the bytes of a checkpoint with the parts of this process."""
        return len(self._state) + self._tensor_file().num_bytes


def assign_parts(parts_by_process: Sequence[Sequence[LocalPart]]) -> list[list[str]]:
    """Return the names of the parts that each process writes, equal on all processes; refuse gaps and overlaps.

    Parts are assigned from the largest to the smallest: of the processes that have a part, the one with the fewest
    assigned bytes writes it.
    """
    holders: dict[LocalPart, list[int]] = defaultdict(list)
    for process, parts in enumerate(parts_by_process):
        for part in parts:
            holders[part].append(process)
    num_elements, starts = Counter[str](), Counter((part.name, part.offset) for part in holders)
    for part in holders:
        num_elements[part.name] += math.prod(part.shape)
    for part in holders:
        if num_elements[part.name] != math.prod(part.whole) or starts[part.name, part.offset] > 1:
            message = (
                f"the parts of {part.name!r} on all processes do not make up the whole tensor, so it cannot be saved "
                "in parts. Save whole tensors: engine.save(folder, sharded=False)."
            )
            raise CheckpointError(message)
    assigned: list[list[str]] = [[] for _ in parts_by_process]
    num_bytes = [0] * len(parts_by_process)
    for part in sorted(holders, key=lambda part: (-part.num_bytes, part.name, part.offset)):
        process = min(holders[part], key=lambda process: (num_bytes[process], process))
        assigned[process].append(part.name)
        num_bytes[process] += part.num_bytes
    return assigned


@contextmanager
def file_errors_explained(target: Path, num_bytes: int, disk: Disk) -> Iterator[None]:
    """Convert an error of the file system to a checkpoint error."""
    try:
        yield
    except PermissionError as error:
        raise access_error(target.parent, error) from error
    except OSError as error:
        if error.errno not in _DISK_FULL:
            message = f"{target} could not be saved: {error}. Earlier checkpoints are unchanged."
            raise CheckpointError(message, path=target) from error
        free_bytes = disk.free_bytes(target.parent)
        message = (
            f"{target} could not be saved: it needs {num_bytes} bytes, and {free_bytes} are free ({error.strerror}). "
            "Earlier checkpoints are unchanged. Free some space, or lower keep_last."
        )
        raise DiskFullError(message, path=target, needed_bytes=num_bytes, free_bytes=free_bytes) from error
