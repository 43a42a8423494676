"""`anybatch plan`: what fits into a device, without the device."""

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

    from anybatch.planner.cost.devices import Device
    from anybatch.planner.report import Plan


def run(words: Sequence[str]) -> int:
    """Run `anybatch plan` and return the exit status."""
    parser = make_parser()
    given = vars(parser.parse(words))
    asked = changes_of(given, parser)
    # Imported late: importing torch takes seconds, and a wrong option is reported without it.
    with frozen_imports():
        import anybatch.planner.report  # noqa: PLC0415 (imports torch)
        import anybatch.planner.verification  # noqa: PLC0415 (imports torch)
        import anybatch.recipes.planning.plan  # noqa: F401, PLC0415 (imports torch)
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
    **choices: Any,  # noqa: ANN401 (passed on)
) -> int:
    """Print the plan of a recipe or model; return the exit status (out of memory if nothing fits)."""
    from anybatch.planner.cost.calibration import measure_rates  # noqa: PLC0415 (imports torch)
    from anybatch.planner.measurements import KnownDevices  # noqa: PLC0415 (imports torch)
    from anybatch.planner.report import draw_plan  # noqa: PLC0415 (imports torch)
    from anybatch.recipes.planning.plan import plan  # noqa: PLC0415 (imports torch)

    known, as_json = KnownDevices(), choices.pop("json")
    found = plan(
        what,
        device=_own_device(device, devices),
        world_size=ranks,
        headroom=headroom,
        known=known,
        proposals=not no_proposals,
        # The table of devices has no CPUs, so the rates of this one are measured.
        rates=measure_rates("this CPU", time.perf_counter) if device.startswith("cpu:") else None,
        **choices,
    )
    sys.stdout.write(_as_json(found) if as_json else f"{found}\n")
    beside = sys.stderr if as_json else sys.stdout  # keeps the JSON output pure
    # A step that does not fit cannot be run.
    if verify and found.baseline.fits:
        beside.write(_verified(found, device, known))
    if figure is not None:
        draw_plan(found, figure)
        beside.write(f"wrote {figure}\n")
    return Status.DONE if found.fits else Status.OUT_OF_MEMORY


def _own_device(name: str, file: Path | None) -> "str | Device":
    """Return the device of that name in the user's file, else the name."""
    from anybatch.planner.cost.devices import devices_of  # noqa: PLC0415 (keeps `--help` light)

    own = () if file is None else devices_of(file)
    return next((one for one in own if one.name == name), name)


def _as_json(found: "Plan") -> str:
    from anybatch.planner.report import as_json  # noqa: PLC0415 (imports torch)

    return f"{json.dumps(as_json(found), indent=1)}\n"


def _verified(found: "Plan", device: str, known: Any) -> str:  # noqa: ANN401 (its class imports torch)
    """Run the planned step, keep its measured memory, and return the report."""
    from anybatch.planner.verification import keep, verify  # noqa: PLC0415 (imports torch)

    measured = verify(found.spec, found.baseline, _device_of(device))
    return f"{measured}\n{keep(measured, found, known)}\n"


def _device_of(budget: str) -> "torch.device":
    """Return the device on which to verify a plan."""
    import torch  # noqa: PLC0415 (slow to import)

    if budget.startswith("cpu:"):
        return torch.device("cpu")
    if not torch.accelerator.is_available():
        message = f"--verify runs a step on {budget}, but this machine has no accelerator. Leave it out to plan only."
        raise UserError(message)
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, 0)
