"""The recipe `digits` on two ranks: a comparison of strategies, and why two ranks are not twice as fast as one."""

from functools import partial

from anybatch.cli.command import plain
from anybatch.cli.compare import first_batches
from anybatch.core.run_config import RunConfig
from anybatch.diagnostics import compare
from anybatch.diagnostics.compare import ComparisonReport
from anybatch.diagnostics.scale import measure_scaling
from anybatch.diagnostics.scaling_ranks import RunSettings
from anybatch.recipes.load import MeasuredJob
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress

RECIPE, EFFECTIVE, MICRO = "digits", 64, 8


def compare_ways(emit: Emit) -> Data:
    """Compare accumulation, DataParallel, DDP, ZeRO-1 and FSDP, as `anybatch compare digits` does."""
    emit_progress(emit, 0, 1, "ways, interleaved")
    report = compare_digits(EFFECTIVE, micro_batch_size=MICRO)
    return {**plain(report), "sentences": report.sentences()}


def compare_digits(effective_batch_size: int, micro_batch_size: int | None = None) -> ComparisonReport:
    """Compare all ways to train the recipe `digits` on two devices."""
    job = MeasuredJob(recipe=RECIPE, config=RunConfig(effective_batch_size=effective_batch_size))
    return compare(
        job.train_spec,
        partial(first_batches, job),
        effective_batch_size=effective_batch_size,
        micro_batch_size=micro_batch_size,
        device_type="cpu",
        num_devices=2,
        max_seconds=20.0,
        title=RECIPE,
    )


def explain_scaling(emit: Emit) -> Data:
    """Measure the parts of a step on one rank and on two, as `anybatch scale` does."""
    emit_progress(emit, 0, 1, "steps, interleaved")
    job = MeasuredJob(recipe=RECIPE, config=RunConfig(effective_batch_size=EFFECTIVE))
    report = measure_scaling(
        job.train_spec, job.data, settings=RunSettings(micro_batch_size=MICRO), max_seconds=10.0, num_cores=2
    )
    return {"recipe": RECIPE, "effective_batch_size": EFFECTIVE, "report": plain(report), "text": str(report)}


WAYS = Experiment(
    name="ways_compared",
    question="Which way of using devices is best for the digits, and how much time and memory does each need?",
    run=compare_ways,
    seconds=40,
    runs_here=False,
    tolerance=0.01,
    noisy=(
        *("seconds_per_step", "seconds_per_sample", "exposed_seconds", "quartiles", "device_hours", "device"),
        *("gradient_error", "sentences"),
    ),
)
SCALING = Experiment(
    name="why_not_linear",
    question="Why are two ranks not twice as fast, and which changes would make them faster?",
    run=explain_scaling,
    seconds=30,
    runs_here=False,
    noisy=("report", "text"),
)
