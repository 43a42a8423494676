"""`anybatch advise RECIPE`: which effective batch size pays off, by a short run or a finished log."""

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
    count,
    let_threads_sleep,
    link,
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


def run(words: Sequence[str]) -> int:
    """Run `anybatch advise` and return the exit status."""
    parser = make_parser()
    given = parser.parse(words)
    if given.ranks and given.link is None:
        parser.error("--ranks needs --link RATE,LATENCY, such as --link 25Gbit,20us")
    let_threads_sleep()
    from anybatch.diagnostics.advise import advise
    from anybatch.diagnostics.figures import draw_advice

    ranks = tuple(given.ranks or ())
    if given.log is not None:
        advice = advise(given.log, ranks=ranks, link=given.link)
    else:
        advice = _advise_on_recipe(given, ranks)
    print_report(f"{given.log or given.recipe}: which effective batch size?", advice, draw_advice, given)
    return Status.DONE


def make_parser() -> Parser:
    """Return the parser of this command."""
    parser = Parser("advise", _DESCRIPTION)
    add = parser.add_argument
    add_recipe(parser, DEFAULT_RECIPE, DEFAULT_RECIPE)
    add_settings(add, "effective_batch_size", "seed", effective_batch_size="the recipe's")
    add(
        "--micro-batch-size",
        type=count,
        metavar="N",
        help="samples per forward and backward; noise is measured between them (default: a quarter of the batch)",
    )
    add("--steps", type=count, default=200, metavar="N", help="training steps (default: 200)")
    add("--every", type=count, default=2, metavar="N", help="measure the noise every N steps (default: 2)")
    add("--ranks", type=count, action="append", metavar="N", help="predict for this number of ranks; repeatable")
    add("--link", type=link, metavar="RATE,LATENCY", help="network between ranks, such as 25Gbit,20us")
    add("--log", type=Path, metavar="FILE", help="read the log of a run that measured noise instead")
    add_report_files(add, "time and samples by batch size", with_json=True)
    return parser


def _advise_on_recipe(given: argparse.Namespace, ranks: tuple[int, ...]) -> "Advice":
    from anybatch.diagnostics.advise import advise
    from anybatch.engine.gradient_noise import GradientNoise
    from anybatch.recipes.load import load_recipe
    from anybatch.recipes.start import start

    job = load_recipe(given.recipe)
    asked = RunConfig(effective_batch_size=given.effective_batch_size)
    size = asked.over(job.defaults).largest_batch_size
    # A scheduler would decay the rate to its end within these few steps.
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
        return advise(engine, trained.batches, steps=given.steps, ranks=ranks, link=given.link)
