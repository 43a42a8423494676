"""Adam with states of one byte, from libraries that are installed: traced where it runs without data, else by formula.

Both libraries keep, for each of Adam's two averages, one byte per element and one float32 per block of 256 elements.
Small parameters keep float32. Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022.
"""

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.core.geometry import ceil_div
from anybatch.engine.update.precision import OptimizerFunction

BLOCK = 256
"""Elements that share a scale."""
LEAST_ELEMENTS = 4096
"""Smaller parameters keep float32 states."""
_LEVELS = 256
_NAMES: Mapping[type[Optimizer], str] = {torch.optim.AdamW: "AdamW8bit", torch.optim.Adam: "Adam8bit"}
_KEPT = ("params", "lr", "betas", "eps", "weight_decay")


@dataclass(frozen=True, slots=True)
class EightBit:
    """An optimizer with states of one byte that can take the place of another one.

    Attributes:
        name: a few words.
        how: what to write.
        make: function `named_parameters -> optimizer`, to be planned.
    """

    name: str
    how: str
    make: OptimizerFunction


def eight_bit(make: OptimizerFunction) -> list[EightBit]:
    """Return the 8-bit optimizers that can take the place of Adam or AdamW; none where no library has one.

    Args:
        make: function `named_parameters -> optimizer`.
    """
    trial = make([("weight", nn.Parameter(torch.zeros(1)))])
    name = _NAMES.get(type(trial))
    if name is None or any(group.get("amsgrad") or group.get("maximize") for group in trial.param_groups):
        return []
    return [*_from_torchao(make, name), *_from_bitsandbytes(make, name)]


def _from_torchao(make: OptimizerFunction, name: str) -> list[EightBit]:
    """Return torchao's: its update is compiled, which takes data, so that a stand-in with such states is traced."""
    if not _has_part("torchao", "optim"):
        return []

    def planned(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        return StatesByFormula(_groups(make(named)))

    words = f"8-bit {name.removesuffix('8bit')} (torchao, state by formula)"
    return [EightBit(words, f"torchao.optim.{name}(...), with states in 8 bits: other steps than now", planned)]


def _from_bitsandbytes(make: OptimizerFunction, name: str) -> list[EightBit]:
    """Return that of bitsandbytes: its update is one operation, which runs without data, so it is traced itself."""
    if not _has_part("bitsandbytes", "optim"):
        return []
    try:
        with _quiet("bitsandbytes"):
            kind = getattr(importlib.import_module("bitsandbytes.optim"), name)
    except Exception:  # noqa: BLE001 (a library that does not load here is as good as none)
        return []

    def real(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        optimizer: Optimizer = kind(_groups(make(named)))
        return optimizer

    words = f"8-bit {name.removesuffix('8bit')} (bitsandbytes)"
    return [EightBit(words, f"bitsandbytes.optim.{name}(...), with states in 8 bits: other steps than now", real)]


class StatesByFormula(Optimizer):
    """Holds what an 8-bit Adam holds, and touches what it touches, without its arithmetic. Only for plans.

    Per parameter, twice: `n` bytes, a float32 scale per 256 elements, and a table of 256 float32 values; twice 4 `n`
    bytes where `n` is below 4,096 or not a multiple of 256. Source: torchao 0.18, `OptimState8bit` and `_new_buffer`.
    The compiled update is taken to need nothing beside.

    Args:
        groups: as any optimizer takes them.
    """

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closure is run
        """Make the states, and read and write each once."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update({name: states_of(parameter) for name in ("exp_avg", "exp_avg_sq")})
                for tensors in state.values():
                    tensors[0].mul_(1)
                parameter.add_(parameter.grad)


def states_of(parameter: Tensor) -> Sequence[Tensor]:
    """Return one average's tensors: codes, scales and levels, or the average itself where it is small."""
    num_elements = parameter.numel()
    if num_elements < LEAST_ELEMENTS or num_elements % BLOCK:
        return (torch.zeros_like(parameter),)
    return (
        torch.zeros_like(parameter, dtype=torch.uint8),
        parameter.new_zeros(ceil_div(num_elements, BLOCK), dtype=torch.float32),
        parameter.new_zeros(_LEVELS, dtype=torch.float32),
    )


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return an optimizer's groups, with what an 8-bit one has a use for."""
    groups = [{name: group[name] for name in _KEPT} for group in optimizer.param_groups]
    return [{**group, "lr": float(group["lr"])} for group in groups]


def _has_part(package: str, part: str) -> bool:
    """Return whether a package with such a part is installed, without importing it."""
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    places = [] if found is None else found.submodule_search_locations or []
    return any((Path(place) / part / "__init__.py").is_file() for place in places)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Let a library not say on import what of it cannot be used here."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
