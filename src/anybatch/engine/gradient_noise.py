"""Measure gradient noise during training, from the norms of the gradients of micro-batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from anybatch.core.compatibility import Feature
from anybatch.core.geometry import checked_int
from anybatch.core.gradient_noise import NUM_MOMENTS, NoiseEstimate, NoiseParts, noise_parts, with_step
from anybatch.core.loss import Loss
from anybatch.core.loss_kinds import SAMPLES
from anybatch.core.splitting import BatchPlan
from anybatch.core.tensors import accumulation_dtype, widest_dtype
from anybatch.core.torch_internals import dense_values
from anybatch.engine.accumulate import MicroBatch, Sums
from anybatch.engine.precision import LossScaler, Target
from anybatch.errors import CompositionError, UserError
from anybatch.parallel.local_parts import local_part
from anybatch.parallel.strategy import Prepared
from anybatch.parallel.world import World

Rows = Literal["group", "layer"]
ALL = "all parameters"
_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise:
    """Measure the gradient's noise scale every `every` steps: `Engine(..., noise=GradientNoise())`.

    Args:
        every: steps between measurements; each one reads the gradient of every micro-batch once more.
        decay: weight of a measurement relative to the next one; 0.99 averages over about 200 of them.
        by: additional rows, next to the one of all parameters: parameter groups of the optimizer, or layers.
        preconditioned: divide gradients by Adam's `sqrt(v) + eps` before taking norms, which gives the noise in the
            directions of Adam's steps. Only for optimizers that keep `exp_avg_sq`.

    Raises:
        UserError: an invalid value.
    """

    every: int = 10
    decay: float = 0.99
    by: Rows = "group"
    preconditioned: bool = False

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        checked_int("every", self.every)
        if not 0.0 < self.decay < 1.0:
            message = f"decay={self.decay} must lie between 0 and 1, such as 0.99 for an average over 200 measurements."
            raise UserError(message)
        if self.by not in get_args(Rows):
            message = f"by={self.by!r} must be one of {', '.join(map(repr, get_args(Rows)))}."
            raise UserError(message)


def refuse_noise(noise: GradientNoise | None, loss: Loss, features: Mapping[Feature, str], world: World) -> None:
    """Refuse to measure if a micro-batch's gradient is not a sum over its samples, or is spread over processes."""
    if noise is None:
        return
    reason = ""
    terms = list(loss.kind.terms.values())
    if Feature.BATCH_NORM in features and Feature.NORMS_FREEZE not in features:
        reason = (
            f"in BatchNorm ({features[Feature.BATCH_NORM]} is in train mode) a sample's gradient depends on the rest "
            "of its micro-batch, so micro-batches are not independent. Use norms='freeze', or another layer"
        )
    elif loss.kind.encode is not None:
        reason = "under ab.joint a sample's gradient depends on the whole batch, so micro-batches are not independent"
    elif len(terms) > 1 and any(term.count is not None for term in terms):
        reason = (
            f"the terms {', '.join(loss.kind.terms)} are means over different items, so a micro-batch has a different "
            "share in each of them. Declare all terms with ab.samples()"
        )
    elif any(term.is_sum for term in terms):
        reason = "the gradient of a sum grows with the batch size. Declare a mean"
    elif Feature.TOKEN_BUDGET in features:
        reason = (
            "micro-batches that are cut by length group similar samples, so they are not random parts of the batch. "
            "Use a number of samples, such as micro_batch_size=16"
        )
    elif world.num_processes > world.size:
        reason = "each rank consists of several processes, and none of them has the whole gradient of a micro-batch"
    if reason:
        message = f"noise=GradientNoise(...) cannot be measured here: {reason}. Or leave noise out."
        raise CompositionError(message, code="noise")


def refuse_preconditioner(noise: GradientNoise | None, target: Target, prepared: Prepared) -> None:
    """Refuse to precondition if the optimizer has no second moment, or a rank has only a part of it."""
    if noise is None or not noise.preconditioned:
        return
    reason = ""
    if not all("betas" in group and "eps" in group for group in target.optimizer.param_groups):
        reason = f"{type(target.optimizer).__name__} has no betas and eps, so it has no second moment"
    elif prepared.layout.in_parts or prepared.shard_update is not None:
        reason = "a rank has only a part of the optimizer's state"
    if reason:
        message = f"GradientNoise(preconditioned=True) cannot be measured here: {reason}. Leave preconditioned out."
        raise CompositionError(message, code="preconditioner")


