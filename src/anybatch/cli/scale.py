"""`anybatch scale RECIPE`: why N ranks are not N times as fast, and what to change."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from anybatch.cli.command import (
    DEFAULT_RECIPE,
    Parser,
    add_figure,
    add_recipe,
    add_settings,
    integer,
    let_threads_sleep,
    link,
    memory_size,
    positive_int,
    print_report,
    progress_line,
)
from anybatch.core.run_config import RunConfig
from anybatch.errors import UserError

_DESCRIPTION = (
    "Run steps of a recipe on several ranks on this machine's CPUs: with and without summing gradients over ranks, "
    "with several bucket sizes, with and without data loading. Report why N ranks are not N times as fast, "
    "what to change, and the expected gain. The trained model is not saved."
)
MEASURED = ("all_reduce", "ddp")
_MAX_FORECAST_SIZE = 32
"""Maximum samples of a micro-batch in a forecast."""


def run(argv: Sequence[str]) -> int:
    """Run `anybatch scale` and return the exit status."""
    args = make_parser().parse(argv)
    let_threads_sleep()
    return scale_recipe(args) if args.forecast is None else run_forecast(args)


def make_parser() -> Parser:
    """Return the parser of this command."""
    parser = Parser("scale", _DESCRIPTION)
    add = parser.add_argument
    add_recipe(parser, DEFAULT_RECIPE, DEFAULT_RECIPE)
    add("--ranks", type=positive_int, default=2, metavar="N", help="ranks to compare with a single rank (default: 2)")
    add_settings(add, "effective_batch_size", "seed", effective_batch_size="the recipe's")
    add(
        "--micro-batch-size",
        type=positive_int,
        metavar="N",
        help="samples per forward and backward (default: the fastest of a few sizes)",
    )
    add(
        "--strategy",
        choices=("all_reduce", "ddp", "zero1", "fsdp"),
        default="all_reduce",
        help="how ranks sum gradients; zero1 and fsdp only with --forecast (default: all_reduce)",
    )
    add("--workers", type=integer, default=0, metavar="N", help="data-loading processes per rank (default: 0)")
    add("--bucket", type=memory_size, default=25 * 2**20, metavar="SIZE", help="gradient bucket size (default: 25MiB)")
    add(
        "--try-bucket",
        type=memory_size,
        action="append",
        metavar="SIZE",
        help="another bucket size to try, such as 5MiB; repeatable (default: 1, 5, 25, 50 and 100 MiB, and the "
        "model's gradients in 1, 2, 4 and 8 parts)",
    )
    add(
        "--seconds",
        type=positive_int,
        default=20,
        metavar="N",
        help="approximate duration of the measurements in seconds (default: 20)",
    )
    add_figure(add, "the parts of a step")
    _add_forecast(parser)
    return parser


def _add_forecast(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("forecast", "predict steps on more ranks").add_argument
    add("--forecast", type=positive_int, metavar="N", help="predict steps on up to N ranks")
    add(
        "--link",
        type=link,
        metavar="RATE,LATENCY",
        help='network link of a host: bandwidth and latency, such as "400Gbit,5us" or "25GB/s,2us"',
    )
    add("--inner-link", type=link, metavar="RATE,LATENCY", help="link between the devices of a host")
    add(
        "--devices-per-host",
        type=positive_int,
        default=1,
        metavar="N",
        help="devices that share the host's link (default: 1)",
    )
    add("--algorithm", choices=("best", "ring", "tree", "gloo"), default="best", help="all-reduce (default: best)")
    add("--weak-scaling", action="store_true", help="keep the samples per rank, so the batch grows with the ranks")
    add("--accumulation-steps", type=positive_int, metavar="N", help="micro-batches per rank (default: as few as fit)")


def scale_recipe(args: argparse.Namespace) -> int:
    """Measure a recipe, print the report, and return the exit status."""
    if args.strategy not in MEASURED:
        message = f"--strategy {args.strategy} can only be forecast: add --forecast N --link RATE,LATENCY, or use ddp."
        raise UserError(message)
    from anybatch.diagnostics.figures import draw_scaling
    from anybatch.diagnostics.scale import measure_scaling
    from anybatch.diagnostics.scaling_ranks import RunSettings
    from anybatch.recipes.load import MeasuredJob, load_recipe

    load_recipe(args.recipe)  # raises errors in the recipe before any rank is started
    config = RunConfig(effective_batch_size=args.effective_batch_size, seed=args.seed)
    job = MeasuredJob(recipe=args.recipe, config=config)
    settings = RunSettings(
        strategy=args.strategy,
        micro_batch_size=args.micro_batch_size,
        bucket_bytes=args.bucket,
        num_workers=args.workers,
    )
    with progress_line(quiet=args.quiet) as show:
        report = measure_scaling(
            job.train_spec,
            job.data,
            num_ranks=args.ranks,
            settings=settings,
            bucket_sizes=args.try_bucket,
            max_seconds=args.seconds,
            on_progress=show,
        )
    return print_report(f"{args.recipe}: what limits scaling?\n{report}", report, args, draw=draw_scaling)


def run_forecast(args: argparse.Namespace) -> int:
    """Time the recipe on one rank, print the forecast that the options ask for, and return the exit status."""
    if args.link is None:
        message = "--forecast needs the network link of a host, such as --link 400Gbit,5us."
        raise UserError(message)
    from anybatch.planner.forecast import forecast, time_one_rank
    from anybatch.planner.forecast_report import Cluster, draw_forecast
    from anybatch.recipes.load import MeasuredJob, load_recipe

    cluster = Cluster(
        link=args.link,
        inner_link=args.inner_link,
        devices_per_host=args.devices_per_host,
        algorithm=args.algorithm,
    )
    requested = RunConfig(effective_batch_size=args.effective_batch_size)
    effective = requested.with_defaults(load_recipe(args.recipe).defaults).largest_batch_size
    size = min(args.micro_batch_size or _MAX_FORECAST_SIZE, effective)

    def job(num_samples: int) -> Any:  # noqa: ANN401 (see `SizedJob`)
        sized = MeasuredJob(recipe=args.recipe, config=RunConfig(effective_batch_size=num_samples))
        return sized.train_spec(), sized.data(steps=1)

    workload = dataclasses.replace(
        time_one_rank(job, size),
        effective_batch_size=None if args.weak_scaling else effective,
        accumulation_steps=args.accumulation_steps,
        bucket_bytes=args.bucket,
    )
    report = forecast(workload, cluster, world_size=args.forecast, strategy=args.strategy)
    return print_report(
        f"{args.recipe}: forecast from times of one rank on this machine:\n{report}", report, args, draw=draw_forecast
    )
