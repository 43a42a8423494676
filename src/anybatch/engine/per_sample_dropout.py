"""Dropout masks that are seeded per sample, so that they do not depend on micro-batches or the number of ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any, NoReturn, Self

import torch
from torch import autograd, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from anybatch.core.randomness import sample_bits, sample_keys, step_seed
from anybatch.core.torch_internals import is_in_backward, packing_function
from anybatch.engine.accumulate import KeyedRandomness, MicroBatch
from anybatch.errors import CompositionError

_ATTENTION = (
    "Write F.dropout(scores.softmax(-1)) @ value (nn.MultiheadAttention: need_weights=True; transformers: 'eager')."
)
_MIN_DIMENSIONS = {"dropout1d": 3, "dropout2d": 2, "dropout3d": 5}
"""Minimum number of axes of a tensor with a sample axis, for functions that drop channels."""


class SampleRandomness(KeyedRandomness):
    """Seeds dropout masks per sample, and restores the caller's random state at the end.

    A torch function mode intercepts dropout functions while a micro-batch runs. Each call of dropout increments the
    seed of torch's CPU generator, starting at the step's seed. So code that restores torch's random state (activation
    checkpointing, a second pass) gets the same masks again. Samples must be along the first axis.
    """

    covers_backward = True  # a checkpointed block that is recomputed in the backward needs the masks of its forward

    def __init__(self, modules: nn.Module, device: torch.device) -> None:
        super().__init__(device)
        _check_layers(modules)
        self._draws = _Draws(device, self.generators)

    def __enter__(self) -> Self:
        # Numbers of calls are compared within a step only: the next step may run other layers of the model.
        self._draws.num_calls_of_step = None
        return super().__enter__()

    @contextmanager
    def micro_batch(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Seed the dropout masks of one forward and backward."""
        self._draws.begin(micro_batch)
        with self._draws:
            yield
        self._draws.end()


