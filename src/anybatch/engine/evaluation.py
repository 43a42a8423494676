"""Evaluation: the same metrics for any micro-batch size and world size."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from anybatch.core.batch import Placement, Position, lengths_of
from anybatch.core.geometry import refuse_unless
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
from anybatch.metrics import OverWholeSet
from anybatch.parallel.strategy import Turn
from anybatch.parallel.world import World

MetricFunction = Callable[[Any, Batch], Any]
Metric = Loss | MetricFunction | OverWholeSet
TotalsAndCounts = dict[str, torch.Tensor]


def evaluate(
    batches: Iterable[Any],
    metric: Metric,
    *,
    context: LoopContext,
    placement: Placement,
    world: World,
    on_halved: Callable[[int, int], None],
) -> tuple[dict[str, float], int]:
    """Return the mean of each metric over all batches and ranks, and the number of samples; see `Engine.evaluate`.

    A micro-batch that does not fit runs in halves, which gives the same sums.
    """
    refuse_unless(_is_iterable(batches), "batches", batches, "an iterable of batches, such as ab.batches(...)")
    is_object = hasattr(metric, "update") and hasattr(metric, "compute")
    has_kind = callable(metric) or isinstance(metric, Loss | OverWholeSet) or is_object
    refuse_unless(has_kind, "metric", metric, "a declared loss, or a function of (model, batch)")
    halving = OomHalving(
        world.device, on_halved, alone=not (context.strategy.capabilities.lockstep or world.has_model_groups)
    )
    if isinstance(metric, OverWholeSet):
        return _evaluate_whole_set(metric, context, batches, placement=placement, world=world, halving=halving)
    if callable(getattr(metric, "update", None)) and callable(getattr(metric, "compute", None)):
        name = type(metric).__name__
        message = (
            f"{name} is a metric object with update() and compute(), which cannot call the model. Use "
            "anybatch.metrics.OverWholeSet(function, compute), where function(model, batch) returns one row per "
            "sample, such as (scores, labels), and compute is lambda outputs: metric(*outputs)."
        )
        raise UserError(message, code="metric_object")
    totals: dict[str, torch.Tensor] = {}
    num_samples = 0
    for batch in _on_all_ranks(batches, world):
        planned = plan_effective_batch(batch, _for_evaluation(placement, batch), world, Position())
        num_samples += planned.plan.num_samples
        measure = _measure_whole if isinstance(metric, Loss) and metric.kind.encode is not None else _measure_parts
        for pairs in measure(metric, context, planned, world, halving):
            for name, pair in pairs.items():
                totals[name] = totals[name] + pair if name in totals else pair
    # The sum below needs equally long tensors; a rank without data has no names.
    names = sorted(set().union(*world.gather_objects(sorted(totals))))
    if not names:
        raise _nothing_to_evaluate()
    nothing = torch.zeros(2, dtype=widest_dtype(world.device), device=world.device)
    # One collective and one synchronization for all metrics.
    stacked = context.strategy.sum(torch.stack([totals.get(name, nothing) for name in names])).tolist()
    means = zip(names, stacked, strict=True)
    return {name: total / count if count else float("nan") for name, (total, count) in means}, num_samples


def _evaluate_whole_set(
    metric: OverWholeSet,
    context: LoopContext,
    batches: Iterable[Any],
    *,
    placement: Placement,
    world: World,
    halving: OomHalving,
) -> tuple[dict[str, float], int]:
    """Return a metric that is computed once, from the rows of all samples of all ranks."""
    own: list[tuple[Sequence[tuple[int, int]], Any]] = []  # (batch, place in the batch) of each row, and the rows
    num_samples = 0
    for number, batch in enumerate(_on_all_ranks(batches, world)):
        planned = plan_effective_batch(batch, _for_evaluation(placement, batch), world, Position())
        num_samples += planned.plan.num_samples
        for unit, micro_batch in zip(planned.units, to_device(planned.micro_batches, world.device), strict=True):
            places = [(number, place) for place in planned.plan.positions(unit)]

            def piece(
                start: int, stop: int, whole: Batch = micro_batch, places: Sequence[tuple[int, int]] = places
            ) -> tuple[Sequence[tuple[int, int]], Any]:
                part = _part(whole, start, stop, len(places))
                with context.autocast():
                    output = context.prepared.call(metric.function, part)
                _refuse_other_rows(output, stop - start)
                return places[start:stop], map_tensors(output, lambda tensor: tensor.detach().cpu())

            pieces = list(halving.run(unit.num_samples, piece))
            own += pieces if unit.weight else []  # a unit of weight 0 repeats samples
    found = [one for of_rank in world.gather_objects(own) for one in of_rank]
    if not found:
        raise _nothing_to_evaluate()
    # In the order of the data, which does not depend on the cut and the number of ranks.
    places = [place for places, _ in found for place in places]
    order = torch.tensor(sorted(range(len(places)), key=places.__getitem__))
    columns = zip(*(list(tensors_of(output)) for _, output in found), strict=True)
    merged = iter([torch.cat(column)[order] for column in columns])
    value = metric.compute(map_tensors(found[0][1], lambda _: next(merged)))
    values = value if isinstance(value, Mapping) else {"metric": value}
    return {name: float(one) for name, one in values.items()}, num_samples


def _for_evaluation(placement: Placement, batch: Any) -> Placement:  # noqa: ANN401 (any nested batch)
    """Return how to cut a batch; under a token budget, samples of unknown length are not cut."""
    if placement.budget is None:
        return placement
    # Samples longer than the budget are allowed: no activations are kept for a backward.
    budget = None if lengths_of(batch) is None else dataclasses.replace(placement.budget, longer="alone")
    return dataclasses.replace(placement, budget=budget)


def _refuse_other_rows(output: object, num_samples: int) -> None:
    tensors = list(tensors_of(output))
    if not tensors or any(not one.dim() or len(one) != num_samples for one in tensors):
        shapes = ", ".join(str(tuple(one.shape)) for one in tensors) or "none"
        message = (
            f"the function of OverWholeSet returned tensors of shape {shapes} for {num_samples} samples. "
            "It must return one row per sample, along the first axis."
        )
        raise LossError(message, code="no_rows")


def _is_iterable(batches: object) -> bool:
    return isinstance(batches, Iterable) and not isinstance(batches, type)


def _nothing_to_evaluate() -> LossError:
    return LossError(
        "nothing to evaluate: no rank has samples. Pass batches that are not empty; an iterator may be exhausted."
    )


def _on_all_ranks(batches: Iterable[Any], world: World) -> Iterator[Any]:
    """Yield batches until every rank has used all of its batches."""
    if world.roll_call is None:
        yield from batches
        return
    iterator, number = iter(batches), 0
    found: list[Any] = []

    def read() -> list[float]:
        found[:] = itertools.islice(iterator, 1)
        return [len(found)]

    while True:
        # Before each batch: a rank without a batch would not join the collectives of the others.
        rows = world.gather_from(read, 1)
        ended = [rank for rank, (has_one,) in enumerate(rows) if not has_one]
        if len(ended) == world.size:
            return
        if ended:
            message = (
                f"rank {', '.join(map(str, ended))} has {number} batches to evaluate, and other ranks have more. "
                "Every rank needs the same number, of any sizes: ab.shares(loader) adds empty batches, and "
                "ab.batches(..., shuffle=False) deals one data set to all ranks."
            )
            raise DataError(message)
        number += 1
        yield found[0]


@contextmanager
def evaluation_mode(modules: nn.Module) -> Iterator[None]:
    """Put modules into eval mode, and restore each module's mode afterwards."""
    # Per module: parts of a model may be in eval mode while the rest trains.
    modes = {module: module.training for module in modules.modules()}
    modules.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _measure_parts(
    metric: "Loss | MetricFunction", context: LoopContext, planned: PlannedBatch, world: World, halving: OomHalving
) -> Iterator[TotalsAndCounts]:
    """Yield (total, count) of each metric for every micro-batch."""
    for unit, micro_batch in zip(planned.units, to_device(planned.micro_batches, world.device), strict=True):

        def piece(start: int, stop: int, whole: Batch = micro_batch, size: int = unit.num_samples) -> TotalsAndCounts:
            return _measure(metric, context, _part(whole, start, stop, size), stop - start, world.device)

        for pairs in halving.run(unit.num_samples, piece):
            if unit.weight:  # padding units only keep ranks in lockstep
                yield pairs


