"""`anybatch plan`: what fits into a device that is not here."""

import argparse
import gc
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from anybatch.cli.parser import Parser, count

_DESCRIPTION = (
    "Say what micro-batch size fits into a device, what holds its memory, and what would change it. The device is not "
    "needed, and no memory is taken: the engine's own step runs on tensors without data."
)
_EPILOG = "docs/memory.md says how it is done and how far it can be trusted."


def run(words: Sequence[str]) -> int:
    """Plan what a command line names; return the exit status."""
    given = vars(make_parser().parse(words))
    # It brings torch, which takes seconds, and is not needed to say that an option is wrong.
    with never_collected():
        subject = importlib.import_module("anybatch.cli.plan_subject")
    return int(subject.plan_subject(given.pop("what"), **given))


@contextmanager
def never_collected() -> Iterator[None]:
    """Let the garbage collector leave alone for good what is made inside.

    A million objects of torch's modules stay to the end anyway: to look through them again and again takes a second.
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
    add("--strategy", choices=("all_reduce", "ddp"), default="auto", help="how ranks sum (default: all_reduce)")
    add(
        "--headroom",
        type=part,
        metavar="X",
        help="part of the memory to leave free (default: 0.1 where --verify has measured, else 0.15)",
    )
    add("--samples", type=count, metavar="N", help="say what a run over so many samples takes, in hours and money")
    add("--no-proposals", action="store_true", help="do not plan what could be changed, which takes as long again")
    add(
        "--verify",
        action="store_true",
        help="run a step where the device is here, print planned beside measured, and keep it for later plans",
    )
    add("--figure", type=Path, metavar="FILE", help="draw memory over the step: .png, .svg or .pdf")
    return parser


def part(text: str) -> float:
    """Return a number from 0 to below 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        message = f"{text} must be a part of the whole, from 0 to below 1: 0.15 leaves 15%"
        raise argparse.ArgumentTypeError(message)
    return value
