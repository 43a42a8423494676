"""The options of `anybatch scale` that forecast steps on more ranks, and the forecast itself."""

import argparse
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from anybatch.cli.parser import count, memory_size, number, output_file, picture_file
from anybatch.cli.report_files import write_report_files
from anybatch.cli.status import Status
from anybatch.core.collective_times import Link, parse_link
from anybatch.core.run_config import RunConfig
from anybatch.core.units import parse_bytes
from anybatch.errors import UserError

if TYPE_CHECKING:
    from anybatch.planner.forecast.workload import Workload

_SIZE = 32
_BUCKET_BYTES = 25 * 2**20


def add_forecast_options(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """Add the options that `run_forecast` reads, except those in `without`."""
    group = parser.add_argument_group("forecast", "predict steps on more ranks")

    def add(option: str, **how: Any) -> None:  # noqa: ANN401 (passed on)
        if option not in without:
            group.add_argument(option, **how)

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
        "--strategy", choices=("all_reduce", "ddp", "zero1", "fsdp"), default="all_reduce", help="(default: all_reduce)"
    )
    add(
        "--reduction",
        choices=("every_micro_batch", "last_micro_batch"),
        default="last_micro_batch",
        help="when fsdp reduces gradients (default: last_micro_batch)",
    )
    add(
        "--effective-batch-size",
        type=count,
        metavar="N",
        help="samples of a step over all ranks (default: the recipe's)",
    )
    add("--weak-scaling", action="store_true", help="keep the share of a rank, so the effective batch grows with ranks")
    add("--accumulation-steps", type=count, metavar="N", help="micro-batches per rank (default: as few as fit)")
    add("--micro-batch-size", type=count, metavar="N", help=f"maximum samples of a micro-batch (default: {_SIZE})")
    add("--bucket", type=memory_size, default=_BUCKET_BYTES, metavar="SIZE", help="gradient bucket (default: 25MiB)")
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
    add("--figure", type=picture_file, metavar="FILE", help="draw the forecast: .png, .svg or .pdf")
    add("--json", type=output_file, metavar="FILE", help="write the results as JSON")


def link(text: str) -> Link:
    """Return a link written as bandwidth and latency."""
    try:
        return parse_link(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def size(text: str) -> int:
    """Return a number of bytes, with or without a unit."""
    try:
        return int(text) if text.isdecimal() else parse_bytes(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run_forecast(given: argparse.Namespace) -> int:
    """Print the forecast that the options ask for, and return the exit status."""
    if given.link is None:
        message = "a forecast needs the network between hosts: --link 400Gbit,5us."
        raise UserError(message)
    # Imported late: importing torch takes seconds, and a wrong option is reported without it.
    from anybatch.planner.forecast.forecast import forecast  # noqa: PLC0415 (imports torch)
    from anybatch.planner.forecast.forecast_report import draw_forecast  # noqa: PLC0415 (imports torch)
    from anybatch.planner.forecast.workload import Cluster  # noqa: PLC0415 (imports torch)

    cluster = Cluster(
        link=given.link,
        inner_link=given.inner_link,
        devices_per_host=given.devices_per_host,
        algorithm=given.algorithm,
        control_link=given.control_link,
    )
    workload, origin = _by_hand(given) if given.micro_batch_seconds is not None else _timed(given)
    report = forecast(workload, cluster, world_size=given.forecast, strategy=given.strategy, reduction=given.reduction)
    sys.stdout.write(f"{origin}\n{report}\n")
    write_report_files(report, draw_forecast, json_file=given.json, figure=given.figure)
    return Status.DONE


def _by_hand(given: argparse.Namespace) -> "tuple[Workload, str]":
    """Return the workload given by options, and the title of the forecast."""
    from anybatch.core.size_choice import SecondsFit  # noqa: PLC0415 (imports torch)
    from anybatch.planner.forecast.workload import Workload  # noqa: PLC0415 (imports torch)

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
        **_common(given, given.effective_batch_size),
    )
    return workload, "Forecast from the given times:"


def _timed(given: argparse.Namespace) -> "tuple[Workload, str]":
    """Time the recipe on this machine; return its workload and the title of the forecast."""
    from anybatch.planner.forecast.one_rank import time_one_rank  # noqa: PLC0415 (imports torch)
    from anybatch.planner.forecast.workload import Workload  # noqa: PLC0415 (imports torch)
    from anybatch.recipes.load import load_recipe  # noqa: PLC0415 (imports torch)
    from anybatch.recipes.measured_job import MeasuredJob  # noqa: PLC0415 (imports torch)

    if given.recipe is None:
        message = "a forecast needs times of one rank: pass a recipe, or --micro-batch-seconds and --gradient-bytes."
        raise UserError(message)
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
