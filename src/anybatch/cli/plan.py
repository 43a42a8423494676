"""`anybatch plan`: predict what fits into a device, without the device."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anybatch.cli.command import Parser, add_figure, add_settings, frozen_imports, positive_int, print_report
from anybatch.cli.status import Status
from anybatch.errors import UserError

if TYPE_CHECKING:
    import torch

    from anybatch.planner.devices import Device

_DESCRIPTION = (
    "Predict the largest micro-batch size that fits on a device, the memory of a step by category, and changes that "
    "would make more fit. The device is not needed: the engine's step runs on fake tensors, which allocate no memory."
)
_WEIGHTS = {
    "bf16": "bf16 weights",
    "bf16-split": "bf16 weights, split",
    "bf16-stochastic": "bf16 weights, rounded stochastically",
}
"""Value of --weights -> name of the change in a plan."""
_OPTIMIZER_CHANGES = {"adamw-fused": "fused optimizer", "adamw-8bit": "8-bit AdamW"}
OPTIMIZERS = ("adamw", "adamw-fused", "adamw-8bit", "adam", "sgd", "adafactor", "rmsprop")


def run(argv: Sequence[str]) -> int:
    """Run `anybatch plan` and return the exit status."""
    parser = make_parser()
    args = parser.parse(argv)
    changes = changes_of(args, parser)
    with frozen_imports():
        import anybatch.planner.plan
        import anybatch.planner.verification
        import anybatch.recipes.planning.plan  # noqa: F401 (imported early, so that its objects are frozen)
    return plan_subject(args, changes)


def make_parser() -> Parser:
    """Return the parser of this command."""
    parser = Parser("plan", _DESCRIPTION)
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


def _add_device(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--device",
        required=True,
        metavar="NAME|SIZE",
        help='device, such as "RTX 4090", A100-40 or H100, or its memory, such as 24GiB; or cpu:8GiB, a CPU with '
        "8 GiB for tensors",
    )
    add("--devices", type=Path, metavar="FILE", help="JSON file that describes your own devices")
    add("--ranks", type=positive_int, default=1, metavar="N", help="number of devices (default: 1)")
    add("--headroom", type=fraction, metavar="X", help="fraction of the memory to keep free (default: 0.15)")
    add("--expandable-segments", action="store_true", help="plan for the allocator setting expandable_segments:True")


def _add_step(parser: Parser) -> None:
    add = parser.add_argument
    add("--effective-batch-size", type=positive_int, metavar="N", help="samples of one optimizer step, over all ranks")
    add(
        "--micro-batch-size",
        type=positive_int,
        metavar="N",
        help="samples per micro-batch (default: the largest that fits)",
    )
    add(
        "--sequence-length",
        type=positive_int,
        metavar="N",
        help="tokens per sample (default: the model's maximum, at most 8192)",
    )
    add("--optimizer", choices=OPTIMIZERS, help="optimizer (default: the recipe's, or AdamW)")
    add("--checkpointing", action="store_true", help="recompute the blocks' activations in the backward")
    add("--lora", type=positive_int, metavar="RANK", help="train LoRA adapters of this rank, over a frozen bf16 base")
    add(
        "--weights",
        choices=("bf16", "bf16-split", "bf16-stochastic", "4bit"),
        help="format of the weights; bf16-split also stores their lower 16 bits, bf16-stochastic rounds updates "
        "stochastically; 4bit needs --lora",
    )
    add_settings(add, "precision", "strategy", precision="fp32; --fit may choose another")


def _add_answer(parser: Parser) -> None:
    add = parser.add_argument
    add("--fit", action="store_true", help="find the fastest combination of changes that fits")
    add("--no-proposals", action="store_true", help="do not look for changes that would help (much faster)")
    add(
        "--verify",
        action="store_true",
        help="also run the step on this machine's device, and compare its memory with the plan",
    )
    add_figure(add, "memory over the step")


def changes_of(args: argparse.Namespace, parser: Parser) -> list[str]:
    """Return the changes of the step that the options select: their names in a plan.

    Exits with an error if options contradict each other.
    """
    if args.weights == "4bit" and args.lora is None:
        parser.error("--weights 4bit freezes the base weights: add --lora RANK to train adapters.")
    changes = []
    if args.lora is not None:
        changes.append(f"LoRA of rank {args.lora}{' on a base in 4 bits' if args.weights == '4bit' else ''}")
    elif args.weights in _WEIGHTS:
        changes.append(_WEIGHTS[args.weights])
    if args.checkpointing:
        changes.append("checkpointing")
    if args.optimizer in _OPTIMIZER_CHANGES:
        changes.append(_OPTIMIZER_CHANGES[args.optimizer])
    return changes


def fraction(text: str) -> float:
    """Return a number from 0 to below 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        message = f"{text} must be at least 0 and below 1: 0.15 keeps 15% free"
        raise argparse.ArgumentTypeError(message)
    return value


def plan_subject(args: argparse.Namespace, changes: Sequence[str]) -> int:
    """Print the plan of a recipe or model; return the exit status, which is out of memory if nothing fits."""
    from anybatch.planner.plan import draw_plan, values_of
    from anybatch.planner.verification import verify as run_step
    from anybatch.recipes.planning.plan import plan

    optimizer = args.optimizer and args.optimizer.partition("-")[0]
    found = plan(
        args.what,
        device=_find_device(args.device, args.devices),
        world_size=args.ranks,
        headroom=args.headroom,
        expandable_segments=args.expandable_segments,
        effective_batch_size=args.effective_batch_size,
        micro_batch_size=args.micro_batch_size,
        sequence_length=args.sequence_length,
        precision=args.precision,
        optimizer=optimizer,
        strategy=args.strategy or "auto",
        changes=changes,
        fit=args.fit,
        proposals=not args.no_proposals,
    )
    measured = None
    if args.verify and found.baseline.fits:
        measured = run_step(found.spec, found.baseline, _device_of(args.device))
    text = str(found) if measured is None else f"{found}\n{measured}"
    status = Status.DONE if found.fits else Status.OUT_OF_MEMORY
    return print_report(
        text, values_of(found, measured), args, status=status, draw=lambda _, path: draw_plan(found, path)
    )


def _find_device(name: str, file: Path | None) -> "str | Device":
    """Return the device with this name in the user's file, else the name."""
    from anybatch.planner.devices import devices_of

    devices = () if file is None else devices_of(file)
    return next((device for device in devices if device.name == name), name)


def _device_of(budget: str) -> "torch.device":
    """Return the device on which to verify a plan."""
    import torch

    if budget.startswith("cpu:"):
        return torch.device("cpu")
    if not torch.accelerator.is_available():
        message = f"--verify runs a step on {budget}, but this machine has no accelerator. Omit --verify to plan only."
        raise UserError(message)
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, 0)
