"""Evaluation: the same metrics for any micro-batch size and world size."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from anybatch.core.batch import Placement, Position, lengths_of
from anybatch.core.geometry import require
from anybatch.core.loss import Loss, LossSum, unit_counts
from anybatch.core.loss_kinds import ONLY_TERM, name_of
from anybatch.core.randomness import BatchKey
from anybatch.core.splitting import Unit
from anybatch.core.tensors import widest_dtype
from anybatch.core.torch_internals import BatchNormBase
from anybatch.core.tree import Batch, map_tensors, slice_samples, tensors_of
from anybatch.engine.accumulate import LoopContext, MicroBatch
from anybatch.engine.micro_batch_size.oom_retry import OomHalving
from anybatch.engine.micro_batches import PlannedBatch, plan_effective_batch, to_device
from anybatch.engine.two_pass import (
    Outputs,
    call_on_whole,
    encode_all,
    first_rank_with_samples,
    gather_outputs,
    one_number,
)
from anybatch.errors import DataError, LossError, UserError
from anybatch.metrics import Metric, MetricFunction, OverWholeSet
from anybatch.parallel.strategy import Turn
from anybatch.parallel.world import World

TotalsAndCounts = dict[str, torch.Tensor]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Runner:
    """Runs a model on batches, micro-batch by micro-batch."""

    context: LoopContext
    placement: Placement
    world: World
    halving: OomHalving

    def planned(self, batches: Iterable[Any]) -> Iterator[PlannedBatch]:
        """Yield the plan of every batch, until all ranks have used all of their batches."""
        for batch in _on_all_ranks(batches, self.world):
            yield plan_effective_batch(batch, _for_evaluation(self.placement, batch), self.world, Position())

    def outputs(self, planned: PlannedBatch, run: Callable[[Unit, Batch], T]) -> Iterator[tuple[Unit, T]]:
        """Yield the result of `run` for each micro-batch; a micro-batch that does not fit runs in smaller pieces."""
        for unit, batch in zip(planned.units, to_device(planned.micro_batches, self.world.device), strict=True):

            def piece(start: int, stop: int, unit: Unit = unit, batch: Batch = batch) -> tuple[Unit, T]:
                if stop - start == unit.num_samples:  # the whole micro-batch: it may have values that cannot be sliced
                    return unit, run(unit, batch)
                part = dataclasses.replace(unit, start=unit.start + start, stop=unit.start + stop)
                return part, run(part, slice_samples(batch, start, stop))

            yield from self.halving.run(unit.num_samples, piece)

    def call(self, function: Any, batch: Batch) -> Any:  # noqa: ANN401 (the function's result)
        """Return the result of a function of the model and a micro-batch."""
        with self.context.autocast():
            return self.context.prepared.call(function, batch)


def evaluate(
    batches: Iterable[Any],
    metric: Metric,
    *,
    context: LoopContext,
    placement: Placement,
    world: World,
    on_halved: Callable[[int, int], None],
) -> tuple[dict[str, float], int]:
    """Return the mean of each metric over all batches and ranks, and the number of samples; see `Engine.evaluate`."""
    is_iterable = isinstance(batches, Iterable) and not isinstance(batches, type)
    require(is_iterable, "batches", batches, "an iterable of batches, such as ab.batches(...)")
    is_object = callable(getattr(metric, "update", None)) and callable(getattr(metric, "compute", None))
    has_kind = callable(metric) or isinstance(metric, Loss | OverWholeSet) or is_object
    require(has_kind, "metric", metric, "a declared loss, or a function of (model, batch)")
    halving = OomHalving(world.device, on_halved, alone=not context.strategy.capabilities.lockstep)
    runner = _Runner(context, placement, world, halving)
    if isinstance(metric, OverWholeSet):
        return _over_whole_set(metric, runner, batches)
    if is_object:
        message = (
            f"{type(metric).__name__} is a metric object with update() and compute(), which cannot call the model. Use "
            "anybatch.metrics.OverWholeSet(function, compute), where function(model, batch) returns one row per "
            "sample, such as (scores, labels), and compute is lambda outputs: metric(*outputs)."
        )
        raise UserError(message, code="metric_object")
    totals: dict[str, torch.Tensor] = {}
    num_samples = 0
    measure = _across_samples if isinstance(metric, Loss) and metric.kind.encode is not None else _over_samples
    for planned in runner.planned(batches):
        num_samples += planned.plan.num_samples
        for pairs in measure(metric, runner, planned):
            for name, pair in pairs.items():
                totals[name] = totals[name] + pair if name in totals else pair
    # Ranks must sum tensors of the same length, but a rank without data does not know the metrics' names.
    names = sorted(set().union(*world.gather_objects(sorted(totals))))
    if not names:
        raise _nothing_to_evaluate()
    zeros = torch.zeros(2, dtype=widest_dtype(world.device), device=world.device)
    # One collective and one synchronization for all metrics.
    stacked = context.strategy.sum(torch.stack([totals.get(name, zeros) for name in names])).tolist()
    means = zip(names, stacked, strict=True)
    return {name: total / count if count else float("nan") for name, (total, count) in means}, num_samples


def _over_whole_set(metric: OverWholeSet, runner: _Runner, batches: Iterable[Any]) -> tuple[dict[str, float], int]:
    """Return (metric computed once from the rows of all samples of all ranks, number of samples)."""
    local_rows: list[tuple[list[tuple[int, int]], Any]] = []  # (batch, position in it) of each row, and the rows
    num_samples = 0

    def rows(unit: Unit, batch: Batch) -> Any:  # noqa: ANN401 (any nested tensors)
        output = runner.call(metric.function, batch)
        _check_rows(output, unit.num_samples)
        return map_tensors(output, lambda tensor: tensor.detach().cpu())

    for number, planned in enumerate(runner.planned(batches)):
        num_samples += planned.plan.num_samples
        for unit, output in runner.outputs(planned, rows):
            if unit.weight:  # a micro-batch of weight 0 repeats samples, to keep ranks in lockstep
                local_rows.append(([(number, position) for position in planned.plan.positions(unit)], output))
    all_rows = [rows for of_rank in runner.world.gather_objects(local_rows) for rows in of_rank]
    if not all_rows:
        raise _nothing_to_evaluate()
    # Rows are sorted into the order of the data, which does not depend on micro-batches and the number of ranks.
    positions = [position for positions, _ in all_rows for position in positions]
    order = torch.tensor(sorted(range(len(positions)), key=positions.__getitem__))
    columns = zip(*(list(tensors_of(output)) for _, output in all_rows), strict=True)
    merged = iter([torch.cat(column)[order] for column in columns])
    value = metric.compute(map_tensors(all_rows[0][1], lambda _: next(merged)))
    values = value if isinstance(value, Mapping) else {"metric": value}
    return {name: float(number) for name, number in values.items()}, num_samples


def _over_samples(metric: "Loss | MetricFunction", runner: _Runner, planned: PlannedBatch) -> Iterator[TotalsAndCounts]:
    """Yield (total, count) of each metric for every micro-batch."""
    for unit, pairs in runner.outputs(planned, partial(_measure, metric, runner)):
        if unit.weight:  # a micro-batch of weight 0 repeats samples, to keep ranks in lockstep
            yield pairs


def _across_samples(
    metric: "Loss | MetricFunction", runner: _Runner, planned: PlannedBatch
) -> Iterator[TotalsAndCounts]:
    """Yield, on one rank only, (total, count) of metrics that compare samples, computed from the whole batch."""
    assert isinstance(metric, Loss)
    context, world = runner.context, runner.world
    # Neither first nor last, since an evaluation reduces no gradients.
    turn, key = Turn(first=False, last=False), BatchKey(planned.seed, 0, planned.sample_ids)
    outputs = Outputs()

    def encode(unit: Unit, batch: Batch) -> None:
        encode_all(context, metric, [(MicroBatch(unit, (), turn, unit.number, key), batch)], outputs=outputs)

    with context.randomness:
        for _ in runner.outputs(planned, encode):
            pass
        tensors, _ = gather_outputs(outputs, planned.plan, world, lambda _: nullcontext())
        if outputs.rebuild is None:
            return
        output = call_on_whole(context, metric, outputs.rebuild(tensors), seed=0)
    if first_rank_with_samples(planned.plan) != world.rank:
        return
    count = torch.tensor(planned.plan.num_samples, device=world.device, dtype=widest_dtype(world.device))
    values = output if isinstance(output, Mapping) else {"loss": output}
    yield {name: torch.stack([one_number(value).to(count.dtype) * count, count]) for name, value in values.items()}


def _for_evaluation(placement: Placement, batch: Any) -> Placement:  # noqa: ANN401 (any nested batch)
    """Return the options for splitting a batch in an evaluation; without lengths, a token budget does not apply."""
    if placement.budget is None:
        return placement
    # Samples longer than the budget are allowed, because no activations are kept for a backward.
    budget = None if lengths_of(batch) is None else dataclasses.replace(placement.budget, longer="alone")
    return dataclasses.replace(placement, budget=budget)


def _check_rows(output: object, num_samples: int) -> None:
    tensors = list(tensors_of(output))
    if not tensors or any(not tensor.dim() or len(tensor) != num_samples for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "none"
        message = (
            f"the function of OverWholeSet returned tensors of shape {shapes} for {num_samples} samples. "
            "It must return one row per sample, along the first axis."
        )
        raise LossError(message, code="no_rows")


def _nothing_to_evaluate() -> LossError:
    return LossError(
        "nothing to evaluate: no rank has samples. Pass batches that are not empty; an iterator may be exhausted."
    )


def _on_all_ranks(batches: Iterable[Any], world: World) -> Iterator[Any]:
    """Yield batches until every rank has used all of its batches."""
    if world.call_tracker is None:
        yield from batches
        return
    iterator, number = iter(batches), 0
    loaded: list[Any] = []

    def read() -> list[float]:
        loaded[:] = itertools.islice(iterator, 1)
        return [len(loaded)]

    while True:
        # Agreed before each batch, because a rank without a batch would not join the collectives of the other ranks.
        rows = world.gather_from(read, 1)
        ended = [rank for rank, (num_loaded,) in enumerate(rows) if not num_loaded]
        if len(ended) == world.size:
            return
        if ended:
            message = (
                f"rank {', '.join(map(str, ended))} has {number} batches to evaluate, but other ranks have more. "
                "Every rank needs the same number, of any sizes: ab.shares(loader) adds empty batches, and "
                "ab.batches(..., shuffle=False) divides one data set among all ranks."
            )
            raise DataError(message)
        number += 1
        yield loaded[0]


@contextmanager
def evaluation_mode(modules: nn.Module) -> Iterator[None]:
    """Put modules into eval mode, and restore each module's mode afterwards."""
    # For each module separately: parts of a model may be in eval mode while other parts train.
    modes = {module: module.training for module in modules.modules()}
    modules.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def stale_statistics(modules: nn.Module) -> str:
    """Return a warning if BatchNorm's running statistics do not belong to the averaged weights; otherwise ""."""
    names = [
        name
        for name, layer in modules.named_modules()
        if isinstance(layer, BatchNormBase) and layer.training and layer.running_mean is not None
    ]
    if not names:
        return ""
    return (
        f"the averaged weights are evaluated, but {len(names)} BatchNorm layer{'s' * (len(names) > 1)} (first "
        f"{names[0]!r}) use running statistics of the trained weights. Recompute the statistics first: with "
        "engine.average.in_place(): torch.optim.swa_utils.update_bn(loader, model)."
    )


