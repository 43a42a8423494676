"""A plan in words, 80 columns wide, for a terminal and for a pipe."""

from typing import TYPE_CHECKING

from anybatch.core.units import duration, in_bytes, per_second, three_digits
from anybatch.diagnostics.memory.bar import MemoryBar
from anybatch.planner.budget import Budget
from anybatch.planner.proposals.ranking import Fit

if TYPE_CHECKING:
    from anybatch.planner.plan import Plan

_NAME_WIDTH = 11


def words_of(plan: "Plan", num_samples: int | None = None) -> str:
    """Return a plan as text.

    Args:
        plan: the plan.
        num_samples: samples of a whole run, to say what it takes; None to leave that out.
    """
    lines = [
        f"{plan.name}: {plan.num_parameters:,} parameters, {plan.optimizer}, {plan.precision}",
        f"on {plan.batch.world_size} x {plan.budget}, {plan.batch.num_samples:,} samples a step",
        "",
        *(_fitting(plan) if plan.as_it_is.fits else _nothing_fits(plan)),
        *_time(plan, num_samples),
        "",
        *str(MemoryBar(plan.bytes_by_purpose(), plan.budget.total_bytes)).splitlines(),
    ]
    if plan.changes:
        lines += ["", *_table(plan)]
    lines += ["", *(f"note: {note}" for note in (*plan.budget.notes, *plan.notes)), _made(plan)]
    return "\n".join(lines)


def _time(plan: "Plan", num_samples: int | None) -> list[str]:
    """Return how long a step takes, on one device and on eight, and what a run takes."""
    seconds = plan.as_it_is.seconds
    if seconds is None or not plan.as_it_is.fits:
        return []
    known = "measured rates" if seconds.is_calibrated else "uncalibrated: from the data sheet"
    band = f"{in_seconds(seconds.least)} and {in_seconds(seconds.greatest)}"
    rows = _rows(time=f"{in_seconds(seconds.total)} a step, between {band} ({known})")
    for world_size in sorted({1, 8, plan.batch.world_size}):
        other = plan.seconds_on(world_size)
        if other is None or (world_size > 1 and plan.budget.device is None):
            continue
        rate = plan.batch.num_samples / other.total
        row = f"{per_second(rate)} samples/s on {world_size}"
        run = None if num_samples is None else plan.bill(num_samples, world_size)
        if run is not None:
            price = "" if run.usd is None else f", about {run.usd:,.0f} USD at {_per_hour(plan)} an hour (check yours)"
            hours = f"{duration(3600 * run.hours)}, {run.device_hours:,.1f} device-hours"
            row += f": {num_samples:,} samples in {hours}{price}"
        rows += [f"{'':{_NAME_WIDTH}}{row}"]
    return rows


def _per_hour(plan: "Plan") -> str:
    """Return what an hour of one device is taken to cost."""
    device = plan.budget.device
    assert device is not None
    assert device.price is not None
    return f"{device.price.usd_per_hour:.2f} USD"


def in_seconds(seconds: float) -> str:
    """Return a time with three digits: `85.0 ms`, `1.23 s`."""
    return f"{three_digits(1000 * seconds)} ms" if seconds < 1 else f"{three_digits(seconds)} s"


def _fitting(plan: "Plan") -> list[str]:
    fit, budget = plan.as_it_is, plan.budget
    taken = fit.reserved_bytes + budget.outside_bytes + budget.workspace_bytes
    left = 1.0 - taken / budget.total_bytes
    return _rows(
        fits=f"micro-batches of {fit.micro_batch_size}: {plan.batch}",
        peak=f"{in_bytes(fit.peak.num_bytes)} in tensors, {in_bytes(taken)} in all, {_moment(fit)}",
        left=f"{100 * left:.0f}% of the device; {100 * budget.headroom:.0f}% is kept free ({budget.why})",
        largest=f"{fit.largest}{_bound(plan)}",
    )


def _bound(plan: "Plan") -> str:
    """Return what keeps the micro-batch size from being larger."""
    fit, usable = plan.as_it_is, plan.budget.usable_bytes
    if fit.binds == "batch":
        return ", which is all there is for a rank"
    if fit.binds == "allocator":
        return f": tensors would leave room for {fit.envelope.largest(usable)}, the allocator's rounding does not"
    what = "the optimizer's step" if fit.binds == "optimizer step" else "tensors"
    return (
        f": one more would take {in_bytes(fit.envelope.peak_bytes(fit.largest + 1))} for {what}, of {in_bytes(usable)}"
    )


def _nothing_fits(plan: "Plan") -> list[str]:
    """Say what does not fit even for a single sample, and the smallest change that would."""
    fit, usable = plan.as_it_is, max(0, plan.budget.usable_bytes)
    alone = [(size, name) for name, size in fit.peak.by_category.items() if size > usable]
    if alone:
        size, name = max(alone)
        term = f"the {name} alone {'takes' if name == 'optimizer' else 'take'} {in_bytes(size)}"
    else:
        largest = sorted(((size, name) for name, size in fit.peak.by_category.items()), reverse=True)[:3]
        term = "no part alone is too large; " + ", ".join(f"{name} {in_bytes(size)}" for size, name in largest)
    fitting = [change for change in plan.changes if change.fits]
    cure = f"{fitting[0].name}: {fitting[0].how}" if fitting else "nothing of what was tried"
    return _rows(
        fits=f"nothing: one sample takes {in_bytes(fit.peak.num_bytes)}, and {in_bytes(usable)} can be had",
        because=term,
        peak=_moment(fit),
        smallest=f"change that would fit: {cure}",
    )


def _moment(fit: Fit) -> str:
    place = {"setup": "before the step", "update": "in the update"}.get(fit.peak.phase, f"in the {fit.peak.phase}")
    return f"{place}, at {fit.peak.operation}" if fit.peak.operation else place


def _table(plan: "Plan") -> list[str]:
    """Return what fits with each change, beside what fits without: the fastest first, and how to make the best one."""
    rows = [("what would change it", "micro-batch", "steps", "memory", "s/step")]
    rows += [_row("as it is", plan.as_it_is, plan.budget)]
    rows += [_row(change.name, change, plan.budget) for change in plan.changes]
    if not any(fit.seconds for fit in (plan.as_it_is, *plan.changes)):
        rows = [(*row[:-1], "") for row in rows]
    width = max(len(row[0]) for row in rows)
    lines = [
        f"{name:<{width}}  {size:>11}  {steps:>6}  {memory:>9}  {time:>9}".rstrip()
        for name, size, steps, memory, time in rows
    ]
    best = plan.changes[0]
    return [*lines, f"{best.name}: {best.how}"] if best.fits else lines


def _row(name: str, fit: Fit, budget: Budget) -> tuple[str, str, str, str, str]:
    taken = in_bytes(fit.reserved_bytes + budget.outside_bytes + budget.workspace_bytes)
    if not fit.fits:
        return name, "-", "-", taken, "-"
    seconds = "-" if fit.seconds is None else in_seconds(fit.seconds.total)
    return name, str(fit.micro_batch_size), str(fit.accumulation_steps), taken, seconds


def _made(plan: "Plan") -> str:
    if not plan.as_it_is.fits:
        return f"planned in {plan.seconds:.1f} s without the device"
    sure = "each allocation follows its line" if plan.exact else "allocations follow lines and quadratics"
    return f"planned in {plan.seconds:.1f} s without the device; {sure}, seen at a third size"


def _rows(**texts: str) -> list[str]:
    return [f"{name:<{_NAME_WIDTH}}{text}" for name, text in texts.items()]
