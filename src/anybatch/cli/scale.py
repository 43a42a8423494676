"""`anybatch scale RECIPE`: why N ranks are not N times as fast, and what to change."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from anybatch.cli.forecast_options import add_forecast_options, run_forecast
from anybatch.cli.parser import Parser, add_recipe, add_settings, count, integer, memory_size, output_file, picture_file
from anybatch.cli.progress_line import progress_line
from anybatch.cli.report_files import write_report_files
from anybatch.cli.status import Status
from anybatch.cli.threads import let_threads_sleep
from anybatch.cli.train_request import DEFAULT_RECIPE
from anybatch.core.run_config import RunConfig
from anybatch.errors import UserError

_DESCRIPTION = (
    "Run steps of a recipe on several ranks of this machine's CPUs, with and without reduction, with several bucket "
    "sizes, with and without data loading. Report what keeps N ranks from being N times as fast, what to change, and "
    "the expected gain. The trained model is not kept."
)
MEASURED = ("all_reduce", "ddp")
_SHARED = ("--strategy", "--effective-batch-size", "--micro-batch-size", "--bucket", "--figure", "--json")
"""Options of both a measurement and a forecast."""


def run(words: Sequence[str]) -> int:
    """Run `anybatch scale` and return the exit status."""
    given = make_parser().parse(words)
    let_threads_sleep()
    if given.log is not None:
        return read_a_log(given.log)
    return scale_recipe(given) if given.forecast is None else run_forecast(given)


def make_parser() -> Parser:
    """Return the parser of this command."""
    parser = Parser("scale", _DESCRIPTION)
    add = parser.add_argument
    add_recipe(parser, DEFAULT_RECIPE, DEFAULT_RECIPE)
    add(
        "--ranks",
        type=count,
        action="append",
        metavar="N",
        help="number of ranks; repeatable (default: 2); one rank is always measured too",
    )
    add_settings(add, "effective_batch_size", "seed", effective_batch_size="the recipe's")
    add(
        "--micro-batch-size",
        type=count,
        metavar="N",
        help="samples per forward and backward (default: the fastest of a few)",
    )
    add(
        "--strategy",
        choices=("all_reduce", "ddp", "zero1", "fsdp"),
        default="all_reduce",
        help="how ranks sum gradients; zero1 and fsdp only with --forecast (default: all_reduce)",
    )
    add("--workers", type=integer, default=0, metavar="N", help="loading processes per rank (default: 0)")
    add("--bucket", type=memory_size, default=25 * 2**20, metavar="SIZE", help="gradient bucket (default: 25MiB)")
    add(
        "--buckets",
        type=memory_size,
        action="append",
        metavar="SIZE",
        help="another bucket size to try, such as 5MiB; repeatable (default: 1, 5, 25, 50 and 100 MiB, and the "
        "model's gradients in 1, 2, 4 and 8 parts)",
    )
    add("--apply", action="store_true", help="try the first suggested change, and report the measured gain")
    add("--seconds", type=count, default=20, metavar="N", help="seconds of measuring, approximately (default: 20)")
    add("--log", type=Path, metavar="FILE", help="read the log of a finished run (events.jsonl) instead of measuring")
    add(
        "--figure",
        type=picture_file,
        metavar="FILE",
        help="draw the parts of a step, and the bucket sizes: .png, .svg or .pdf",
    )
    add("--json", type=output_file, metavar="FILE", help="write the results as JSON")
    add_forecast_options(parser, without=_SHARED)
    return parser


def scale_recipe(given: argparse.Namespace) -> int:
    """Measure a recipe, print the report, and return the exit status."""
    if given.strategy not in MEASURED:
        message = f"--strategy {given.strategy} can only be forecast: add --forecast N --link RATE,LATENCY, or use ddp."
        raise UserError(message)
    # Imported late: importing torch takes seconds, and a wrong option is reported without it.
    from anybatch.diagnostics.scaling.figure import draw_scaling  # noqa: PLC0415 (imports torch)
    from anybatch.diagnostics.scaling.measure import RunSettings  # noqa: PLC0415 (imports torch)
    from anybatch.diagnostics.scaling.scale import measure_scaling  # noqa: PLC0415 (imports torch)
    from anybatch.recipes.load import load_recipe  # noqa: PLC0415 (imports torch)
    from anybatch.recipes.measured_job import MeasuredJob  # noqa: PLC0415 (imports torch)

    load_recipe(given.recipe)  # a mistake is reported here, not by a rank
    config = RunConfig(effective_batch_size=given.effective_batch_size, seed=given.seed)
    job = MeasuredJob(recipe=given.recipe, config=config)
    settings = RunSettings(
        strategy=given.strategy,
        micro_batch_size=given.micro_batch_size,
        bucket_bytes=given.bucket,
        num_workers=given.workers,
    )
    with progress_line() as tell:
        report = measure_scaling(
            job.train_spec,
            job.data,
            ranks=given.ranks or (2,),
            settings=settings,
            bucket_sizes=given.buckets,
            most_seconds=given.seconds,
            apply=given.apply,
            tell=tell,
        )
    sys.stdout.write(f"{given.recipe}: what limits scaling?\n{report}\n")
    write_report_files(report, draw_scaling, json_file=given.json, figure=given.figure)
    return Status.DONE


def read_a_log(path: Path) -> int:
    """Print the parts of a step by the log of a run, and return the exit status."""
    from anybatch.diagnostics.scaling.from_log import read_steps  # noqa: PLC0415 (imports torch)

    sys.stdout.write(f"{path}: parts of a step\n{read_steps(path)}\n")
    return Status.DONE