class _Draws(TorchFunctionMode):
    """Intercepts every torch function of a micro-batch, and applies masks that are seeded per sample in dropout."""

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.generators = generators
        self.num_calls_of_step: int | None = None
        self.packed = False
        self.in_attention = False
        self._num_samples = 0
        self._num_calls = 0
        self._packing_function = packing_function()
        self._device = device
        self._first_seed = 0
        self._device_states: list[torch.Tensor] = []
        # Seeded like the CPU generator: if their states differ, numbers were drawn from the CPU generator.
        self._clean = torch.Generator()
        self._probing = True

    def begin(self, micro_batch: MicroBatch) -> None:
        """Reset the count of calls, and compute the keys of this micro-batch's samples."""
        self._first_seed = step_seed(micro_batch.key.seed, micro_batch.key.step)
        self._num_samples = micro_batch.unit.num_samples
        self._keys = sample_keys(micro_batch.key, micro_batch.unit.start, micro_batch.unit.stop).to(
            self._device, non_blocking=True
        )
        self._num_calls = 0
        self.packed = False
        torch.default_generator.manual_seed(self._first_seed)
        for generator in self.generators[1:]:
            generator.manual_seed(micro_batch.seed)
        # The states of device generators are compared later to detect draws from them.
        self._device_states = [generator.get_state() for generator in self.generators[1:]]

    def end(self) -> None:
        """Refuse random numbers that depend on how the batch is split."""
        if self._has_drawn():
            _refuse(
                "random numbers were drawn outside dropout",
                "Draw random numbers with the data, so that they belong to a sample.",
            )
        if self.num_calls_of_step not in (None, self._num_calls):
            _refuse(
                f"dropout was called {self.num_calls_of_step} times in one micro-batch of a step and "
                f"{self._num_calls} times in another, so the number of a call depends on the micro-batch size",
                "Call it in every micro-batch, regardless of the data.",
            )
        self.num_calls_of_step = self._num_calls
        # In the first micro-batch, a check after every function finds the function that draws. This is slow, so later
        # micro-batches are checked only at their end.
        self._probing = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 (torch's protocol)
        if func is self._packing_function:
            self.packed = True
        rule = _RULES.get(func)
        if rule is not None:
            return rule(self, func, *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if self._probing and self._has_drawn():
            is_attention = func is functional.scaled_dot_product_attention
            _refuse(
                f"{getattr(func, '__name__', func)} draws random numbers that are not seeded per sample",
                _ATTENTION
                if is_attention
                else "Draw random numbers with the data, so that they belong to a sample, or use F.dropout.",
            )
        return result

    def keep(self, what: str, dropped: torch.Tensor, p: float, *, by_channel: bool) -> torch.Tensor:
        """Return the mask of kept elements, shaped like `dropped`, or (samples, channels, 1, ...) if `by_channel`."""
        call = self._next_call()
        self._check_sample_axis(what, dropped)
        shape = tuple(dropped.shape)
        rest = shape[1:2] if by_channel else shape[1:]
        groups = shape[0] // self._num_samples
        bits = sample_bits(self._keys, call, (rest if groups == 1 else (groups, *rest)) or (1,))
        # Bits are uniform from -2**31 to 2**31 - 1, so a fraction p of them is below the bound. The bound must fit into
        # 32 bits, so at p = 1 one element in 2**32 is kept, and multiplied by 0.
        kept = bits >= min(round(p * 2**32), 2**32 - 1) - 2**31
        return kept.reshape(shape[0], *rest, *(1,) * (dropped.dim() - 1 - len(rest)))

    def _next_call(self) -> int:
        """Return the number of this call of dropout; a recomputed forward gets the same number again."""
        generator = torch.default_generator
        if self._has_drawn():  # checked now, since the new seed below would hide the draw
            _refuse(
                "random numbers were drawn outside dropout",
                "Draw random numbers with the data, so that they belong to a sample, or use F.dropout.",
            )
        call = generator.initial_seed() - self._first_seed
        if not 0 <= call <= self._num_calls:
            _refuse("the forward seeds torch's generator", "Remove torch.manual_seed from the forward.")
        if call == self._num_calls:
            if is_in_backward():  # the same check as in torch's checkpointing
                _refuse(
                    "activation checkpointing recomputes the forward without its random state",
                    "Use preserve_rng_state=True, the default.",
                )
            self._num_calls += 1
        generator.manual_seed(self._first_seed + call + 1)
        return call

    def _check_sample_axis(self, what: str, dropped: torch.Tensor) -> None:
        """Refuse a tensor whose first axis is not the axis of the samples, alone or flattened with other axes."""
        shape, number = tuple(dropped.shape), self._num_samples
        about = f"{what} drops elements of a tensor {shape}"
        if isinstance(dropped, nn.Parameter):
            _refuse(
                f"{what} drops elements of a parameter, which belong to no sample",
                "Apply dropout to the layer's output instead.",
            )
        if len(shape) < _MIN_DIMENSIONS.get(what, 1):
            _refuse(f"{about} without a sample axis", "Keep the batch axis.")
        if shape[0] % number:
            _refuse(f"{about} whose axis 0 is not the axis of the {number} samples", "Put samples first.")
        if self.packed and shape[0] != number:
            _refuse(
                f"{about} after a sequence was packed, which mixes the {number} samples",
                "Apply dropout before packing or after padding.",
            )
        # Attention has samples times heads in the first axis.
        if len(shape) > 2 and shape[0] != number == shape[1] and not self.in_attention:  # noqa: PLR2004
            _refuse(
                f"{about}, whose {number} samples may be in axis 0 or axis 1",
                "Put samples first; if they are first, choose another micro_batch_size.",
            )

    def _has_drawn(self) -> bool:
        """Return whether other code has drawn from torch's generators since they were last seeded."""
        default = torch.default_generator
        if not torch.equal(default.get_state(), self._clean.manual_seed(default.initial_seed()).get_state()):
            return True
        states = zip(self.generators[1:], self._device_states, strict=True)
        return any(not torch.equal(generator.get_state(), state) for generator, state in states)


def _check_layers(modules: nn.Module) -> None:
    """Refuse layers with samples in the second axis, and recurrent layers with dropout, before the first forward."""
    for name, module in modules.named_modules():
        layer = f"{type(module).__name__} {name!r}"
        if getattr(module, "batch_first", True) is False:
            _refuse(f"the layer {layer} has samples in its second axis", "Use batch_first=True.")
        if isinstance(module, nn.RNNBase) and module.training and module.dropout > 0 and module.num_layers > 1:
            _refuse(
                f"the layer {layer} applies dropout internally, where masks cannot be seeded per sample",
                "Stack one-layer modules with nn.Dropout between them, or set its dropout to 0.",
            )


def _refuse(what: str, remedy: str) -> NoReturn:
    """Raise the `CompositionError` for random numbers that cannot be seeded per sample."""
    message = (
        f"rng='per_sample' does not work with this model: {what}. {remedy} Or use rng='micro_batch', which is exact "
        "for the same micro-batches."
    )
    raise CompositionError(message, code="not_keyed_by_sample")


def _dropout(  # noqa: PLR0917 (torch's signature)
    draws: _Draws,
    func: Callable[..., Any],
    input: torch.Tensor,  # noqa: A002 (torch's name)
    p: float = 0.5,
    training: bool = True,  # noqa: FBT001, FBT002 (torch's signature)
    inplace: bool = False,  # noqa: FBT001, FBT002
) -> Any:  # noqa: ANN401 (as torch)
    """Drop elements or channels by a mask seeded per sample, or call the function unchanged if it draws nothing."""
    if not training or not 0 < p <= 1 or not input.numel():
        return func(input, p, training, inplace)
    kept = draws.keep(func.__name__, input, p, by_channel=func is not functional.dropout)
    # With p = 1 everything is dropped, and 0 times an infinite scale would be NaN.
    scale = 1 / (1 - p) if p < 1 else 0.0
    if inplace:
        return input.mul_(scale).masked_fill_(~kept, 0.0)
    return torch.where(kept, input * scale, 0.0)


Rule = Callable[..., Any]


def _inside_of(function: Any, *, is_attention: bool = False) -> Rule:  # noqa: ANN401 (a FunctionType to us, not to mypy)
    """Return the rule for a torch function written in Python, whose inner calls must be intercepted too.

    torch disables a mode while the mode handles a function. If the mode were simply enabled again, the function would
    call the mode forever, so its code runs with a `has_torch_function` that returns False.
    """
    known = {**function.__globals__, "has_torch_function": _no, "has_torch_function_unary": _no}
    body = FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)
    body.__kwdefaults__ = function.__kwdefaults__

    def rule(draws: _Draws, _: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (as torch)
        with draws, _inside_attention(draws) if is_attention else nullcontext():
            return body(*args, **kwargs)

    return rule


@contextmanager
def _inside_attention(draws: _Draws) -> Iterator[None]:
    draws.in_attention = True
    try:
        yield
    finally:
        draws.in_attention = False


def _no(*_: object) -> bool:
    return False


_RULES: Mapping[Any, Rule] = {
    **dict.fromkeys(
        (functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
        _dropout,
    ),
    functional.multi_head_attention_forward: _inside_of(functional.multi_head_attention_forward, is_attention=True),
    # A checkpointed block is recomputed in the backward, and needs the masks of its forward there.
    **{function: _inside_of(function) for function in (autograd.backward, autograd.grad, torch.Tensor.backward)},
}
