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
    add_report_files,
    add_settings,
    let_threads_sleep,
    positive_int,
    print_report,
)
from anybatch.cli.status import Status
from anybatch.core.run_config import RunConfig

if TYPE_CHECKING:
    from anybatch.diagnostics.advise import Advice

_DESCRIPTION = (
    "Train a recipe for some steps, and measure the gradient noise and the step time. Report what larger and smaller "
    "effective batches cost, which one reaches a given loss in the least time, its learning rate, and whether gradient "
    "accumulation pays off here. The trained model is not kept."
)


def run(argv: Sequence[str]) -> int:
    """Run `anybatch advise` and return the exit status."""
    given = make_parser().parse(argv)
    let_threads_sleep()
    from anybatch.diagnostics.advise import advise

    advice = _advise_on_recipe(given) if given.log is None else advise(given.log)
    print_report(f"{given.log or given.recipe}: which effective batch size?", advice, None, given)
    return Status.DONE


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
        help="samples per forward and backward; the noise is estimated from the differences between micro-batches "
        "(default: a quarter of the batch)",
    )
    add("--steps", type=positive_int, default=200, metavar="N", help="training steps (default: 200)")
    add("--every", type=positive_int, default=2, metavar="N", help="measure the noise every N steps (default: 2)")
    add("--log", type=Path, metavar="FILE", help="instead of training, read the log of a run that measured the noise")
    add_report_files(add, with_json=True)
    return parser


def _advise_on_recipe(given: argparse.Namespace) -> "Advice":
    from anybatch.core.gradient_noise import GradientNoise
    from anybatch.diagnostics.advise import advise
    from anybatch.recipes.load import load_recipe
    from anybatch.recipes.start import start

    job = load_recipe(given.recipe)
    requested = RunConfig(effective_batch_size=given.effective_batch_size)
    size = requested.with_defaults(job.defaults).largest_batch_size
    # A scheduler would decay the rate to its final value within these few steps.
    job = replace(job, noise=GradientNoise(every=given.every), scheduler=None)
    trained = start(
        job,
        RunConfig(
            effective_batch_size=size,
            steps=given.steps,
            seed=given.seed,
            micro_batch_size=given.micro_batch_size or max(1, -(-size // 4)),
        ),
    )
    with trained.engine as engine:
        return advise(engine, trained.batches, steps=given.steps)
