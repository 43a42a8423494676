"""Dropout whose masks belong to samples: the same at any cut and on any number of ranks."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType, TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import autograd, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from anybatch.core.randomness import sample_bits, sample_keys, step_seed
from anybatch.core.torch_internals import is_in_backward
from anybatch.engine.accumulation.accumulate import MicroBatch
from anybatch.engine.torch_internals import packing_function
from anybatch.errors import CompositionError, UserError

_INSTEAD = "Or use rng='micro_batch', which is exact for the same cut."
_ALPHA = 1.7580993408473766  # what SELU tends to: minus this is what alpha dropout puts in the place of what it drops
# `dropout2d` is missing here because torch takes three axes for (N, C, L) there, which has samples.
_UNBATCHED_DIMENSIONS = {"dropout1d": 2, "dropout3d": 4}


@dataclass(frozen=True, slots=True)
class PerSample:
    """Draw dropout masks by (seed, step, global sample id, number of the call inside the forward).

    Args:
        sample_dims: name of a module to the axis of samples in whatever is dropped inside it, where that is not the
            first: `{"encoder": 1}` for layers with batch_first=False. "" is the whole model.

    Raises:
        UserError: an axis below 0.
    """

    sample_dims: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, axis in self.sample_dims.items():
            if axis < 0:
                message = f"sample_dims[{name!r}]={axis} must be 0 or above: axes are counted from the first one."
                raise UserError(message)


class SampleRandomness:
    """Answers dropout with masks that belong to samples, and puts the caller's random state back at the end.

    While a micro-batch runs, calls of dropout functions are seen by a torch function mode. The number of a call is kept
    in the seed of torch's own CPU generator, counted up from the step's seed: whatever replays torch's random state
    (activation checkpointing, a second pass) replays the same masks.

    Args:
        policy: where samples are.
        modules: what is trained; errors name its modules.
        device: where it is.

    Raises:
        UserError: `sample_dims` names a module that there is not.
        CompositionError: a layer drops where masks cannot be keyed.
    """

    covers_backward = True  # a checkpointed block that is run again there asks for the masks of its forward

    def __init__(self, policy: PerSample, modules: nn.Module, device: torch.device) -> None:
        _refuse_layers(modules)
        self._draws = _Draws(dict(modules.named_modules()), _axes_of_modules(policy, modules), device)
        self._states: list[torch.Tensor] = []

    def __enter__(self) -> Self:
        self._states = [generator.get_state() for generator in self._draws.generators]
        # Calls are compared within a step only: the next one may take another way through the model.
        self._draws.num_calls_of_step = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for generator, state in zip(self._draws.generators, self._states, strict=True):
            generator.set_state(state)

    @contextmanager
    def micro_batch(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Key the draws of one forward and backward.

        Raises:
            CompositionError: at the end, if something else has drawn, or another number of calls was made than in the
                micro-batch before.
        """
        self._draws.begin(micro_batch)
        with self._draws:
            yield
        self._draws.end()

    def whole(self, seed: int) -> None:
        """Seed what is drawn once for the effective batch: it is the same at any cut as it is."""
        for generator in self._draws.generators:
            generator.manual_seed(seed)

    def parked(self) -> AbstractContextManager[None]:
        """Micro-batches that take turns are refused before."""
        message = "masks by sample are counted within one forward at a time"
        raise AssertionError(message)


