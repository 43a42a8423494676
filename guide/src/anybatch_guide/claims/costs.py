"""Measurements of claims about the cost of accumulation: time and memory."""

import itertools

from anybatch_guide.claims.claim import Numbers
from anybatch_guide.claims.measuring import BatchCut, median_ratio, step_memory, step_seconds
from anybatch_guide.experiment import Emit, emit_progress
from anybatch_guide.tasks.task import load

ROUNDS = 15


def n_times_longer(emit: Emit) -> Numbers:
    """Compare the time of a step of four micro-batches with the same samples in one pass, and with one micro-batch."""
    accumulated, unsplit, one_micro_batch = BatchCut(16, 4), BatchCut(64, 1), BatchCut(16, 1)
    times = step_seconds(load("digits"), (accumulated, unsplit, one_micro_batch), emit, rounds=ROUNDS)
    return {
        "accumulation_steps": accumulated.number,
        "ratio_to_same_samples": median_ratio(times, accumulated, unsplit),
        "ratio_to_one_micro_batch": median_ratio(times, accumulated, one_micro_batch),
    }


def small_micro_batches(emit: Emit) -> Numbers:
    """Time a step over 64 samples with smaller and smaller micro-batches."""
    cuts = {size: BatchCut(size, 64 // size) for size in (64, 16, 4, 1)}
    times = step_seconds(load("digits"), tuple(cuts.values()), emit, rounds=ROUNDS)
    return {f"ratio_{size}": median_ratio(times, cuts[size], cuts[64]) for size in (16, 4, 1)}


def larger_is_faster(emit: Emit) -> Numbers:
    """Time a step over 256 samples, with micro-batches from 1 to 256."""
    sizes = (1, 4, 16, 64, 256)
    cuts = {size: BatchCut(size, 256 // size) for size in sizes}
    times = step_seconds(load("digits"), tuple(cuts.values()), emit, rounds=7)
    return {
        f"gain_{small}_to_{large}": median_ratio(times, cuts[small], cuts[large])
        for small, large in itertools.pairwise(sizes)
    }


def not_free(emit: Emit) -> Numbers:
    """Return the bytes that a step of four micro-batches needs in addition to a step of one micro-batch."""
    task = load("digits")
    emit_progress(emit, 0, 2, "one micro-batch")
    alone = step_memory(task, micro_batch_size=16, effective_batch_size=16)
    emit_progress(emit, 1, 2, "four micro-batches")
    several = step_memory(task, micro_batch_size=16, effective_batch_size=64)
    return {
        "weight_bytes": alone["peak"]["weights"],
        "extra_in_forward": several["forward"]["gradients"] - alone["forward"]["gradients"],
        "extra_at_peak": sum(several["peak"].values()) - sum(alone["peak"].values()),
        "peak_bytes": sum(several["peak"].values()),
    }


def less_memory(emit: Emit) -> Numbers:
    """Compare the peak memory of a step over 64 samples in one pass, in four micro-batches, and one by one."""
    task = load("digits")
    peaks = {}
    for done, size in enumerate((64, 16, 1)):
        emit_progress(emit, done, 3, f"micro-batches of {size}")
        peaks[size] = step_memory(task, micro_batch_size=size, effective_batch_size=64)["peak"]
    totals = {size: sum(peak.values()) for size, peak in peaks.items()}
    return {
        "peak_at_once": totals[64],
        "peak_in_four": totals[16],
        "peak_one_by_one": totals[1],
        "ratio_in_four": totals[16] / totals[64],
        "kept_one_by_one": (totals[1] - peaks[1]["activations"] - peaks[1].get("temporaries", 0)) / totals[1],
    }
