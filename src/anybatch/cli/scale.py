"""`anybatch scale RECIPE`: why N ranks are not N times as fast, and what to change."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anybatch.cli.command import (
    DEFAULT_RECIPE,
    Parser,
    add_recipe,
    add_report_files,
    add_settings,
    count,
    integer,
    let_threads_sleep,
    link,
    memory_size,
    number,
    print_report,
    progress_line,
    size,
)
from anybatch.cli.status import Status
from anybatch.core.run_config import RunConfig
from anybatch.core.schedules import sizes_of
from anybatch.errors import UserError

if TYPE_CHECKING:
    from anybatch.planner.forecast_report import Workload

_DESCRIPTION = (
    "Run steps of a recipe on several ranks of this machine's CPUs, with and without reduction, with several bucket "
    "sizes, with and without data loading. Report what keeps N ranks from being N times as fast, what to change, and "
    "the expected gain. The trained model is not kept."
)
MEASURED = ("all_reduce", "ddp")
_SIZE = 32
"""Maximum samples of a micro-batch in a forecast."""


def run(words: Sequence[str]) -> int:
    """Run `anybatch scale` and return the exit status."""
    given = make_parser().parse(words)
    let_threads_sleep()
    if given.log is not None:
        from anybatch.diagnostics.step_times import read_steps

        sys.stdout.write(f"{given.log}: parts of a step\n{read_steps(given.log)}\n")
        return Status.DONE
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
    add_report_files(add, "the parts of a step, and the bucket sizes", with_json=True)
    _add_forecast(parser)
    return parser


def _add_forecast(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("forecast", "predict steps on more ranks").add_argument
    add("--forecast", type=count, metavar="N", help="predict steps on up to N ranks")
    add(
        "--link",
        type=link,
        metavar="RATE,LATENCY",
        help="network of a host, such as 400Gbit,5us, 1Gbit,1ms or 25GB/s,2us",
    )
    add("--inner-link", type=link, metavar="RATE,LATENCY", help="link between the devices of a host")
    add(
        "--devices-per-host", type=count, default=1, metavar="N", help="devices that share the host's link (default: 1)"
    )
    add(
        "--control-link",
        type=link,
        metavar="RATE,LATENCY",
        help="latency of the control plane, over TCP (default: the link's, at least 100us)",
    )
    add("--algorithm", choices=("best", "ring", "tree", "gloo"), default="best", help="all-reduce (default: best)")
    add(
        "--reduction",
        choices=("every_micro_batch", "last_micro_batch"),
        default="last_micro_batch",
        help="when fsdp reduces gradients (default: last_micro_batch)",
    )
    add("--weak-scaling", action="store_true", help="keep the share of a rank, so the effective batch grows with ranks")
    add("--accumulation-steps", type=count, metavar="N", help="micro-batches per rank (default: as few as fit)")
    add(
        "--variation",
        type=number,
        default=0.0,
        metavar="X",
        help="variation of the ranks' times, standard deviation over mean (default: 0)",
    )
    add(
        "--micro-batch-seconds",
        type=number,
        metavar="X",
        help="seconds of one micro-batch, instead of timing the recipe",
    )
    add("--fixed-seconds", type=number, default=0.0, metavar="X", help="fixed seconds of a micro-batch (default: 0)")
    add("--update-seconds", type=number, default=0.0, metavar="X", help="seconds of the optimizer update (default: 0)")
    add(
        "--gradient-bytes",
        type=size,
        metavar="SIZE",
        help="size of all gradients, such as 102MB, with --micro-batch-seconds",
    )


def scale_recipe(given: argparse.Namespace) -> int:
    """Measure a recipe, print the report, and return the exit status."""
    if given.strategy not in MEASURED:
        message = f"--strategy {given.strategy} can only be forecast: add --forecast N --link RATE,LATENCY, or use ddp."
        raise UserError(message)
    from anybatch.diagnostics.figures import draw_scaling
    from anybatch.diagnostics.scale import measure_scaling
    from anybatch.diagnostics.scaling_ranks import RunSettings
    from anybatch.recipes.load import (
        MeasuredJob,
        load_recipe,
    )

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
    print_report(f"{given.recipe}: what limits scaling?", report, draw_scaling, given)
    return Status.DONE


def run_forecast(given: argparse.Namespace) -> int:
    """Print the forecast that the options ask for, and return the exit status."""
    if given.link is None:
        message = "a forecast needs the network between hosts: --link 400Gbit,5us."
        raise UserError(message)
    from anybatch.planner.forecast import forecast
    from anybatch.planner.forecast_report import Cluster, draw_forecast

    cluster = Cluster(
        link=given.link,
        inner_link=given.inner_link,
        devices_per_host=given.devices_per_host,
        algorithm=given.algorithm,
        control_link=given.control_link,
    )
    workload, origin = _by_hand(given) if given.micro_batch_seconds is not None else _timed(given)
    report = forecast(workload, cluster, world_size=given.forecast, strategy=given.strategy, reduction=given.reduction)
    print_report(origin, report, draw_forecast, given)
    return Status.DONE


def _by_hand(given: argparse.Namespace) -> "tuple[Workload, str]":
    """Return the workload given by options, and the title of the forecast."""
    from anybatch.core.geometry import SecondsFit
    from anybatch.planner.forecast_report import Workload

    if given.gradient_bytes is None:
        message = "--micro-batch-seconds also needs the size of the gradients: add --gradient-bytes 102MB."
        raise UserError(message)
    size, fixed = given.micro_batch_size or _SIZE, given.fixed_seconds
    if not 0.0 <= fixed <= given.micro_batch_seconds:
        message = f"--fixed-seconds {fixed} must be a part of --micro-batch-seconds {given.micro_batch_seconds}."
        raise UserError(message)
    workload = Workload(
        micro_batch=SecondsFit(fixed, (given.micro_batch_seconds - fixed) / size),
        micro_batch_size=size,
        gradient_bytes=given.gradient_bytes,
        update_seconds=given.update_seconds,
        **_common(given, max(sizes_of(given.effective_batch_size)) if given.effective_batch_size else None),
    )
    return workload, "Forecast from the given times:"


def _timed(given: argparse.Namespace) -> "tuple[Workload, str]":
    """Time the recipe on this machine; return its workload and the title of the forecast."""
    from anybatch.planner.forecast import time_one_rank
    from anybatch.planner.forecast_report import Workload
    from anybatch.recipes.load import (
        MeasuredJob,
        load_recipe,
    )

    asked = RunConfig(effective_batch_size=given.effective_batch_size)
    effective = asked.over(load_recipe(given.recipe).defaults).largest_batch_size
    size = min(given.micro_batch_size or _SIZE, effective)

    def job(num_samples: int) -> Any:  # noqa: ANN401 (as `SizedJob` says)
        made = MeasuredJob(recipe=given.recipe, config=RunConfig(effective_batch_size=num_samples))
        return made.train_spec(), made.data(steps=1)

    found = time_one_rank(job, size)
    workload = Workload(
        micro_batch=found.micro_batch,
        micro_batch_size=size,
        gradient_bytes=found.gradient_bytes,
        update_seconds=found.update_seconds,
        num_parameters=found.num_parameters,
        **_common(given, effective),
    )
    return workload, f"{given.recipe}: forecast from times of one rank on this machine:"


def _common(given: argparse.Namespace, effective_batch_size: int | None) -> dict[str, Any]:
    return {
        "effective_batch_size": None if given.weak_scaling else effective_batch_size,
        "accumulation_steps": given.accumulation_steps,
        "bucket_bytes": given.bucket,
        "variation": given.variation,
    }