@dataclass(frozen=True, slots=True, eq=False)
class NoiseOfStep:
    """The sums of one effective batch that determine its gradient's noise; on the device."""

    squares: Float[Tensor, " row"]
    numbers: Float[Tensor, " numbers"]
    counts: Tensor
    guess: float | None
    loss_scale: Tensor
    num_samples: int


@dataclass(slots=True)
class _Seen:
    """Measurements of the current effective batch.

    Attributes:
        cells: by dtype of gradients, each parameter's squared norm in the current micro-batch.
        arrived: numbers of the parameters whose gradient has arrived in this micro-batch.
        squares: sum of the squared norms over micro-batches, by parameter.
        of_sum: memory for the squared norms of the summed gradient, by row.
        divisors: memory for preconditioning, by dtype, with the size of the largest parameter.
        corrections: of the second moment's bias, by parameter; None before Adam's first step. Empty if not needed.
        loss_scale: of the step.
        counts: of the items of each micro-batch.
        is_fit: every micro-batch's part of the gradient is a mean over its counted items.
    """

    cells: dict[torch.dtype, Float[Tensor, " parameter"]]
    squares: Float[Tensor, " parameter"]
    of_sum: Float[Tensor, " row"]
    divisors: dict[torch.dtype, Float[Tensor, " elements"]]
    corrections: Sequence[Tensor | None]
    loss_scale: Tensor
    arrived: set[int] = field(default_factory=set)
    counts: list[float] = field(default_factory=list)
    is_fit: bool = True


