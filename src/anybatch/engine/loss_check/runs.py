"""Runs the user's model and loss on a few samples, each time from the same state, to compare gradients."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anybatch.core.loss import Loss, LossSum, factors_of, scaled, unit_counts
from anybatch.core.loss_kinds import COUNTED, LossFunction
from anybatch.core.torch_internals import gradients, kept_buffers, widened
from anybatch.core.tree import Batch, copied, join_samples, map_tensors
from anybatch.engine.loss_check.fixed_draws import FixedBatchStatistics, FixedDraws
from anybatch.engine.user_code import Model, SeededGenerators, modules_of

_MAX_WIDENED = 2**28
"""Maximum number of parameter elements for copies in float64; larger models use float32."""
_FLOOR = 1e-2
"""A parameter's difference is divided by at least this fraction of the whole gradient's norm, to ignore rounding."""

Gradients = list[Tensor | None]
Call = Callable[[LossFunction, Batch], Any]


class UndecidedError(Exception):
    """The samples cannot be compared; the message is the reason, as a clause."""


class NotFiniteError(UndecidedError):
    """A gradient is NaN or infinite."""


class NothingToCompareError(UndecidedError):
    """These samples give no information about the loss; this does not suggest a fault."""


class Piece(NamedTuple):
    """Samples that run together: the batch, on the host, and their number."""

    batch: Batch
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossParts:
    """The loss, and everything that a run of it needs.

    `leaves` returns the tensors whose gradients are compared, by name. `gather` returns the whole gradient for a shard.
    """

    loss: Loss
    model: Model
    modules: nn.Module
    device: torch.device
    autocast: Callable[[], AbstractContextManager[object]]
    call: Call
    leaves: Callable[[], Mapping[str, Tensor]]
    gather: Callable[[Tensor], Tensor] = lambda tensor: tensor
    can_widen: bool = True


class LossRuns:
    """Runs the user's loss on pieces, and returns gradients of the parameters.

    Each run starts with the same buffers and generators, and random draws and batch statistics are fixed. Gradients
    come from `autograd.grad`, which does not change `.grad` and runs neither accumulation hooks nor DDP. The caller
    uses `without_side_effects` to restore everything else.
    """

    def __init__(self, parts: LossParts, generators: SeededGenerators) -> None:
        self.parts = parts
        self.draws, self._norms = FixedDraws(), FixedBatchStatistics()
        self.returned_number = False
        self.seed = 0
        self.has_aligned_draws = False  # whether Python and numpy draw the same numbers for any samples
        self._generators = generators
        self._buffers = [kept_buffers(nn.ModuleList([parts.modules, *modules_of(parts.loss.functions.values())]))]
        self._wide: torch.dtype | None = None

    @property
    def names(self) -> list[str]:
        """Names of the gradients."""
        return list(self.parts.leaves())

    @property
    def narrowest(self) -> torch.dtype:
        """The least precise floating-point type in use, including autocast."""
        dtypes = {leaf.dtype for leaf in self.parts.leaves().values() if leaf.is_floating_point()}
        with self.parts.autocast():
            if torch.is_autocast_enabled(self.parts.device.type):
                dtypes.add(torch.get_autocast_dtype(self.parts.device.type))
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)

    @contextlib.contextmanager
    def widened(self) -> Iterator[torch.dtype]:
        """Run on copies of the modules in float64 within the context; very large bf16 or fp16 models use float32.

        The copies are shallow. Attributes that a forward sets on them are lost; the original parameters do not change.
        """
        num_elements = sum(leaf.numel() for leaf in self.parts.leaves().values())
        dtype = torch.float64 if num_elements <= _MAX_WIDENED else torch.float32
        if not self.parts.can_widen or torch.finfo(self.narrowest).eps <= torch.finfo(dtype).eps:
            message = "copies in a more precise type cannot be made"
            raise UndecidedError(message)
        before, buffers, default = self.parts, self._buffers, torch.get_default_dtype()
        self.parts = _widened(before, dtype)
        self._wide, self._buffers = dtype, [*buffers, kept_buffers(self.parts.modules)]
        torch.set_default_dtype(dtype)
        try:
            yield dtype
        finally:
            torch.set_default_dtype(default)
            self.parts, self._buffers, self._wide = before, buffers, None

    def counts(self, piece: Piece) -> tuple[float, ...]:
        """Return the count of a piece for each term: the number of items that the term averages over."""
        return unit_counts(self.parts.loss, copied(piece.batch), piece.num_samples)

    def gradient(self, pieces: Sequence[Piece], *, is_full: bool = False) -> Gradients:
        """Return the sum of the pieces' gradients, with the same weights as micro-batches in a step.

        As a formula: `sum(count / total * autograd.grad(loss(piece), parameters) for piece in pieces)`.
        """
        counts = [self.counts(piece) for piece in pieces]
        divisors = [sum(column) for column in zip(*counts, strict=True)]
        if not any(divisors):
            message = "these samples have nothing that the loss averages over (all tokens are ignored, for example)"
            raise NothingToCompareError(message)
        if is_full:
            self._norms.reset()
        if self.parts.loss.kind.encode is not None:
            return self._run(pieces, self._joint_value)[0]
        total, total_count = Gradients(), 0.0
        for piece, count in zip(pieces, counts, strict=True):
            value_of = partial(self._value, counts=count, divisors=divisors)
            part, number = self._run([piece], value_of)
            total_count += number
            total = list(map(_added, total, part)) if total else part
        # If the loss function returns counts, the total is divided by their sum at the end.
        return [None if g is None else g / total_count for g in total] if total_count else total

    def value_of(self, piece: Piece) -> Tensor:
        """Return the loss of a piece with its graph, for second derivatives."""
        counts = self.counts(piece)
        self._begin()
        with torch.enable_grad(), self._norms, self.draws, self.parts.autocast():
            return self._value([self._output(piece)], counts=counts, divisors=counts)[0]

    def plain_gradient(self, piece: Piece) -> Gradients:
        """Return the gradient of a piece's returned loss, without weighting it by the piece's count."""

        def value(outputs: Sequence[Any]) -> tuple[Tensor, float]:
            return (outputs[0].total if isinstance(outputs[0], LossSum) else outputs[0]).sum(), 0.0

        return self._run([piece], value)[0]

    def _begin(self) -> None:
        for buffers in self._buffers:
            buffers.restore()
        self._generators.seed(self.seed)

    def _run(
        self, pieces: Sequence[Piece], value_of: Callable[[list[Any]], tuple[Tensor, float]]
    ) -> tuple[Gradients, float]:
        self._begin()
        # The backward is included, because checkpointed blocks run again in it.
        with torch.enable_grad(), self._norms, self.draws:
            with self.parts.autocast():
                outputs = [self._output(piece) for piece in pieces]
                value, count = value_of(outputs)
            del outputs
            leaves = list(self.parts.leaves().values())
            if not value.requires_grad:
                return [None] * len(leaves), count
            of_leaves = gradients(value, leaves)
        wide: Gradients = [None if g is None else _wide(self.parts.gather(g.detach())) for g in of_leaves]
        if not all(bool(torch.isfinite(g).all()) for g in wide if g is not None):
            message = "a gradient is not finite"
            raise NotFiniteError(message)
        return wide, count

    def _output(self, piece: Piece) -> Any:  # noqa: ANN401 (the user's function)
        self.draws.restart()
        batch = map_tensors(copied(piece.batch), self._moved)
        loss = self.parts.loss
        return self.parts.call(loss.kind.encode or loss.function, batch)

    def _moved(self, tensor: Tensor) -> Tensor:
        dtype = self._wide if tensor.is_floating_point() else None
        return tensor.to(self.parts.device, dtype)

    def _joint_value(self, outputs: list[Any]) -> tuple[Tensor, float]:
        self.draws.restart()
        value = self.parts.call(self.parts.loss.function, join_samples(outputs))
        return value, 0.0

    def _value(self, outputs: list[Any], *, counts: Sequence[float], divisors: Sequence[float]) -> tuple[Tensor, float]:
        """Return the contribution of one piece, as in a step, and the count that the loss function returned, or 0."""
        loss, output = self.parts.loss, outputs[0]
        self.returned_number |= isinstance(output, Tensor) and not output.dim()
        if loss.kind.returns_count:
            if isinstance(output, Tensor) and not output.dim():
                return output * (counts[0] / divisors[0]), 0.0
            if not isinstance(output, (Tensor, LossSum)):
                scaled(loss, output, factors_of(loss, counts, divisors, 1.0))  # raises the error about this value
            is_sum = isinstance(output, LossSum)
            return (output.total, float(output.count)) if is_sum else (output.sum(), float(output.numel()))
        output = _with_counts_read(output)
        values = output if loss.kind.named and isinstance(output, Mapping) else {loss.names[0]: output}
        sums = [name for name, value in values.items() if name in loss.kind.terms and _adds_up(loss, name, value)]
        terms = scaled(loss, output, factors_of(loss, counts, divisors, 1.0, sums))
        if not terms:
            return torch.zeros(()), 0.0
        return torch.stack([term.to(terms[0].dtype) for term in terms]).sum(), 0.0


def difference(full: Gradients, other: Gradients) -> tuple[float, int]:
    """Return the largest relative difference between the gradients of a parameter, and the index of the parameter."""
    norms = [0.0 if g is None else float(torch.linalg.vector_norm(g)) for g in full]
    others = [0.0 if g is None else float(torch.linalg.vector_norm(g)) for g in other]
    floor = _FLOOR * max(math.hypot(*norms), math.hypot(*others))
    if not floor:
        message = "the gradient of these samples is zero"
        raise NothingToCompareError(message)
    largest, index = 0.0, 0
    for number, (a, b, norm) in enumerate(zip(full, other, norms, strict=True)):
        error = others[number] if a is None else norm if b is None else float(torch.linalg.vector_norm(a - b))
        if error / max(norm, floor) > largest:
            largest, index = error / max(norm, floor), number
    return largest, index


def _adds_up(loss: Loss, name: str, value: object) -> bool:
    """Return whether a term's value is a finite sum, which adds to the loss even if the piece has a count of 0."""
    # Compare names: the items of a declaration that was copied or unpickled are equal, but not the same objects.
    if loss.kind.terms[name].items.name != COUNTED.name:
        return False
    total = value.total if isinstance(value, LossSum) else value
    is_sum = isinstance(value, LossSum) or (isinstance(value, Tensor) and value.dim() > 0)
    return is_sum and isinstance(total, Tensor) and bool(torch.isfinite(total).all())


