"""Compute the largest useful number of ranks for each strategy, from a comparison and a network."""

from collections.abc import Mapping

from anybatch.core.size_choice import SecondsFit
from anybatch.diagnostics.comparison.report import ComparisonReport
from anybatch.planner.forecast.forecast import forecast
from anybatch.planner.forecast.workload import Cluster, StrategyName, Workload

_STRATEGIES: Mapping[str, StrategyName] = {"ddp": "ddp", "all_reduce": "all_reduce", "zero1": "zero1", "fsdp": "fsdp"}


def largest_worlds(report: ComparisonReport, cluster: Cluster) -> dict[str, int]:
    """Return the largest useful number of ranks by way, at the compared effective batch size.

    A micro-batch of m samples takes `a + b m` seconds: a and b are fitted to the small and the native batch, including
    the update.

    Args:
        report: result of `compare`; ways that were not measured, or use one process, are skipped.
        cluster: the network between ranks.
    """
    by_name = {one.way.name: one for one in report.results}
    small, native = by_name.get("small batch"), by_name.get("native")
    if small is None or native is None or small.way.num_samples == native.way.num_samples:
        return {}
    slope = (native.seconds_per_step - small.seconds_per_step) / (native.way.num_samples - small.way.num_samples)
    fixed = small.seconds_per_step - slope * small.way.num_samples
    found = {}
    for one in report.results:
        strategy = _STRATEGIES.get(one.way.strategy or "")
        if strategy is None or one.way.num_ranks == 1:
            continue
        workload = Workload(
            # A line through two noisy times may start below 0 or have a negative slope.
            micro_batch=SecondsFit(max(0.0, fixed), max(slope, 1e-3 * native.seconds_per_sample)),
            micro_batch_size=one.way.micro_batch_size,
            gradient_bytes=one.gradient_bytes,
            effective_batch_size=one.way.num_samples,
        )
        largest = forecast(workload, cluster, world_size=2, strategy=strategy).largest_useful
        if largest is not None:
            found[one.way.name] = largest
    return found
