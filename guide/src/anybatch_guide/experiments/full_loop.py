"""The full loop: the log of two steps as the engine wrote it, the gradient at its moments, and what it costs."""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import anybatch as ab
from anybatch.core.records import MicroBatchRecord, PhaseRecord, Record
from anybatch.events.jsonl import JsonLine, read_jsonl
from anybatch_guide.experiment import Data, Experiment, Tell
from anybatch_guide.listings.full_loop import make_model, measured, train, ways

NUM_WARM_UP = 2
"""Steps that are run before those that are shown: the first ones allocate."""
NUM_SHOWN = 2
ROUNDS = 40
NATIVE = "by hand 64 x 1"
FIELDS = ("kind", "name", "event", "step", "position")


def run(tell: Tell) -> Data:
    """Return a log, the gradients of a second run with the same losses, and the times of whole steps."""

    def say(done: int) -> None:
        tell({"kind": "guide.progress", "done": done, "of": ROUNDS, "what": "rounds"})

    say(0)
    with tempfile.TemporaryDirectory(prefix="anybatch-guide-") as folder:
        path = Path(folder, "loop.jsonl")
        with ab.JsonlLog(path) as log:
            train(NUM_WARM_UP + NUM_SHOWN, log, make_model())
        lines = list(read_jsonl(path))
    strips = Strips()
    train(NUM_WARM_UP + NUM_SHOWN, strips, strips.model)
    shown = [line for line in lines if line.get("step", -1) >= NUM_WARM_UP]
    seconds = measured(ways(), ROUNDS, lambda: say(1))
    return {
        "geometry": lines[0]["geometry"],
        "num_parameters": lines[0]["num_parameters"],
        "gradient_bytes": lines[0]["gradient_bytes"],
        "first_step": NUM_WARM_UP,
        "log": log_columns(shown),
        "strips": strip_rows(strips.rows),
        "seconds_per_step": {name: quartiles(values) for name, values in seconds.items()},
        "times_native": {name: quartiles(ratios(values, seconds[NATIVE])) for name, values in seconds.items()},
    }


class Strips:
    """An observer that copies 64 numbers of the gradient, evenly spaced over all, whenever they have changed."""

    def __init__(self) -> None:
        self.model = make_model()
        self.rows: list[tuple[int, str, int | None, list[float]]] = []

    def observe(self, record: Record) -> None:
        """Look after each backward, after clipping and after the update."""
        if isinstance(record, MicroBatchRecord) and record.event == "end":
            self._look(record.step, "micro_batch", record.position)
        if isinstance(record, PhaseRecord) and record.event == "end" and record.name in ("clip", "update"):
            self._look(record.step, record.name, None)

    def _look(self, step: int, name: str, position: int | None) -> None:
        row = flat_gradient(self.model)
        if step >= NUM_WARM_UP:
            self.rows.append((step, name, position, row[torch.linspace(0, len(row) - 1, 64).long()].tolist()))


def flat_gradient(model: torch.nn.Module) -> Tensor:
    """Return the gradient in one row; zero where there is none."""
    parameters = list(model.parameters())
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad.detach()).flatten() for p in parameters])


def strip_rows(rows: Sequence[tuple[int, str, int | None, list[float]]]) -> dict[str, Any]:
    """Return strips as whole numbers from -1000 to 1000, of the largest number among them."""
    largest = max(abs(x) for *_, row in rows for x in row)
    found = [
        {"step": step, "after": name, "position": position, "cells": [round(1000 * x / largest) for x in row]}
        for step, name, position, row in rows
    ]
    return {"largest": float(f"{largest:.4g}"), "rows": found}


def log_columns(lines: Sequence[JsonLine]) -> dict[str, Any]:
    """Return lines of a log as columns: what happened, when in seconds since the first, and the numbers that came."""
    start = lines[0]["time_seconds"]
    columns: dict[str, Any] = {"first_sequence": lines[0]["sequence"]}
    columns["seconds"] = [round(line["time_seconds"] - start, 6) for line in lines]
    for field in FIELDS:
        columns[field] = shortened([line.get(field) for line in lines])
    columns["numbers"] = [[index, numbers_of(line)] for index, line in enumerate(lines) if numbers_of(line)]
    return columns


def shortened(values: Sequence[object]) -> dict[str, Any]:
    """Return a column as its distinct values and, for each line, the number of one of them."""
    distinct = list(dict.fromkeys(values))
    return {"words": distinct, "of": [distinct.index(value) for value in values]}


def numbers_of(line: JsonLine) -> dict[str, Any]:
    """Return what a line says in numbers, if it says any."""
    if line["kind"] == "step":
        return {name: line[name] for name in ("loss", "gradient_norm", "clipped", "counts", "num_samples")}
    if line["kind"] == "micro_batch" and line["event"] == "end":
        return {name: line[name] for name in ("num_samples", "first_sample_id", "counts", "loss_sums")}
    if line["kind"] == "memory":
        return {"category_bytes": line["category_bytes"]}
    return {}


def ratios(values: Sequence[float], native: Sequence[float]) -> list[float]:
    """Return each step's time over that of its neighbour, the native step of the same round."""
    return [value / other for value, other in zip(values, native, strict=True)]


def quartiles(values: Sequence[float]) -> Mapping[str, float]:
    """Return the median and the quartiles beside it, with four significant digits."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {name: float(f"{x:.4g}") for name, x in (("median", middle), ("low", low), ("high", high))}


EXPERIMENT = Experiment(
    name="full_loop",
    question="What happens in a step, when, and what does accumulating cost?",
    run=run,
    seconds=25,
    tolerance=1e-4,
    noisy=("seconds", "seconds_per_step", "times_native", "category_bytes"),
)
