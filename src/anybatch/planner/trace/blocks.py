"""The repeated blocks of a model, and what becomes of it when they are run again in the backward."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from anybatch.engine.inputs import Model
from anybatch.planner.torch_internals import checkpointed, known_operations

Keeping = Literal["inputs", "products"]
"""Activations that a checkpointed block keeps: its inputs alone, or results of matrix products and attention, too."""

_PRODUCTS: Final = known_operations(
    [
        *("mm.default", "addmm.default", "bmm.default", "baddbmm.default", "convolution.default"),
        "_scaled_dot_product_flash_attention.default",
        "_scaled_dot_product_efficient_attention.default",
        "_scaled_dot_product_cudnn_attention.default",
        "_scaled_dot_product_flash_attention_for_cpu.default",
    ]
)


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Modules of one class that follow each other.

    Attributes:
        parent: what holds them.
        names: their names in it.
        path: the name of the parent in the model; empty if it is the model.
        kind: their class.
    """

    parent: nn.Module
    names: tuple[str, ...]
    path: str
    kind: type[nn.Module]

    @property
    def modules(self) -> list[nn.Module]:
        """Return the blocks themselves, in order."""
        return [self.parent.get_submodule(name) for name in self.names]

    def __str__(self) -> str:
        """Return where they are: `blocks.* (12 x Block)`."""
        return f"{self.path}{'.' * bool(self.path)}* ({len(self.names)} x {self.kind.__name__})"


def as_module(model: Model) -> nn.Module:
    """Return a model as one module, with data or without."""
    return nn.ModuleDict(dict(model)) if isinstance(model, Mapping) else model


def repeated_blocks(model: Model) -> tuple[Blocks, ...]:
    """Return the outermost rows of at least two modules of one class that hold modules and parameters of their own.

    Such are the layers of a transformer and the stages of a residual network. Nothing inside a block is one.

    Args:
        model: with data or without.
    """
    modules = as_module(model)
    found: list[Blocks] = []
    inside: list[str] = []
    for path, parent in modules.named_modules():
        # Blocks within blocks are recomputed with the outer one.
        if any(path == taken or path.startswith(f"{taken}.") for taken in inside):
            continue
        if not isinstance(parent, _CONTAINERS):
            continue
        # Each class once, in the order in which they appear.
        for kind in dict.fromkeys(type(child) for child in parent.children()):
            names = tuple(name for name, child in parent.named_children() if type(child) is kind)
            first = parent.get_submodule(names[0])
            # A single layer gains nothing from recomputation: its input is kept either way.
            composite = any(True for _ in first.children()) and not isinstance(first, _CONTAINERS)
            if len(names) > 1 and composite and any(True for _ in first.parameters()):
                found.append(Blocks(parent, names, path, kind))
                inside += [f"{path}.{name}" if path else name for name in names]
    return tuple(found)


def checkpoint_blocks(model: Model, keeping: Keeping = "inputs", *, every: int = 1) -> Model:
    """Wrap the repeated blocks of a model so that they run again in the backward; return the model.

    Args:
        model: changed in place; if it is a block itself it stays as it is.
        keeping: what a block keeps from forward to backward.
        every: wrap every n-th block.
    """
    contexts: dict[str, Any] = {}
    if keeping == "products":
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    for blocks in repeated_blocks(model):
        for name in blocks.names[::every]:
            wrapped = checkpointed(blocks.parent.get_submodule(name), contexts)
            setattr(blocks.parent, name, wrapped)
    return model


def _keep_products(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    del context, args, kwargs
    return CheckpointPolicy.MUST_SAVE if operation in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
