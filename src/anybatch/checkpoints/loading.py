"""Load: check every byte of a checkpoint, then restore it; fall back to an older one if the newest is damaged."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anybatch.checkpoints.files import STATE, TENSORS, intact, read_digests
from anybatch.checkpoints.folder import list_checkpoints
from anybatch.checkpoints.structure import unpack
from anybatch.checkpoints.tensors import read_tensors
from anybatch.errors import DamagedCheckpointError, MissingCheckpointError, NotACheckpointError


@dataclass(frozen=True, slots=True)
class SkippedCheckpoint:
    """A checkpoint that was passed over.

    Attributes:
        path: its folder.
        reason: why it cannot be used, in sentences.
    """

    path: Path
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class LoadedCheckpoint:
    """The newest intact checkpoint.

    Attributes:
        path: its folder.
        state: what was saved.
        skipped: newer ones that are damaged, newest first. The user should hear of them: the steps between are lost.
    """

    path: Path
    state: dict[Any, Any]
    skipped: tuple[SkippedCheckpoint, ...]


def load(path: str | os.PathLike[str]) -> dict[Any, Any]:
    """Return the state that was saved as the checkpoint `path`, bit for bit, with its tensors on the CPU.

    Tensors that were one memory are one tensor again; all are contiguous, and none requires a gradient.

    Raises:
        MissingCheckpointError: nothing is there.
        NotACheckpointError: something else is there.
        TruncatedCheckpointError: a file is shorter than what was written.
        DamagedCheckpointError: a file is missing or not what was written.
        NewerCheckpointError: a newer version of the format, or a dtype that this version of torch lacks.
        CheckpointAccessError: it may not be read.
    """
    path = Path(path)
    digests = read_digests(path)
    try:
        with intact(path / STATE, digests[STATE]) as file:
            body = json.loads(file.read())
        with intact(path / TENSORS, digests[TENSORS]) as file:
            tensors = read_tensors(file)
        state: dict[Any, Any] = unpack(body["state"], tensors)
    except (LookupError, TypeError, ValueError) as error:  # its digests hold, so it was written like this
        message = f"{path} is intact, but not what this version writes ({error!r}). Load an older checkpoint."
        raise DamagedCheckpointError(message, path=path) from error
    return state


def load_latest(folder: str | os.PathLike[str]) -> LoadedCheckpoint:
    """Load the newest intact checkpoint in `folder`, and say which damaged ones were passed over.

    A checkpoint that is intact but cannot be used here is not passed over: what can be put right, such as its
    permissions or the version of anybatch, must not cost the steps since the one before.

    Raises:
        MissingCheckpointError: there is none at all.
        DamagedCheckpointError: there are some, and none is intact.
        NewerCheckpointError: the newest is of a newer version of the format.
        CheckpointAccessError: the newest may not be read.
    """
    skipped: list[SkippedCheckpoint] = []
    # A checkpoint that may not be read, or is newer, raises: to fall back silently would lose steps for no reason.
    for path in reversed(list_checkpoints(folder)):
        try:
            return LoadedCheckpoint(path, load(path), tuple(skipped))
        except (DamagedCheckpointError, MissingCheckpointError, NotACheckpointError) as error:
            skipped.append(SkippedCheckpoint(path, str(error)))
    if not skipped:
        message = f"there is no checkpoint in {folder}. Start the run from the beginning, or give another folder."
        raise MissingCheckpointError(message, path=Path(folder))
    reasons = "\n".join(f"- {each.reason}" for each in skipped)
    message = f"none of the {len(skipped)} checkpoints in {folder} is intact:\n{reasons}\n"
    message += "Put a copy of one of them back, or start the run from the beginning in another folder."
    raise DamagedCheckpointError(message, path=Path(folder))
