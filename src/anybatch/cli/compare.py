"""`anybatch compare RECIPE`: run a recipe with each training setup, interleaved, and compare them."""

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from anybatch.cli.command import (
    DEFAULT_RECIPE,
    Parser,
    add_figure,
    add_recipe,
    add_settings,
    hide_logs_of_torch,
    let_threads_sleep,
    number,
    positive_int,
    print_report,
    progress_line,
    settings_of,
)

if TYPE_CHECKING:
    from anybatch.core.batch import EffectiveBatch
    from anybatch.recipes.load import MeasuredJob

_DESCRIPTION = (
    "Run steps of a recipe with each training setup, interleaved: a small batch, the whole effective batch, "
    "accumulation, DataParallel, DDP with and without accumulation and no_sync, ZeRO-1, FSDP. Print time, memory, "
    "traffic, cost, and the difference from the gradient of the whole batch. The trained model is not saved."
)
_EPILOG = (
    "Example: --effective-batch-size 8 --micro-batch-size 1 compares accumulation over 8 samples with one batch of 8."
)


def run(argv: Sequence[str]) -> int:
    """Run `anybatch compare` and return the exit status."""
    args = make_parser().parse(argv)
    let_threads_sleep()
    hide_logs_of_torch()
    from anybatch.diagnostics.compare import compare
    from anybatch.diagnostics.figures import draw_comparison
    from anybatch.recipes.load import MeasuredJob, load_recipe

    config = dataclasses.replace(settings_of(args), micro_batch_size=None)
    job = MeasuredJob(recipe=args.recipe, config=config)
    with progress_line(quiet=args.quiet) as show:
        report = compare(
            job.train_spec,
            partial(first_batches, job),
            effective_batch_size=config.with_defaults(load_recipe(args.recipe).defaults).largest_batch_size,
            micro_batch_size=args.micro_batch_size,
            num_devices=args.devices,
            device_type=args.device,
            max_seconds=args.seconds,
            title=f"{args.recipe}: which training setup?",
            on_progress=show,
        )
    return print_report(str(report), report, args, draw=draw_comparison)


def make_parser() -> Parser:
    """Return the parser of this command."""
    parser = Parser("compare", _DESCRIPTION, epilog=_EPILOG)
    add = parser.add_argument
    add_recipe(parser, DEFAULT_RECIPE, DEFAULT_RECIPE)
    add_settings(add, "effective_batch_size", "seed", effective_batch_size="the recipe's")
    add(
        "--micro-batch-size",
        type=positive_int,
        metavar="N",
        help="samples per micro-batch when accumulating (default: a quarter of the samples of a device)",
    )
    add(
        "--devices",
        type=positive_int,
        metavar="N",
        help="devices for the multi-device runs (default: all GPUs; 2 on a CPU)",
    )
    add("--device", choices=("cpu", "cuda"), help="device type (default: cuda if there are enough GPUs)")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="number format (default: fp32)")
    add("--seconds", type=number, default=60.0, metavar="X", help="stop repeating runs after X seconds (default: 60)")
    add_figure(add, "time, memory and traffic")
    return parser


def first_batches(job: "MeasuredJob") -> "Iterable[EffectiveBatch]":
    """Return the effective batch of the comparison, as batches; called on every rank."""
    return job.data(steps=1)(0)
