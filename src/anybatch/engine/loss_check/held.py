"""Fixed random draws and fixed batch statistics, independent of other samples and of the order.

With both, the gradient of a batch can be compared with the sum over its pieces, including dropout and BatchNorm.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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

    def __torch_dispatch__(
        self,
        function: Any,  # noqa: ANN401 (torch's protocol)
        types: Any,  # noqa: ANN401 (torch's protocol)
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (torch's protocol)
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
        output.copy_(make(given, output, lambda: self._uniform(output), self.is_constant))
        return output

    def _uniform(self, like: Tensor) -> Tensor:
        if self.is_constant:
            return torch.full(like.shape, _CONSTANT, device=like.device)
        self._place.number = getattr(self._place, "number", 0) + 1
        generator = torch.Generator().manual_seed(self._place.number)
        # Away from 0 and 1, where logarithms and quantiles are infinite.
        numbers: Tensor = 0.02 + 0.96 * torch.rand(like.shape[1:], generator=generator)
        return numbers.to(like.device).expand(like.shape)


_Draw = Callable[[Mapping[str, Any], Tensor, Callable[[], Tensor], bool], Tensor]
"""Function (arguments, output, function that returns uniform numbers, whether these are constant) -> replacement."""


def _from_uniform(given: Mapping[str, Any], _: Tensor, uniform: Callable[[], Tensor], __: bool) -> Tensor:  # noqa: FBT001
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    drawn: Tensor = low + uniform() * (high - low)
    return drawn


def _normal(given: Mapping[str, Any], _: Tensor, uniform: Callable[[], Tensor], __: bool) -> Tensor:  # noqa: FBT001
    standard = (2 * uniform() - 1).erfinv() * math.sqrt(2.0)
    drawn: Tensor = standard * given.get("std", 1.0) + given.get("mean", 0.0)
    return drawn


def _bernoulli(given: Mapping[str, Any], output: Tensor, uniform: Callable[[], Tensor], constant: bool) -> Tensor:  # noqa: FBT001
    p = given["self"] if given.get("p") is None else given["p"]
    p = torch.as_tensor(p, device=output.device)
    # Constant numbers keep everything, since they could otherwise drop a whole layer.
    return p.expand(output.shape) > 0 if constant else uniform() < p


def _whole_numbers(given: Mapping[str, Any], _: Tensor, uniform: Callable[[], Tensor], __: bool) -> Tensor:  # noqa: FBT001
    low = given.get("low", given.get("from")) or 0
    high = given.get("high", given.get("to"))
    drawn: Tensor = low + uniform() * ((low + _MOST_RANDOM if high is None else high) - low)
    return drawn.floor()


def _likeliest(given: Mapping[str, Any], output: Tensor, _: Callable[[], Tensor], __: bool) -> Tensor:  # noqa: FBT001
    number = output.shape[-1]
    order: Tensor = given["self"].argsort(dim=-1, descending=True, stable=True)
    return order[..., torch.arange(number, device=order.device) % order.shape[-1]]


def _shifted(_: Mapping[str, Any], output: Tensor, __: Callable[[], Tensor], ___: bool) -> Tensor:  # noqa: FBT001
    return torch.arange(len(output), device=output.device).roll(len(output) // 2)


_DRAWS: Mapping[str, _Draw] = {
    **dict.fromkeys(("rand", "rand_like", "uniform"), _from_uniform),
    **dict.fromkeys(("randn", "randn_like", "normal"), _normal),
    **dict.fromkeys(("randint", "randint_like", "random"), _whole_numbers),
    "bernoulli": _bernoulli,
    "multinomial": _likeliest,
    "randperm": _shifted,
    "log_normal": lambda *arguments: _normal(*arguments).exp(),
    "exponential": lambda given, _, uniform, __: -uniform().log() / given.get("lambd", 1.0),
    "geometric": lambda given, _, uniform, __: (uniform().log() / math.log1p(-given["p"])).ceil(),
    "cauchy": lambda given, _, uniform, __: given["median"] + given["sigma"] * (math.pi * (uniform() - 0.5)).tan(),
    # Functions of the parameters only, which belong to each sample.
    "poisson": lambda given, *_: given["self"].round(),
    "binomial": lambda given, *_: (given["count"] * given["prob"]).round(),
    "_standard_gamma": lambda given, *_: given["self"],
    "_sample_dirichlet": lambda given, *_: given["self"] / given["self"].sum(-1, keepdim=True),
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

    def __torch_function__(
        self,
        function: Any,  # noqa: ANN401 (torch's protocol)
        types: Any,  # noqa: ANN401 (torch's protocol)
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (torch's protocol)
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
