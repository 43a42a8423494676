"""Saves a checkpoint: each process writes its parts under a temporary name, and the first one renames the folder.

```text
all      SharedSave(...)           packs the state of the process; refuses values that cannot be restored
first    begin()                   creates the folder, under a temporary name
all      deal(...)                 chooses the process that writes a part; with several processes only
all      write()                   writes this process's file, and returns its digest
first    finish(digests)           writes the rest, renames the folder atomically, removes the oldest checkpoints
```

A whole checkpoint consists of the parts of one process. With several processes, the caller synchronises them between
these calls. Background threads use files in the folder instead: `leave` writes a digest or an error, which the first
process reads with `left`.
"""

import errno
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
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

# As long as a real digest, so that the length of the digests is known before the files are written.
_ANY_SHA256 = "0" * 64
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}
Place = tuple[str, tuple[int, ...]]
"""The name of a tensor, and where a part of it begins."""


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint, synced to survive a power failure.

    Attributes:
        path: its folder.
        num_bytes: length of its files.
        warnings: messages for the user: failed removals, and checkpoints that `load_latest` would prefer.
    """

    path: Path
    num_bytes: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A part of a tensor that a process has; `whole` is the shape of the tensor."""

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
    """Save `state` as the checkpoint of `step`, and keep the `keep_last` newest up to it.

    If the process is killed at any moment, `load_latest` finds the earlier checkpoints, with or without this one.
    `torch.save(state, path)` may leave half a file, without a digest.

    Only one process at a time may save into a folder. Tensors must not change while they are written.

    Args:
        folder: folder of this run's checkpoints; created if it is missing.
        step: steps made before this state, from 0. A checkpoint of the same step is replaced.
        state: nested dicts (also `OrderedDict` and `Counter`) with text or integer keys, lists, tuples, None, booleans,
            integers, floats, text, bytes, and dense tensors of any dtype on any device.
        keep_last: number of checkpoints to keep, including this one. Later steps are kept and not counted.
        disk: the file system; tests pass one that fails.

    Raises:
        UserError: a value in `state` cannot be restored unchanged, or `step` or `keep_last` is not a count; nothing was
            written.
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

    With several processes, `folder` is on a shared file system. In `state`, a `TensorPart` replaces a tensor of which
    this process has a part, and a tensor without data one of other processes. Names and other values are written by
    process 0, the first one.
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
        checked_int("step", step, least=0)
        checked_int("keep_last", keep_last)
        packed = pack(state, has_others=num_processes > 1)
        self._state = json_bytes({"step": step, "state": packed.structure})
        self._parts: Mapping[str, TensorPart] = packed.parts
        self._process, self._num_processes = process, num_processes
        self._keep_last, self._disk = keep_last, disk
        self._target = Path(folder) / folder_name(step)
        self._partial = self._target.with_name(self._target.name + SAVING)
        self._warnings: list[str] = []

    @property
    def path(self) -> Path:
        """The final folder of the checkpoint."""
        return self._target

    @property
    def held(self) -> list[HeldPart]:
        """The parts of this process, to exchange with the others; empty ones only of an empty tensor."""
        return [
            HeldPart(name, held.offset, tuple(held.part.shape), held.shape, held.part.nbytes)
            for name, held in self._parts.items()
            if held.part.numel() or not math.prod(held.shape)
        ]

    def begin(self) -> None:
        """Make the folder that all processes write into."""
        folder = self._target.parent
        with file_errors_explained(self._target, self._num_bytes(), self._disk):
            make_folders(folder, disk=self._disk)
            # Cleaned up first, because half-written folders of a killed run use space.
            self._warnings += tidy(folder, disk=self._disk)
            self._disk.make_folder(self._partial)
            self._disk.sync_folder(folder)

    def deal(self, told: Sequence[Sequence[HeldPart]]) -> None:
        """Keep the parts that this process writes, given the parts of all processes, and free the rest."""
        dealt = assign_parts(told)[self._process]
        self._parts = {name: self._parts[name] for name, _ in dealt}

    def stage(self) -> None:
        """Copy the parts that this process writes to host memory, so that training may continue."""
        self._parts = {
            name: TensorPart(held.part.detach().to("cpu", copy=True), held.shape, held.offset)
            for name, held in self._parts.items()
        }

    def write(self) -> Digest:
        """Write this process's file, and return its digest."""
        with file_errors_explained(self._target, self._num_bytes(), self._disk):
            if not self._partial.is_dir():
                message = (
                    f"{self._target} could not be saved: process {self._process} does not see the folder that the "
                    "first process has made. Save into a folder that all processes share, or whole tensors by the "
                    "first process alone: engine.save(folder, sharded=False)."
                )
                raise CheckpointError(message, path=self._target)
            path = self._partial / part_name(self._process, self._num_processes)
            return write_file(path, self._tensor_file().blocks(), disk=self._disk)

    def leave(self, digest: Digest | None, reason: str = "") -> None:
        """Report success or failure to the first process, by a small file next to the written one."""
        note = self._note(self._process)
        draft = note.with_suffix(".draft")
        body = {"digest": None if digest is None else asdict(digest), "reason": reason}
        write_file(draft, [json_bytes(body)], disk=self._disk)
        # Renamed, so that nobody reads a partial file.
        self._disk.rename(draft, note)

    def left(self) -> list[Digest] | None:
        """Return the digests of all processes and remove their reports; None while some are missing."""
        notes = [self._note(process) for process in range(self._num_processes)]
        if not all(note.exists() for note in notes):
            return None
        found = [json.loads(note.read_bytes()) for note in notes]
        for process, body in enumerate(found):
            if body["digest"] is None:
                message = f"{self._target} could not be saved: process {process} failed: {body['reason']}"
                raise CheckpointError(message, path=self._target)
        for note in notes:
            self._disk.remove_file(note)
        return [Digest(**body["digest"]) for body in found]

    def finish(self, digests: Sequence[Digest]) -> SavedCheckpoint:
        """Write the rest of the state, rename the folder, and remove the oldest checkpoints."""
        parts = {part_name(process, len(digests)): digest for process, digest in enumerate(digests)}
        num_bytes = _num_bytes_of({STATE: len(self._state), **{name: part.num_bytes for name, part in parts.items()}})
        with file_errors_explained(self._target, num_bytes, self._disk):
            state = write_file(self._partial / STATE, [self._state], disk=self._disk)
            # Written last, so that its presence proves that the others are complete.
            write_file(self._partial / DIGESTS, [digests_bytes({STATE: state, **parts})], disk=self._disk)
            self._disk.sync_folder(self._partial)
            put_in_place(self._partial, self._target, disk=self._disk)
        folder, step = self._target.parent, step_of(self._target)
        # Old ones are removed last, so that an earlier failure keeps them.
        failures = prune(folder, step=step, keep_last=self._keep_last, disk=self._disk)
        later = [
            f"{path} is of a later step than {step}, and load_latest prefers it. Remove it unless it is to be resumed."
            for path in list_checkpoints(folder)
            if step_of(path) > step
        ]
        return SavedCheckpoint(self._target, num_bytes, (*self._warnings, *failures, *later))

    def abandon(self) -> None:
        """Remove the written files if possible; the next save removes the rest."""
        with suppress(OSError):
            remove(self._partial, disk=self._disk)

    def _note(self, process: int) -> Path:
        return self._partial / f"{part_name(process, self._num_processes)}.written"

    def _tensor_file(self) -> TensorFile:
        offsets = {name: held.offset for name, held in self._parts.items()} if self._num_processes > 1 else None
        return file_layout({name: held.part for name, held in self._parts.items()}, offsets=offsets)

    def _num_bytes(self) -> int:
        """Return the bytes of a checkpoint with the parts of this process."""
        return _num_bytes_of({STATE: len(self._state), part_name(0, 1): self._tensor_file().num_bytes})


