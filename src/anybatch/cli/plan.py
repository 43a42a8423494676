"""`anybatch plan`: what fits into a device, without the device."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anybatch.cli.command import Parser, add_report_files, count, frozen_imports
from anybatch.cli.status import Status
from anybatch.errors import UserError

if TYPE_CHECKING:
    import torch

    from anybatch.planner.devices import Device

_DESCRIPTION = (
    "Predict the micro-batch size that fits into a device, the memory of a step by category, and changes that would "
    "help. The device is not needed, and no memory is allocated: the engine's step runs on fake tensors."
)
_CHECKPOINTING = {
    "whole": "checkpointing",
    "every-2nd": "checkpointing every 2nd block",
    "selective": "checkpointing all but products",
}
_WEIGHTS = {
    "bf16": "bf16 weights",
    "bf16-split": "bf16 weights, split",
    "bf16-stochastic": "bf16 weights, rounded stochastically",
}
"""How bf16 weights are updated: the option, and the change of the plan."""
OPTIMIZERS = ("adamw", "adamw-fused", "adamw-8bit", "adam", "sgd", "adafactor", "rmsprop")


def run(words: Sequence[str]) -> int:
    """Run `anybatch plan` and return the exit status."""
    parser = make_parser()
    given = vars(parser.parse(words))
    asked = changes_of(given, parser)
    with frozen_imports():
        import anybatch.planner.plan
        import anybatch.planner.verification
        import anybatch.recipes.planning.plan  # noqa: F401 (imported here, with its garbage collection frozen)
    return plan_subject(given.pop("what"), **given, **asked)


def make_parser() -> Parser:
    """Return the parser of this command."""
    parser = Parser("plan", _DESCRIPTION, explain_unknown=_explain_unknown)
    parser.add_argument(
        "what",
        metavar="WHAT",
        help="a recipe, as for `anybatch train`; a published model, such as llama-3.1-8b; a config.json; or a model "
        "name of transformers, torchvision or timm",
    )
    _add_device(parser)
    _add_step(parser)
    _add_answer(parser)
    return parser


def _explain_unknown(words: Sequence[str]) -> str:
    """Return the error for unknown words; for a removed option, with the alternative."""
    name = words[0].partition("=")[0]
    if name in {"--samples", "--deadline", "--price"}:
        return f"{name} was removed: multiply the predicted time of a step by the number of steps"
    return f"unknown {'option' if name.startswith('-') else 'argument'} {name!r}"


def _add_device(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--device",
        required=True,
        metavar="NAME|SIZE",
        help='"RTX 4090", A100-40, H100, ... or its memory, such as 24GiB; cpu:8GiB counts tensors on a CPU',
    )
    add("--devices", type=Path, metavar="FILE", help="JSON file of your own devices")
    add("--ranks", type=count, default=1, metavar="N", help="number of devices (default: 1)")
    add(
        "--headroom",
        type=fraction,
        metavar="X",
        help="part of the memory to keep free (default: 0.1 after --verify on this device, else 0.15)",
    )
    add("--expandable-segments", action="store_true", help="plan for an allocator with expandable_segments:True")


def _add_step(parser: Parser) -> None:
    add = parser.add_argument
    add("--effective-batch-size", type=count, metavar="N", help="samples of one optimizer step, over all ranks")
    add("--micro-batch-size", type=count, metavar="N", help="samples per micro-batch (default: the largest that fits)")
    add(
        "--sequence-length",
        type=count,
        metavar="N",
        help="tokens per sample (default: the model's maximum, at most 8192)",
    )
    add("--precision", choices=("fp32", "bf16", "fp16"), help="number format (default: fp32; --fit may choose another)")
    add("--optimizer", choices=OPTIMIZERS, help="optimizer (default: the recipe's, or AdamW)")
    add("--checkpointing", choices=tuple(_CHECKPOINTING), help="recompute blocks in the backward")
    add("--lora", type=count, metavar="RANK", help="train adapters of this rank, over a frozen bf16 base")
    add(
        "--weights",
        choices=("bf16", "bf16-split", "bf16-stochastic", "4bit"),
        help="number format of weights, and how they are updated; 4bit needs --lora",
    )
    add("--offload", action="store_true", help="keep saved activations in host memory")
    add(
        "--strategy",
        default="auto",
        metavar="NAME",
        help="how ranks sum gradients: all_reduce, ddp, zero1 or fsdp (default: auto, by the device)",
    )


def _add_answer(parser: Parser) -> None:
    add = parser.add_argument
    add("--fit", action="store_true", help="find the fastest combination of changes that fits")
    add("--no-proposals", action="store_true", help="do not plan single changes; each takes as long as the plan")
    add(
        "--verify",
        action="store_true",
        help="run the step on this machine's device, compare, and keep the result for later plans",
    )
    add_report_files(add, "memory over the step")
    add("--json", action="store_true", help="print the plan as JSON")


def changes_of(given: dict[str, Any], parser: Parser) -> dict[str, Any]:
    """Remove the options about changes of the step from `given`, and return them as arguments of `ab.plan`.

    Exits with an error if options contradict each other.
    """
    optimizer, lora, weights = given.pop("optimizer"), given.pop("lora"), given.pop("weights")
    checkpointing, offload = given.pop("checkpointing"), given.pop("offload")
    if weights == "4bit" and lora is None:
        parser.error("--weights 4bit freezes the base weights: add --lora RANK to train adapters.")
    if checkpointing and offload:
        parser.error("--offload and --checkpointing exclude each other: recomputed blocks save no activations.")
    changes = []
    if lora is not None:
        changes.append(f"LoRA of rank {lora}{' on a base in 4 bits' if weights == '4bit' else ''}")
    elif weights in _WEIGHTS:
        changes.append(_WEIGHTS[weights])
    if checkpointing:
        changes.append(_CHECKPOINTING[checkpointing])
    if offload:
        changes.append("offloading")
    name, _, variant = (optimizer or "").partition("-")
    if variant:
        changes.append("fused optimizer" if variant == "fused" else "8-bit AdamW")
    return {"changes": changes, "optimizer": name or None}


def fraction(text: str) -> float:
    """Return a number from 0 to below 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        message = f"{text} must be from 0 to below 1: 0.15 keeps 15% free"
        raise argparse.ArgumentTypeError(message)
    return value


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
    from anybatch.planner.calibration import measure_rates
    from anybatch.planner.measurements import KnownDevices
    from anybatch.planner.plan import as_json, draw_plan
    from anybatch.planner.verification import keep
    from anybatch.planner.verification import verify as run_step
    from anybatch.recipes.planning.plan import plan

    known, wants_json = KnownDevices(), choices.pop("json")
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
    sys.stdout.write(f"{json.dumps(as_json(found), indent=1) if wants_json else found}\n")
    beside = sys.stderr if wants_json else sys.stdout  # keeps the JSON output pure
    # A step that does not fit cannot be run.
    if verify and found.baseline.fits:
        measured = run_step(found.spec, found.baseline, _device_of(device))
        beside.write(f"{measured}\n{keep(measured, found, known)}\n")
    if figure is not None:
        draw_plan(found, figure)
        beside.write(f"wrote {figure}\n")
    return Status.DONE if found.fits else Status.OUT_OF_MEMORY


def _own_device(name: str, file: Path | None) -> "str | Device":
    """Return the device of that name in the user's file, else the name."""
    from anybatch.planner.devices import devices_of

    own = () if file is None else devices_of(file)
    return next((one for one in own if one.name == name), name)


def _device_of(budget: str) -> "torch.device":
    """Return the device on which to verify a plan."""
    import torch

    if budget.startswith("cpu:"):
        return torch.device("cpu")
    if not torch.accelerator.is_available():
        message = f"--verify runs a step on {budget}, but this machine has no accelerator. Leave it out to plan only."
        raise UserError(message)
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, 0)