class _Draws(TorchFunctionMode):
    """Sees every torch function of a micro-batch and answers those that drop."""

    def __init__(self, modules: Mapping[str, nn.Module], axes: Mapping[int, int], device: torch.device) -> None:
        super().__init__()
        self.generators = [torch.default_generator, *device_generators(device)]
        self.num_calls_of_step: int | None = None
        self.packed = False
        self.num_samples = 0
        self._packing_function = packing_function()
        self._names = {id(module): name for name, module in modules.items()}
        self._axes = axes
        self._time_first = next((one for one in modules if getattr(modules[one], "batch_first", True) is False), None)
        self._device = device
        self._first_seed = 0
        self._axis_of_call: list[int | None] = []
        self._device_states: list[torch.Tensor] = []
        # Seeded like the host's generator, it shows the state that this one has if nothing has drawn from it.
        self._clean = torch.Generator()
        self._is_batch_first = False
        self._probing = True

    def begin(self, micro_batch: MicroBatch) -> None:
        """Count calls from 0 on, for the samples of this micro-batch."""
        self._first_seed = step_seed(micro_batch.key.seed, micro_batch.key.step)
        self.num_samples = micro_batch.unit.num_samples
        self._keys = sample_keys(micro_batch.key, micro_batch.unit.start, micro_batch.unit.stop).to(
            self._device, non_blocking=True
        )
        self._axis_of_call.clear()
        self.packed = False
        torch.default_generator.manual_seed(self._first_seed)
        for generator in self.generators[1:]:
            generator.manual_seed(micro_batch.seed)
        # A device's generator holds no count; it is looked at only to see whether anything has drawn from it.
        self._device_states = [generator.get_state() for generator in self.generators[1:]]

    def end(self) -> None:
        """Refuse what would not be the same at another cut."""
        if self._has_moved():
            self.refuse(
                "random numbers were drawn that are not dropout's",
                "Draw them with the data, so that they belong to the sample.",
            )
        calls = len(self._axis_of_call)
        if self.num_calls_of_step not in (None, calls):
            self.refuse(
                f"dropout was called {self.num_calls_of_step} times in one micro-batch of a step and {calls} times in "
                "another, so the number of a call depends on the cut",
                "Call it in every micro-batch, whatever the data.",
            )
        self.num_calls_of_step = calls
        # Looking after every function is slow: in the first micro-batch it names what draws, later the end is enough.
        self._probing = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (whatever the function returns)
        rule = _packing if func is self._packing_function else _RULES.get(func)
        if rule is not None:
            return rule(self, func, *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if self._probing and self._has_moved():
            self.refuse(
                f"{getattr(func, '__name__', func)} draws random numbers that are not keyed",
                "Draw them with the data, so that they belong to the sample, or write it with F.dropout.",
            )
        return result

    def keep(self, what: str, dropped: torch.Tensor, p: float, *, by_channel: bool) -> torch.Tensor:
        """Return which elements of `dropped` stay: booleans of its shape, or with length 1 in every axis but two."""
        if isinstance(dropped, nn.Parameter):
            self.refuse(
                f"{what} drops elements of a parameter, which belong to no sample",
                "Drop what the layer returns instead.",
            )
        call, declared = self._next_call()
        axis = declared or 0
        if declared is None:
            self._refuse_time_first(what, tuple(dropped.shape))
        rest = self._shape_of_sample(what, dropped, axis, by_channel=by_channel)
        groups = dropped.shape[axis] // self.num_samples
        shape = rest if groups == 1 else (groups, *rest)
        bits = sample_bits(self._keys, call, shape or (1,))
        # Bits are uniform from -2**31 on, so that so many of them are below. The bound has to fit into 32 bits itself:
        # at p = 1 one element in 2**32 stays, and is scaled by 0.
        kept = bits >= min(round(p * 2**32), 2**32 - 1) - 2**31
        kept = kept.reshape(dropped.shape[axis], *rest).movedim(0, axis)
        return kept.reshape(*kept.shape, *(1,) * (dropped.dim() - kept.dim()))

    @contextmanager
    def batch_first(self) -> Iterator[None]:
        """Take the first axis for that of samples meanwhile, whatever was declared."""
        before, self._is_batch_first = self._is_batch_first, True
        try:
            yield
        finally:
            self._is_batch_first = before

    def refuse(self, what: str, remedy: str) -> NoReturn:
        """Raise the error for what cannot be keyed.

        Raises:
            CompositionError: always.
        """
        found = self._owner()
        where = "" if found is None else f" (in {_called(self._names[id(found)])})"
        message = f"rng='per_sample' does not compose with this model: {what}{where}. {remedy} {_INSTEAD}"
        raise CompositionError(message)

    def _next_call(self) -> tuple[int, int | None]:
        """Return the number of this call and the axis of samples, None if it was not declared.

        They are the same ones again where a forward is replayed.
        """
        generator, known = torch.default_generator, self._axis_of_call
        call = generator.initial_seed() - self._first_seed
        if not 0 <= call <= len(known):
            self.refuse("torch's random numbers were seeded again", "Leave torch.manual_seed out of the forward.")
        if call == len(known):
            if is_in_backward():  # torch's own checkpointing asks this too
                self.refuse(
                    "activation checkpointing runs the forward again without its random state",
                    "Leave preserve_rng_state=True.",
                )
            is_declared = self._axes and not self._is_batch_first
            known.append(self._axes.get(id(self._owner())) if is_declared else 0 if self._is_batch_first else None)
        generator.manual_seed(self._first_seed + call + 1)
        return call, known[call]

    def _refuse_time_first(self, what: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor whose samples may be in its second axis, where no axis was declared."""
        fits_both = len(shape) > 2 and shape[0] != self.num_samples == shape[1] and not shape[0] % self.num_samples  # noqa: PLR2004
        if self._time_first is not None:
            reason = f"the model has layers with batch_first=False, {_called(self._time_first)} first"
        elif fits_both:
            reason = f"axis 0 is a multiple of {self.num_samples}, the number of samples, and axis 1 has as many"
        else:
            return
        self.refuse(
            f"{what} drops elements of a tensor {shape}, and its samples may be in axis 0 or in axis 1: {reason}",
            "Name the axis of samples: rng=PerSample(sample_dims={'': 0}), or 1, for the whole model; or module by "
            "module.",
        )

    def _shape_of_sample(self, what: str, dropped: torch.Tensor, axis: int, *, by_channel: bool) -> tuple[int, ...]:
        """Return the axes of one sample's mask, without the groups of consecutive rows that a flattened one has."""
        shape = tuple(dropped.shape)
        rest = shape[:axis] + shape[axis + 1 :]
        if by_channel and (len(shape) <= 1 or axis > 1):
            self.refuse(
                f"{what} drops whole channels of a tensor {shape} with samples in axis {axis}", "Use F.dropout."
            )
        if axis >= len(shape) or shape[axis] % self.num_samples:
            self.refuse(
                f"{what} drops elements of a tensor {shape} whose axis {axis} does not hold the "
                f"{self.num_samples} samples of the micro-batch",
                "Name the axis of samples: rng=PerSample(sample_dims={'the module': 1}).",
            )
        if self.packed and shape[axis] != self.num_samples:
            self.refuse(
                f"{what} drops elements of a tensor {shape} after a sequence was packed, which mixes the "
                f"{self.num_samples} samples",
                "Drop before packing or after padding.",
            )
        return rest[:1] if by_channel else rest

    def _has_moved(self) -> bool:
        """Whether anything but this drew from torch's generators since they were seeded last."""
        own = torch.default_generator
        if not torch.equal(own.get_state(), self._clean.manual_seed(own.initial_seed()).get_state()):
            return True
        states = zip(self.generators[1:], self._device_states, strict=True)
        return any(not torch.equal(generator.get_state(), state) for generator, state in states)

    def _owner(self) -> nn.Module | None:
        """Return the innermost module of the model in which Python is at this moment."""
        frame = inspect.currentframe()
        while frame is not None:
            code = frame.f_code
            # The first argument of a method is its module, by whatever name.
            first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            if id(first) in self._names:
                return first
            frame = frame.f_back
        return None


def device_generators(device: torch.device) -> list[torch.Generator]:
    """Return the generator of an accelerator, or none for the CPU."""
    if device.type == "cpu":
        return []
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", None)
    return [generators[device.index or 0]] if generators else []


def _axes_of_modules(policy: PerSample, modules: nn.Module) -> dict[int, int]:
    """Return the axis of samples inside each module for which one was declared; the innermost declaration counts."""
    known = dict(modules.named_modules())
    axes: dict[int, int] = {}
    # The name of an inner module is longer, so that its declaration comes later and replaces the outer one.
    for name in sorted(policy.sample_dims, key=len):
        if name not in known:
            message = (
                f"sample_dims names the module {name!r}, which there is not; there are "
                f"{', '.join(map(repr, list(known)[1:9]))}{' and others' if len(known) > 9 else ''}."  # noqa: PLR2004
            )
            raise UserError(message)
        axes |= {id(module): policy.sample_dims[name] for module in known[name].modules()}
    return axes


def _refuse_layers(modules: nn.Module) -> None:
    """Refuse recurrent layers that drop, before anything is run."""
    for name, module in modules.named_modules():
        if isinstance(module, nn.RNNBase) and module.training and module.dropout > 0 and module.num_layers > 1:
            message = (
                f"rng='per_sample' does not compose with {type(module).__name__}(dropout={module.dropout}), "
                f"{_called(name)}: {_RECURRENT[0]}. {_RECURRENT[1]} {_INSTEAD}"
            )
            raise CompositionError(message)


def _called(name: str) -> str:
    return f"module {name!r}" if name else "the model itself"


_RECURRENT = (
    "recurrent layers drop between their own layers, where no mask can be given",
    "Stack one-layer modules with nn.Dropout between them, or set its dropout to 0.",
)
_ATTENTION = (
    "fused attention drops its weights inside one kernel, where no mask can be given",
    "Write F.dropout(scores.softmax(-1)) @ value (nn.MultiheadAttention: need_weights=True; transformers: 'eager').",
)

Rule = Callable[..., Any]


def _dropping(apply: Callable[..., torch.Tensor], *, by_channel: bool = False) -> Rule:
    """Return the rule of a dropout function: the function itself where it draws nothing, a keyed mask otherwise."""

    def rule(draws: _Draws, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (as torch)
        what = func.__name__
        names = ("input", "p", "train") if hasattr(torch, what) else ("input", "p", "training", "inplace")
        given = {"p": 0.5, "training": "alpha" not in what, **dict(zip(names, args, strict=False)), **kwargs}
        values, p = given["input"], given["p"]
        if not given.get("train", given["training"]) or not 0 < p <= 1 or not values.numel():
            return func(*args, **kwargs)
        if values.dim() == _UNBATCHED_DIMENSIONS.get(what):
            draws.refuse(f"{what} of a tensor {tuple(values.shape)}, which has no axis of samples", "Keep the batch.")
        kept = draws.keep(what, values, p, by_channel=by_channel)
        return apply(values, kept, p, inplace=given.get("inplace", False) or what.endswith("_"))

    return rule


def _zero(values: torch.Tensor, kept: torch.Tensor, p: float, *, inplace: bool) -> torch.Tensor:
    """Return what stays divided by the share that stays, and 0 for the rest."""
    # With p = 1 all is dropped: the scale would be infinite, and infinity times 0 is NaN.
    scale = 1 / (1 - p) if p < 1 else 0.0
    if inplace:
        return values.mul_(scale).masked_fill_(~kept, 0.0)
    return torch.where(kept, values * scale, 0.0)


def _saturate(values: torch.Tensor, kept: torch.Tensor, p: float, *, inplace: bool) -> torch.Tensor:
    """Return alpha dropout: mean and variance of what comes from SELU stay.

    Source: Klambauer et al., "Self-Normalizing Neural Networks", 2017, section 3.
    """
    scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p)) if p < 1 else 0.0
    if inplace:
        return values.masked_fill_(~kept, -_ALPHA).mul_(scale).add_(_ALPHA * scale * p)
    return torch.where(kept, values, -_ALPHA) * scale + _ALPHA * scale * p


def _attention(draws: _Draws, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (as torch)
    drops = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)  # noqa: PLR2004 (query, key, value, mask before)
    if drops > 0:
        draws.refuse(_ATTENTION[0], _ATTENTION[1])
    return func(*args, **kwargs)


def _followed(function: Any, *, batch_first: bool = False) -> Rule:  # noqa: ANN401 (a FunctionType to us, not to mypy)
    """Return the rule of a torch function in Python whose own calls are to be seen too.

    A mode is off while it handles a function, and a function that finds it on hands itself over again, for ever. So
    what runs is the same code with that question answered no.
    """
    known = {**function.__globals__, "has_torch_function": _no, "has_torch_function_unary": _no}
    body = FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)
    body.__kwdefaults__ = function.__kwdefaults__

    def rule(draws: _Draws, _: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (as torch)
        with draws, draws.batch_first() if batch_first else nullcontext():
            return body(*args, **kwargs)

    return rule


def _no(*_: object) -> bool:
    return False


def _recurrent(draws: _Draws, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (as torch)
    # The weights are the last list: packed sequences have their sizes before it, and an LSTM a list of states.
    last = max((number for number, value in enumerate(args) if isinstance(value, (list, tuple))), default=len(args))
    names = ("params", "has_biases", "num_layers", "dropout", "train")
    given = {**dict(zip(names, args[last:], strict=False)), **kwargs}
    if given["train"] and given["dropout"] > 0 and given["num_layers"] > 1:
        draws.refuse(_RECURRENT[0], _RECURRENT[1])
    return func(*args, **kwargs)


def _packing(draws: _Draws, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (as torch)
    draws.packed = True
    return func(*args, **kwargs)


_RULES: Mapping[Any, Rule] = {
    **dict.fromkeys((functional.dropout, torch.dropout, torch.dropout_), _dropping(_zero)),
    **dict.fromkeys(
        (
            *(functional.dropout1d, functional.dropout2d, functional.dropout3d),
            *(torch.feature_dropout, torch.feature_dropout_),
        ),
        _dropping(_zero, by_channel=True),
    ),
    **dict.fromkeys((functional.alpha_dropout, torch.alpha_dropout, torch.alpha_dropout_), _dropping(_saturate)),
    **dict.fromkeys(
        (functional.feature_alpha_dropout, torch.feature_alpha_dropout, torch.feature_alpha_dropout_),
        _dropping(_saturate, by_channel=True),
    ),
    functional.scaled_dot_product_attention: _attention,
    # It lays samples times heads along the first axis before it drops, whatever the layer's batch_first.
    functional.multi_head_attention_forward: _followed(functional.multi_head_attention_forward, batch_first=True),
    # A checkpointed block is run again in the backward, and has to get the masks of its forward there.
    **{function: _followed(function) for function in (autograd.backward, autograd.grad, torch.Tensor.backward)},
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
}
