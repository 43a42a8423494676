"""Export: the weights of a checkpoint as one safetensors file, readable without anybatch."""

import os
import warnings
from collections import defaultdict
from pathlib import Path

from anybatch.checkpoints.disk import LOCAL_DISK
from anybatch.checkpoints.files import write_file
from anybatch.checkpoints.loading import candidates, newest_intact, stored_state, verify
from anybatch.checkpoints.saving import file_errors_explained
from anybatch.checkpoints.tensors import STANDARD_DTYPES, StoredTensor, file_layout
from anybatch.errors import CheckpointError, UserError


def export(checkpoint: str | os.PathLike[str], file: str | os.PathLike[str], *, averaged: bool = False) -> Path:
    """Write a model's weights and buffers to one safetensors file, under their names in the model.

    Read it with `model.load_state_dict(safetensors.torch.load_file(file))`, with `safetensors.torch.load_model`, or in
    transformers as `model.safetensors`. Tensors are copied one by one, also from sharded checkpoints, so the model need
    not fit into memory.

    A tensor with several names, such as tied embeddings, is written under its first name, and the file's metadata maps
    the others to it, as in `safetensors.torch.save_model`: `load_model` and transformers tie them again, and
    `load_state_dict` needs `strict=False`. With several named models, weights are prefixed, as in `generator.0.weight`;
    a checkpoint saved with `only_trainable=True` lacks frozen weights.

    Args:
        checkpoint: an engine's checkpoint, or a folder of them, of which the newest intact one is used.
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
        tensors, tied = _named_once(state["model"], state["average"] if averaged else {}, path)
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


def _named_once(
    model: dict[str, object], average: dict[str, StoredTensor], path: Path
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return each tensor of a model under its first name, and its other names."""
    names: dict[object, list[str]] = defaultdict(list)
    for name, value in model.items():
        if isinstance(value, StoredTensor):
            names[value.key].append(name)
    left_out = [name for name, value in model.items() if not isinstance(value, StoredTensor)]
    if left_out:
        message = f"{', '.join(left_out)} of {path}: no tensors, and left out of the export."
        warnings.warn(message, stacklevel=3)
    tensors: dict[str, StoredTensor] = {}
    for first, *others in names.values():
        # The average has a tied weight under one of its names.
        found = next((average[name] for name in (first, *others) if name in average), model[first])
        assert isinstance(found, StoredTensor)
        if found.dtype not in STANDARD_DTYPES:
            message = f"{first!r} is of {found.dtype}, which safetensors lacks. Convert the model before saving."
            raise UserError(message)
        tensors[first] = found
    return tensors, {other: first for first, *others in names.values() for other in others}
