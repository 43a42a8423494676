"""Fixed random draws and fixed batch statistics, independent of other samples and of the order.

With both, the gradient of a batch can be compared with the sum over its pieces, including dropout and BatchNorm.
"""

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from anybatch.engine.torch_internals import TorchDispatchMode, arguments_of

_CONSTANT = 0.37
_DROPOUT_ARGUMENTS = ("dropout_p", "dropout")
"""Arguments of fused attention and recurrent layers, whose masks cannot be replaced."""
_RRELU_SLOPE = 0.2
_MOST_RANDOM = 1000


class HeldDraws(TorchDispatchMode):
    """Replaces torch's random draws by the same numbers for every sample.

    The mode runs below autograd, so it includes dropout in recurrent layers, in attention and in checkpointed blocks.
    The numbers vary over all axes except the first, and from draw to draw. `randperm` becomes a shift by half, which
    pairs each sample with another one.
    """

    def __init__(self, *, constant: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.is_constant = constant
        self._place = threading.local()  # norms='exact' runs micro-batches in threads
        self._known: dict[Any, tuple[list[str], dict[str, Any], bool]] = {}
        self.num_draws = 0
        self.unknown: set[str] = set()

    def restart(self) -> None:
        """Repeat the numbers from the first draw on; called before each forward."""
        self._place.number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 (torch's protocol)
        """Run an operation, and replace its output if it is random."""
        given = dict(kwargs or {})
        if function not in self._known:
            is_random = torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())
            self._known[function] = *arguments_of(function), is_random
        names, defaults, is_random = self._known[function]
        if not is_random and not any(name in names for name in _DROPOUT_ARGUMENTS):
            return function(*args, **given)
        fixed: dict[str, object] = dict.fromkeys(_DROPOUT_ARGUMENTS, 0.0)
        if is_random:
            fixed["generator"] = None  # the user's generators must not advance
            self.num_draws += 1
        if "rrelu" in function.name():
            fixed |= {"lower": _RRELU_SLOPE, "upper": _RRELU_SLOPE}
        args = tuple(fixed.get(name, value) for name, value in zip(names, args, strict=False)) + args[len(names) :]
        given = {name: fixed.get(name, value) for name, value in given.items()}
        output = function(*args, **given)
        if not is_random:
            return output
        name = function.name().partition("::")[2].partition(".")[0].rstrip("_")
        return self._replaced(name, output, {**defaults, **dict(zip(names, args, strict=False)), **given})

    def _replaced(self, name: str, output: Any, given: Mapping[str, Any]) -> Any:  # noqa: ANN401 (torch's output)
        if name == "native_dropout" and type(output[0]) is Tensor:
            kept = self._uniform(output[0]) >= given["p"]
            return given["input"] * kept / (1 - given["p"] or 1.0), kept
        if not isinstance(output, Tensor) or "rrelu" in name or name.startswith("_scaled_dot_product"):
            return output
        make = _DRAWS.get(name)
        if make is None or type(output) is not Tensor:
            self.unknown.add(name)
            return output
        output.copy_(make(_Draw(given, output, lambda: self._uniform(output), self.is_constant)))
        return output

    def _uniform(self, like: Tensor) -> Tensor:
        if self.is_constant:
            return torch.full(like.shape, _CONSTANT, device=like.device)
        self._place.number = getattr(self._place, "number", 0) + 1
        generator = torch.Generator().manual_seed(self._place.number)
        # Away from 0 and 1, where logarithms and quantiles are infinite.
        numbers: Tensor = 0.02 + 0.96 * torch.rand(like.shape[1:], generator=generator)
        return numbers.to(like.device).expand(like.shape)


class _Draw(NamedTuple):
    """A random operation: its arguments, its output, and a function that returns uniform numbers of its shape."""

    given: Mapping[str, Any]
    output: Tensor
    uniform: Callable[[], Tensor]
    is_constant: bool


def _from_uniform(draw: _Draw) -> Tensor:
    low, high = draw.given.get("from", 0.0), draw.given.get("to", 1.0)
    drawn: Tensor = low + draw.uniform() * (high - low)
    return drawn


def _normal(draw: _Draw) -> Tensor:
    standard = (2 * draw.uniform() - 1).erfinv() * math.sqrt(2.0)
    drawn: Tensor = standard * draw.given.get("std", 1.0) + draw.given.get("mean", 0.0)
    return drawn


def _bernoulli(draw: _Draw) -> Tensor:
    p = draw.given["self"] if draw.given.get("p") is None else draw.given["p"]
    p = torch.as_tensor(p, device=draw.output.device)
    # Constant numbers keep everything, since they could otherwise drop a whole layer.
    return p.expand(draw.output.shape) > 0 if draw.is_constant else draw.uniform() < p


def _whole_numbers(draw: _Draw) -> Tensor:
    low = draw.given.get("low", draw.given.get("from")) or 0
    high = draw.given.get("high", draw.given.get("to"))
    drawn: Tensor = low + draw.uniform() * ((low + _MOST_RANDOM if high is None else high) - low)
    return drawn.floor()


def _likeliest(draw: _Draw) -> Tensor:
    order: Tensor = draw.given["self"].argsort(dim=-1, descending=True, stable=True)
    return order[..., torch.arange(draw.output.shape[-1], device=order.device) % order.shape[-1]]


_DRAWS: Mapping[str, Callable[[_Draw], Tensor]] = {
    **dict.fromkeys(("rand", "rand_like", "uniform"), _from_uniform),
    **dict.fromkeys(("randn", "randn_like", "normal"), _normal),
    **dict.fromkeys(("randint", "randint_like", "random"), _whole_numbers),
    "bernoulli": _bernoulli,
    "multinomial": _likeliest,
    "randperm": lambda d: torch.arange(len(d.output), device=d.output.device).roll(len(d.output) // 2),
    "log_normal": lambda d: _normal(d).exp(),
    "exponential": lambda d: -d.uniform().log() / d.given.get("lambd", 1.0),
    "geometric": lambda d: (d.uniform().log() / math.log1p(-d.given["p"])).ceil(),
    "cauchy": lambda d: d.given["median"] + d.given["sigma"] * (math.pi * (d.uniform() - 0.5)).tan(),
    # Functions of the parameters only, which belong to each sample.
    "poisson": lambda d: d.given["self"].round(),
    "binomial": lambda d: (d.given["count"] * d.given["prob"]).round(),
    "_standard_gamma": lambda d: d.given["self"],
    "_sample_dirichlet": lambda d: d.given["self"] / d.given["self"].sum(-1, keepdim=True),
}
"""Replacements, by the name of the operation."""


class HeldNorms(TorchFunctionMode):
    """Lets each BatchNorm layer normalise every piece with the statistics of its first call in the full run.

    Layers stay in training mode. The statistics are constants: no gradient flows through them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._statistics: dict[int, tuple[Tensor, Tensor]] = {}

    def reset(self) -> None:
        """Clear the statistics before a full run."""
        self._statistics.clear()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 (torch's protocol)
        """Run a function, with the recorded statistics in `F.batch_norm`."""
        if function is not F.batch_norm:
            return function(*args, **(kwargs or {}))
        given = dict(zip(_BATCH_NORM, args, strict=False)) | dict(kwargs or {})
        if given.get("training"):
            given |= self._held(given)
        return F.batch_norm(**given)

    def _held(self, given: Mapping[str, Any]) -> dict[str, Any]:
        x, running, weight = given["input"], given.get("running_mean"), given.get("weight")
        layer = id(weight if running is None else running)
        if layer not in self._statistics:
            axes = [axis for axis in range(x.dim()) if axis != 1]
            wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
            mean, var = wide.mean(axes), wide.var(axes, unbiased=False)
            if x.numel() == x.shape[1]:  # a single value has no variance
                mean, var = torch.zeros_like(mean), torch.ones_like(var)
            self._statistics[layer] = mean, var
        mean, var = self._statistics[layer]
        like = x if weight is None else weight
        return {"running_mean": mean.to(like), "running_var": var.to(like), "training": False}


_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
