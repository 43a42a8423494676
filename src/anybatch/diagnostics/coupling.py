"""Modules that draw random numbers, and modules whose output for one sample depends on the others."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from anybatch.core.nested import map_tensors, tensors_of

_Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Seen:
    """What one forward showed, modules by name, each in the order in which it ended.

    Attributes:
        draws: modules that advanced torch's generator, but no child of theirs did.
        couples: modules whose output for one sample changed with another sample, but no child's did.
        narrowest: the floating-point type with the fewest bits that any module returned; None if none was returned.
    """

    draws: tuple[str, ...]
    couples: tuple[str, ...]
    narrowest: torch.dtype | None


def look(modules: nn.Module, run: Callable[[], object], num_samples: int) -> Seen:
    """Run a forward and look at every module that it calls; buffers are the caller's to put back.

    A module is called again with what it was called with, in which the first sample is replaced by the second, so that
    every input stays one that it can handle. It couples samples if its output for the others changes.

    Args:
        modules: all modules that may be called.
        run: runs the forward over the whole batch.
        num_samples: samples in the batch; at least 3.
    """
    names = {module: name for name, module in modules.named_modules()}
    calls: dict[nn.Module, _Call] = {}
    states: dict[nn.Module, torch.Tensor] = {}
    drew: list[nn.Module] = []
    dtypes: list[torch.dtype] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states[module] = torch.default_generator.get_state()
        calls.setdefault(module, map_tensors((args, kwargs), torch.Tensor.detach))

    def after(module: nn.Module, _args: object, _kwargs: object, output: object) -> None:
        if not torch.equal(states[module], torch.default_generator.get_state()):
            drew.append(module)
        with contextlib.suppress(TypeError):
            dtypes.extend(t.dtype for t in tensors_of(output) if t.is_floating_point())

    hooks = [module.register_forward_pre_hook(before, with_kwargs=True) for module in names]
    hooks += [module.register_forward_hook(after, with_kwargs=True) for module in names]
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    couple = [module for module, call in calls.items() if _couples(module, call, num_samples)]
    return Seen(
        draws=tuple(names[m] for m in _innermost(dict.fromkeys(drew))),
        couples=tuple(names[m] for m in _innermost(dict.fromkeys(couple))),
        narrowest=min(dtypes, key=lambda dtype: torch.finfo(dtype).bits, default=None),
    )


def _couples(module: nn.Module, call: _Call, num_samples: int) -> bool:
    """Whether the output for samples from the second on changes when the first becomes a copy of the second."""
    args, kwargs = call
    if not any(_has_samples(tensor, num_samples) for tensor in tensors_of((args, kwargs))):
        return False

    def replaced(tensor: torch.Tensor) -> torch.Tensor:
        if not _has_samples(tensor, num_samples):
            return tensor
        return torch.cat([tensor[1:2], tensor[1:]])

    outputs = _outputs(module, (call, call, map_tensors(call, replaced)), num_samples)
    if not outputs or not _same(outputs[0], outputs[1]):  # it keeps something between calls, a cache say
        return False
    return not _same(outputs[0], outputs[2])


def _outputs(module: nn.Module, calls: Sequence[_Call], num_samples: int) -> list[list[torch.Tensor]]:
    """Return what each call gives the samples from the second on, buffers and random numbers as before the first.

    Nothing is returned for a module that cannot be called again.
    """
    state = torch.default_generator.get_state()
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    outputs = []
    with torch.no_grad():
        for args, kwargs in calls:
            torch.default_generator.set_state(state)
            for buffer, value in kept:
                buffer.copy_(value)
            try:
                output = module(*args, **kwargs)
            except Exception:  # noqa: BLE001 (a module that cannot be called again cannot be judged)
                return []
            tensors = (tensor for tensor in tensors_of(output) if tensor.is_floating_point())
            outputs.append([tensor[1:] for tensor in tensors if _has_samples(tensor, num_samples)])
    return outputs


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )


def _has_samples(tensor: torch.Tensor, num_samples: int) -> bool:
    return tensor.dim() > 0 and len(tensor) == num_samples


def _innermost(found: dict[nn.Module, None]) -> Iterator[nn.Module]:
    """Yield those of which no child was found."""
    for module in found:
        if not any(child in found for child in module.modules() if child is not module):
            yield module
