"""The changes that let a step fit together, as text."""

from collections.abc import Callable, Sequence
from textwrap import wrap

from anybatch.core.splitting import Cut, plan_batch
from anybatch.core.units import in_bytes, three_digits
from anybatch.memory.counted import Counted
from anybatch.parallel.strategy import Strategy
from anybatch.planner.budget import Budget
from anybatch.planner.proposals.changes import Change
from anybatch.planner.proposals.combinations import Answer, Combination
from anybatch.planner.proposals.how_to_write import engine_line, strategy_lines
from anybatch.planner.proposals.ranking import Fit, PlanTarget

_WIDTH, _COLUMNS = 11, 80
_MOST_NAMES = 3


def answer_lines(answer: Answer, target: PlanTarget, batch_norms: Sequence[str]) -> list[str]:
    """Return what fits together, what it costs and how to write it, and what else was tried; 80 columns where it can.

    Args:
        answer: what was found.
        target: the hardware and batch size.
        batch_norms: names of layers with BatchNorm.
    """
    best = answer.best
    if best is None or best.fit is None:
        lines = _rows("fits with", ["nothing of what was tried"])
    else:
        lines = [
            *_rows("fits with", [best.name, *_what_fits(best.fit, target)]),
            *_rows("costs", _costs(best, batch_norms)),
            *([""] if best.changes or best.strategy else []),
            *(f"  {line}" for line in code_of(best.changes, best.strategy, best.spec.strategy).splitlines()),
        ]
    return [*lines, "", *_table(answer.tried, target)]


def code_of(changes: Sequence[Change], named: str = "", strategy: str | Callable[[], Strategy] = "") -> str:
    """Return the lines to write for changes together, those of each below its name; the engine is made last, once.

    Args:
        changes: in the order in which they are made.
        named: what the strategy is called that ranks share the step by, where that was chosen too.
        strategy: as in `StepSpec`.
    """
    parts = [f"# {one.name}\n{one.how}" for one in changes if one.how]
    of_engine = {one.name: one.engine for one in changes if one.engine}
    if named:
        before, of_engine[named] = strategy_lines(strategy)
        parts += before
    if of_engine:
        parts.append(f"# {', '.join(of_engine)}\n{engine_line(', '.join(dict.fromkeys(of_engine.values())))}")
    return "\n".join(parts)


def in_seconds(seconds: float) -> str:
    """Return a time with three digits: `85.0 ms`, `1.23 s`."""
    return f"{three_digits(1000 * seconds)} ms" if seconds < 1 else f"{three_digits(seconds)} s"


def counted_ways(fit: Fit) -> tuple[Counted, Counted]:
    """Return what the two figures of `peak_text` count."""
    return "in tensors", "allocated" if fit.on_cpu else "in all"


def peak_text(fit: Fit, budget: Budget) -> str:
    """Return the most memory of a step: what tensors hold of it, and what it takes of the device.

    Args:
        fit: the step.
        budget: the device's memory.
    """
    taken = fit.reserved_bytes + budget.outside_bytes + budget.workspace_bytes
    sizes = zip((fit.tensor_bytes, taken), counted_ways(fit), strict=True)
    return ", ".join(f"{in_bytes(num_bytes)} {way}" for num_bytes, way in sizes)


def _what_fits(fit: Fit, target: PlanTarget) -> list[str]:
    budget = target.budget
    batch = plan_batch(target.effective_batch_size, fit.world_size, Cut(micro_batch_size=fit.micro_batch_size))
    lines = [
        f"micro-batches of {fit.micro_batch_size}: {batch}",
        f"{peak_text(fit, budget)}, of {in_bytes(budget.total_bytes)}",
    ]
    if fit.seconds is not None:
        known = "measured rates" if fit.seconds.is_calibrated else "uncalibrated"
        between = f"{in_seconds(fit.seconds.least)} and {in_seconds(fit.seconds.greatest)}"
        lines.append(f"{in_seconds(fit.seconds.total)} a step, between {between} ({known})")
    return lines


def _costs(best: Combination, batch_norms: Sequence[str]) -> list[str]:
    """Return what each change costs, and what cutting the batch does to BatchNorm."""
    said = [f"{one.name}: {one.costs}" for one in best.changes if one.costs]
    if best.same_step:
        said.append("nothing in exactness: gradient and update are those of the step as it is, up to rounding")
    fit = best.fit
    if batch_norms and fit is not None and (fit.accumulation_steps > 1 or fit.world_size > 1):
        shown = ", ".join(batch_norms[:_MOST_NAMES]) + (", ..." if len(batch_norms) > _MOST_NAMES else "")
        whole = fit.micro_batch_size * fit.accumulation_steps * fit.world_size
        seen = f"see {fit.micro_batch_size} samples, not {whole}: cutting changes the result"
        said.append(f"BatchNorm: {len(batch_norms)} layers ({shown}) {seen}")
        said.append('ab.Engine(..., norms="exact") sees the whole batch, "freeze" needs none; GroupNorm does not care')
    return said


def _table(tried: Sequence[Combination], target: PlanTarget) -> list[str]:
    """Return everything that was tried, in order, with why it is not the answer."""
    rows = [("tried", "micro-batch", "steps", "memory", "s/step", "")]
    for one in tried:
        fit = one.fit
        if fit is None:
            rows.append((one.name, "-", "-", "-", "-", one.why))
            continue
        taken = fit.reserved_bytes + target.budget.outside_bytes + target.budget.workspace_bytes
        sizes = (str(fit.micro_batch_size), str(fit.accumulation_steps)) if fit.fits else ("-", "-")
        seconds = in_seconds(fit.seconds.total) if fit.seconds is not None and fit.fits else "-"
        rows.append((one.name, *sizes, in_bytes(taken), seconds, one.why or "the answer"))
    lines = []
    for name, size, steps, memory, seconds, why in rows:
        lines += [name, f"  {size:>11}  {steps:>6}  {memory:>9}  {seconds:>9}  {why}".rstrip()]
    return [f"{rows[0][0]:<2}{lines[1]}", *lines[2:]] if lines else []


def _rows(name: str, texts: Sequence[str]) -> list[str]:
    lines = [line for text in texts for line in wrap(text, _COLUMNS - _WIDTH, subsequent_indent="  ")]
    return [f"{name if not number else '':<{_WIDTH}}{line}" for number, line in enumerate(lines)]