def _num_bytes_of(lengths: Mapping[str, int]) -> int:
    """Return the bytes of files of these lengths, and of their digests."""
    digests = digests_bytes({name: Digest(length, _ANY_SHA256) for name, length in lengths.items()})
    return sum(lengths.values()) + len(digests)


def assign_parts(told: Sequence[Sequence[HeldPart]]) -> list[list[Place]]:
    """Return the parts that each process writes; equal on all processes.

    What several processes have (replicas) is dealt to the one with the fewest bytes so far, the largest part first.

    Raises:
        CheckpointError: the parts of a tensor leave gaps or overlap.
    """
    holders: dict[Place, list[int]] = defaultdict(list)
    known: dict[Place, HeldPart] = {}
    for process, held in enumerate(told):
        for part in held:
            place = part.name, part.offset
            holders[place].append(process)
            _refuse_unless_whole(part.name, known.setdefault(place, part).shape == part.shape)
    numbers: dict[str, int] = defaultdict(int)
    for part in known.values():
        numbers[part.name] += math.prod(part.shape)
    for part in known.values():
        _refuse_unless_whole(part.name, numbers[part.name] == math.prod(part.whole))
    dealt: list[list[Place]] = [[] for _ in told]
    num_bytes = [0] * len(told)
    for place in sorted(known, key=lambda place: (-known[place].num_bytes, place)):
        process = min(holders[place], key=lambda process: (num_bytes[process], process))
        dealt[process].append(place)
        num_bytes[process] += known[place].num_bytes
    return dealt


def _refuse_unless_whole(name: str, holds: bool) -> None:  # noqa: FBT001 (a condition, as in assert)
    if not holds:
        message = (
            f"the parts of {name!r} that processes hold do not make up the whole tensor: its layout is not one that "
            "can be saved in parts. Save whole tensors: engine.save(folder, sharded=False)."
        )
        raise CheckpointError(message)


@contextmanager
def file_errors_explained(target: Path, num_bytes: int, disk: Disk) -> Iterator[None]:
    """Convert an error of the file system to a checkpoint error."""
    try:
        yield
    except PermissionError as error:
        raise access_error(target.parent, error) from error
    except OSError as error:
        if error.errno not in _FULL:
            message = f"{target} could not be saved: {error}. Earlier checkpoints are unchanged."
            raise CheckpointError(message, path=target) from error
        free_bytes = disk.free_bytes(target.parent)
        message = (
            f"{target} could not be saved: it needs {num_bytes} bytes, and {free_bytes} are free "
            f"({error.strerror}). Earlier checkpoints are unchanged. Make room, or lower keep_last."
        )
        raise DiskFullError(message, path=target, needed_bytes=num_bytes, free_bytes=free_bytes) from error
