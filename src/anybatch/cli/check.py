"""`anybatch check`: check a recipe or a training loop. The exit status is the verdict, for CI."""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from anybatch.cli.command import DEFAULT_RECIPE, OutputOptions, Parser, add_recipe, integer, positive_int, print_report
from anybatch.cli.status import Status

if TYPE_CHECKING:
    from anybatch.core.tree import Batch
    from anybatch.recipes.job import Job

_DESCRIPTION = (
    "Check whether micro-batches give the gradient of the whole batch. Without --loop, run a recipe's model and loss "
    "on a few samples in float64, first as one batch and then in micro-batches; report the cause of any difference "
    "and the fix. With --loop, check your own training loop, unchanged: it runs in a temporary copy of its folder, "
    "with a small test model that records the weight of each sample in each gradient. With --trainer, check the first "
    "steps of a transformers Trainer, without and with ab.exact."
)
_EPILOG = "The exit status is 0 if all gradients are exact, 9 if they cannot be compared, and 8 otherwise."


def run(argv: Sequence[str]) -> int:
    """Run `anybatch check` and return the exit status."""
    parser = make_parser()
    args = parser.parse(argv)
    if args.trainer is not None:
        if args.recipe is not None or args.loop is not None:
            parser.error("give only one of a recipe, --loop and --trainer.")
        return check_trainer_function(args.trainer, args)
    if args.loop is not None:
        if args.recipe is not None:
            parser.error(f"give a recipe or --loop, not both: {args.recipe} and --loop {args.loop}")
        return check_loop_function(args.loop, args, data=args.data, ranks=args.ranks)
    return check_recipe(args)


def make_parser() -> Parser:
    """Return the parser of this command."""
    parser = Parser("check", _DESCRIPTION, epilog=_EPILOG)
    add_recipe(parser, None, DEFAULT_RECIPE)
    parser.add_argument("--samples", type=positive_int, default=12, metavar="N", help="size of the batch (default: 12)")
    parser.add_argument(
        "--micro-batch-size",
        type=positive_int,
        action="append",
        metavar="N",
        help="a micro-batch size to try; repeatable (default: 1 sample, 2/5 and 3/5 of the batch)",
    )
    parser.add_argument("--seed", type=integer, default=0, metavar="N", help="seed of all random numbers (default: 0)")
    loop = parser.add_argument_group("your own loop")
    loop.add_argument("--loop", metavar="FILE.py:FUNCTION", help="the function that runs your training loop")
    loop.add_argument(
        "--data",
        choices=("classes", "tokens", "values", "scores"),
        help="targets of the test data: class labels, tokens, real values, or 0 and 1 (default: all that it accepts)",
    )
    loop.add_argument(
        "--ranks", type=int, choices=(1, 2), help="number of processes (default: 2 if the loop uses torch.distributed)"
    )
    parser.add_argument(
        "--trainer", metavar="FILE.py:FUNCTION", help="a function that returns a transformers Trainer, or trains it"
    )
    return parser


def check_recipe(args: argparse.Namespace) -> int:
    """Check one batch of a recipe, print the report, and return the exit status."""
    from anybatch.diagnostics.check import check
    from anybatch.recipes.load import load_recipe

    recipe = args.recipe or DEFAULT_RECIPE
    job = load_recipe(recipe)
    report = check(
        job.train_spec(seed=args.seed).model,
        job.loss,
        first_batch(job, args.samples, args.seed),
        micro_batch_sizes=args.micro_batch_size,
        norms=job.norms,
        seed=args.seed,
    )
    wrong = Status.UNDECIDED if report.verdict == "undecided" else Status.NOT_EXACT
    text = f"{recipe}: do micro-batches give the gradient of the whole batch?\n{report}"
    return print_report(text, report, args, status=Status.DONE if report.equal else wrong)


def check_trainer_function(name: str, args: OutputOptions) -> int:
    """Check the first steps of a trainer, print the report, and return the exit status."""
    from anybatch.diagnostics.trainer_check import check_made_trainer
    from anybatch.recipes import load_function

    report = check_made_trainer(load_function(name, "trainer"))
    text = f"{name}: do steps have the gradient of all their samples in one batch?\n{report}"
    return print_report(text, report, args, status=Status.DONE if report.equal else Status.NOT_EXACT)


def first_batch(job: "Job", num_samples: int, seed: int) -> "Batch":
    """Return the first `num_samples` samples of a job's first epoch, collated as one micro-batch."""
    from anybatch.core.batch import Placement
    from anybatch.core.splitting import SplitOptions

    data = job.train_batches(effective_batch_size=num_samples, steps=1, seed=seed)
    # With one rank and no limit on micro-batches, the only micro-batch is the whole batch.
    return next(Placement(SplitOptions(), 1, 0).micro_batches(next(iter(data))))


def check_loop_function(
    name: str,
    args: OutputOptions,
    *,
    data: Literal["classes", "tokens", "values", "scores"] | None,
    ranks: Literal[1, 2] | None,
) -> int:
    """Check an unchanged training loop, or the trainer that it builds, and return the exit status."""
    from anybatch.diagnostics.loop_check.check_loop import check_loop
    from anybatch.errors import LoopError
    from anybatch.recipes import load_function

    # The subprocess calls this function, because importing the file runs its code.
    find = partial(load_function, name, "loop")
    try:
        report = check_loop(find, data=data, ranks=ranks, returns_loop=True)
    except LoopError as error:
        if error.code != "uses_trainer":
            raise
        return check_trainer_function(name, args)
    return print_report(str(report), report, args, status=Status.NOT_EXACT if report.findings else Status.DONE)
