"""Update bf16 weights in float32 without permanent float32 copies: convert a few weights, update them, round them back.

With rounding to nearest, a bf16 weight loses updates smaller than 1 / 512 of its value, and training stalls. Two ways
avoid this:

- "split": the upper 16 bits of a float32 number are a bf16 number. The model has the upper 16 bits and the engine the
  lower 16 bits, and together they are the exact float32 weight.
- "stochastic": only the bf16 weight is stored. It is rounded up or down at random, so that its expected value is the
  float32 number. The optimizer's state is rounded in the same way.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from jaxtyping import BFloat16, Float32, Int16, Int32
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.core.randomness import rounding_seed
from anybatch.core.tensors import widened
from anybatch.errors import CompositionError
from anybatch.parallel.dtensors import is_dtensor
from anybatch.parallel.strategy import Capabilities, trainable

Bf16Weights = Literal["copied", "split", "stochastic"]
"""How bf16 weights are updated: with float32 copies, with their lower 16 bits, or with stochastic rounding."""

PIECE_BYTES = 1 << 28
"""Maximum bytes of weights that are converted to float32 together; a larger parameter is converted alone."""
_SLICE = 1 << 24
"""Maximum number of elements that are rounded together, since rounding needs several copies of them."""
_UPPER = -(1 << 16)
"""Mask of the upper 16 bits of 32."""
_INDEPENDENT_UPDATES = ("torch.optim", "bitsandbytes")
"""Packages whose optimizers update each parameter independently, so that a few parameters can be updated at a time."""


def split(values: Float32[Tensor, "*shape"]) -> tuple[BFloat16[Tensor, "*shape"], Int16[Tensor, "*shape"]]:
    """Return the nearest bf16 numbers of float32 numbers, and the difference between their bits as int16.

    Ties round away from zero, so that the difference fits in 16 bits. A NaN stays a NaN, but its bits may change.
    """
    bits = values.view(torch.int32)
    upper = bits.add(1 << 15).bitwise_and_(_UPPER)
    missing = (bits - upper).to(torch.int16)
    # For a NaN the sum of bits may overflow, so it is converted directly.
    return torch.where(values.isnan(), values, upper.view(torch.float32)).to(torch.bfloat16), missing


def joined(values: BFloat16[Tensor, "*shape"], missing: Int16[Tensor, "*shape"]) -> Float32[Tensor, "*shape"]:
    """Return the float32 numbers that were `split`, bit for bit."""
    wide = values.float()
    wide.view(torch.int32).add_(missing)
    return wide


def stochastically_rounded(
    values: Float32[Tensor, "*shape"], drawn: Int32[Tensor, "*shape"]
) -> BFloat16[Tensor, "*shape"]:
    """Round each number to one of the two nearest bf16 numbers, so that its expected value is unchanged.

    `drawn` has random integers from 0 to 65535, and is overwritten. bf16 numbers and numbers that are not finite stay
    unchanged. The probabilities of rounding up are exact, because they are multiples of 1 / 65536.

    Source: Gupta et al., "Deep learning with limited numerical precision", 2015, section 3.
    """
    # Adding 16 random bits to the lower 16 bits v carries into the upper half with probability v / 65536.
    up = drawn.add_(values.view(torch.int32)).bitwise_and_(_UPPER)
    return torch.where(values.isfinite(), up.view(torch.float32), values).to(torch.bfloat16)


class Float32Windows:
    """Float32 parameters for an optimizer ("windows") that use memory only during their update.

    For a few parameters at a time: convert the bf16 weights to float32 (open the windows), run the optimizer's step,
    and round the weights back (close the windows). The methods identify parameters by number.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, way: Bf16Weights, seed: int) -> None:
        self._parameters = tuple(parameters)
        self._keeps_bits, self._seed = way == "split", seed
        # A closed window has the shape of its parameter, but the memory of a single number.
        self._placeholders = {
            parameter.device: torch.zeros((), dtype=torch.float32, device=parameter.device)
            for parameter in self._parameters
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
        return [number for number, (window, parameter) in enumerate(pairs) if window is not parameter]

    def wide_weights(self) -> list[Tensor]:
        """Return every parameter; bf16 parameters as float32, with "split" including their lower bits."""
        return [
            joined(parameter.detach(), self.missing[number]) if number in self.missing else widened(parameter.detach())
            for number, parameter in enumerate(self._parameters)
        ]

    def pieces(self, optimizer: Optimizer) -> list[list[int]]:
        """Return groups of parameters that are updated together; a single group unless updates are independent."""
        module = type(optimizer).__module__
        is_independent = module.startswith(_INDEPENDENT_UPDATES) or getattr(optimizer, "updates_each_by_itself", False)
        pieces: list[list[int]] = [[]]
        piece_bytes = 0
        for number, parameter in enumerate(self.updated):
            piece_bytes += 4 * parameter.numel()
            if is_independent and pieces[-1] and piece_bytes > PIECE_BYTES:
                pieces.append([])
                piece_bytes = 4 * parameter.numel()
            pieces[-1].append(number)
        return pieces

    def num_bytes(self, piece: Sequence[int]) -> int:
        """Return the bytes of the windows of these parameters while they are open."""
        return sum(4 * self.updated[number].numel() for number in set(piece) & set(self._numbers))

    @contextmanager
    def opened(self, optimizer: Optimizer, piece: Sequence[int]) -> Iterator[None]:
        """Open the windows of these parameters within the context, and hide all other parameters from the optimizer."""
        visible = {id(self.updated[number]) for number in piece}
        groups = [group["params"] for group in optimizer.param_groups]
        all_parameters = [list(parameters) for parameters in groups]
        try:
            for parameters in groups:
                parameters[:] = [parameter for parameter in parameters if id(parameter) in visible]
            for number in piece:
                self._open(optimizer, number)
            yield
        finally:
            for parameters, originals in zip(groups, all_parameters, strict=True):
                parameters[:] = originals
            for number in piece:
                self._free(number)

    @torch.no_grad()
    def step(self, optimizer: Optimizer, gradients: Sequence[Tensor | None], step: int) -> None:
        """Run one optimizer step, piece by piece."""
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
        """Under "stochastic", convert the optimizer's state of bf16 weights to bf16; otherwise a no-op."""
        for number in range(len(self.updated)) if numbers is None else numbers:
            for name in self._wide_state(optimizer, number, torch.float32):
                state = optimizer.state[self.updated[number]]
                state[name] = state[name].to(torch.bfloat16)

    def _window(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a closed window of a parameter; the parameter itself if it is not in bf16."""
        if parameter.dtype is not torch.bfloat16:
            return parameter
        return nn.Parameter(self._placeholders[parameter.device].expand(parameter.shape))

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
            window.data = self._placeholders[window.device].expand(window.shape)

    def _wide_state(self, optimizer: Optimizer, number: int, dtype: torch.dtype) -> list[str]:
        """Return the names of state tensors to convert, with this type and the window's shape; none under "split"."""
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
    """Yield corresponding slices of tensors of one shape; if any is not contiguous, yield the whole tensors."""
    if all(tensor.is_contiguous() for tensor in tensors):
        yield from zip(*(tensor.view(-1).split(_SLICE) for tensor in tensors), strict=True)
    else:
        yield tensors


def check_bf16_weights(way: Bf16Weights, modules: nn.Module, optimizer: object, strategy: Capabilities) -> None:
    """Refuse a value of `bf16_weights` that this model, optimizer or strategy does not support.

    The table in `core/compatibility.py` refuses other combinations.
    """
    if way == "copied":
        return
    parameters = trainable(modules)
    half = next((name for name, parameter in parameters.items() if parameter.dtype is torch.float16), None)
    reasons = []
    if isinstance(optimizer, Optimizer):
        reasons.append(
            "the optimizer was created with the bf16 weights, but the update needs float32 parameters: pass a function "
            "named_parameters -> optimizer"
        )
    if half is not None:
        reasons.append(f"{half!r} is in fp16, whose bits are not the upper half of a float32 number: use bf16")
    if strategy.feature is None and strategy.replaces_parameters:
        reasons.append(f"strategy={strategy.name!r} replaces parameters: use strategy='all_reduce'")
    if any(map(is_dtensor, parameters.values())):
        reasons.append("a weight is a DTensor, sharded over processes: use bf16_weights='copied'")
    if reasons:
        message = f"bf16_weights={way!r} cannot be used: {'; and '.join(reasons)}."
        raise CompositionError(message)
