"""Modules that draw random numbers, and modules whose output for one sample depends on the others."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from anybatch.core.tree import tensors_of
from anybatch.norms.layers import tried_couplings


@dataclass(frozen=True, slots=True)
class ForwardTraits:
    """Names of modules with properties observed in one forward, in the order in which the modules finished.

    Attributes:
        random_modules: modules that advanced torch's generator, without a child that did.
        coupling_modules: modules whose output for a sample depends on another sample, without a child that does.
        narrowest_dtype: the floating-point type with the fewest bits that any module returned; None if none was.
    """

    random_modules: tuple[str, ...]
    coupling_modules: tuple[str, ...]
    narrowest_dtype: torch.dtype | None


def find_traits(modules: nn.Module, run: Callable[[], object], num_samples: int) -> ForwardTraits:
    """Run a forward and observe every module that it calls; the caller must restore buffers."""
    names = {module: name for name, module in modules.named_modules()}
    states: dict[nn.Module, bytes] = {}
    drew: list[nn.Module] = []
    dtypes: list[torch.dtype] = []

    def before(module: nn.Module, _args: object) -> None:
        states[module] = _state()

    def after(module: nn.Module, _args: object, output: object) -> None:
        # A generator that has moved is the only sign of a draw that works for every module.
        if states[module] != _state():
            drew.append(module)
        # A module may return something other than a batch.
        with contextlib.suppress(TypeError):
            dtypes.extend(t.dtype for t in tensors_of(output) if t.is_floating_point())

    hooks = [module.register_forward_pre_hook(before) for module in names]
    hooks += [module.register_forward_hook(after) for module in names]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return ForwardTraits(
        random_modules=tuple(names[m] for m in _innermost(dict.fromkeys(drew))),
        coupling_modules=tuple(tried_couplings(modules, run, num_samples)),
        narrowest_dtype=min(dtypes, key=lambda dtype: torch.finfo(dtype).bits, default=None),
    )


def _state() -> bytes:
    # As bytes: inside of `vmap`, tensors cannot be compared.
    return bytes(torch.default_generator.get_state().tolist())


def _innermost(found: dict[nn.Module, None]) -> Iterator[nn.Module]:
    """Yield the names without a child among them."""
    for module in found:
        if not any(child in found for child in module.modules() if child is not module):
            yield module
