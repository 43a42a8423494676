"""`anybatch compare RECIPE`: run a job with every way of using devices, interleaved, and compare them."""

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from anybatch.cli.command import (
    DEFAULT_RECIPE,
    Parser,
    add_recipe,
    add_report_files,
    add_settings,
    count,
    hide_logs_of_torch,
    let_threads_sleep,
    link,
    number,
    print_report,
    progress_line,
    settings_of,
)
from anybatch.cli.status import Status

if TYPE_CHECKING:
    from anybatch.core.batch import EffectiveBatch
    from anybatch.recipes.load import MeasuredJob

_DESCRIPTION = (
    "Run steps of a recipe with every way of using devices, interleaved: a small batch, the effective batch unsplit, "
    "accumulated, DataParallel, DDP with and without accumulation and no_sync, ZeRO-1, FSDP. Print time, memory, "
    "traffic, cost, and the error against the gradient of the whole batch. The trained model is not kept."
)
_EPILOG = "--effective-batch-size 8 --micro-batch-size 1 is the classical comparison of 8 x 1 with one batch of 8. "


def run(words: Sequence[str]) -> int:
    """Run `anybatch compare` and return the exit status."""
    given = make_parser().parse(words)
    let_threads_sleep()
    hide_logs_of_torch()
    from anybatch.diagnostics.compare import compare
    from anybatch.diagnostics.figures import draw_comparison
    from anybatch.recipes.load import (
        MeasuredJob,
        load_recipe,
    )

    config = dataclasses.replace(settings_of(given), micro_batch_size=None)
    job = MeasuredJob(recipe=given.recipe, config=config)
    with progress_line() as tell:
        report = compare(
            job.train_spec,
            partial(first_batches, job),
            effective_batch_size=config.over(load_recipe(given.recipe).defaults).largest_batch_size,
            micro_batch_size=given.micro_batch_size,
            num_devices=given.devices,
            device_type=given.device,
            num_samples=given.samples,
            price_per_hour=given.price,
            most_seconds=given.seconds,
            title=f"{given.recipe}: which way of using devices?",
            tell=tell,
        )
    if given.link is not None:
        from anybatch.planner.forecast import largest_worlds
        from anybatch.planner.forecast_report import Cluster

        report = dataclasses.replace(report, largest_worlds=largest_worlds(report, Cluster(link=given.link)))
    print_report("", report, draw_comparison, given)
    return Status.DONE


def make_parser() -> Parser:
    """Return the parser of this command."""
    parser = Parser("compare", _DESCRIPTION, epilog=_EPILOG)
    add = parser.add_argument
    add_recipe(parser, DEFAULT_RECIPE, DEFAULT_RECIPE)
    add_settings(add, "effective_batch_size", "seed", effective_batch_size="the recipe's")
    add(
        "--micro-batch-size",
        type=count,
        metavar="N",
        help="samples of a micro-batch when accumulating (default: a quarter of a device's share)",
    )
    add("--devices", type=count, metavar="N", help="devices for the multi-device runs (default: all GPUs; 2 on a CPU)")
    add("--device", choices=("cpu", "cuda"), help="device type (default: cuda if there are enough GPUs)")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="number format (default: fp32)")
    add("--samples", type=count, default=1_000_000, metavar="N", help="estimate cost of N samples (default: 1,000,000)")
    add("--price", type=number, metavar="X", help="price per device-hour; adds a cost column")
    add(
        "--link",
        type=link,
        metavar="RATE,LATENCY",
        help="a network, such as 25Gbit,20us; adds the largest useful number of ranks",
    )
    add(
        "--seconds", type=number, default=60.0, metavar="X", help="start no round after this many seconds (default: 60)"
    )
    add_report_files(add, "time, memory and traffic", with_json=True)
    return parser


def first_batches(job: "MeasuredJob") -> "Iterable[EffectiveBatch]":
    """Return the effective batches of the comparison; ranks call it."""
    from anybatch.diagnostics.compared_ranks import NUM_BATCHES

    return job.data(steps=NUM_BATCHES)(0)
