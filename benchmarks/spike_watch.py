"""Planted divergences: does the watch see them before the loss is lost, and does a roll-back save the run?

Real training runs of both small recipes (`small_runs.py`), with SGD and AdamW. Each divergence is planted into a run at
a random step, in one of six ways, with a random strength. It counts if the run is *lost* without the watch: the median
of the last five reported losses rises by half of the difference between the loss at the beginning and the loss before
the plant. Harmless plants are left out, whether the watch sees them or not.

- Caught: the watch warns after the plant and before the step at which the run is lost.
- Saved: with `spikes="roll_back"` the same run ends as the run of the same seed without a plant, up to the scatter of
  runs over seeds.
- False alarms: warnings in runs without a plant, of seeds that its thresholds were not chosen on.

    python benchmarks/spike_watch.py --runs FILE [--seconds N] [--out benchmarks/results/NAME.md]

Runs are kept in FILE: after a stop, or with `--seconds`, the benchmark resumes there.
"""

import argparse
import dataclasses
import json
import math
import random
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import report
import torch
from small_runs import Rows, Setting, batches_of, engine_of, judged, new_model, taken, task_of
from torch import Tensor, nn

import anybatch as ab
from anybatch.core.spikes import SpikeRule, spikes_of
from anybatch.errors import AnyBatchWarning, NonFiniteError

SEEDS, HEALTHY_SEEDS = range(10, 15), range(10, 20)
"""Seeds other than 0 to 9 and 100 to 103, on which thresholds were chosen."""
MEDIAN_OF = 5
PART_LOST = 0.5

