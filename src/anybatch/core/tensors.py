"""Dtypes for sums, the relative error between gradients, and the repeated blocks of a model."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

_LOW_PRECISION: Final = (torch.bfloat16, torch.float16)


def is_low_precision(tensor: Tensor) -> bool:
    """Whether a tensor is bf16 or fp16, whose sums need a wider dtype: a bf16 sum stalls after a few hundred terms."""
    return tensor.dtype in _LOW_PRECISION


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype for summing and sending a parameter's gradient: float32 for bf16 and fp16, else its dtype."""
    return torch.float32 if is_low_precision(tensor) else tensor.dtype


def widened(tensor: Tensor) -> Tensor:
    """Return a bf16 or fp16 tensor as float32, and any other tensor without a copy."""
    return tensor.float() if is_low_precision(tensor) else tensor


@functools.cache  # a cache hit is faster than reading the type of a device
def widest_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for sums of losses, counts and statistics: float64, or float32 on mps, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


Gradients = Mapping[str, torch.Tensor | None]


def relative_error(found: Gradients, expected: Gradients) -> float:
    """Return ||found - expected|| / ||expected|| over all parameters together, in float64.

    If a gradient is None on only one side, the error is infinite: an optimizer may change a parameter with a zero
    gradient, but not a parameter without a gradient.

    Args:
        found: the gradients to check, by parameter name: dense or sparse, on any device and of any dtype.
        expected: the gradients to compare with, by parameter name.

    Raises:
        ValueError: the two do not have the same parameters.
    """
    return math.hypot(*errors_by_parameter(found, expected).values())


def errors_by_parameter(found: Gradients, expected: Gradients) -> dict[str, float]:
    """Return each parameter's contribution to the relative error: ||found_p - expected_p|| / ||expected||.

    The squares add up to the square of `relative_error`. The norm in the denominator is over all parameters: the norm
    of one parameter would inflate the errors of gradients that consist of rounding errors.
    """
    if set(found) != set(expected):
        message = f"the parameters differ: {sorted(set(found) ^ set(expected))} have a gradient on only one side."
        raise ValueError(message)
    norm = math.sqrt(sum(float(_as_float64(value).square().sum()) for value in expected.values() if value is not None))
    errors = {}
    for name, value in expected.items():
        other = found[name]
        if value is None and other is None:
            errors[name] = 0.0
        elif value is None or other is None:
            errors[name] = math.inf
        else:
            difference = float((_as_float64(other) - _as_float64(value)).norm())
            errors[name] = difference / norm if norm else (math.inf if difference else 0.0)
    return errors


def _as_float64(tensor: torch.Tensor) -> torch.Tensor:
    # To the host first: not every accelerator has float64.
    return tensor.detach().cpu().to_dense().double()


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Consecutive modules of one class in a container."""

    parent: nn.Module  # the module that contains the blocks
    names: tuple[str, ...]  # names of the blocks in the parent
    path: str  # name of the parent in the model; empty if it is the model
    kind: type[nn.Module]  # class of the blocks

    @property
    def modules(self) -> list[nn.Module]:
        """Return the block modules, in order."""
        return [self.parent.get_submodule(name) for name in self.names]

    def __str__(self) -> str:
        """Return the location of the blocks: `blocks.* (12 x Block)`."""
        return f"{self.path}{'.' * bool(self.path)}* ({len(self.names)} x {self.kind.__name__})"


def repeated_blocks(modules: nn.Module) -> tuple[Blocks, ...]:
    """Return the outermost repeated blocks: at least two modules of one class in one container, each with children.

    Examples are the layers of a transformer and the stages of a residual network. Repeated blocks inside a block, and
    blocks without parameters, are not returned.
    """
    found: list[Blocks] = []
    block_paths: list[str] = []
    for path, parent in modules.named_modules():
        # Skip the modules inside of blocks.
        if any(path == block or path.startswith(f"{block}.") for block in block_paths):
            continue
        if not isinstance(parent, _CONTAINERS):
            continue
        # Each class once, in the order in which they appear.
        for kind in dict.fromkeys(type(child) for child in parent.children()):
            names = tuple(name for name, child in parent.named_children() if type(child) is kind)
            first = parent.get_submodule(names[0])
            # A single layer is too small to be a block.
            composite = any(True for _ in first.children()) and not isinstance(first, _CONTAINERS)
            if len(names) > 1 and composite and any(True for _ in first.parameters()):
                found.append(Blocks(parent, names, path, kind))
                block_paths += [f"{path}.{name}" if path else name for name in names]
    return tuple(found)
