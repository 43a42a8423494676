"""The full loop: the engine's log of two steps, snapshots of the gradient, and the times of steps."""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import anybatch as ab
from anybatch.core.records import MicroBatchRecord, PhaseRecord, Record
from anybatch.events.jsonl import JsonLine, read_jsonl
from anybatch_guide.claims.measuring import flat_gradients
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress
from anybatch_guide.lines import significant
from anybatch_guide.listings.full_loop import make_model, measured, train, ways

NUM_WARM_UP = 2
"""Number of warm-up steps, which allocate memory, before the shown steps."""
NUM_SHOWN = 2
ROUNDS = 40
REFERENCE = "by hand 64 x 1"
"""The reference for all step times: plain PyTorch, without accumulation."""
FIELDS = ("kind", "name", "event", "step", "position")


def run(emit: Emit) -> Data:
    """Return the log of a run, the gradients of a second run with the same losses, and the times of steps."""

    def emit_rounds(done: int) -> None:
        emit_progress(emit, done, ROUNDS, "rounds")

    emit_rounds(0)
    with tempfile.TemporaryDirectory(prefix="anybatch-guide-") as folder:
        path = Path(folder, "loop.jsonl")
        with ab.JsonlLog(path) as log:
            train(NUM_WARM_UP + NUM_SHOWN, log, make_model())
        lines = list(read_jsonl(path))
    snapshots = GradientSnapshots()
    train(NUM_WARM_UP + NUM_SHOWN, snapshots, snapshots.model)
    shown = [line for line in lines if line.get("step", -1) >= NUM_WARM_UP]
    seconds = measured(ways(), ROUNDS, lambda: emit_rounds(1))
    ratios = {
        name: [value / other for value, other in zip(values, seconds[REFERENCE], strict=True)]
        for name, values in seconds.items()
    }
    return {
        "num_parameters": lines[0]["num_parameters"],
        "first_step": NUM_WARM_UP,
        "log": log_columns(shown),
        "strips": quantized_snapshots(snapshots.rows),
        "seconds_per_step": {name: quartiles(values) for name, values in seconds.items()},
        "times_native": {name: quartiles(values) for name, values in ratios.items()},
    }


class GradientSnapshots:
    """An observer that copies 64 evenly spaced elements of the gradient after every change.

    `rows` has the step, the event ("micro_batch", "clip" or "update"), the position, and the elements.
    """

    def __init__(self) -> None:
        self.model = make_model()
        self.rows: list[tuple[int, str, int | None, list[float]]] = []

    def observe(self, record: Record) -> None:
        """Copy after each backward, after clipping and after the update."""
        if isinstance(record, MicroBatchRecord) and record.event == "end":
            self._copy_gradient(record.step, "micro_batch", record.position)
        if isinstance(record, PhaseRecord) and record.event == "end" and record.name in ("clip", "update"):
            self._copy_gradient(record.step, record.name, None)

    def _copy_gradient(self, step: int, name: str, position: int | None) -> None:
        gradient = flat_gradients(self.model)
        if step >= NUM_WARM_UP:
            elements = gradient[torch.linspace(0, len(gradient) - 1, 64).long()]
            self.rows.append((step, name, position, elements.tolist()))


def quantized_snapshots(rows: Sequence[tuple[int, str, int | None, list[float]]]) -> dict[str, Any]:
    """Return snapshots as integers from -1000 to 1000, scaled by the largest absolute value in any snapshot."""
    largest = max(abs(x) for *_, row in rows for x in row)
    snapshots = [
        {"step": step, "after": name, "position": position, "cells": [round(1000 * x / largest) for x in row]}
        for step, name, position, row in rows
    ]
    return {"largest": significant(largest, 4), "rows": snapshots}


def log_columns(lines: Sequence[JsonLine]) -> dict[str, Any]:
    """Return lines of a log as columns: the fields of `FIELDS`, seconds since the first line, and numeric fields."""
    start = lines[0]["time_seconds"]
    columns: dict[str, Any] = {"first_sequence": lines[0]["sequence"]}
    columns["seconds"] = [round(line["time_seconds"] - start, 6) for line in lines]
    for field in FIELDS:
        columns[field] = dictionary_encoded([line.get(field) for line in lines])
    columns["numbers"] = [[index, numbers_of(line)] for index, line in enumerate(lines) if numbers_of(line)]
    return columns


def dictionary_encoded(values: Sequence[object]) -> dict[str, Any]:
    """Return a column as its distinct values (`words`) and, for each line, the index of its value (`of`)."""
    distinct = list(dict.fromkeys(values))
    return {"words": distinct, "of": [distinct.index(value) for value in values]}


def numbers_of(line: JsonLine) -> dict[str, Any]:
    """Return the numeric fields of a line; empty if the page shows none of them."""
    if line["kind"] == "step":
        return {name: line[name] for name in ("loss", "gradient_norm", "counts")}
    if line["kind"] == "micro_batch" and line["event"] == "end":
        return {name: line[name] for name in ("num_samples", "counts", "loss_sums")}
    return {}


def quartiles(values: Sequence[float]) -> Mapping[str, float]:
    """Return the median and both quartiles, with four significant digits."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {name: significant(x, 4) for name, x in (("median", middle), ("low", low), ("high", high))}


EXPERIMENT = Experiment(
    name="full_loop",
    question="What happens in a step, in which order, and how much time does accumulation add?",
    run=run,
    seconds=25,
    tolerance=1e-4,
    noisy=("seconds", "seconds_per_step", "times_native"),
)
