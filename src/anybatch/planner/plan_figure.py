"""Draw a plan: memory over the course of the planned step."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from anybatch.core.units import in_bytes
from anybatch.diagnostics.memory.picture import MemoryPicture, draw_memory
from anybatch.memory.timeline import timeline
from anybatch.planner.report import Plan


def draw_plan(plan: Plan, path: Path) -> None:
    """Draw the predicted memory of tensors over a step, at the proposed micro-batch size.

    The limit is drawn at the memory available to tensors, without context, libraries and the allocator's rounding.

    Args:
        plan: the plan to draw.
        path: the file, which ends in .png, .svg or .pdf.

    Raises:
        UserError: matplotlib is not installed, or the file name does not end in .png, .svg or .pdf.
        OSError: the file cannot be written.
    """
    fit, budget = plan.baseline, plan.budget
    overhead = budget.outside_bytes + budget.workspace_bytes + fit.reserved_bytes - fit.peak.num_bytes
    shown = "two of " if fit.accumulation_steps > 1 else "all of "
    picture = MemoryPicture(
        title=f"{plan.name} on {plan.budget}, planned: micro-batches of {fit.micro_batch_size}",
        below=f"{plan.optimizer}, {plan.precision}; {shown}{fit.accumulation_steps} micro-batches are shown; "
        f"plus {in_bytes(overhead)} overhead",
        limit_bytes=budget.total_bytes - overhead,
        headroom=budget.headroom,
    )
    course = timeline(fit.envelope.at(fit.micro_batch_size))
    draw_memory(dataclasses.replace(course, marks=_beginnings(course.marks)), picture, path)


def _beginnings(marks: Sequence[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    """Return the marks at the beginning of each micro-batch, counted from 1, and of the update."""
    found = []
    for place, name in marks:
        if match := re.fullmatch(r"micro-batch (\d+) begins", name):
            found.append((place, f"micro-batch {int(match[1]) + 1}"))
        elif name == "update begins":
            found.append((place, "update"))
    return tuple(found)
