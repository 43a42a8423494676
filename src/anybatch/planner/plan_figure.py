"""A plan as a picture: memory over the course of the step that was planned."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from anybatch.core.units import in_bytes
from anybatch.diagnostics.memory.picture import MemoryPicture, draw_memory
from anybatch.memory.timeline import timeline
from anybatch.planner.report import Plan


def draw_plan(plan: Plan, path: Path) -> None:
    """Draw what tensors will hold over the course of a step, at the micro-batch size that is proposed.

    The line for what there is stands where tensors may go: context, libraries and the allocator's rounding are below
    it already.

    Args:
        plan: whose proposed size is drawn.
        path: the file, which ends in .png, .svg or .pdf.

    Raises:
        UserError: matplotlib is not installed, or the picture has another ending than .png, .svg or .pdf.
        OSError: it cannot be written.
    """
    fit, budget = plan.baseline, plan.budget
    beside = budget.outside_bytes + budget.workspace_bytes + fit.reserved_bytes - fit.peak.num_bytes
    shown = "two of " if fit.accumulation_steps > 1 else "all of "
    picture = MemoryPicture(
        title=f"{plan.name} on {plan.budget}, planned: micro-batches of {fit.micro_batch_size}",
        below=f"{plan.optimizer}, {plan.precision}; {shown}{fit.accumulation_steps} micro-batches are shown; "
        f"{in_bytes(beside)} beside tensors",
        limit_bytes=budget.total_bytes - beside,
        headroom=budget.headroom,
    )
    course = timeline(fit.envelope.at(fit.micro_batch_size))
    draw_memory(dataclasses.replace(course, marks=_beginnings(course.marks)), picture, path)


def _beginnings(marks: Sequence[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    """Return where micro-batches, counted from 1, and the update begin."""
    found = []
    for place, name in marks:
        if match := re.fullmatch(r"micro-batch (\d+) begins", name):
            found.append((place, f"micro-batch {int(match[1]) + 1}"))
        elif name == "update begins":
            found.append((place, "update"))
    return tuple(found)
