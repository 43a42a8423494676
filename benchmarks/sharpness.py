"""Do larger batches end in sharper minima, and do those generalize worse?

A small `digits` (`small_runs.py`), trained at several batch sizes: with the same learning rate, with the rate by the
optimizer's rule (linear for SGD, square root for AdamW), and with that rate for the same number of *steps* as the
smallest batch, and so for more samples. At the end of each run: the largest eigenvalue of the Hessian over all training
samples (`measure_sharpness`), the loss over them, and accuracy and loss on held-out ones. Five seeds.

    python benchmarks/sharpness.py --runs FILE [--seconds N] [--out benchmarks/results/NAME.md]

Runs are kept in FILE: after a stop, or with `--seconds`, the benchmark resumes there.
"""

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import report
import torch
from learning_rate_rules import EPS, OPTIMIZERS, STUDENT_95, scaled
from small_runs import OptimizerName, Setting, task_of, train

from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch_guide.sharpness import measure_sharpness

SEEDS = range(5)
SIZES = (16, 64, 256, 1024)
LONG_SIZES = (64, 256)
"""Batch sizes that are also run for the same number of steps as the smallest."""
RATES = {"SGD": 0.02, "AdamW": 0.008}
BETAS = {"SGD": (0.9,), "AdamW": (0.9, 0.99)}
RULES = {"SGD": scaled("linear"), "AdamW": scaled("sqrt")}
FIELDS = ("sharpness", "train_loss", "held_out", "accuracy")


def settings(optimizer: OptimizerName) -> Iterator[tuple[str, Setting]]:
    """Yield every run, without its seed, with a description of its rate."""
    base = Setting(
        task="digits",
        optimizer=optimizer,
        batch_size=SIZES[0],
        learning_rate=RATES[optimizer],
        betas=BETAS[optimizer],
        eps=EPS[optimizer],
        seed=0,
    )
    yield "base", base
    for size in SIZES[1:]:
        yield "same rate", dataclasses.replace(base, batch_size=size)
    for size in SIZES[1:]:
        yield "scaled rate", RULES[optimizer](base, size)
    for size in LONG_SIZES:
        long = dataclasses.replace(RULES[optimizer](base, size), task=f"digits x {size // SIZES[0]}")
        yield "scaled rate, same steps", long


def measured(setting: Setting) -> dict[str, float]:
    """Train with a setting, and return the measurements."""
    model, outcome = train(setting)
    task = task_of("digits")
    found = dict.fromkeys(FIELDS, math.nan)
    found |= {"held_out": outcome.held_out, "accuracy": outcome.accuracy}
    if not math.isfinite(outcome.held_out):
        return found
    spec = TrainSpec(
        model=model, optimizer=lambda named: torch.optim.SGD(named, lr=0.0), loss=task.loss, measure_gradient_norm=False
    )
    sharpness = measure_sharpness(spec, task.train, Hardware(micro_batch_size=256), tolerance=1e-2)
    with torch.no_grad():
        loss = float(task.loss.function(model, task.train))
    return found | {"sharpness": sharpness.eigenvalue, "train_loss": loss}


class Measured:
    """All measurements, stored in a file; runs missing ones."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._known: dict[str, dict[str, Any]] = {line["key"]: line for line in map(json.loads, lines)}

    def __call__(self, setting: Setting) -> dict[str, Any]:
        """Return the measurements of a run."""
        key = json.dumps(asdict(setting), sort_keys=True)
        if key not in self._known:
            self._known[key] = {"key": key, **measured(setting)}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self._known[key]) + "\n")
        return self._known[key]

    def values(self, setting: Setting, name: str) -> list[float]:
        """Return one of the measurements, for each seed."""
        return [float(self(dataclasses.replace(setting, seed=seed))[name]) for seed in SEEDS]


def mean_and_error(values: list[float], digits: int) -> str:
    """Return a mean with its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):.{digits}f} ± {error:.{digits}f}"


def compared(values: list[float], others: list[float]) -> str:
    """Return whether values are higher or lower than others of the same seeds, beyond chance."""
    differences = [one - other for one, other in zip(values, others, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    mean = statistics.fmean(differences)
    return "no difference" if abs(mean) <= STUDENT_95 * error else "higher" if mean > 0 else "lower"


def rows(runs: Measured, optimizer: OptimizerName) -> list[str]:
    """Return the table of an optimizer."""
    rule = "linear" if optimizer == "SGD" else "square root"
    lines = [
        "",
        f"## {optimizer}, scaled by the {rule} rule",
        "",
        (
            "| rate | batch | largest eigenvalue | against the smallest batch | training loss | held-out accuracy, % "
            "| against the smallest batch |"
        ),
        "|---|--:|--:|---|--:|--:|---|",
    ]
    base = next(setting for _, setting in settings(optimizer))
    for name, setting in settings(optimizer):
        sharpness, loss = runs.values(setting, "sharpness"), runs.values(setting, "train_loss")
        accuracy = [100 * value for value in runs.values(setting, "accuracy")]
        first = [100 * value for value in runs.values(base, "accuracy")]
        lines.append(
            f"| {name} | {setting.batch_size} | {mean_and_error(sharpness, 2)} "
            f"| {compared(sharpness, runs.values(base, 'sharpness')) if name != 'base' else ''} "
            f"| {mean_and_error(loss, 4)} | {mean_and_error(accuracy, 2)} "
            f"| {compared(accuracy, first) if name != 'base' else ''} |"
        )
    return lines


def main() -> None:
    """Run the missing runs, and print the tables."""
    torch.set_num_threads(1)
    parser = report.parser(__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="file that keeps runs")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so many, to be continued")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, action="append", help="one of them only")
    given = parser.parse_args()
    runs, begin = Measured(given.runs), time.monotonic()
    optimizers: tuple[OptimizerName, ...] = tuple(given.optimizer or OPTIMIZERS)
    for optimizer in optimizers:
        for seed in SEEDS:
            for _, setting in settings(optimizer):
                runs(dataclasses.replace(setting, seed=seed))
                if time.monotonic() - begin > given.seconds:
                    raise SystemExit(3)
    report.publish(
        [line for optimizer in optimizers for line in rows(runs, optimizer)][1:],
        title="Sharp and flat minima: the largest eigenvalue of the Hessian by batch size",
        command="python benchmarks/sharpness.py --runs FILE",
        setting=f"`digits` shrunk, {len(SEEDS)} seeds, mean ± standard error; differences beyond 95% of Student's t",
        out=given.out,
    )


if __name__ == "__main__":
    main()
