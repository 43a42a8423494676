"""`anybatch advise RECIPE`: find the effective batch size that pays off, from a short run or a log."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from anybatch.cli.command import (
    DEFAULT_RECIPE,
    Parser,
    add_recipe,
    add_settings,
    let_threads_sleep,
    positive_int,
    print_report,
)
from anybatch.core.run_config import RunConfig

if TYPE_CHECKING:
    from anybatch.diagnostics.advise import Advice

_DESCRIPTION = (
    "Train a recipe for some steps, and measure the gradient noise and the step time. Report the cost of larger and "
    "smaller effective batch sizes, the size that reaches a given loss in the least time, the learning rate for that "
    "size, and whether gradient accumulation pays off on this machine. The trained model is not saved."
)


def run(argv: Sequence[str]) -> int:
    """Run `anybatch advise` and return the exit status."""
    args = make_parser().parse(argv)
    let_threads_sleep()
    from anybatch.diagnostics.advise import advise

    advice = _advise_on_recipe(args) if args.log is None else advise(args.log)
    return print_report(f"{args.log or args.recipe}: which effective batch size?\n{advice}", advice, args)


def make_parser() -> Parser:
    """Return the parser of this command."""
    parser = Parser("advise", _DESCRIPTION)
    add = parser.add_argument
    add_recipe(parser, DEFAULT_RECIPE, DEFAULT_RECIPE)
    add_settings(add, "effective_batch_size", "seed", effective_batch_size="the recipe's")
    add(
        "--micro-batch-size",
        type=positive_int,
        metavar="N",
        help="samples per forward and backward; the gradient noise is estimated from the differences between "
        "micro-batches (default: a quarter of the effective batch)",
    )
    add("--steps", type=positive_int, default=200, metavar="N", help="training steps (default: 200)")
    add("--every", type=positive_int, default=2, metavar="N", help="measure gradient noise every N steps (default: 2)")
    add("--log", type=Path, metavar="FILE", help="instead of training, read the log of a run with gradient noise")
    return parser


def _advise_on_recipe(args: argparse.Namespace) -> "Advice":
    from anybatch.core.gradient_noise import GradientNoise
    from anybatch.diagnostics.advise import advise
    from anybatch.recipes.load import load_recipe
    from anybatch.recipes.start import start

    job = load_recipe(args.recipe)
    requested = RunConfig(effective_batch_size=args.effective_batch_size)
    size = requested.with_defaults(job.defaults).largest_batch_size
    # A scheduler would decay the learning rate to its final value within these few steps.
    job = replace(job, noise=GradientNoise(every=args.every), scheduler=None)
    trained = start(
        job,
        RunConfig(
            effective_batch_size=size,
            steps=args.steps,
            seed=args.seed,
            micro_batch_size=args.micro_batch_size or max(1, -(-size // 4)),
        ),
    )
    with trained.engine as engine:
        return advise(engine, trained.batches, steps=args.steps)