class NoiseMeter:
    """Takes the squared norm of each micro-batch's gradient before it is added to the sum.

    A hook before `AccumulateGrad` receives the gradient; the sum and its memory are not touched. Hooks are registered
    only while micro-batches of a measured step run.
    """

    def __init__(
        self,
        noise: GradientNoise,
        prepared: Prepared,
        target: Target,
        scaler: LossScaler,
        *,
        loss: Loss,
        world: World,
    ) -> None:
        self._noise = noise
        self._layout = prepared.layout
        self._names = tuple(prepared.parameters)
        self._parameters = tuple(prepared.parameters.values())
        self._leaves = prepared.gradient_leaves
        self._target = target
        self._scaler = scaler
        self._world = world
        self._items = next(iter(loss.kind.terms.values())).items if loss.kind.terms else SAMPLES
        rows = _rows(noise.by, prepared.parameters, target)
        self._row_names = (ALL, *rows) if len(rows) > 1 or noise.by == "layer" else (ALL,)
        self._rows = tuple(rows.values())
        row_of = {number: row for row, members in enumerate(self._rows) for number in members}
        self._row_of = torch.tensor([row_of[number] for number in range(len(row_of))], device=world.device)
        self._moments = self._zeros(len(self._row_names), NUM_MOMENTS)
        self._items_per_sample: Tensor | float = 1.0
        self._seen: _Seen | None = None

    @property
    def num_numbers(self) -> int:
        """Number of values that ranks sum."""
        return 1 + len(self._row_names)

    @property
    def estimate(self) -> NoiseEstimate:
        """The current estimate."""
        return NoiseEstimate(
            names=self._row_names,
            moments=self._moments,
            items=self._items.name,
            items_per_sample=self._items_per_sample,
        )

    def effective_batch(self, step: int, plan: BatchPlan) -> AbstractContextManager[None]:
        """Return the context for running, or repeating, the micro-batches of an effective batch."""
        self._seen = None
        num_units = sum(unit.weight > 0 for share in plan.shares for unit in share)
        if step % self._noise.every or num_units < 2:  # noqa: PLR2004 (differences need two)
            return _NOTHING
        return self._watched()

    def after(self, micro_batch: MicroBatch, contributions: Sequence[Tensor]) -> None:
        """Add the squared norms of a micro-batch's gradient, after its backward."""
        del contributions
        seen = self._seen
        if seen is None:
            return
        for cells in seen.cells.values():
            seen.squares += cells
            cells.zero_()
        seen.arrived.clear()
        factor = micro_batch.factors[0]
        seen.counts.append(factor.count * micro_batch.unit.weight)
        seen.is_fit = seen.is_fit and (factor.count > 0 or not factor.adds_without_count)

    def numbers(self, sums: Sums, *, is_late: bool) -> Float[Tensor, " numbers"]:
        """Return the values that ranks sum, (1 + rows,): squares of counts and norms; zeros if nothing is measured."""
        seen = self._seen
        if seen is None:
            return self._zeros(self.num_numbers)
        found = self._zeros(1)
        for count in sums.late_counts if is_late else seen.counts:
            found += torch.as_tensor(count).to(found) ** 2
        if not seen.is_fit:  # NaN on one rank makes the sum NaN, so all ranks skip the step
            found.fill_(torch.nan)
        rows = self._zeros(len(self._rows)).index_add_(0, self._row_of, seen.squares)
        return torch.cat([found, self._with_total(rows)])

    def finish(
        self,
        gradients: Sequence[Tensor | None],
        numbers: Float[Tensor, " numbers"],
        counts: Tensor,
        plan: BatchPlan,
        *,
        guess: float | None,
    ) -> NoiseOfStep | None:
        """Return the noise of the step, from the sums over ranks; None if it was not measured.

        Ranks have agreed on the step, so it must not run out of memory: its memory was allocated before micro-batches
        ran. Only the norms of sparse, non-contiguous or sharded gradients (as under FSDP) allocate here.
        """
        seen, self._seen = self._seen, None
        if seen is None:
            return None
        self._square_sum(gradients, seen)
        return NoiseOfStep(seen.of_sum, numbers, counts, guess, seen.loss_scale, plan.num_samples)

    def add(self, found: NoiseOfStep) -> NoiseEstimate:
        """Add a completed step to the averages, and return the new estimate."""
        numbers, guess = found.numbers, found.guess
        count = found.counts.to(numbers)[0]
        squared_shares = numbers[0] / count**2
        of_parts = numbers[1:] if guess is None else numbers[1:] * (guess / count) ** 2
        parts = noise_parts(self._with_total(found.squares), of_parts, squared_shares)
        scale = found.loss_scale.to(numbers)
        self._moments = with_step(
            self._moments,
            NoiseParts(parts.squared_norm / scale**2, parts.variance / scale**2),
            weight=count**2 * (1.0 - squared_shares),
            num_samples=found.num_samples,
            decay=self._noise.decay,
        )
        self._items_per_sample = count / found.num_samples
        return self.estimate

    def state_dict(self) -> dict[str, Any]:
        """Return the averages; the same on every rank."""
        return {"rows": list(self._row_names), "moments": self._moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from saved averages, unless they have other rows."""
        if tuple(state["rows"]) == self._row_names:
            self._moments = state["moments"].to(self._moments)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        number = len(self._names)
        types = {accumulation_dtype(parameter) for parameter in self._parameters}
        cells = {dtype: torch.zeros(number, dtype=dtype, device=self._world.device) for dtype in types}
        seen = self._seen = _Seen(
            cells,
            self._zeros(number),
            of_sum=self._zeros(len(self._rows)),
            divisors=self._divisors(),
            corrections=self._bias_corrections(),
            loss_scale=self._scaler.scale(torch.ones((), device=self._world.device)),
        )
        leaves = self._parameters if self._leaves is None else self._leaves()
        nodes = [get_gradient_edge(leaf).node for leaf in leaves]
        hooks = [node.register_prehook(self._hook(place, seen)) for place, node in enumerate(nodes)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, number: int, seen: _Seen) -> Callable[[tuple[Tensor, ...]], None]:
        """Return a hook for parameter `number`, which receives the gradient of one backward before it is added."""
        cell = seen.cells[accumulation_dtype(self._parameters[number])][number]
        arrived = seen.arrived

        def note(gradients: tuple[Tensor, ...]) -> None:
            gradient = gradients[0]
            if gradient is None:  # returned by a custom autograd function
                return
            if number in arrived:
                message = (
                    f"the gradient of {self._names[number]!r} arrived in several parts within one micro-batch, so its "
                    "norm is unknown. Leave noise=GradientNoise(...) out."
                )
                raise CompositionError(message)
            arrived.add(number)
            _square(self._preconditioned(number, _dense(gradient), seen), cell)

        return note

    def _square_sum(self, gradients: Sequence[Tensor | None], seen: _Seen) -> None:
        """Store the squared norm of the summed gradient by row; the cells are zero after the last micro-batch."""
        if self._layout.in_parts:  # a collective: one norm for all parameters of a row
            for row, members in enumerate(self._rows):
                there = [gradient for number in members if (gradient := gradients[number]) is not None]
                if there:
                    seen.of_sum[row] = self._layout.norm(there).to(seen.of_sum) ** 2
            return
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                cell = seen.cells[accumulation_dtype(self._parameters[number])][number]
                _square(self._preconditioned(number, _dense(gradient), seen), cell)
        # Reuses the memory of the sums over micro-batches, which `numbers` has copied.
        seen.squares.zero_()
        for cells in seen.cells.values():
            seen.squares += cells
        seen.of_sum.index_add_(0, self._row_of, seen.squares)

    def _divisors(self) -> dict[torch.dtype, Tensor]:
        if not self._noise.preconditioned:
            return {}
        sizes: dict[torch.dtype, int] = {}
        for weight in self._target.updated:
            dtype = accumulation_dtype(weight)
            sizes[dtype] = max(sizes.get(dtype, 0), weight.numel())
        return {dtype: torch.empty(size, dtype=dtype, device=self._world.device) for dtype, size in sizes.items()}

    def _bias_corrections(self) -> Sequence[Tensor | None]:
        """Return Adam's `1 - beta2 ** step` by parameter; constant until the update."""
        if not self._noise.preconditioned:
            return ()
        states = self._target.optimizer.state
        betas = {id(one): group["betas"][1] for group in self._target.optimizer.param_groups for one in group["params"]}
        return [
            1.0 - float(betas[id(one)]) ** torch.as_tensor(states[one]["step"]).to(self._moments)
            if states.get(one)
            else None
            for one in self._target.updated
        ]

    def _preconditioned(self, number: int, gradient: Tensor, seen: _Seen) -> Tensor:
        """Return a gradient, divided by Adam's `sqrt(v) + eps` if preconditioned; NaN before Adam's first step."""
        if not self._noise.preconditioned:
            return gradient
        weight, correction = self._target.updated[number], seen.corrections[number]
        if correction is None:
            divisor = seen.divisors[accumulation_dtype(weight)][: gradient.numel()].view(gradient.shape)
            return divisor.fill_(torch.nan)
        second_moment = self._target.optimizer.state[weight]["exp_avg_sq"]
        group = next(g for g in self._target.optimizer.param_groups if any(p is weight for p in g["params"]))
        divisor = seen.divisors[accumulation_dtype(weight)][: second_moment.numel()].view(second_moment.shape)
        divisor.copy_(second_moment).div_(correction).sqrt_().add_(group["eps"])
        # Reuses the memory of the divisor.
        return torch.div(gradient, divisor, out=divisor)

    def _with_total(self, rows: Float[Tensor, " row"]) -> Float[Tensor, " named"]:
        """Return the sum of the rows, followed by the rows if they are reported."""
        total = rows.sum().reshape(1)
        return total if len(self._row_names) == 1 else torch.cat([total, rows])

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=widest_dtype(self._world.device), device=self._world.device)


def _square(values: Tensor, cell: Float[Tensor, ""]) -> None:
    """Write the squared norm of a gradient into a cell."""
    if values.is_contiguous() and values.dtype is cell.dtype:
        torch.dot(values.view(-1), values.view(-1), out=cell)
    else:
        cell.copy_(torch.linalg.vector_norm(values, dtype=cell.dtype).square())


def _dense(gradient: Tensor) -> Tensor:
    """Return the values of a gradient; a sparse gradient is coalesced, since it may repeat indices."""
    return dense_values(gradient.coalesce()) if gradient.is_sparse else local_part(gradient)


def _rows(by: Rows, parameters: Mapping[str, nn.Parameter], target: Target) -> dict[str, list[int]]:
    """Return the parameters' numbers by row."""
    rows: dict[str, list[int]] = {}
    places = {id(one): place for place, group in enumerate(target.optimizer.param_groups) for one in group["params"]}
    for number, (name, updated) in enumerate(zip(parameters, target.updated, strict=True)):
        row = name.rpartition(".")[0] or name if by == "layer" else f"group {places[id(updated)]}"
        rows.setdefault(row, []).append(number)
    return rows
