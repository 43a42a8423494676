"""`anybatch plan`: what fits into a device that is not here."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anybatch.cli.frozen_imports import frozen_imports
from anybatch.cli.plan_options import changes_of, make_parser
from anybatch.cli.status import Status
from anybatch.errors import UserError

if TYPE_CHECKING:
    import torch

    from anybatch.planner.cost.device import Device
    from anybatch.planner.report import Plan


def run(words: Sequence[str]) -> int:
    """Plan the recipe or model that a command line names; return the exit status."""
    parser = make_parser()
    given = vars(parser.parse(words))
    asked = changes_of(given, parser)
    # torch takes seconds to import, and is not needed to say that an option is wrong.
    with frozen_imports():
        import anybatch.planner.plan_figure  # noqa: PLC0415 (brings torch)
        import anybatch.planner.verification  # noqa: PLC0415 (brings torch)
        import anybatch.recipes.planning.plan  # noqa: F401, PLC0415 (brings torch)
    return plan_subject(given.pop("what"), **given, **asked)


def plan_subject(
    what: str,
    *,
    device: str,
    devices: Path | None,
    ranks: int,
    headroom: float | None,
    no_proposals: bool,
    verify: bool,
    figure: Path | None,
    **choices: Any,  # noqa: ANN401 (handed on)
) -> int:
    """Print the plan of a recipe or model; return the exit status: that of "out of memory" if nothing fits.

    Args:
        what: as `plan` takes it.
        device: as `plan` takes it, or the name of one in `devices`.
        devices: file of devices of one's own.
        ranks: devices.
        headroom: part of the device to leave free; None for what was measured there, or else the default.
        no_proposals: leave out what could be changed.
        verify: run the planned step on this machine's accelerator, or on its CPU for a budget of one, and keep what it
            takes for later plans.
        figure: file for a picture.
        **choices: what else `plan` takes; `json` prints the plan so, and the rest to standard error.

    Raises:
        CannotPlanError, UserError: as `plan`.
    """
    from anybatch.planner.cache.measured_devices import KnownDevices  # noqa: PLC0415 (brings torch)
    from anybatch.planner.cost.calibration import measure_rates  # noqa: PLC0415 (brings torch)
    from anybatch.planner.plan_figure import draw_plan  # noqa: PLC0415 (brings torch)
    from anybatch.recipes.planning.plan import plan  # noqa: PLC0415 (brings torch)

    known, as_json = KnownDevices(), choices.pop("json")
    found = plan(
        what,
        device=_own_device(device, devices),
        world_size=ranks,
        headroom=headroom,
        known=known,
        proposals=not no_proposals,
        # CPUs are not in the table of devices, so this one is measured.
        rates=measure_rates("this CPU", time.perf_counter) if device.startswith("cpu:") else None,
        **choices,
    )
    sys.stdout.write(_as_json(found) if as_json else f"{found}\n")
    beside = sys.stderr if as_json else sys.stdout  # what reads JSON reads nothing else
    # Where nothing fits there is no size to run.
    if verify and found.baseline.fits:
        beside.write(_verified(found, device, known))
    if figure is not None:
        draw_plan(found, figure)
        beside.write(f"wrote {figure}\n")
    return Status.DONE if found.fits else Status.OUT_OF_MEMORY


def _own_device(name: str, file: Path | None) -> "str | Device":
    """Return the device of that name in a file of one's own; the name itself without a file, or where it is not there.

    Raises:
        UserError: the file lists no devices.
    """
    from anybatch.planner.cost.devices import devices_of  # noqa: PLC0415 (keeps `--help` light)

    own = () if file is None else devices_of(file)
    return next((one for one in own if one.name == name), name)


def _as_json(found: "Plan") -> str:
    from anybatch.planner.plan_json import as_json  # noqa: PLC0415 (brings torch)

    return f"{json.dumps(as_json(found), indent=1)}\n"


def _verified(found: "Plan", device: str, known: Any) -> str:  # noqa: ANN401 (its class brings torch)
    """Run the planned step, keep what it took, and return it in words."""
    from anybatch.planner.measured import keep  # noqa: PLC0415 (brings torch)
    from anybatch.planner.verification import verify  # noqa: PLC0415 (brings torch)

    measured = verify(found.spec, found.baseline, _device_of(device))
    return f"{measured}\n{keep(measured, found, known)}\n"


def _device_of(budget: str) -> "torch.device":
    """Return where a plan for a budget is verified.

    Raises:
        UserError: it is not here.
    """
    import torch  # noqa: PLC0415 (takes seconds)

    if budget.startswith("cpu:"):
        return torch.device("cpu")
    if not torch.accelerator.is_available():
        message = f"--verify runs a step on {budget}, and there is no accelerator here. Leave it out to plan only."
        raise UserError(message)
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, 0)
