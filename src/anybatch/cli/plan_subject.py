"""`anybatch plan WHAT`: plan it, print the plan, draw it."""

import sys
import time
from pathlib import Path
from typing import Any

from anybatch.cli.status import Status
from anybatch.diagnostics.plan.budget import UNMEASURED_HEADROOM
from anybatch.diagnostics.plan.figure import draw_plan
from anybatch.diagnostics.plan.words import words_of
from anybatch.memory.calibration import measure_rates
from anybatch.recipes.planning import plan


def plan_subject(
    what: str,
    *,
    ranks: int,
    headroom: float | None,
    samples: int | None,
    no_proposals: bool,
    figure: Path | None,
    **choices: Any,  # noqa: ANN401 (handed on)
) -> int:
    """Print the plan of a recipe or model; return the exit status: that of "out of memory" if nothing fits.

    Args:
        what: as `plan` takes it.
        ranks: devices.
        headroom: part of the device to leave free; None for the default.
        samples: of a whole run, to say what it takes.
        no_proposals: leave out what could be changed.
        figure: file for a picture.
        **choices: what else `plan` takes.

    Raises:
        CannotPlanError, UserError: as `plan`.
    """
    found = plan(
        what,
        world_size=ranks,
        headroom=UNMEASURED_HEADROOM if headroom is None else headroom,
        proposals=not no_proposals,
        rates=measure_rates("this CPU", time.perf_counter) if choices["device"].startswith("cpu:") else None,
        **choices,
    )
    sys.stdout.write(f"{words_of(found, samples)}\n")
    if figure is not None:
        draw_plan(found, figure)
        sys.stdout.write(f"wrote {figure}\n")
    return Status.DONE if found.as_it_is.fits else Status.OUT_OF_MEMORY
