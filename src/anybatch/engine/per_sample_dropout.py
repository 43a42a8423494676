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
from anybatch.engine.accumulate import MicroBatch
from anybatch.engine.torch_internals import packing_function
from anybatch.errors import CompositionError, UserError

_INSTEAD = "Or use rng='micro_batch', which is exact for the same cut."
_ALPHA = 1.7580993408473766  # the negative limit of SELU: alpha dropout replaces dropped elements by -_ALPHA
# Without `dropout2d`, for which torch interprets three axes as (N, C, L), with samples.
_UNBATCHED_DIMENSIONS = {"dropout1d": 2, "dropout3d": 4}


@dataclass(frozen=True, slots=True)
class PerSample:
    """Draw dropout masks by (seed, step, global sample id, number of the call inside the forward).

    Args:
        sample_dims: for modules in which samples are not along the first axis, name of the module to the sample axis
            of the tensors dropped inside it: `{"encoder": 1}` for layers with batch_first=False. "" is the whole model.

    Raises:
        UserError: an axis is below 0.
    """

    sample_dims: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, axis in self.sample_dims.items():
            if axis < 0:
                message = f"sample_dims[{name!r}]={axis} must be 0 or above; axes are counted from the first."
                raise UserError(message)


class KeyedGenerators:
    """Torch's generators of the CPU and the rank's device, seeded in a step; the caller's state returns at its end."""

    def __init__(self, device: torch.device) -> None:
        self.generators = [torch.default_generator, *device_generators(device)]
        self._states: list[torch.Tensor] = []

    def __enter__(self) -> Self:
        self._states = [generator.get_state() for generator in self.generators]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for generator, state in zip(self.generators, self._states, strict=True):
            generator.set_state(state)

    def whole(self, seed: int) -> None:
        """Seed the numbers that are drawn once for the effective batch, which do not depend on the cut."""
        for generator in self.generators:
            generator.manual_seed(seed)