def _with_counts_read(output: Any) -> Any:  # noqa: ANN401 (the user's loss)
    """Return a loss with its counts as Python numbers; unlike a step, this waits for the device."""
    if isinstance(output, Mapping):
        return {name: _with_counts_read(value) for name, value in output.items()}
    return LossSum(output.total, float(output.count)) if isinstance(output, LossSum) else output


def _wide(gradient: Tensor) -> Tensor:
    dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
    return dense.to(torch.promote_types(dense.dtype, torch.float32), copy=True)


def _added(total: Tensor | None, other: Tensor | None) -> Tensor | None:
    if total is None or other is None:
        return other if total is None else total
    return total.add_(other)


def _widened(parts: LossParts, dtype: torch.dtype) -> LossParts:
    """Return the parts with copies of modules, parameters and buffers in another type."""
    named = parts.leaves()
    modules, copy_of = widened(parts.modules, dtype)
    model = (
        copy_of(parts.model) if isinstance(parts.model, nn.Module) else {k: copy_of(v) for k, v in parts.model.items()}
    )
    loss = replace(parts.loss, function=copy_of(parts.loss.function))
    if loss.kind.encode is not None:
        loss = replace(loss, kind=replace(loss.kind, encode=copy_of(loss.kind.encode)))
    leaves = {name: copy_of(tensor) for name, tensor in named.items()}
    return replace(
        parts,
        loss=loss,
        model=model,
        modules=modules,
        autocast=nullcontext,
        call=lambda function, batch: function(model, batch),
        leaves=lambda: leaves,
    )
