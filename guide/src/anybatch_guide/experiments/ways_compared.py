"""Accumulation, DataParallel, DDP, ZeRO-1 and FSDP on one job: the output of `anybatch compare digits`."""

from functools import partial

from anybatch.cli.compare import first_batches
from anybatch.core.run_config import RunConfig
from anybatch.diagnostics import compare
from anybatch.recipes.load import MeasuredJob
from anybatch_guide.experiment import Data, Emit, Experiment

EFFECTIVE, MICRO = 64, 8


def run(emit: Emit) -> Data:
    """Compare the ways on two ranks."""
    emit({"kind": "guide.progress", "done": 0, "of": 1, "what": "ways, interleaved"})
    job = MeasuredJob(recipe="digits", config=RunConfig(effective_batch_size=EFFECTIVE))
    report = compare(
        job.train_spec,
        partial(first_batches, job),
        effective_batch_size=EFFECTIVE,
        micro_batch_size=MICRO,
        device_type="cpu",
        num_devices=2,
        most_seconds=20.0,
        title="digits",
    )
    return {**report.as_json(), "sentences": report.sentences()}


EXPERIMENT = Experiment(
    name="ways_compared",
    question="Which way of using devices is best for the digits, and how much time and memory does each need?",
    run=run,
    seconds=40,
    runs_here=False,
    tolerance=0.01,
    noisy=(
        *("seconds_per_step", "seconds_per_sample", "exposed_seconds", "quartiles", "device_hours", "device"),
        *("gradient_error", "sentences"),
    ),
)
