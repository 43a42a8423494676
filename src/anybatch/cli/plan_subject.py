"""`anybatch plan WHAT`: plan it, print the plan, draw it."""

import sys
import time
from pathlib import Path
from typing import Any

import torch

from anybatch.cli.status import Status
from anybatch.errors import UserError
from anybatch.planner.cache.measured_devices import KnownDevices
from anybatch.planner.cost.calibration import measure_rates
from anybatch.planner.figure import draw_plan
from anybatch.planner.measured import keep
from anybatch.planner.report import words_of
from anybatch.planner.verification import verify as verified
from anybatch.recipes.planning.plan import plan


def plan_subject(
    what: str,
    *,
    ranks: int,
    headroom: float | None,
    samples: int | None,
    no_proposals: bool,
    verify: bool,
    figure: Path | None,
    **choices: Any,  # noqa: ANN401 (handed on)
) -> int:
    """Print the plan of a recipe or model; return the exit status: that of "out of memory" if nothing fits.

    Args:
        what: as `plan` takes it.
        ranks: devices.
        headroom: part of the device to leave free; None for what was measured there, or else the default.
        samples: of a whole run, to say what it takes.
        no_proposals: leave out what could be changed.
        verify: run the planned step on this machine's accelerator, or on its CPU for a budget of one, and keep what it
            takes for later plans.
        figure: file for a picture.
        **choices: what else `plan` takes.

    Raises:
        CannotPlanError, UserError: as `plan`.
    """
    known = KnownDevices()
    found = plan(
        what,
        world_size=ranks,
        headroom=headroom,
        known=known,
        proposals=not no_proposals,
        rates=measure_rates("this CPU", time.perf_counter) if choices["device"].startswith("cpu:") else None,
        **choices,
    )
    sys.stdout.write(f"{words_of(found, samples)}\n")
    if verify and found.as_it_is.fits:
        measured = verified(found.spec, found.as_it_is, _device_of(choices["device"]))
        sys.stdout.write(f"{measured}\n{keep(measured, found, known)}\n")
    if figure is not None:
        draw_plan(found, figure)
        sys.stdout.write(f"wrote {figure}\n")
    return Status.DONE if found.as_it_is.fits else Status.OUT_OF_MEMORY


def _device_of(budget: str) -> torch.device:
    """Return where a plan for a budget is verified.

    Raises:
        UserError: it is not here.
    """
    if budget.startswith("cpu:"):
        return torch.device("cpu")
    if not torch.accelerator.is_available():
        message = f"--verify runs a step on {budget}, and there is no accelerator here. Leave it out to plan only."
        raise UserError(message)
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, 0)