def stale_statistics(modules: nn.Module) -> str:
    """Return a warning if running statistics do not belong to the averaged weights; otherwise an empty text."""
    found = [
        name
        for name, layer in modules.named_modules()
        if isinstance(layer, BatchNormBase) and layer.training and layer.running_mean is not None
    ]
    if not found:
        return ""
    return (
        f"{len(found)} BatchNorm layer{'s' * (len(found) > 1)} (first {found[0]!r}) evaluate the averaged weights with "
        "running statistics of the trained weights. Recompute them first, with batches that can be iterated "
        "repeatedly: with engine.average.in_place(): anybatch.norms.recompute_statistics(model, batches)."
    )


def _measure_whole(
    metric: "Loss | MetricFunction", context: LoopContext, planned: PlannedBatch, world: World, halving: OomHalving
) -> Iterator[TotalsAndCounts]:
    """Yield (total, count) of metrics across samples, for the whole effective batch, on one rank only."""
    assert isinstance(metric, Loss)
    batches = to_device(planned.micro_batches, world.device)
    # An evaluation reduces nothing in its forwards.
    turn = Turn(first=False, last=False)
    key = BatchKey(planned.seed, 0, planned.sample_ids)
    outputs = Outputs()
    with context.randomness:
        for number, (unit, batch) in enumerate(zip(planned.units, batches, strict=True)):

            def piece(start: int, stop: int, unit: Unit = unit, batch: Batch = batch, number: int = number) -> None:
                part = dataclasses.replace(unit, start=unit.start + start, stop=unit.start + stop)
                micro_batch = MicroBatch(part, (), turn, number, key)
                data = _part(batch, start, stop, unit.num_samples)
                encode_all(context, metric, [(micro_batch, data)], outputs=outputs)

            for _ in halving.run(unit.num_samples, piece):
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


def _part(batch: Batch, start: int, stop: int, num_samples: int) -> Batch:
    """Return some samples; a whole batch unchanged, since it may hold values that cannot be sliced."""
    return batch if stop - start == num_samples else slice_samples(batch, start, stop)


def _measure(
    metric: "Loss | MetricFunction", context: LoopContext, batch: Batch, num_samples: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return (total, count) of each metric in one micro-batch."""
    if isinstance(metric, Loss):
        counts = dict(zip(metric.names, unit_counts(metric, batch, num_samples), strict=True))
        sums = {name for name, term in metric.kind.terms.items() if term.is_sum}
    else:
        counts, sums = {}, set()
    with context.autocast():
        output = context.prepared.call(metric.function if isinstance(metric, Loss) else metric, batch)
    values = output if isinstance(output, Mapping) else {_metric_name(metric): output}
    pairs = {}
    for name, value in values.items():
        count = counts.get(name)
        # An undeclared loss with one value per item (such as a token) is a mean over these items, as in training.
        if isinstance(metric, Loss) and metric.kind.brings_count and isinstance(value, torch.Tensor) and value.dim():
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
