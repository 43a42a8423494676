"""Fixed random draws and fixed batch statistics, which do not depend on the other samples of a batch or on their order.

So the gradient of a batch with dropout and BatchNorm can be compared with the sum of the gradients of its pieces.
"""

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from anybatch.core.torch_internals import TorchDispatchMode, arguments_of
from anybatch.norms.exact import BatchNormCall, BatchNormReplacement

_CONSTANT = 0.37
_DROPOUT_ARGUMENTS = ("dropout_p", "dropout")
"""Arguments of fused attention and recurrent layers, whose masks cannot be replaced."""
_RRELU_SLOPE = 0.2
_MAX_RANDOM = 1000


class FixedDraws(TorchDispatchMode):
    """Replaces torch's random draws by the same numbers for every sample.

    The mode runs below autograd, so it includes dropout in recurrent layers, in attention and in checkpointed blocks.
    The numbers differ along all axes except the first, and between draws. `randperm` returns a shift by half of the
    length, which pairs each sample with another one.
    """

    def __init__(self, *, constant: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.is_constant = constant
        self._state = threading.local()  # norms='exact' runs micro-batches in threads
        self._known: dict[Any, tuple[list[str], dict[str, Any], bool]] = {}
        self.num_draws = 0
        self.unknown: set[str] = set()

    def restart(self) -> None:
        """Start again with the numbers of the first draw; called before each forward."""
        self._state.number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 (torch's protocol)
        """Run an operation, and replace its output if it is random."""
        arguments = dict(kwargs or {})
        if function not in self._known:
            is_random = torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())
            self._known[function] = *arguments_of(function), is_random
        names, defaults, is_random = self._known[function]
        if not is_random and not any(name in names for name in _DROPOUT_ARGUMENTS):
            return function(*args, **arguments)
        fixed: dict[str, object] = dict.fromkeys(_DROPOUT_ARGUMENTS, 0.0)
        if is_random:
            fixed["generator"] = None  # the user's generators must not advance
            self.num_draws += 1
        if "rrelu" in function.name():
            fixed |= {"lower": _RRELU_SLOPE, "upper": _RRELU_SLOPE}
        args = tuple(fixed.get(name, value) for name, value in zip(names, args, strict=False)) + args[len(names) :]
        arguments = {name: fixed.get(name, value) for name, value in arguments.items()}
        output = function(*args, **arguments)
        if not is_random:
            return output
        name = function.name().partition("::")[2].partition(".")[0].rstrip("_")
        return self._replaced(name, output, {**defaults, **dict(zip(names, args, strict=False)), **arguments})

    def _replaced(self, name: str, output: Any, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 (torch's output)
        if name == "native_dropout" and type(output[0]) is Tensor:
            kept = self._uniform(output[0]) >= arguments["p"]
            return arguments["input"] * kept / (1 - arguments["p"] or 1.0), kept
        if not isinstance(output, Tensor) or "rrelu" in name or name.startswith("_scaled_dot_product"):
            return output
        make = _DRAWS.get(name)
        if make is None or type(output) is not Tensor:
            self.unknown.add(name)
            return output
        output.copy_(make(_Draw(arguments, output, lambda: self._uniform(output), self.is_constant)))
        return output

    def _uniform(self, like: Tensor) -> Tensor:
        if self.is_constant:
            return torch.full(like.shape, _CONSTANT, device=like.device)
        self._state.number = getattr(self._state, "number", 0) + 1
        generator = torch.Generator().manual_seed(self._state.number)
        # Away from 0 and 1, where logarithms and quantiles are infinite.
        numbers: Tensor = 0.02 + 0.96 * torch.rand(like.shape[1:], generator=generator)
        return numbers.to(like.device).expand(like.shape)


class _Draw(NamedTuple):
    """A random operation: its arguments, its output, and a function that returns uniform numbers of that shape."""

    arguments: Mapping[str, Any]
    output: Tensor
    uniform: Callable[[], Tensor]
    is_constant: bool


def _from_uniform(draw: _Draw) -> Tensor:
    low, high = draw.arguments.get("from", 0.0), draw.arguments.get("to", 1.0)
    drawn: Tensor = low + draw.uniform() * (high - low)
    return drawn


def _normal(draw: _Draw) -> Tensor:
    standard = (2 * draw.uniform() - 1).erfinv() * math.sqrt(2.0)
    drawn: Tensor = standard * draw.arguments.get("std", 1.0) + draw.arguments.get("mean", 0.0)
    return drawn


def _bernoulli(draw: _Draw) -> Tensor:
    p = draw.arguments["self"] if draw.arguments.get("p") is None else draw.arguments["p"]
    p = torch.as_tensor(p, device=draw.output.device)
    # Constant draws keep everything, since the same number for all elements could drop a whole layer.
    return p.expand(draw.output.shape) > 0 if draw.is_constant else draw.uniform() < p


def _integers(draw: _Draw) -> Tensor:
    low = draw.arguments.get("low", draw.arguments.get("from")) or 0
    high = draw.arguments.get("high", draw.arguments.get("to"))
    drawn: Tensor = low + draw.uniform() * ((low + _MAX_RANDOM if high is None else high) - low)
    return drawn.floor()


def _most_likely(draw: _Draw) -> Tensor:
    order: Tensor = draw.arguments["self"].argsort(dim=-1, descending=True, stable=True)
    return order[..., torch.arange(draw.output.shape[-1], device=order.device) % order.shape[-1]]


_DRAWS: Mapping[str, Callable[[_Draw], Tensor]] = {
    **dict.fromkeys(("rand", "rand_like", "uniform"), _from_uniform),
    **dict.fromkeys(("randn", "randn_like", "normal"), _normal),
    **dict.fromkeys(("randint", "randint_like", "random"), _integers),
    "bernoulli": _bernoulli,
    "multinomial": _most_likely,
    "randperm": lambda d: torch.arange(len(d.output), device=d.output.device).roll(len(d.output) // 2),
    "exponential": lambda d: -d.uniform().log() / d.arguments.get("lambd", 1.0),
    # These do not draw, but compute a value from the distribution's parameters, which each sample has separately.
    "poisson": lambda d: d.arguments["self"].round(),
    "_standard_gamma": lambda d: d.arguments["self"],
    "_sample_dirichlet": lambda d: d.arguments["self"] / d.arguments["self"].sum(-1, keepdim=True),
}
"""Replacements, by the name of the operation."""


class FixedBatchStatistics(BatchNormReplacement):
    """Lets each BatchNorm layer normalise every piece with the statistics of its first call on all samples.

    Layers stay in training mode. The statistics are constants: no gradient flows through them.
    """

    def __init__(self) -> None:
        super().__init__(self._normalise)
        self._statistics: dict[int, tuple[Tensor, Tensor]] = {}

    def reset(self) -> None:
        """Clear the statistics before a run on all samples."""
        self._statistics.clear()

    def _normalise(self, call: BatchNormCall) -> Tensor:
        x = call.values
        layer = id(call.weight if call.running_mean is None else call.running_mean)
        if layer not in self._statistics:
            axes = [axis for axis in range(x.dim()) if axis != 1]
            wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
            mean, var = wide.mean(axes), wide.var(axes, unbiased=False)
            if x.numel() == x.shape[1]:  # one value per channel, which has no variance
                mean, var = torch.zeros_like(mean), torch.ones_like(var)
            self._statistics[layer] = mean, var
        like = x if call.weight is None else call.weight
        mean, var = (statistic.to(like) for statistic in self._statistics[layer])
        return F.batch_norm(x, mean, var, call.weight, call.bias, eps=call.eps)
