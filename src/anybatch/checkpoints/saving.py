"""Saves a checkpoint: write it under a temporary name, rename it atomically, then remove the oldest."""

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from anybatch.checkpoints.disk import LOCAL_DISK, Disk
from anybatch.checkpoints.files import (
    DIGESTS,
    STATE,
    TENSORS,
    Digest,
    access_error,
    digests_bytes,
    json_bytes,
    write_file,
)
from anybatch.checkpoints.folder import (
    SAVING,
    folder_name,
    list_checkpoints,
    make_folders,
    prune,
    put_in_place,
    remove,
    step_of,
    tidy,
)
from anybatch.checkpoints.structure import pack
from anybatch.checkpoints.tensors import TensorFile, file_layout
from anybatch.core.whole_numbers import checked_int
from anybatch.errors import CheckpointError, DiskFullError

# As long as a real digest, so that the length of the digests is known before the files are written.
_ANY_SHA256 = "0" * 64
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}


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


@dataclass(frozen=True, slots=True, eq=False)
class _CheckpointContent:
    """The bytes and tensors of a checkpoint to write."""

    state: bytes
    tensors: TensorFile

    @property
    def num_bytes(self) -> int:
        """Bytes of all three files."""
        lengths = {STATE: len(self.state), TENSORS: self.tensors.num_bytes}
        digests = digests_bytes({name: Digest(length, _ANY_SHA256) for name, length in lengths.items()})
        return sum(lengths.values()) + len(digests)


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
    checked_int("step", step, least=0)
    checked_int("keep_last", keep_last)
    folder = Path(folder)
    target = folder / folder_name(step)
    # Invalid values are refused here, before the first file is created.
    packed = pack(state)
    body = {"step": step, "state": packed.structure}
    content = _CheckpointContent(json_bytes(body), file_layout(packed.tensors))
    with file_errors_explained(target, content.num_bytes, disk):
        make_folders(folder, disk=disk)
        # Cleaned up first, because half-written folders of a killed run use space.
        warnings = tidy(folder, disk=disk)
        partial = target.with_name(target.name + SAVING)
        try:
            _write(partial, content, disk)
            put_in_place(partial, target, disk=disk)
        except BaseException:
            # The first error is raised: a full disk may also refuse the removal.
            with suppress(OSError):
                remove(partial, disk=disk)
            raise
    return finish_saving(target, content.num_bytes, warnings, keep_last=keep_last, disk=disk)


def finish_saving(
    target: Path, num_bytes: int, warnings: Sequence[str], *, keep_last: int, disk: Disk
) -> SavedCheckpoint:
    """Remove the oldest checkpoints, now that a new one is in place, and return the result with warnings.

    Old ones are removed last, so that an earlier failure keeps them.
    """
    folder, step = target.parent, step_of(target)
    failures = prune(folder, step=step, keep_last=keep_last, disk=disk)
    later = [
        f"{path} is of a later step than {step}, and load_latest prefers it. Remove it unless it is to be resumed."
        for path in list_checkpoints(folder)
        if step_of(path) > step
    ]
    return SavedCheckpoint(target, num_bytes, (*warnings, *failures, *later))


def _write(partial: Path, content: _CheckpointContent, disk: Disk) -> None:
    disk.make_folder(partial)
    digests = {
        STATE: write_file(partial / STATE, [content.state], disk=disk),
        TENSORS: write_file(partial / TENSORS, content.tensors.blocks(), disk=disk),
    }
    # Written last, so that its presence proves that the other two are complete.
    write_file(partial / DIGESTS, [digests_bytes(digests)], disk=disk)
    disk.sync_folder(partial)


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
