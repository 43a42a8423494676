"""Activation checkpointing of a model's repeated blocks."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, Literal

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from anybatch.core.tensors import repeated_blocks
from anybatch.engine.user_code import Model
from anybatch.planner.torch_internals import checkpointed, known_operations

Keeping = Literal["inputs", "products"]
"""Activations that a checkpointed block saves: its inputs, or also the results of matrix products and attention."""

_PRODUCTS: Final = known_operations(
    [
        *("mm.default", "addmm.default", "bmm.default", "baddbmm.default", "convolution.default"),
        "_scaled_dot_product_flash_attention.default",
        "_scaled_dot_product_efficient_attention.default",
        "_scaled_dot_product_cudnn_attention.default",
        "_scaled_dot_product_flash_attention_for_cpu.default",
    ]
)


def as_module(model: Model) -> nn.Module:
    """Return a model, or a mapping of models, as one module."""
    return nn.ModuleDict(dict(model)) if isinstance(model, Mapping) else model


def checkpoint_blocks(model: Model, keeping: Keeping = "inputs", *, every: int = 1) -> Model:
    """Wrap the repeated blocks of a model in activation checkpointing; return the model.

    Args:
        model: changed in place, except if the model itself is a block.
        keeping: activations that a block saves for its backward.
        every: wrap every n-th block.
    """
    contexts: dict[str, Any] = {}
    if keeping == "products":
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    for blocks in repeated_blocks(as_module(model)):
        for name in blocks.names[::every]:
            wrapped = checkpointed(blocks.parent.get_submodule(name), contexts)
            setattr(blocks.parent, name, wrapped)
    return model


def _keep_products(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    del context, args, kwargs
    return CheckpointPolicy.MUST_SAVE if operation in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
