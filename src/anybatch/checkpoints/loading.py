"""Load and export checkpoints: check every byte before reading; fall back to an older one if one is damaged."""

import json
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anybatch.checkpoints.files import (
    LOCAL_DISK,
    STATE,
    folder_name,
    has_digests,
    list_checkpoints,
    open_explained,
    open_intact,
    parsed,
    read_digests,
    step_in_name,
    tensor_files,
    write_file,
)
from anybatch.checkpoints.saving import file_errors_explained
from anybatch.checkpoints.structure import read_stored, unpack
from anybatch.checkpoints.tensors import STANDARD_DTYPES, StoredTensor, file_layout, stored_tensors
from anybatch.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MissingCheckpointError,
    NotACheckpointError,
    UserError,
)


@dataclass(frozen=True, slots=True)
class SkippedCheckpoint:
    """A checkpoint that was skipped in loading.

    Attributes:
        path: its folder.
        reason: why it cannot be used.
    """

    path: Path
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class LoadedCheckpoint:
    """The newest intact checkpoint.

    Attributes:
        path: its folder.
        state: the saved state.
        skipped: damaged newer checkpoints, newest first. Report them to the user: the steps since `path` are lost.
    """

    path: Path
    state: dict[Any, Any]
    skipped: tuple[SkippedCheckpoint, ...]


def load(path: str | os.PathLike[str]) -> dict[Any, Any]:
    """Return the state saved as the checkpoint `path`, bit for bit, with its tensors on the CPU.

    Tensors that shared memory share it again; all are contiguous, and none requires a gradient. A state saved in parts
    by several processes is complete again.

    Raises:
        MissingCheckpointError: the path does not exist.
        NotACheckpointError: the path is not a checkpoint.
        TruncatedCheckpointError: a file is shorter than written.
        DamagedCheckpointError: a file is missing or different.
        NewerCheckpointError: a newer version of the format, or a dtype that this version of torch lacks.
        CheckpointAccessError: no permission to read it.
    """
    path = Path(path)
    verify(path)
    with stored_state(path) as state, _format_errors_explained(path):
        loaded: dict[Any, Any] = read_stored(state)
    return loaded


def verify(path: Path, *, process: int = 0, num_processes: int = 1) -> None:
    """Compare the files of a checkpoint with their digests; several processes may divide the tensor files."""
    digests = read_digests(path)
    names = tensor_files(digests)
    checked = names[process::num_processes] if len(names) > 1 else names
    for name in (STATE, *checked):
        with open_intact(path / name, digests[name]) as file:
            if name == STATE:
                _check_step_name(path, file.read())


def _check_step_name(path: Path, state: bytes) -> None:
    """Refuse a checkpoint whose name has another step, because it could be mistaken for the newest checkpoint."""
    named, saved = step_in_name(path), (parsed(state) or {}).get("step")
    if named is not None and saved is not None and named != saved:
        message = (
            f"{path} holds the checkpoint of step {saved}: the folder was renamed or copied. Rename it to "
            f"{folder_name(saved)} or a name without a step, or remove it."
        )
        raise DamagedCheckpointError(message, path=path)


@contextmanager
def stored_state(path: Path) -> Iterator[dict[Any, Any]]:
    """Open a verified checkpoint; yields its state with `StoredTensor`s, readable inside the `with`."""
    names = tensor_files(read_digests(path))
    with ExitStack() as stack:
        with _format_errors_explained(path):
            with open_explained(path / STATE) as file:
                body = json.loads(file.read())
            files = [stack.enter_context(open_explained(path / name)) for name in names]
            state: dict[Any, Any] = unpack(body["state"], stored_tensors(files))
        yield state


@contextmanager
def _format_errors_explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:  # not damage, because the digests match
        message = (
            f"{path} is intact, but this version of anybatch cannot read it ({error!r}). Load an older checkpoint."
        )
        raise DamagedCheckpointError(message, path=path) from error


def load_latest(folder: str | os.PathLike[str]) -> LoadedCheckpoint:
    """Load the newest intact checkpoint in `folder`, and list the damaged checkpoints that were skipped.

    An intact checkpoint that cannot be used raises an error: the user can fix permissions or the version of anybatch,
    but falling back to an older checkpoint would lose steps.

    Raises:
        MissingCheckpointError: the folder has no checkpoints.
        DamagedCheckpointError: no checkpoint is intact.
        NewerCheckpointError: the newest has a newer version of the format.
        CheckpointAccessError: no permission to read the newest.
    """
    folder = Path(folder)
    return newest_intact(folder, list_checkpoints(folder), load)


def candidates(path: Path) -> tuple[Path, ...]:
    """Return `path` if it is a checkpoint, or else the checkpoints in this folder."""
    return (path,) if has_digests(path) else list_checkpoints(path)


