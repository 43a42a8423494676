"""`anybatch tune RECIPE`: speed and memory by micro-batch size, and whether data loading keeps up."""

from collections.abc import Sequence

from anybatch.cli.command import (
    DEFAULT_RECIPE,
    Parser,
    add_recipe,
    add_report_files,
    add_settings,
    count,
    integer,
    let_threads_sleep,
    print_report,
    settings_of,
)
from anybatch.cli.status import Status

_DESCRIPTION = (
    "Run steps of a recipe with many micro-batch sizes, interleaved, and print the speed and memory of each. Load its "
    "data with several numbers of workers, and report whether that keeps up. The trained model is not kept."
)
_EPILOG = "`anybatch train` tries a few sizes automatically; this prints the whole curve."
_WORKERS = (0, 1, 2)


def run(words: Sequence[str]) -> int:
    """Run `anybatch tune` and return the exit status."""
    given = make_parser().parse(words)
    let_threads_sleep()
    from anybatch.diagnostics.figures import draw_tuning
    from anybatch.diagnostics.tune import LOADED_STEPS, tune
    from anybatch.recipes.load import MeasuredJob

    job = MeasuredJob(recipe=given.recipe, config=settings_of(given))
    report = tune(
        job.train_spec(),
        job.data(steps=LOADED_STEPS + 1),  # one more than is timed: the first batch also starts the workers
        micro_batch_sizes=given.micro_batch_sizes,
        num_workers=_WORKERS if given.workers is None else given.workers,
    )
    print_report(f"{given.recipe}: speed by micro-batch size", report, draw_tuning, given)
    return Status.DONE


def make_parser() -> Parser:
    """Return the parser of this command."""
    parser = Parser("tune", _DESCRIPTION, epilog=_EPILOG)
    add = parser.add_argument
    add_recipe(parser, DEFAULT_RECIPE, DEFAULT_RECIPE)
    add_settings(add, "effective_batch_size", "precision", "seed", effective_batch_size="the recipe's")
    add(
        "--micro-batch-size",
        type=count,
        action="append",
        dest="micro_batch_sizes",
        metavar="N",
        help="a size to try; repeatable (default: the batch in 1, 2, 4, ... parts)",
    )
    add(
        "--workers",
        type=integer,
        action="append",
        metavar="N",
        help="a number of loading processes to try; repeatable (default: 0, 1 and 2)",
    )
    add_report_files(add, "both curves")
    return parser
