"""Dtypes of sums, the error between gradients, snapshots of buffers, and the repeated blocks of a model."""

import functools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from anybatch.core.torch_internals import buffer_tables, copy_each

_LOW_PRECISION: Final = (torch.bfloat16, torch.float16)


def is_low_precision(tensor: Tensor) -> bool:
    """Whether sums of this dtype need a wider one: a bf16 sum stalls after some hundred terms."""
    return tensor.dtype in _LOW_PRECISION


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype for summing and sending gradients of a parameter: float32 for bf16 and fp16, else its own."""
    return torch.float32 if is_low_precision(tensor) else tensor.dtype


def widened(tensor: Tensor) -> Tensor:
    """Return a bf16 or fp16 tensor as float32, and any other tensor without a copy."""
    return tensor.float() if is_low_precision(tensor) else tensor


@functools.cache  # reading a device's type takes longer
def widest_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which losses, counts and statistics are summed: float64, which only mps devices lack."""
    return torch.float32 if device.type == "mps" else torch.float64


Gradients = Mapping[str, torch.Tensor | None]


def relative_error(found: Gradients, expected: Gradients) -> float:
    """Return ||found - expected|| / ||expected|| over all parameters together, in float64.

    A gradient that is None on one side only counts as infinitely far: an unused parameter is not the same as one with a
    zero gradient, because an optimizer may change only the latter.

    Args:
        found: gradients by parameter name, dense or sparse, on any device and of any dtype.
        expected: the gradients to compare with.

    Raises:
        ValueError: the two do not have the same parameters.
    """
    return math.hypot(*errors_by_parameter(found, expected).values())


def errors_by_parameter(found: Gradients, expected: Gradients) -> dict[str, float]:
    """Return each parameter's part in the relative error: ||found_p - expected_p|| / ||expected||, over all of them.

    The squares add up to the square of `relative_error`. Dividing by the parameter's own norm instead would inflate
    parameters whose gradient is only rounding error.
    """
    if set(found) != set(expected):
        message = f"different parameters: {sorted(set(found) ^ set(expected))} are on one side only."
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


class BufferValues:
    """A snapshot of all buffers' values, copied when it is made."""

    def __init__(self, modules: nn.Module) -> None:
        self._kept = [
            (module, name, buffer, buffer.detach().clone())
            for module in modules.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the values, even if a module has replaced the tensor."""
        for module, name, buffer, value in self._kept:
            buffer.copy_(value)
            setattr(module, name, buffer)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


class BufferKeeper:
    """A snapshot of all buffers' values that every step renews in the same memory.

    It costs nothing for a model without buffers. Modules that are added later are ignored.
    """

    def __init__(self, modules: nn.Module) -> None:
        self._owners = buffer_tables(modules)
        self._before: list[tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]] = []
        self._values: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def keep(self) -> None:
        """Take the snapshot: copy the current values."""
        self._before = [(owner, dict(owner)) for owner in self._owners if owner]
        values = [value for _, named in self._before for value in named.values() if value is not None]
        # A forward may replace a buffer by a new tensor (`self.running_mean = ...`), whose shape may differ.
        fits = len(values) == len(self._values) and all(map(operator.is_, values, self._values))
        if not fits and not (len(values) == len(self._copies) and all(map(_alike, values, self._copies))):
            self._copies = [torch.empty_like(value) for value in values]
        self._values = values
        if values:
            with torch.no_grad():
                copy_each(self._copies, values)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the last snapshot, even if a module has replaced, added or dropped a tensor."""
        # Clear first, to remove buffers that the forward has added.
        for owner in self._owners:
            owner.clear()
        for owner, named in self._before:
            owner.update(named)
        if self._values:
            copy_each(self._values, self._copies)


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Consecutive modules of one class.

    Attributes:
        parent: the module that contains them.
        names: their names in it.
        path: name of the parent in the model; empty if it is the model.
        kind: their class.
    """

    parent: nn.Module
    names: tuple[str, ...]
    path: str
    kind: type[nn.Module]

    @property
    def modules(self) -> list[nn.Module]:
        """Return the block modules, in order."""
        return [self.parent.get_submodule(name) for name in self.names]

    def __str__(self) -> str:
        """Return their location: `blocks.* (12 x Block)`."""
        return f"{self.path}{'.' * bool(self.path)}* ({len(self.names)} x {self.kind.__name__})"


def repeated_blocks(modules: nn.Module) -> tuple[Blocks, ...]:
    """Return the outermost runs of two or more modules of one class, each with child modules and parameters.

    Examples are the layers of a transformer and the stages of a residual network. Runs inside a block are not returned.
    """
    found: list[Blocks] = []
    inside: list[str] = []
    for path, parent in modules.named_modules():
        # Blocks within blocks belong to the outer blocks.
        if any(path == taken or path.startswith(f"{taken}.") for taken in inside):
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
                inside += [f"{path}.{name}" if path else name for name in names]
    return tuple(found)
