"""Measures the noise of gradients while a run goes on: norms of micro-batch gradients, taken as they arrive."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from anybatch.core.compatibility import Feature
from anybatch.core.dtypes import accumulation_dtype, widest_dtype
from anybatch.core.gradient_noise import NUM_MOMENTS, NoiseEstimate, NoiseParts, noise_parts, with_step
from anybatch.core.loss import Loss
from anybatch.core.loss_kinds import SAMPLES
from anybatch.core.splitting import BatchPlan
from anybatch.core.torch_internals import dense_values
from anybatch.core.whole_numbers import checked_int
from anybatch.engine.accumulation.accumulate import MicroBatch
from anybatch.engine.accumulation.sums import Sums
from anybatch.engine.update.precision import LossScaler, Target
from anybatch.errors import CompositionError, UserError
from anybatch.parallel.local_parts import local_part
from anybatch.parallel.strategy import Prepared
from anybatch.parallel.world import World

Rows = Literal["group", "layer"]
ALL = "all parameters"
_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise:
    """Measure the gradient's noise scale in one step of every `every`: `Engine(..., noise=GradientNoise())`.

    Args:
        every: steps from one measurement to the next; one reads every micro-batch's gradient once more.
        decay: weight of a measurement, by that of the next: 0.99 averages over about 200 of them.
        by: rows beside the one of all parameters: parameter groups of the optimizer, or layers.
        preconditioned: divide gradients by what Adam divides them by, `sqrt(v) + eps`, before norms are taken: the
            noise in the directions in which Adam steps. Only for optimizers that keep `exp_avg_sq`.

    Raises:
        UserError: a value that cannot be used.
    """

    every: int = 10
    decay: float = 0.99
    by: Rows = "group"
    preconditioned: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        checked_int("every", self.every)
        if not 0.0 < self.decay < 1.0:
            message = f"decay={self.decay} must lie between 0 and 1, such as 0.99 for an average over 200 measurements."
            raise UserError(message)
        if self.by not in get_args(Rows):
            message = f"by={self.by!r} must be one of {', '.join(map(repr, get_args(Rows)))}."
            raise UserError(message)


def refuse_noise(noise: GradientNoise | None, loss: Loss, features: Mapping[Feature, str], world: World) -> None:
    """Refuse to measure where a micro-batch's gradient is not a sum over its own samples, or is not in one place.

    Args:
        noise: what is asked for.
        loss: the declared loss.
        features: of the run.
        world: the ranks.

    Raises:
        CompositionError: with the reason.
    """
    if noise is None:
        return
    reason = ""
    terms = list(loss.kind.terms.values())
    if Feature.BATCH_NORM in features and Feature.NORMS_FREEZE not in features:
        reason = (
            f"in BatchNorm ({features[Feature.BATCH_NORM]} is in train mode) a sample's gradient depends on the others "
            "of its micro-batch, so that micro-batches are no independent parts. Use norms='freeze', or another layer"
        )
    elif loss.kind.encode is not None:
        reason = "under ab.joint a sample's gradient depends on the whole batch, so there are no independent parts"
    elif len(terms) > 1 and any(term.count is not None for term in terms):
        reason = (
            f"the terms {', '.join(loss.kind.terms)} are means over different items, so that a micro-batch has no "
            "single share in the batch. Declare all of them with ab.samples() to measure"
        )
    elif any(term.is_sum for term in terms):
        reason = "a loss that stays a sum has no gradient of its own, whatever the batch. Declare a mean"
    elif Feature.TOKEN_BUDGET in features:
        reason = (
            "a cut by length puts like samples together, so that micro-batches are no random parts of it. Measure "
            "with a number of samples, micro_batch_size=16"
        )
    elif world.num_processes > world.size:
        reason = "each rank is several processes, and none of them sees a micro-batch's whole gradient"
    if reason:
        message = f"noise=GradientNoise(...) cannot be measured here: {reason}. Or leave noise out."
        raise CompositionError(message)


def refuse_preconditioner(noise: GradientNoise | None, target: Target, prepared: Prepared) -> None:
    """Refuse to precondition where there is nothing whole to precondition with.

    Args:
        noise: what is asked for.
        target: the optimizer and what it updates.
        prepared: what the strategy has made of the model.

    Raises:
        CompositionError: with the reason.
    """
    if noise is None or not noise.preconditioned:
        return
    reason = ""
    if not all("betas" in group and "eps" in group for group in target.optimizer.param_groups):
        reason = f"{type(target.optimizer).__name__} has no betas and eps, and so divides by no second moment"
    elif prepared.layout.in_parts or prepared.shard_update is not None:
        reason = "a rank has only a part of the optimizer's state"
    if reason:
        message = f"GradientNoise(preconditioned=True) cannot be measured here: {reason}. Leave preconditioned out."
        raise CompositionError(message)


@dataclass(frozen=True, slots=True, eq=False)
class NoiseOfStep:
    """The sums of one effective batch that its gradient's noise follows from; on the device.

    Attributes:
        squares: squared norm of the summed gradient, by row.
        numbers: what `NoiseMeter.numbers` returned, summed over ranks.
        counts: of each loss term, over all ranks.
        guess: what micro-batches were divided by in the place of a count that came late; None if none did.
        loss_scale: what all of these gradients are multiplied with, under fp16.
        num_samples: of the effective batch, over all ranks.
    """

    squares: Float[Tensor, " row"]
    numbers: Float[Tensor, " numbers"]
    counts: Tensor
    guess: float | None
    loss_scale: Tensor
    num_samples: int


@dataclass(slots=True)
class _Seen:
    """What has been seen of the effective batch under way.

    Attributes:
        cells: by type of gradients, the squared norm of each parameter's in the present micro-batch.
        arrived: numbers of the parameters whose gradient has come in it.
        squares: sum of these over micro-batches, by parameter.
        of_sum: for the squared norms of the summed gradient, by row.
        divisors: for gradients while they are preconditioned, by type: as long as the largest parameter.
        corrections: of the second moment's bias, by parameter; None before Adam's first step. Empty where not needed.
        loss_scale: of the step.
        counts: of the items of each micro-batch.
        is_fit: every micro-batch's part in the gradient is a mean over its counted items.
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
    """Sees each micro-batch's gradient on its way into the sum, and keeps nothing of it but its squared norm.

    A hook before `AccumulateGrad` gets the gradient that is going to be added; the sum, and where it is kept, are left
    alone. Hooks are there in the steps that are measured, while micro-batches run, and in no others.

    Args:
        noise: what to measure, and how often.
        prepared: the model as the strategy has prepared it.
        target: the optimizer and what it updates.
        scaler: fp16's gradient scaler, or nothing.
        loss: the declared loss.
        world: the ranks.
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
        """How many numbers it has ranks sum."""
        return 1 + len(self._row_names)

    @property
    def estimate(self) -> NoiseEstimate:
        """The noise as it is known by now."""
        return NoiseEstimate(
            names=self._row_names,
            moments=self._moments,
            items=self._items.name,
            items_per_sample=self._items_per_sample,
        )

    def effective_batch(self, step: int, plan: BatchPlan) -> AbstractContextManager[None]:
        """Return the context in which the micro-batches of an effective batch are run, again too.

        Args:
            step: its number.
            plan: with fewer than two micro-batches over all ranks there is nothing to compare.
        """
        self._seen = None
        num_units = sum(unit.weight > 0 for share in plan.shares for unit in share)
        if step % self._noise.every or num_units < 2:  # noqa: PLR2004 (differences need two)
            return _NOTHING
        return self._watched()

    def after(self, micro_batch: MicroBatch, contributions: Sequence[Tensor]) -> None:
        """Add the squared norms of a micro-batch's gradient; called behind its backward."""
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
        """Return what ranks have to sum, (1 + rows,): squares of counts and of norms. Zeros where nothing is measured.

        Args:
            sums: of this rank's micro-batches.
            is_late: counts have come with the losses.
        """
        seen = self._seen
        if seen is None:
            return self._zeros(self.num_numbers)
        found = self._zeros(1)
        for count in sums.late_counts if is_late else seen.counts:
            found += torch.as_tensor(count).to(found) ** 2
        if not seen.is_fit:  # then it is no number on any rank, and the step is left out on all
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
        """Return what the step says, from the sums over ranks; None in a step that is not measured.

        Ranks have agreed on the step, so it may not run out of memory: what it needs was made before micro-batches ran.
        That goes for gradients that are dense, contiguous and whole; the norms of others, as under FSDP, do allocate.

        Args:
            gradients: of each parameter, summed over micro-batches and ranks, and divided.
            numbers: of all ranks, summed.
            counts: of each loss term in the effective batch, over all ranks.
            plan: of the effective batch.
            guess: what micro-batches were divided by in the place of a count that came late; None if none did.
        """
        seen, self._seen = self._seen, None
        if seen is None:
            return None
        self._square_sum(gradients, seen)
        return NoiseOfStep(seen.of_sum, numbers, counts, guess, seen.loss_scale, plan.num_samples)

    def add(self, found: NoiseOfStep) -> NoiseEstimate:
        """Average a step in, and return what is known now. Of steps that count alone: a repeated one comes once."""
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
        """Return the averages, which go on from here; the same on every rank."""
        return {"rows": list(self._row_names), "moments": self._moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved averages; those of other rows are not taken up."""
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
        """Return a hook for parameter `number`. Autograd hands it the gradient of one backward, before it is added."""
        cell = seen.cells[accumulation_dtype(self._parameters[number])][number]
        arrived = seen.arrived

        def note(gradients: tuple[Tensor, ...]) -> None:
            gradient = gradients[0]
            if gradient is None:  # a function of Python's has returned none
                return
            if number in arrived:
                message = (
                    f"the gradient of {self._names[number]!r} came in pieces within one micro-batch, so that its norm "
                    "is not known. Leave noise=GradientNoise(...) out."
                )
                raise CompositionError(message)
            arrived.add(number)
            _square(self._preconditioned(number, _dense(gradient), seen), cell)

        return note

    def _square_sum(self, gradients: Sequence[Tensor | None], seen: _Seen) -> None:
        """Note the squared norm of the summed gradient by row; micro-batches have left their cells empty."""
        if self._layout.in_parts:  # other ranks have the rest, so one norm for all parameters of a row
            for row, members in enumerate(self._rows):
                there = [gradient for number in members if (gradient := gradients[number]) is not None]
                if there:
                    seen.of_sum[row] = self._layout.norm(there).to(seen.of_sum) ** 2
            return
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                cell = seen.cells[accumulation_dtype(self._parameters[number])][number]
                _square(self._preconditioned(number, _dense(gradient), seen), cell)
        # In the memory of the sums over micro-batches, which have been handed out.
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
        """Return Adam's `1 - beta2 ** step` by parameter, which stays as it is until the update."""
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
        """Return a gradient divided by Adam's `sqrt(v) + eps`, if that is asked for. NaN before Adam's first step."""
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
        # In the memory of the divisor: one copy of one parameter at a time.
        return torch.div(gradient, divisor, out=divisor)

    def _with_total(self, rows: Float[Tensor, " row"]) -> Float[Tensor, " named"]:
        """Return rows behind their sum; the sum alone where nobody asks for rows."""
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
    """Return the numbers of a gradient, each once: a sparse one may name an index several times."""
    return dense_values(gradient.coalesce()) if gradient.is_sparse else local_part(gradient)


def _rows(by: Rows, parameters: Mapping[str, nn.Parameter], target: Target) -> dict[str, list[int]]:
    """Return the parameters' numbers by row."""
    rows: dict[str, list[int]] = {}
    places = {id(one): place for place, group in enumerate(target.optimizer.param_groups) for one in group["params"]}
    for number, (name, updated) in enumerate(zip(parameters, target.updated, strict=True)):
        row = name.rpartition(".")[0] or name if by == "layer" else f"group {places[id(updated)]}"
        rows.setdefault(row, []).append(number)
    return rows
