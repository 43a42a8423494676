"""`anybatch tune RECIPE`: speed and memory by micro-batch size."""

from collections.abc import Sequence

from anybatch.cli.command import (
    DEFAULT_RECIPE,
    Parser,
    add_recipe,
    add_settings,
    let_threads_sleep,
    positive_int,
    print_report,
    settings_of,
)

_DESCRIPTION = (
    "Run steps of a recipe with many micro-batch sizes, interleaved, and print the speed and memory of each. The "
    "trained model is not kept."
)
_EPILOG = "`anybatch train` tries a few sizes automatically; `anybatch tune` prints the whole curve."


def run(argv: Sequence[str]) -> int:
    """Run `anybatch tune` and return the exit status."""
    args = make_parser().parse(argv)
    let_threads_sleep()
    from anybatch.diagnostics.tune import tune
    from anybatch.recipes.load import MeasuredJob

    job = MeasuredJob(recipe=args.recipe, config=settings_of(args))
    report = tune(
        job.train_spec(),
        job.data(steps=1)(0),
        micro_batch_sizes=args.micro_batch_sizes,
    )
    return print_report(f"{args.recipe}: speed by micro-batch size\n{report}", report, args)


def make_parser() -> Parser:
    """Return the parser of this command."""
    parser = Parser("tune", _DESCRIPTION, epilog=_EPILOG)
    add = parser.add_argument
    add_recipe(parser, DEFAULT_RECIPE, DEFAULT_RECIPE)
    add_settings(add, "effective_batch_size", "precision", "seed", effective_batch_size="the recipe's")
    add(
        "--micro-batch-size",
        type=positive_int,
        action="append",
        dest="micro_batch_sizes",
        metavar="N",
        help="a size to try; repeatable (default: the batch in 1, 2, 4, ... parts)",
    )
    return parser
