"""Measure gradient noise during training, from the norms of the gradients of micro-batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from anybatch.core.compatibility import Feature
from anybatch.core.geometry import require
from anybatch.core.gradient_noise import (
    ALL,
    NUM_MOMENTS,
    GradientNoise,
    NoiseEstimate,
    NoiseParts,
    noise_parts,
    with_step,
)
from anybatch.core.loss import Loss
from anybatch.core.loss_kinds import SAMPLES
from anybatch.core.splitting import BatchPlan
from anybatch.core.tensors import accumulation_dtype, widest_dtype
from anybatch.core.torch_internals import dense_values
from anybatch.engine.accumulate import MicroBatch, Sums
from anybatch.engine.precision import LossScaler
from anybatch.errors import CompositionError
from anybatch.parallel.dtensors import local_part
from anybatch.parallel.strategy import Prepared

_NOTHING = nullcontext()


def check_noise(noise: object, loss: Loss, features: Mapping[Feature, str]) -> None:
    """Raise an error if the gradient of a micro-batch is not a sum over independent, random samples."""
    require(isinstance(noise, GradientNoise), "noise", noise, "a GradientNoise, or None")
    reason = ""
    terms = list(loss.kind.terms.values())
    if Feature.BATCH_NORM in features and Feature.NORMS_FREEZE not in features:
        reason = (
            f"in BatchNorm ({features[Feature.BATCH_NORM]} is in train mode) a sample's gradient depends on the other "
            "samples of its micro-batch, so samples are not independent. Use norms='freeze', or another layer"
        )
    elif loss.kind.encode is not None:
        reason = "under ab.joint a sample's gradient depends on the whole batch, so samples are not independent"
    elif len(terms) > 1 and any(term.count is not None for term in terms):
        reason = (
            f"the terms {', '.join(loss.kind.terms)} are means over different items, so the weight of a micro-batch "
            "differs between terms. Declare all terms with ab.samples()"
        )
    elif any(term.is_sum for term in terms):
        reason = "the gradient of a sum grows with the batch size. Declare a mean"
    elif Feature.TOKEN_BUDGET in features:
        reason = (
            "micro-batches that are split by length group similar samples, so they are not random parts of the batch. "
            "Use a number of samples, such as micro_batch_size=16"
        )
    if reason:
        message = f"noise=GradientNoise(...) cannot be measured here: {reason}. Or leave noise out."
        raise CompositionError(message, code="noise")


@dataclass(frozen=True, slots=True, eq=False)
class NoiseOfStep:
    """Values on the device that determine the gradient noise of one effective batch.

    `sums` is the sum of squared counts (numbers of items), and of squared gradient norms, over all micro-batches and
    ranks. If the loss function returns the count, `guess` is the divisor used before the count was known.
    """

    squared_norm: Float[Tensor, ""]
    sums: Float[Tensor, " 2"]
    counts: Tensor
    guess: float | None
    loss_scale: Tensor
    num_samples: int


@dataclass(slots=True)
class _StepMeasurement:
    """Measurements of the current effective batch.

    Attributes:
        cells: dtype of gradients -> the squared norm of each parameter's gradient in the current micro-batch.
        squares: sum of the squared norms over micro-batches, by parameter.
        loss_scale: factor of the loss under fp16; 1 otherwise.
        computed: indices of the parameters whose gradient has been computed in the current micro-batch.
        counts: number of items (samples or tokens) of each micro-batch.
        is_valid: whether every micro-batch's part of the gradient is a mean over its counted items.
    """

    cells: dict[torch.dtype, Float[Tensor, " parameter"]]
    squares: Float[Tensor, " parameter"]
    loss_scale: Tensor
    computed: set[int] = field(default_factory=set)
    counts: list[float] = field(default_factory=list)
    is_valid: bool = True


class NoiseMeter:
    """Computes the squared norm of each micro-batch's gradient before the gradient is added to the sum.

    A hook before autograd's `AccumulateGrad` (which adds to `.grad`) receives the gradient and changes nothing. Hooks
    are registered only while micro-batches of a measured step run.
    """

    num_sums = 2
    """Number of values that ranks sum."""

    def __init__(
        self, noise: GradientNoise, prepared: Prepared, scaler: LossScaler, *, loss: Loss, device: torch.device
    ) -> None:
        self._noise = noise
        self._layout = prepared.layout
        self._names = tuple(prepared.parameters)
        self._parameters = tuple(prepared.parameters.values())
        self._leaves = prepared.gradient_leaves
        self._scaler = scaler
        self._device = device
        self._items = next(iter(loss.kind.terms.values())).items if loss.kind.terms else SAMPLES
        self._moments = self._zeros(1, NUM_MOMENTS)
        self._items_per_sample: Tensor | float = 1.0
        self._current: _StepMeasurement | None = None

    @property
    def estimate(self) -> NoiseEstimate:
        """The current estimate."""
        return NoiseEstimate(moments=self._moments, items=self._items.name, items_per_sample=self._items_per_sample)

    def effective_batch(self, step: int, plan: BatchPlan) -> AbstractContextManager[None]:
        """Return the context in which the micro-batches of an effective batch run, also when the step is repeated."""
        self._current = None
        num_units = sum(unit.weight > 0 for share in plan.shares for unit in share)
        if step % self._noise.every or num_units < 2:  # noqa: PLR2004 (differences need two)
            return _NOTHING
        return self._watched()

    def after(self, micro_batch: MicroBatch, contributions: Sequence[Tensor]) -> None:
        """Add the squared norms of a micro-batch's gradient, after its backward."""
        del contributions
        current = self._current
        if current is None:
            return
        for cells in current.cells.values():
            current.squares += cells
            cells.zero_()
        current.computed.clear()
        factor = micro_batch.factors[0]
        current.counts.append(factor.count * micro_batch.unit.weight)
        current.is_valid = current.is_valid and (factor.count > 0 or not factor.adds_without_count)

    def sums(self, sums: Sums, *, is_late: bool) -> Float[Tensor, " 2"]:
        """Return the values that ranks sum: the squares of counts and of norms; zeros if this step is not measured."""
        current = self._current
        values = self._zeros(self.num_sums)
        if current is None:
            return values
        for count in sums.returned_counts if is_late else current.counts:
            values[0] += torch.as_tensor(count).to(values) ** 2
        if not current.is_valid:  # NaN on one rank makes the sum NaN, so the step does not enter the averages
            values[0] = torch.nan
        values[1] = current.squares.sum()
        return values

    def finish(
        self,
        gradients: Sequence[Tensor | None],
        sums: Float[Tensor, " 2"],
        counts: Tensor,
        plan: BatchPlan,
        *,
        guess: float | None,
    ) -> NoiseOfStep | None:
        """Return the noise of the step, from the `sums` over ranks; None if the step was not measured.

        Ranks have already agreed that the step succeeds, so this must not run out of memory: it uses memory allocated
        before the micro-batches ran, except for a scalar and norms of sparse, non-contiguous or sharded gradients.
        """
        current, self._current = self._current, None
        if current is None:
            return None
        return NoiseOfStep(
            self._squared_sum(gradients, current), sums, counts, guess, current.loss_scale, plan.num_samples
        )

    def add(self, step: NoiseOfStep) -> NoiseEstimate:
        """Add a completed step to the averages, and return the new estimate."""
        sums, guess = step.sums, step.guess
        count = step.counts.to(sums)[0]
        squared_shares = sums[0] / count**2
        of_parts = sums[1:] if guess is None else sums[1:] * (guess / count) ** 2
        parts = noise_parts(step.squared_norm.reshape(1), of_parts, squared_shares)
        scale = step.loss_scale.to(sums)
        self._moments = with_step(
            self._moments,
            NoiseParts(parts.squared_norm / scale**2, parts.variance / scale**2),
            weight=count**2 * (1.0 - squared_shares),
            num_samples=step.num_samples,
            decay=self._noise.decay,
        )
        self._items_per_sample = count / step.num_samples
        return self.estimate

    def state_dict(self) -> dict[str, Any]:
        """Return the averages; the same on every rank."""
        return {"rows": [ALL], "moments": self._moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore saved averages. Only the first row is used: older checkpoints have more, for groups and layers."""
        self._moments = state["moments"][:1].to(self._moments)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        number = len(self._names)
        types = {accumulation_dtype(parameter) for parameter in self._parameters}
        cells = {dtype: torch.zeros(number, dtype=dtype, device=self._device) for dtype in types}
        loss_scale = self._scaler.scale(torch.ones((), device=self._device))
        current = self._current = _StepMeasurement(cells, self._zeros(number), loss_scale)
        leaves = self._parameters if self._leaves is None else self._leaves()
        nodes = [get_gradient_edge(leaf).node for leaf in leaves]
        hooks = [node.register_prehook(self._hook(index, current)) for index, node in enumerate(nodes)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, number: int, current: _StepMeasurement) -> Callable[[tuple[Tensor, ...]], None]:
        """Return a hook for parameter `number`, which receives the gradient of one backward before it is added."""
        cell = current.cells[accumulation_dtype(self._parameters[number])][number]
        computed = current.computed

        def measure(gradients: tuple[Tensor, ...]) -> None:
            gradient = gradients[0]
            if gradient is None:  # returned by a custom autograd function
                return
            if number in computed:
                message = (
                    f"the gradient of {self._names[number]!r} arrived in several parts within one micro-batch, so its "
                    "norm is unknown. Leave noise=GradientNoise(...) out."
                )
                raise CompositionError(message)
            computed.add(number)
            _square(_dense(gradient), cell)

        return measure

    def _squared_sum(self, gradients: Sequence[Tensor | None], current: _StepMeasurement) -> Float[Tensor, ""]:
        """Return the squared norm of the summed gradient; it reuses the cells, which the last micro-batch sets to 0."""
        squares = current.squares
        if self._layout.in_parts:  # a collective
            present = [gradient for gradient in gradients if gradient is not None]
            return self._layout.norm(present).to(squares) ** 2 if present else squares.new_zeros(())
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                _square(_dense(gradient), current.cells[accumulation_dtype(self._parameters[number])][number])
        # Reuses the memory of the sums over micro-batches, which `sums` has copied.
        squares.zero_()
        for cells in current.cells.values():
            squares += cells
        return squares.sum()

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=widest_dtype(self._device), device=self._device)


def _square(values: Tensor, cell: Float[Tensor, ""]) -> None:
    """Write the squared norm of a gradient into a cell."""
    if values.is_contiguous() and values.dtype is cell.dtype:
        torch.dot(values.view(-1), values.view(-1), out=cell)
    else:
        cell.copy_(torch.linalg.vector_norm(values, dtype=cell.dtype).square())


def _dense(gradient: Tensor) -> Tensor:
    """Return the values of a gradient; a sparse gradient is coalesced, since it may repeat indices."""
    return dense_values(gradient.coalesce()) if gradient.is_sparse else local_part(gradient)