Kind = Literal[
    "bad batches", "rate too high", "gradients corrupted", "norms explode", "slow divergence", "weights corrupted"
]
STRENGTHS: dict[Kind, tuple[float, float]] = {
    "bad batches": (5.0, 30.0),  # inputs times this and one label for all, or random bytes, for 20 steps
    "rate too high": (15.0, 60.0),  # learning rate times this, from then on
    "gradients corrupted": (50.0, 500.0),  # noise at this multiple of the gradient's norm, for 3 steps
    "norms explode": (1.3, 3.0),  # gradient times this, squared, cubed and so on, for 30 steps
    "slow divergence": (1.05, 1.15),  # learning rate times this in each step, up to 30 times
    "weights corrupted": (8.0, 40.0),  # one matrix times this, once
}
SETTINGS = (
    Setting(task="digits", optimizer="SGD", batch_size=16, learning_rate=0.02, betas=(0.9,), eps=0.0, seed=0),
    Setting(task="digits", optimizer="AdamW", batch_size=16, learning_rate=0.004, betas=(0.9, 0.99), eps=1e-8, seed=0),
    Setting(task="text", optimizer="SGD", batch_size=8, learning_rate=0.1, betas=(0.9,), eps=0.0, seed=0),
    Setting(task="text", optimizer="AdamW", batch_size=8, learning_rate=0.008, betas=(0.9, 0.99), eps=1e-8, seed=0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A planted fault.

    Attributes:
        kind: one of the keys of `STRENGTHS`.
        start: its first step.
        strength: its strength, see `STRENGTHS`.
    """

    kind: Kind
    start: int
    strength: float


@dataclass(slots=True)
class Run:
    """The outcome of a run.

    Attributes:
        losses: reported losses.
        norms: reported gradient norms.
        held_out: loss over the held-out samples at the end; infinite if the run ended with an error.
        actions: codes of the watch's actions, with their steps.
    """

    losses: list[float]
    norms: list[float]
    held_out: float
    actions: list[tuple[str, int]]


class FaultInjector:
    """Applies the planted fault, step by step.

    Args:
        planted: the fault.
        setting: setting of the run.
        engine: engine of the run.
        model: model of the run.
    """

    def __init__(self, planted: Planted, setting: Setting, engine: ab.Engine, model: nn.Module) -> None:
        self._planted = planted
        self._engine = engine
        self._model = model
        self._generator = torch.Generator().manual_seed(setting.seed)
        self._age = -1
        for parameter in model.parameters():
            parameter.register_hook(self._gradient)

    def before(self, step: int, rows: Rows) -> Rows:
        """Apply the fault before a step, and return its samples."""
        planted = self._planted
        self._age = step - planted.start
        if self._age < 0:
            return rows
        if planted.kind == "rate too high":
            self._multiply_rates(planted.strength)
        if planted.kind == "slow divergence":
            self._multiply_rates(min(30.0, planted.strength ** (self._age + 1)))
        if planted.kind == "weights corrupted" and not self._age:
            with torch.no_grad():
                matrices = [parameter for parameter in self._model.parameters() if parameter.ndim > 1]
                matrices[int(torch.randint(len(matrices), (1,), generator=self._generator))].mul_(planted.strength)
        if planted.kind == "bad batches" and self._age < 20:
            return self._spoiled(rows)
        return rows

    def _spoiled(self, rows: Rows) -> Rows:
        inputs, targets = rows
        if rows[inputs].is_floating_point():
            label = int(torch.randint(10, (1,), generator=self._generator))
            return {
                inputs: rows[inputs] * self._planted.strength,
                targets: torch.full_like(rows[targets], label),
            }
        return {name: torch.randint(0, 256, value.shape, generator=self._generator) for name, value in rows.items()}

    def _multiply_rates(self, factor: float) -> None:
        # LambdaLR computes from its base rates in every step, so this does not accumulate.
        for group in self._engine.optimizer.param_groups:
            group["lr"] *= factor

    def _gradient(self, gradient: Tensor) -> Tensor:
        planted = self._planted
        if planted.kind == "norms explode" and 0 <= self._age < 30:
            return gradient * planted.strength ** (self._age + 1)
        if planted.kind == "gradients corrupted" and 0 <= self._age < 3:
            noise = torch.randn(gradient.shape, generator=self._generator) / math.sqrt(gradient.numel())
            return gradient + planted.strength * gradient.norm() * noise
        return gradient


class DiagnosisStore:
    """An observer that stores the codes of the watch's diagnoses, with their steps."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []

    def observe(self, record: Any) -> None:  # noqa: ANN401 (one of many records)
        """Store the code of a diagnosis with a step."""
        if record.kind == "diagnosis" and record.step is not None:
            self.found.append((record.code, record.step))


def run(setting: Setting, planted: Planted | None, *, watched: bool, until_lost: bool = False) -> Run:
    """Run a training.

    Args:
        setting: setting of the run.
        planted: the fault; None for a run without one.
        watched: whether a watch rolls back.
        until_lost: whether to stop when the run is lost, or 150 steps after the plant.
    """
    task, model, actions = task_of(setting.task), new_model(setting), DiagnosisStore()
    made = Run([], [], math.inf, actions.found)
    engine = engine_of(
        setting, model, measure_gradient_norm=True, spikes="roll_back" if watched else None, observer=actions
    )
    saboteur = None if planted is None else FaultInjector(planted, setting, engine, model)
    with warnings.catch_warnings(), engine:
        warnings.simplefilter("ignore", AnyBatchWarning)
        try:
            for step, ids in enumerate(batches_of(setting)):
                rows = taken(task.train, ids)
                done = engine.step(rows if saboteur is None else saboteur.before(step, rows))
                made.losses.append(done.loss)
                made.norms.append(done.grad_norm or 0.0)
                if (
                    until_lost
                    and planted is not None
                    and step >= planted.start
                    and (step > planted.start + 150 or lost_at(made, planted) is not None)
                ):
                    return made
        except NonFiniteError:
            made.losses.append(math.inf)
            made.norms.append(math.inf)
            return made
    made.held_out, _ = judged(model, task)
    return made


def lost_at(made: Run, planted: Planted) -> int | None:
    """Return the step at which the run is lost; None if it never is."""
    start, losses = planted.start, made.losses
    if len(losses) <= start:  # it has already diverged
        return None
    level, first = statistics.median(losses[start - 30 : start]), statistics.median(losses[:3])
    bar = level + PART_LOST * (first - level)
    for step in range(start, len(losses)):
        recent = losses[step + 1 - MEDIAN_OF : step + 1]
        if not math.isfinite(losses[step]) or statistics.median(recent) > bar:
            return step
    return None


def plants() -> Iterator[tuple[Setting, Planted]]:
    """Yield every run with its planted fault."""
    for seed in SEEDS:
        for setting in SETTINGS:
            num_steps = len(list(batches_of(setting)))
            for kind, (least, most) in STRENGTHS.items():
                draw = random.Random(f"{seed} {setting.task} {setting.optimizer} {kind}")  # noqa: S311 (no secret)
                yield (
                    dataclasses.replace(setting, seed=seed),
                    Planted(
                        kind=kind,
                        start=draw.randrange(num_steps // 4, num_steps * 3 // 5),
                        strength=math.exp(draw.uniform(math.log(least), math.log(most))),
                    ),
                )


class Results:
    """Stored runs in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._known = {line["key"]: line for line in map(json.loads, lines)}

    def healthy(self, setting: Setting) -> dict[str, Any]:
        """Return the result of a run without a plant: held-out loss, steps, and the warnings of a passive watch."""

        def make() -> dict[str, Any]:
            made = run(setting, None, watched=False)
            values = [(step, *pair) for step, pair in enumerate(zip(made.losses, made.norms, strict=True))]
            alarms = [str(spike) for spike in spikes_of(values, SpikeRule())]
            return {"held_out": made.held_out, "steps": len(made.losses), "alarms": alarms}

        return self._kept({"setting": asdict(setting)}, make)

    def planted(self, setting: Setting, planted: Planted) -> dict[str, Any]:
        """Return when the loss was lost, when the watch warned, and how the watched run ended."""

        def make() -> dict[str, Any]:
            alone = run(setting, planted, watched=False, until_lost=True)
            lost = lost_at(alone, planted)
            if lost is None:
                return {"lost": None}
            watched = run(setting, planted, watched=True)
            spoke = [step for code, step in watched.actions if code == "spike" and step >= planted.start]
            return {
                "lost": lost,
                "caught": min(spoke, default=None),
                "early": sum(code == "spike" and step < planted.start for code, step in watched.actions),
                "held_out": watched.held_out,
                "told": Counter(code for code, _ in watched.actions),
            }

        return self._kept({"setting": asdict(setting), "planted": asdict(planted)}, make)

    def _kept(self, what: dict[str, Any], make: Any) -> dict[str, Any]:  # noqa: ANN401 (a function)
        key = json.dumps(what, sort_keys=True)
        if key not in self._known:
            self._known[key] = {"key": key, **make()}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self._known[key]) + "\n")
        found: dict[str, Any] = self._known[key]
        return found


def work(results: Results) -> Iterator[None]:
    """Make all missing runs, and yield after each one."""
    for setting, planted in plants():
        results.planted(setting, planted)
        yield
    for seed in HEALTHY_SEEDS:
        for setting in SETTINGS:
            results.healthy(dataclasses.replace(setting, seed=seed))
            yield


def name_of(setting: Setting) -> str:
    """Return a run's name in the tables."""
    return f"{setting.task}, {setting.optimizer}"


def rows_of(results: Results) -> list[str]:
    """Return the tables."""
    lines = [
        "| planted | runs | lost without the watch | caught before that | steps ahead, median | saved |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    noise = {
        (setting.task, setting.optimizer): statistics.stdev(one["held_out"] for one in sound(results, setting))
        for setting in SETTINGS
    }
    total: Counter[str] = Counter()
    differences: dict[str, list[float]] = {}
    for kind in STRENGTHS:
        count: Counter[str] = Counter()
        ahead = []
        for setting, planted in plants():
            if planted.kind != kind:
                continue
            found = results.planted(setting, planted)
            if not math.isfinite(results.healthy(setting)["held_out"]):
                continue
            count["runs"] += 1
            if found["lost"] is None:
                continue
            count["lost"] += 1
            count["early"] += found["early"]
            if found["caught"] is not None and found["caught"] < found["lost"]:
                count["caught"] += 1
                ahead.append(found["lost"] - found["caught"])
            scatter = noise[setting.task, setting.optimizer]
            worse = (found["held_out"] - results.healthy(setting)["held_out"]) / scatter
            differences.setdefault(name_of(setting), []).append(worse)
            count["saved"] += worse <= 2.0
        total += count
        lines.append(
            f"| {kind} | {count['runs']} | {count['lost']} | {count['caught']} | "
            f"{statistics.median(ahead) if ahead else 0:g} | {count['saved']} |"
        )
    lines.append(f"| together | {total['runs']} | {total['lost']} | {total['caught']} | | {total['saved']} |")
    lines += [
        "",
        (
            f"Caught: {total['caught'] / total['lost']:.1%} of {total['lost']}. "
            f"Alarms in these runs before the plant: {total['early']}."
        ),
        (
            "Saved: the held-out loss at the end is at most two standard deviations (of runs without a plant, over "
            f"{len(HEALTHY_SEEDS)} seeds) above that of the same seed without a plant."
        ),
        "",
        (
            "| runs without a plant | steps | false alarms | held-out loss, mean and deviation "
            "| rolled back runs: median of (loss - loss without plant) / deviation |"
        ),
        "|---|--:|--:|--:|--:|",
    ]
    steps = alarms = 0
    for setting in SETTINGS:
        healthy = sound(results, setting)
        losses = [one["held_out"] for one in healthy]
        steps += sum(one["steps"] for one in healthy)
        alarms += sum(len(one["alarms"]) for one in healthy)
        found = differences.get(name_of(setting), [math.nan])
        lines.append(
            f"| {name_of(setting)} | {sum(one['steps'] for one in healthy)} | "
            f"{sum(len(one['alarms']) for one in healthy)} | {statistics.fmean(losses):.4f} "
            f"({statistics.stdev(losses):.4f}) | {statistics.median(found):+.2f} of {len(found)} |"
        )
    every = [results.healthy(dataclasses.replace(one, seed=seed)) for one in SETTINGS for seed in HEALTHY_SEEDS]
    sick = [one for one in every if not math.isfinite(one["held_out"])]
    lines += ["", f"False alarms: {alarms} in {steps:,} steps, {alarms / steps * 10_000:.2f} in 10,000."]
    if sick:
        seen = sum(bool(one["alarms"]) for one in sick)
        lines += [
            "",
            (
                f"{len(sick)} of {len(every)} runs without a plant diverged by themselves, and are not among these; "
                f"the watch spoke in {seen} of them: {'; '.join(one['alarms'][0] for one in sick if one['alarms'])}."
            ),
        ]
    return lines


def sound(results: Results, setting: Setting) -> list[dict[str, Any]]:
    """Return the runs of a setting without a plant, except those that diverged anyway."""
    runs = [results.healthy(dataclasses.replace(setting, seed=seed)) for seed in HEALTHY_SEEDS]
    return [one for one in runs if math.isfinite(one["held_out"])]


def main() -> None:
    """Run the missing runs, and print the tables."""
    torch.set_num_threads(1)
    parser = report.parser(__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="file that keeps runs")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so many, to be continued")
    given: argparse.Namespace = parser.parse_args()
    results, begin = Results(given.runs), time.monotonic()
    for _ in work(results):
        if time.monotonic() - begin > given.seconds:
            raise SystemExit(3)
    report.publish(
        rows_of(results),
        title="Spike watch: planted divergences seen, runs saved, false alarms",
        command="python benchmarks/spike_watch.py --runs FILE",
        setting=f"both recipes shrunk, SGD and AdamW, {len(SEEDS)} seeds of each plant, one thread",
        out=given.out,
    )


if __name__ == "__main__":
    main()
