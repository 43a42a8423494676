"""Save: write all of a checkpoint beside the others, give it its name in one operation, then remove the oldest."""

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
from anybatch.checkpoints.tensors import TensorFile, lay_out
from anybatch.core.whole_numbers import checked_int
from anybatch.errors import CheckpointError, DiskFullError

# As long as any other, so that the length of the digests is known before the files are written.
_ANY_SHA256 = "0" * 64
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that is complete and would survive a power failure.

    Attributes:
        path: its folder.
        num_bytes: length of its files.
        warnings: sentences to show the user: what could not be removed, and what `load_latest` would prefer to it.
    """

    path: Path
    num_bytes: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _CheckpointContent:
    """The bytes and tensors of a checkpoint that is about to be written."""

    state: bytes
    tensors: TensorFile

    @property
    def num_bytes(self) -> int:
        """Bytes of the files, all three."""
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

    Killed at any moment, `load_latest` finds either the checkpoints that were there before or this one with them.
    The plain call that this stands in for, `torch.save(state, path)`, leaves half a file then, and no digest.

    One process at a time saves into a folder. Tensors must not change while they are written.

    Args:
        folder: of this run's checkpoints; made if it is missing.
        step: steps made before this state, from 0 on. A checkpoint of the same step is replaced.
        state: nested dicts (also `OrderedDict` and `Counter`) with keys of text or integers, lists, tuples, None,
            booleans, integers, floats, text, bytes, and dense tensors of any dtype on any device.
        keep_last: how many checkpoints to leave, this one included. Those of later steps are left and not counted.
        disk: the file system, for tests that let it fail.

    Raises:
        UserError: something in `state` cannot be restored as it is, or `step` or `keep_last` is not a count; nothing
            has been written.
        DiskFullError: there is no room. This and all below: the checkpoints that were there are as they were.
        CheckpointAccessError: `folder` may not be written.
        CheckpointError: the file system failed in another way.
    """
    checked_int("step", step, least=0)
    checked_int("keep_last", keep_last)
    folder = Path(folder)
    target = folder / folder_name(step)
    # Refusals come from here, before the first file is made.
    packed = pack(state)
    body = {"step": step, "state": packed.structure}
    content = _CheckpointContent(json_bytes(body), lay_out(packed.tensors))
    with file_errors_explained(target, content.num_bytes, disk):
        make_folders(folder, disk=disk)
        # Before writing, because half-written folders of a killed run take room that this checkpoint may need.
        warnings = tidy(folder, disk=disk)
        partial = target.with_name(target.name + SAVING)
        try:
            _write(partial, content, disk)
            put_in_place(partial, target, disk=disk)
        except BaseException:
            # The first error is the one to raise: a disk that is full may refuse the removal, too.
            with suppress(OSError):
                remove(partial, disk=disk)
            raise
    return finish_saving(target, content.num_bytes, warnings, keep_last=keep_last, disk=disk)


def finish_saving(
    target: Path, num_bytes: int, warnings: Sequence[str], *, keep_last: int, disk: Disk
) -> SavedCheckpoint:
    """Remove the oldest checkpoints, now that a new one is in place, and return what is to be said about it.

    Only now: a failure before this leaves all older ones.

    Args:
        target: the new one.
        num_bytes: of its files.
        warnings: what was to be said before.
        keep_last: how many checkpoints to leave.
        disk: the file system.
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
    # Last, so that its presence says that the other two are complete.
    write_file(partial / DIGESTS, [digests_bytes(digests)], disk=disk)
    disk.sync_folder(partial)


@contextmanager
def file_errors_explained(target: Path, num_bytes: int, disk: Disk) -> Iterator[None]:
    """Say what an error of the file system means for the checkpoint."""
    try:
        yield
    except PermissionError as error:
        raise access_error(target.parent, error) from error
    except OSError as error:
        if error.errno not in _FULL:
            message = f"{target} could not be saved: {error}. The checkpoints that were there are as they were."
            raise CheckpointError(message, path=target) from error
        free_bytes = disk.free_bytes(target.parent)
        message = (
            f"{target} could not be saved: it needs {num_bytes} bytes, and {free_bytes} are free "
            f"({error.strerror}). The checkpoints that were there are as they were. Make room, or lower keep_last."
        )
        raise DiskFullError(message, path=target, needed_bytes=num_bytes, free_bytes=free_bytes) from error