def _measure(metric: "Loss | MetricFunction", runner: _Runner, unit: Unit, batch: Batch) -> dict[str, torch.Tensor]:
    """Return (total, count) of each metric in one micro-batch."""
    device = runner.world.device
    if isinstance(metric, Loss):
        counts = dict(zip(metric.names, unit_counts(metric, batch, unit.num_samples), strict=True))
        sums = {name for name, term in metric.kind.terms.items() if term.is_sum}
    else:
        counts, sums = {}, set()
    output = runner.call(metric.function if isinstance(metric, Loss) else metric, batch)
    values = output if isinstance(output, Mapping) else {_metric_name(metric): output}
    pairs = {}
    for name, value in values.items():
        count = counts.get(name)
        # An undeclared loss that returns one value per item (such as a token) is a mean over items, as in training.
        if isinstance(metric, Loss) and metric.kind.returns_count and isinstance(value, torch.Tensor) and value.dim():
            count = None
        total, count = _total_and_count(name, value, count, is_sum=name in sums)
        pair = [torch.as_tensor(number, device=device, dtype=widest_dtype(device)) for number in (total, count)]
        pairs[name] = torch.stack(pair)
    return pairs


def _metric_name(metric: "Loss | MetricFunction") -> str:
    """Return the name of a metric's only value: the name of the function, if it has one."""
    if isinstance(metric, Loss):
        return ONLY_TERM
    while isinstance(metric, partial):
        metric = metric.func
    name = name_of(metric)
    return name if name.isidentifier() else "metric"


def _total_and_count(name: str, value: object, count: float | None, *, is_sum: bool) -> tuple[Any, Any]:
    if is_sum and count is not None:
        return (value.total if isinstance(value, LossSum) else torch.as_tensor(value).sum()), count
    if isinstance(value, LossSum):
        return value.total, value.count
    if isinstance(value, torch.Tensor) and value.dim():
        return value.sum(), value.numel() if count is None else count
    if isinstance(value, torch.Tensor) and count is not None:
        return (value * count, count) if count else (0.0, 0.0)  # a mean over nothing is NaN
    message = (
        f"metric {name!r} returned {type(value).__name__} without a count. Return one value per sample (a tensor), "
        "ab.LossSum(total, count) or a dict of these, or declare the function: ab.mean_over_samples(metric)."
    )
    raise LossError(message, term=name, code="no_count")