def newest_intact(
    folder: Path, paths: Sequence[Path], read: Callable[[Path], dict[Any, Any] | None]
) -> LoadedCheckpoint:
    """Return the newest readable checkpoint of `paths` (newest last), and the damaged checkpoints that were skipped.

    `folder` is the folder of the checkpoints, or the only checkpoint, whose error is raised. `read` verifies a
    checkpoint, and may return its state.
    """
    if paths == (folder,):
        return LoadedCheckpoint(folder, read(folder) or {}, ())
    skipped: list[SkippedCheckpoint] = []
    # An unreadable or newer checkpoint raises: falling back silently would lose steps.
    for path in reversed(paths):
        try:
            return LoadedCheckpoint(path, read(path) or {}, tuple(skipped))
        except (DamagedCheckpointError, MissingCheckpointError, NotACheckpointError) as error:
            skipped.append(SkippedCheckpoint(path, str(error)))
    if not skipped:
        message = f"no checkpoint in {folder}. Start the run from the beginning, or give another folder."
        raise MissingCheckpointError(message, path=folder)
    reasons = "\n".join(f"- {each.reason}" for each in skipped)
    message = f"none of the {len(skipped)} checkpoints in {folder} is intact:\n{reasons}\n"
    message += "Put a copy of one of them back, or start the run from the beginning in another folder."
    raise DamagedCheckpointError(message, path=folder)


def export(checkpoint: str | os.PathLike[str], file: str | os.PathLike[str], *, averaged: bool = False) -> Path:
    """Write a model's weights and buffers to one safetensors file, under their names in the model.

    Read it with `model.load_state_dict(safetensors.torch.load_file(file))`, with `safetensors.torch.load_model`, or in
    transformers as `model.safetensors`. Tensors are copied one by one, so the model need not fit into memory.

    A tensor with several names, such as tied embeddings, is written under its first name, and the file's metadata maps
    its other names to the first, as in `safetensors.torch.save_model`. `load_model` and transformers tie them again;
    `load_state_dict` needs `strict=False`. With several named models, weights are prefixed, as in `generator.0.weight`;
    a checkpoint saved with `only_trainable=True` lacks frozen weights.

    Args:
        checkpoint: an engine's checkpoint, or a folder of checkpoints, whose newest intact one is exported.
        file: file to write; must not exist, but its folder must.
        averaged: export the averaged weights, see `Engine(average_decay=...)`.

    Raises:
        UserError: `file` exists, or safetensors lacks a dtype.
        CheckpointError: no checkpoint is intact, it is not an engine's, it has no averaged weights, or `file` could not
            be written (and does not exist).

    Warns:
        UserWarning: the model has state that is not a tensor (`get_extra_state`), which is skipped.
    """
    path, target = Path(checkpoint), Path(file)
    if target.exists():
        message = f"{target} exists already. Give another name, or remove it first."
        raise UserError(message)
    path = newest_intact(path, candidates(path), verify).path
    with stored_state(path) as state:
        if "model" not in state or "average" not in state:
            message = f"{path} was not saved by an engine: it holds {', '.join(map(str, state))}. Use load(path)."
            raise CheckpointError(message, path=path)
        if averaged and state["average"] is None:
            message = f"{path} has no averaged weights. Build the engine with average_decay=0.999, say."
            raise CheckpointError(message, path=path)
        tensors, tied = _by_first_name(state["model"], state["average"] if averaged else {}, path)
        laid_out = file_layout(tensors, metadata=tied)
        draft = target.with_name(target.name + ".saving")
        with file_errors_explained(target, laid_out.num_bytes, LOCAL_DISK):
            draft.unlink(missing_ok=True)
            try:
                write_file(draft, laid_out.blocks(), disk=LOCAL_DISK)
                LOCAL_DISK.rename(draft, target)
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
            LOCAL_DISK.sync_folder(target.parent)
    return target


def _by_first_name(
    model: dict[str, object], average: dict[str, StoredTensor], path: Path
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors of a model by their first names, and a dict from each other name to the first name."""
    names: dict[object, list[str]] = defaultdict(list)
    for name, value in model.items():
        if isinstance(value, StoredTensor):
            names[value.key].append(name)
    left_out = [name for name, value in model.items() if not isinstance(value, StoredTensor)]
    if left_out:
        message = f"the export skips {', '.join(left_out)} of {path}, because only tensors can be exported."
        warnings.warn(message, stacklevel=3)
    tensors: dict[str, StoredTensor] = {}
    for first, *others in names.values():
        # The averaged weights contain a tied weight only once, under one of its names.
        tensor = next((average[name] for name in (first, *others) if name in average), model[first])
        assert isinstance(tensor, StoredTensor)
        if tensor.dtype not in STANDARD_DTYPES:
            message = f"{first!r} is of {tensor.dtype}, which safetensors lacks. Convert the model before saving."
            raise UserError(message)
        tensors[first] = tensor
    return tensors, {other: first for first, *others in names.values() for other in others}
