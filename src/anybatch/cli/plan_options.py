"""The options of `anybatch plan`, and what they ask for in the words of a plan."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anybatch.cli.parser import Parser, count, picture_file

_DESCRIPTION = (
    "Say what micro-batch size fits into a device, what holds its memory, and what would change it. The device is not "
    "needed, and no memory is taken: the engine's own step runs on tensors without data."
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
"""Weights in bf16 by what is kept beside them, as an option and as a change of the plan."""
OPTIMIZERS = ("adamw", "adamw-fused", "adamw-8bit", "adam", "sgd", "adafactor", "rmsprop")


def make_parser() -> Parser:
    """Return the parser of this verb."""
    parser = Parser("plan", _DESCRIPTION, explain_unknown=_explain_unknown)
    parser.add_argument(
        "what",
        metavar="WHAT",
        help="a recipe, as `anybatch train` takes it; a published model, such as llama-3.1-8b; a config.json; or a "
        "model of transformers, torchvision or timm by its name there",
    )
    _add_device(parser)
    _add_step(parser)
    _add_answer(parser)
    return parser


def _explain_unknown(words: Sequence[str]) -> str:
    """Return the error for unknown words; for options of former versions, with the alternative."""
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
        help='"RTX 4090", A100-40, H100, ... or its memory, such as 24GiB; cpu:8GiB for tensors on a CPU',
    )
    add("--devices", type=Path, metavar="FILE", help="devices of your own by name, as JSON")
    add("--ranks", type=count, default=1, metavar="N", help="devices (default: 1)")
    add(
        "--headroom",
        type=fraction,
        metavar="X",
        help="part of the memory to leave free (default: 0.1 where --verify has measured, else 0.15)",
    )
    add("--expandable-segments", action="store_true", help="the allocator is told expandable_segments:True")


def _add_step(parser: Parser) -> None:
    add = parser.add_argument
    add("--effective-batch-size", type=count, metavar="N", help="samples of one optimizer step, over all ranks")
    add("--micro-batch-size", type=count, metavar="N", help="samples at once (default: the largest that fits)")
    add(
        "--sequence-length",
        type=count,
        metavar="N",
        help="tokens of a sample (default: all the model can take, up to 8192)",
    )
    add("--precision", choices=("fp32", "bf16", "fp16"), help="number format (default: fp32; --fit may say another)")
    add("--optimizer", choices=OPTIMIZERS, help="another optimizer than the recipe's, or AdamW")
    add("--checkpointing", choices=tuple(_CHECKPOINTING), help="run blocks again in the backward")
    add("--lora", type=count, metavar="RANK", help="train adapters of that rank, on a base in bf16")
    add(
        "--weights",
        choices=("bf16", "bf16-split", "bf16-stochastic", "4bit"),
        help="number format of weights, and how they are updated; 4bit goes with --lora",
    )
    add("--offload", action="store_true", help="keep what blocks save in the host's memory")
    add(
        "--strategy",
        default="auto",
        metavar="NAME",
        help="how ranks sum gradients: all_reduce, ddp, zero1 or fsdp (default: auto, by the device)",
    )


def _add_answer(parser: Parser) -> None:
    add = parser.add_argument
    add("--fit", action="store_true", help="find the changes that let it fit together, at the least cost")
    add("--no-proposals", action="store_true", help="do not plan what could be changed, which takes as long again")
    add(
        "--verify",
        action="store_true",
        help="run a step where the device is here, print planned beside measured, and keep it for later plans",
    )
    add("--figure", type=picture_file, metavar="FILE", help="draw memory over the step: .png, .svg or .pdf")
    add("--json", action="store_true", help="print the plan as JSON")


def changes_of(given: dict[str, Any], parser: Parser) -> dict[str, Any]:
    """Take what is asked of the step out of the given options, and return it as `ab.plan` takes it.

    Ends the program where options contradict each other.

    Args:
        given: the values of all options; those that are named here are removed.
        parser: says what is wrong.
    """
    optimizer, lora, weights = given.pop("optimizer"), given.pop("lora"), given.pop("weights")
    checkpointing, offload = given.pop("checkpointing"), given.pop("offload")
    if weights == "4bit" and lora is None:
        parser.error("--weights 4bit keeps a base that is not trained: it goes with --lora RANK.")
    if checkpointing and offload:
        parser.error("--offload keeps what blocks save, and under --checkpointing they save nothing: name one of them.")
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
        message = f"{text} must be a part of the whole, from 0 to below 1: 0.15 leaves 15%"
        raise argparse.ArgumentTypeError(message)
    return value
