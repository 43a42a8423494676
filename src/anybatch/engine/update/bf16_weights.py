"""Weights in bf16 that are updated in float32 without a copy in float32 beside them: some at a time, then rounded.

Rounded to the nearest, a weight in bf16 keeps no update below a 512th of itself, and training stalls. Two ways keep it:

- "split": a float32 number is its upper 16 bits, which are a bf16 number, and its lower 16 bits. The model has the
  upper ones, the engine the lower ones, and together they are the float32 weight: nothing is lost.
- "stochastic": only the bf16 number is kept, rounded up with the probability that makes its mean the float32 number.
  The optimizer's state is kept in the same way.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from jaxtyping import BFloat16, Float32, Int16, Int32
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.core.dtypes import widened
from anybatch.core.randomness import rounding_seed
from anybatch.errors import CompositionError, UserError
from anybatch.parallel.local_parts import is_dtensor
from anybatch.parallel.strategy import Capabilities, trainable

Bf16Weights = Literal["copied", "split", "stochastic"]
"""What an update of bf16 weights has beside them: float32 copies, the lower 16 bits of such, or nothing."""

PIECE_BYTES = 1 << 28
"""Weights are widened together up to so many bytes in float32; one parameter at the least."""
_SLICE = 1 << 24
"""So many numbers are rounded at a time, since rounding takes several copies of them."""
_UPPER = -(1 << 16)
"""The upper 16 bits of 32."""
_BY_ITSELF = ("torch.optim", "bitsandbytes")
"""Whose optimizers update each parameter by itself, so that some can be updated at a time."""


def split(values: Float32[Tensor, "*shape"]) -> tuple[BFloat16[Tensor, "*shape"], Int16[Tensor, "*shape"]]:
    """Return float32 numbers as the nearest bf16 numbers, and what is missing of their bits.

    Half-way between two of them the one further from zero is taken, so that what is missing has 16 bits. A NaN stays
    one, with other bits.
    """
    bits = values.view(torch.int32)
    upper = bits.add(1 << 15).bitwise_and_(_UPPER)
    missing = (bits - upper).to(torch.int16)
    # A NaN's bits overflow.
    return torch.where(values.isnan(), values, upper.view(torch.float32)).to(torch.bfloat16), missing


def joined(values: BFloat16[Tensor, "*shape"], missing: Int16[Tensor, "*shape"]) -> Float32[Tensor, "*shape"]:
    """Return the float32 numbers that `split` has taken apart, bit for bit."""
    wide = values.float()
    wide.view(torch.int32).add_(missing)
    return wide


def stochastically_rounded(
    values: Float32[Tensor, "*shape"], drawn: Int32[Tensor, "*shape"]
) -> BFloat16[Tensor, "*shape"]:
    """Return each number as one of the two bf16 numbers around it; in the mean over what is drawn it is itself.

    What bf16 has is returned as it is, and so is what is not finite. The probabilities are exact: multiples of
    1 / 65536, as the bits that are cut off.

    Source: Gupta et al., "Deep learning with limited numerical precision", 2015, section 3.

    Args:
        values: any.
        drawn: whole numbers from 0 to 65535, each as likely; overwritten.
    """
    # What is cut off, with as many random bits added, carries into the upper half as often as it is large.
    up = drawn.add_(values.view(torch.int32)).bitwise_and_(_UPPER)
    return torch.where(values.isfinite(), up.view(torch.float32), values).to(torch.bfloat16)


class Float32Windows:
    """Parameters in float32, for an optimizer, that take memory only while it updates them.

    The plain loop, for some of them at a time: widen the bf16 weights, step, round the weights back.

    Args:
        parameters: the model's; those in bf16 get windows, others are updated where they are.
        way: "split" or "stochastic".
        seed: of the random bits, with the step and the parameter's number: all ranks round alike.

    Attributes:
        updated: what the optimizer holds, parameter by parameter.
        missing: the lower bits of each window, as `split` has them; empty where nothing is kept.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, way: Bf16Weights, seed: int) -> None:
        self._parameters = tuple(parameters)
        self._keeps_bits, self._seed = way == "split", seed
        # What closed windows are made of, one for each device: a number, as often as it is asked for.
        self._nothing = {
            one.device: torch.zeros((), dtype=torch.float32, device=one.device) for one in self._parameters
        }
        self.updated = tuple(map(self._window, self._parameters))
        self.missing: dict[int, Tensor] = {}
        if self._keeps_bits:
            self.missing = {n: torch.zeros_like(self._parameters[n], dtype=torch.int16) for n in self._numbers}
        self._generators: dict[torch.device, torch.Generator] = {}

    @property
    def _numbers(self) -> list[int]:
        """The numbers of the parameters that have a window."""
        pairs = zip(self.updated, self._parameters, strict=True)
        return [number for number, (window, own) in enumerate(pairs) if window is not own]

    def wide_weights(self) -> list[Tensor]:
        """Return every parameter in float32 where it is in bf16, with its lower bits if they are kept."""
        return [
            joined(parameter.detach(), self.missing[number]) if number in self.missing else widened(parameter.detach())
            for number, parameter in enumerate(self._parameters)
        ]

    def pieces(self, optimizer: Optimizer) -> list[list[int]]:
        """Return the numbers of the parameters that are updated together: all, if only that is known to be right.

        Args:
            optimizer: torch's own, those of bitsandbytes and what says so itself (`updates_each_by_itself = True`)
                update each parameter by itself.
        """
        alone = type(optimizer).__module__.startswith(_BY_ITSELF) or getattr(optimizer, "updates_each_by_itself", False)
        found: list[list[int]] = [[]]
        held_bytes = 0
        for number, parameter in enumerate(self.updated):
            held_bytes += 4 * parameter.numel()
            if alone and found[-1] and held_bytes > PIECE_BYTES:
                found.append([])
                held_bytes = 4 * parameter.numel()
            found[-1].append(number)
        return found

    def num_bytes(self, piece: Sequence[int]) -> int:
        """Return the bytes of the windows of some parameters while they are open."""
        return sum(4 * self.updated[number].numel() for number in set(piece) & set(self._numbers))

    @contextmanager
    def opened(self, optimizer: Optimizer, piece: Sequence[int]) -> Iterator[None]:
        """Let the optimizer see some parameters only, in float32.

        Args:
            optimizer: over all.
            piece: their numbers.
        """
        seen = {id(self.updated[number]) for number in piece}
        groups = [group["params"] for group in optimizer.param_groups]
        whole = [list(parameters) for parameters in groups]
        try:
            for parameters in groups:
                parameters[:] = [parameter for parameter in parameters if id(parameter) in seen]
            for number in piece:
                self._open(optimizer, number)
            yield
        finally:
            for parameters, every in zip(groups, whole, strict=True):
                parameters[:] = every
            for number in piece:
                self._free(number)

    @torch.no_grad()
    def step(self, optimizer: Optimizer, gradients: Sequence[Tensor | None], step: int) -> None:
        """Let the optimizer make one step, piece by piece.

        Args:
            optimizer: over `updated`.
            gradients: summed and clipped, in float32, by parameter; None leaves a parameter as it is.
            step: its number, for the random bits.
        """
        for piece in self.pieces(optimizer):
            used = [number for number in piece if gradients[number] is not None]
            with self.opened(optimizer, used):
                for number in used:
                    self.updated[number].grad = gradients[number]
                with torch.enable_grad():
                    optimizer.step()
                for number in used:
                    self._close(optimizer, number, step)

    @torch.no_grad()
    def narrow_state(self, optimizer: Optimizer, numbers: Sequence[int] | None = None) -> None:
        """Keep the optimizer's state in bf16 where weights are, if nothing is kept beside them.

        Numbers that bf16 has stay as they are.

        Args:
            optimizer: has made its state, or loaded one.
            numbers: of parameters; None for all.
        """
        for number in range(len(self.updated)) if numbers is None else numbers:
            for name in self._wide_state(optimizer, number, torch.float32):
                state = optimizer.state[self.updated[number]]
                state[name] = state[name].to(torch.bfloat16)

    def _window(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a closed window of a parameter; the parameter itself if it is not in bf16."""
        if parameter.dtype is not torch.bfloat16:
            return parameter
        return nn.Parameter(self._nothing[parameter.device].expand(parameter.shape))

    def _open(self, optimizer: Optimizer, number: int) -> None:
        parameter, window = self._parameters[number], self.updated[number]
        if window is parameter:
            return
        window.data = joined(parameter, self.missing[number]) if self._keeps_bits else parameter.float()
        for name in self._wide_state(optimizer, number, torch.bfloat16):
            state = optimizer.state[window]
            state[name] = state[name].float()

    def _close(self, optimizer: Optimizer, number: int, step: int) -> None:
        parameter, window = self._parameters[number], self.updated[number]
        if window is parameter:
            return
        if self._keeps_bits:
            for wide, narrow, bits in _slices(window.detach(), parameter, self.missing[number]):
                values, missing = split(wide)
                narrow.copy_(values)
                bits.copy_(missing)
            return
        generator = self._generators.setdefault(parameter.device, torch.Generator(parameter.device))
        generator.manual_seed(rounding_seed(self._seed, step, number))
        _round(window.detach(), parameter, generator)
        for name in self._wide_state(optimizer, number, torch.float32):
            state = optimizer.state[window]
            narrow = torch.empty_like(state[name], dtype=torch.bfloat16)
            _round(state[name], narrow, generator)
            state[name] = narrow

    def _free(self, number: int) -> None:
        window = self.updated[number]
        if window is not self._parameters[number]:
            window.grad = None
            window.data = self._nothing[window.device].expand(window.shape)

    def _wide_state(self, optimizer: Optimizer, number: int, dtype: torch.dtype) -> list[str]:
        """Return the names of the state that is kept like the weights of a window, of a type."""
        window = self.updated[number]
        if self._keeps_bits or window is self._parameters[number]:
            return []
        state = optimizer.state.get(window, {})
        return sorted(
            name
            for name, value in state.items()
            if isinstance(value, Tensor) and value.dtype is dtype and value.shape == window.shape and value.dim()
        )


def _round(values: Tensor, into: Tensor, generator: torch.Generator) -> None:
    """Round float32 numbers stochastically into a tensor of bf16 numbers."""
    for wide, narrow in _slices(values, into):
        drawn = torch.empty_like(wide, dtype=torch.int32).random_(0, 1 << 16, generator=generator)
        narrow.copy_(stochastically_rounded(wide, drawn))


def _slices(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield parts of tensors of one shape; those that do not lie in order in one piece of memory come whole."""
    if all(tensor.is_contiguous() for tensor in tensors):
        yield from zip(*(tensor.view(-1).split(_SLICE) for tensor in tensors), strict=True)
    else:
        yield tensors


def refuse_bf16_weights(way: Bf16Weights, modules: nn.Module, optimizer: object, strategy: Capabilities) -> None:
    """Refuse ways to keep bf16 weights where they do not hold, beside what the composition table refuses.

    Args:
        way: what was asked for.
        modules: everything that trains.
        optimizer: an instance, or a function that makes it.
        strategy: what it says of itself.

    Raises:
        UserError: with the reason, and what to use.
    """
    if way not in {"copied", "split", "stochastic"}:
        message = f"bf16_weights={way!r} must be 'copied', 'split' or 'stochastic'."
        raise UserError(message)
    if way == "copied":
        return
    own = trainable(modules)
    half = next((name for name, one in own.items() if one.dtype is torch.float16), None)
    found = []
    if isinstance(optimizer, Optimizer):
        found.append(
            "the optimizer is an instance over the weights, and these are updated in float32: give it as a function "
            "named_parameters -> optimizer"
        )
    if half is not None:
        found.append(f"{half!r} is in fp16, whose bits are no half of a float32 number: use bf16")
    if strategy.feature is None and strategy.replaces_parameters:
        found.append(f"strategy={strategy.name!r} replaces parameters: use strategy='all_reduce'")
    if any(map(is_dtensor, own.values())):
        found.append("a weight is a DTensor, of which each process has a part: use bf16_weights='copied'")
    if found:
        message = f"bf16_weights={way!r} cannot be: {'; and '.join(found)}."
        raise CompositionError(message)
