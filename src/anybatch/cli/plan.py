"""`anybatch plan`: what fits into a device that is not here."""

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anybatch.cli.parser import Parser, count
from anybatch.cli.status import Status
from anybatch.errors import UserError

if TYPE_CHECKING:
    import torch

_DESCRIPTION = (
    "Say what micro-batch size fits into a device, what holds its memory, and what would change it. The device is not "
    "needed, and no memory is taken: the engine's own step runs on tensors without data."
)
_EPILOG = "docs/memory.md says how it is done and how far it can be trusted."


def run(words: Sequence[str]) -> int:
    """Plan the recipe or model that a command line names; return the exit status."""
    given = vars(make_parser().parse(words))
    # torch takes seconds to import, and is not needed to say that an option is wrong.
    with frozen_imports():
        import anybatch.planner.plan_figure  # noqa: PLC0415 (brings torch)
        import anybatch.planner.verification  # noqa: PLC0415 (brings torch)
        import anybatch.recipes.planning.plan  # noqa: F401, PLC0415 (brings torch)
    return plan_subject(given.pop("what"), **given)


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Keep the garbage collector from ever looking at objects made inside.

    The million objects of torch's modules stay to the end anyway, and visiting them again and again takes a second.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if enabled:
            gc.enable()


def make_parser() -> Parser:
    """Return the parser of this verb."""
    parser = Parser("plan", _DESCRIPTION, epilog=_EPILOG)
    add = parser.add_argument
    add(
        "what",
        metavar="WHAT",
        help="a recipe, as `anybatch train` takes it; a published model, such as llama-3.1-8b; or a config.json",
    )
    add(
        "--device",
        required=True,
        metavar="NAME|SIZE",
        help='"RTX 4090", A100-40, H100, ... or its memory, such as 24GiB; cpu:8GiB for tensors on a CPU',
    )
    add("--effective-batch-size", type=count, metavar="N", help="samples of one optimizer step, over all ranks")
    add("--ranks", type=count, default=1, metavar="N", help="devices (default: 1)")
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="number format (default: fp32)")
    add("--sequence-length", type=count, metavar="N", help="tokens of a sample (default: all the model can take)")
    add(
        "--strategy",
        default="auto",
        metavar="NAME",
        help="how ranks sum gradients: all_reduce, ddp, zero1 or fsdp (default: auto, by the device)",
    )
    add(
        "--headroom",
        type=fraction,
        metavar="X",
        help="part of the memory to leave free (default: 0.1 where --verify has measured, else 0.15)",
    )
    add("--no-proposals", action="store_true", help="do not plan what could be changed, which takes as long again")
    add(
        "--verify",
        action="store_true",
        help="run a step where the device is here, print planned beside measured, and keep it for later plans",
    )
    add("--figure", type=Path, metavar="FILE", help="draw memory over the step: .png, .svg or .pdf")
    return parser


def fraction(text: str) -> float:
    """Return a number from 0 to below 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        message = f"{text} must be a part of the whole, from 0 to below 1: 0.15 leaves 15%"
        raise argparse.ArgumentTypeError(message)
    return value


def plan_subject(
    what: str,
    *,
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
        ranks: devices.
        headroom: part of the device to leave free; None for what was measured there, or else the default.
        no_proposals: leave out what could be changed.
        verify: run the planned step on this machine's accelerator, or on its CPU for a budget of one, and keep what it
            takes for later plans.
        figure: file for a picture.
        **choices: what else `plan` takes.

    Raises:
        CannotPlanError, UserError: as `plan`.
    """
    from anybatch.planner.cache.measured_devices import KnownDevices  # noqa: PLC0415 (brings torch)
    from anybatch.planner.cost.calibration import measure_rates  # noqa: PLC0415 (brings torch)
    from anybatch.planner.measured import keep  # noqa: PLC0415 (brings torch)
    from anybatch.planner.plan_figure import draw_plan  # noqa: PLC0415 (brings torch)
    from anybatch.planner.verification import verify as verified  # noqa: PLC0415 (brings torch)
    from anybatch.recipes.planning.plan import plan  # noqa: PLC0415 (brings torch)

    known = KnownDevices()
    found = plan(
        what,
        world_size=ranks,
        headroom=headroom,
        known=known,
        proposals=not no_proposals,
        # CPUs are not in the table of devices, so this one is measured.
        rates=measure_rates("this CPU", time.perf_counter) if choices["device"].startswith("cpu:") else None,
        **choices,
    )
    sys.stdout.write(f"{found}\n")
    # Where nothing fits there is no size to run.
    if verify and found.baseline.fits:
        measured = verified(found.spec, found.baseline, _device_of(choices["device"]))
        sys.stdout.write(f"{measured}\n{keep(measured, found, known)}\n")
    if figure is not None:
        draw_plan(found, figure)
        sys.stdout.write(f"wrote {figure}\n")
    return Status.DONE if found.baseline.fits else Status.OUT_OF_MEMORY


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