class SampleRandomness(KeyedGenerators):
    """Gives dropout masks that are keyed by sample, and restores the caller's random state at the end.

    A torch function mode intercepts dropout functions while a micro-batch runs. The number of a call is stored in the
    seed of torch's CPU generator, counted up from the step's seed, so that code that replays torch's random state
    (activation checkpointing, a second pass) replays the same masks.

    Raises:
        UserError: `sample_dims` names a module that does not exist.
        CompositionError: a layer uses dropout whose masks cannot be keyed.
    """

    covers_backward = True  # a checkpointed block that is recomputed there needs the masks of its forward

    def __init__(self, policy: PerSample, modules: nn.Module, device: torch.device) -> None:
        super().__init__(device)
        _refuse_layers(modules)
        axes = _axes_of_modules(policy, modules)
        self._draws = _Draws(dict(modules.named_modules()), axes, device, self.generators)

    def __enter__(self) -> Self:
        # Calls are compared within a step only: the next step may take another path through the model.
        self._draws.num_calls_of_step = None
        return super().__enter__()

    @contextmanager
    def micro_batch(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Key the draws of one forward and backward.

        Raises:
            CompositionError: on exit, if other functions drew numbers, or the number of calls differs from the previous
                micro-batch.
        """
        self._draws.begin(micro_batch)
        with self._draws:
            yield
        self._draws.end()

    def parked(self) -> AbstractContextManager[None]:
        """Raise an assertion: interleaved micro-batches are refused before."""
        message = "per-sample masks are counted within one forward at a time"
        raise AssertionError(message)


class _Draws(TorchFunctionMode):
    """Intercepts every torch function of a micro-batch, and applies keyed masks in dropout functions."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        axes: Mapping[int, int],
        device: torch.device,
        generators: Sequence[torch.Generator],
    ) -> None:
        super().__init__()
        self.generators = generators
        self.num_calls_of_step: int | None = None
        self.packed = False
        self.num_samples = 0
        self._packing_function = packing_function()
        self._names = {id(module): name for name, module in modules.items()}
        self._axes = axes
        self._time_first = next((key for key in modules if getattr(modules[key], "batch_first", True) is False), None)
        self._device = device
        self._first_seed = 0
        self._axis_of_call: list[int | None] = []
        self._device_states: list[torch.Tensor] = []
        # Seeded like the CPU generator, to compare its state with a state from which nothing was drawn.
        self._clean = torch.Generator()
        self._is_batch_first = False
        self._probing = True

    def begin(self, micro_batch: MicroBatch) -> None:
        """Reset the count of calls, and key the samples of this micro-batch."""
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
        # Device generators hold no count; their states only show whether anything was drawn from them.
        self._device_states = [generator.get_state() for generator in self.generators[1:]]

    def end(self) -> None:
        """Refuse draws that would differ at another cut."""
        if self._has_moved():
            self.refuse(
                "random numbers were drawn outside dropout",
                "Draw them with the data, so that they belong to the sample.",
            )
        calls = len(self._axis_of_call)
        if self.num_calls_of_step not in (None, calls):
            self.refuse(
                f"dropout was called {self.num_calls_of_step} times in one micro-batch of a step and {calls} times in "
                "another, so the number of a call depends on the cut",
                "Call it in every micro-batch, regardless of the data.",
            )
        self.num_calls_of_step = calls
        # A check after every function is slow. In the first micro-batch it finds the function that draws; later
        # micro-batches are checked at their end.
        self._probing = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 (torch's protocol)
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
        """Return the mask of kept elements, of the shape of `dropped` or with length 1 in all axes but two."""
        if isinstance(dropped, nn.Parameter):
            self.refuse(
                f"{what} drops elements of a parameter, which belong to no sample",
                "Apply dropout to the layer's output instead.",
            )
        call, declared = self._next_call()
        axis = declared or 0
        if declared is None:
            self._refuse_time_first(what, tuple(dropped.shape))
        rest = self._shape_of_sample(what, dropped, axis, by_channel=by_channel)
        groups = dropped.shape[axis] // self.num_samples
        shape = rest if groups == 1 else (groups, *rest)
        bits = sample_bits(self._keys, call, shape or (1,))
        # Bits are uniform from -2**31 on, so this fraction of them is below the bound. The bound must fit into 32 bits,
        # so at p = 1 one element in 2**32 is kept, and scaled by 0.
        kept = bits >= min(round(p * 2**32), 2**32 - 1) - 2**31
        kept = kept.reshape(dropped.shape[axis], *rest).movedim(0, axis)
        return kept.reshape(*kept.shape, *(1,) * (dropped.dim() - kept.dim()))

    @contextmanager
    def batch_first(self) -> Iterator[None]:
        """Use the first axis as the sample axis temporarily, regardless of the declaration."""
        before, self._is_batch_first = self._is_batch_first, True
        try:
            yield
        finally:
            self._is_batch_first = before

    def refuse(self, what: str, remedy: str) -> NoReturn:
        """Raise the `CompositionError` for draws that cannot be keyed."""
        owner = self._owner()
        where = "" if owner is None else f" (in {_called(self._names[id(owner)])})"
        message = f"rng='per_sample' does not compose with this model: {what}{where}. {remedy} {_INSTEAD}"
        raise CompositionError(message)

    def _next_call(self) -> tuple[int, int | None]:
        """Return the number of this call and the sample axis (None if not declared); a replay gives the same ones."""
        generator, known = torch.default_generator, self._axis_of_call
        call = generator.initial_seed() - self._first_seed
        if not 0 <= call <= len(known):
            self.refuse("the forward seeds torch's generator", "Remove torch.manual_seed from the forward.")
        if call == len(known):
            if is_in_backward():  # the same check as in torch's checkpointing
                self.refuse(
                    "activation checkpointing recomputes the forward without its random state",
                    "Use preserve_rng_state=True, the default.",
                )
            is_declared = self._axes and not self._is_batch_first
            known.append(self._axes.get(id(self._owner())) if is_declared else 0 if self._is_batch_first else None)
        generator.manual_seed(self._first_seed + call + 1)
        return call, known[call]

    def _refuse_time_first(self, what: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor whose samples may be along its second axis, if no axis was declared."""
        fits_both = len(shape) > 2 and shape[0] != self.num_samples == shape[1] and not shape[0] % self.num_samples  # noqa: PLR2004
        if self._time_first is not None:
            reason = f"the model has layers with batch_first=False, {_called(self._time_first)} first"
        elif fits_both:
            reason = f"the micro-batch has {self.num_samples} samples, and both axes fit that number"
        else:
            return
        self.refuse(
            f"{what} drops elements of a tensor {shape}, whose samples may be in axis 0 or axis 1: {reason}",
            "Declare the sample axis, 0 or 1: rng=PerSample(sample_dims={'': 0}) for the whole model, or per module.",
        )

    def _shape_of_sample(self, what: str, dropped: torch.Tensor, axis: int, *, by_channel: bool) -> tuple[int, ...]:
        """Return the shape of one sample's mask, without the rows per sample of a flattened tensor."""
        shape = tuple(dropped.shape)
        rest = shape[:axis] + shape[axis + 1 :]
        if by_channel and (len(shape) <= 1 or axis > 1):
            self.refuse(
                f"{what} drops whole channels of a tensor {shape} with samples in axis {axis}", "Use F.dropout."
            )
        if axis >= len(shape) or shape[axis] % self.num_samples:
            self.refuse(
                f"{what} drops elements of a tensor {shape} whose axis {axis} is not the axis of the "
                f"{self.num_samples} samples of the micro-batch",
                "Declare the sample axis: rng=PerSample(sample_dims={'the module': 1}).",
            )
        if self.packed and shape[axis] != self.num_samples:
            self.refuse(
                f"{what} drops elements of a tensor {shape} after a sequence was packed, which mixes the "
                f"{self.num_samples} samples",
                "Apply dropout before packing or after padding.",
            )
        return rest[:1] if by_channel else rest

    def _has_moved(self) -> bool:
        """Return whether other code drew from torch's generators since they were last seeded."""
        default = torch.default_generator
        if not torch.equal(default.get_state(), self._clean.manual_seed(default.initial_seed()).get_state()):
            return True
        states = zip(self.generators[1:], self._device_states, strict=True)
        return any(not torch.equal(generator.get_state(), state) for generator, state in states)

    def _owner(self) -> nn.Module | None:
        """Return the innermost module of the model on the Python stack."""
        frame = inspect.currentframe()
        while frame is not None:
            code = frame.f_code
            # The first argument of a module's method is the module, under any name.
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
    """Return the declared sample axis of each module; the innermost declaration counts."""
    known = dict(modules.named_modules())
    axes: dict[int, int] = {}
    # Names of inner modules are longer, so their declarations come later and override outer ones.
    for name in sorted(policy.sample_dims, key=len):
        if name not in known:
            message = (
                f"sample_dims names the module {name!r}, which does not exist. Modules are "
                f"{', '.join(map(repr, list(known)[1:9]))}{' and others' if len(known) > 9 else ''}."  # noqa: PLR2004
            )
            raise UserError(message)
        axes |= {id(module): policy.sample_dims[name] for module in known[name].modules()}
    return axes


def _refuse_layers(modules: nn.Module) -> None:
    """Refuse recurrent layers with dropout before the first forward."""
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
    "recurrent layers apply dropout internally, where masks cannot be keyed",
    "Stack one-layer modules with nn.Dropout between them, or set its dropout to 0.",
)
_ATTENTION = (
    "fused attention applies dropout inside one kernel, where masks cannot be keyed",
    "Write F.dropout(scores.softmax(-1)) @ value (nn.MultiheadAttention: need_weights=True; transformers: 'eager').",
)

Rule = Callable[..., Any]


def _dropping(apply: Callable[..., torch.Tensor], *, by_channel: bool = False) -> Rule:
    """Return the rule of a dropout function: a keyed mask, or the unchanged function if it draws nothing."""

    def rule(draws: _Draws, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (as torch)
        what = func.__name__
        names = ("input", "p", "train") if hasattr(torch, what) else ("input", "p", "training", "inplace")
        given = {"p": 0.5, "training": "alpha" not in what, **dict(zip(names, args, strict=False)), **kwargs}
        values, p = given["input"], given["p"]
        if not given.get("train", given["training"]) or not 0 < p <= 1 or not values.numel():
            return func(*args, **kwargs)
        if values.dim() == _UNBATCHED_DIMENSIONS.get(what):
            draws.refuse(f"{what} of a tensor {tuple(values.shape)} without a sample axis", "Keep the batch axis.")
        kept = draws.keep(what, values, p, by_channel=by_channel)
        return apply(values, kept, p, inplace=given.get("inplace", False) or what.endswith("_"))

    return rule


def _zero(values: torch.Tensor, kept: torch.Tensor, p: float, *, inplace: bool) -> torch.Tensor:
    """Return kept values divided by the kept fraction, and 0 for the rest."""
    # With p = 1 everything is dropped, and 0 times an infinite scale would be NaN.
    scale = 1 / (1 - p) if p < 1 else 0.0
    if inplace:
        return values.mul_(scale).masked_fill_(~kept, 0.0)
    return torch.where(kept, values * scale, 0.0)


def _saturate(values: torch.Tensor, kept: torch.Tensor, p: float, *, inplace: bool) -> torch.Tensor:
    """Return alpha dropout, which preserves mean and variance of SELU outputs.

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
    """Return the rule of a torch function in Python whose inner calls must be intercepted too.

    A mode is off while it handles a function. With the mode on, the function would dispatch itself again forever, so
    the same code runs with `has_torch_function` returning False.
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
    # The weights are the last list, after the sizes of packed sequences and an LSTM's list of states.
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
    # It puts samples times heads into the first axis before dropout, regardless of batch_first.
    functional.multi_head_attention_forward: _followed(functional.multi_head_attention_forward, batch_first=True),
    # A checkpointed block is recomputed in the backward, and needs the masks of its forward there.
    **{function: _followed(function) for function in (autograd.backward, autograd.grad, torch.Tensor.backward)},
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
}
