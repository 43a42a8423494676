"""The recipes as `anybatch train` runs them: the same loss curve with any split and any number of ranks.

`digits` runs for 30 epochs on 1 and 2 ranks, in micro-batches of 4, 16 and 256, and every loss is compared with 1 rank
and one micro-batch. In float32 rounding grows over the steps of a training run, so the same job is also run in float64.
`text` runs for its 200 steps. `finetune` runs in float64 for 12 steps, split into micro-batches of 8 in arrival order,
by length at 2,048 tokens, and packed at 2,048 tokens; each twice, alternating.

    python benchmarks/same_curve.py [--only finetune] [--out benchmarks/results/NAME.md]
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import report
from torch import Tensor, nn

import anybatch as ab
from anybatch.recipes.digits import Network, accuracy, digits, loss
from anybatch.recipes.finetune import finetune

FIRST_STEPS = 6
CUTS = {
    "padded, 8 samples in arrival order": ("padded", "--micro-batch-size", "8"),
    "padded, 2,048 tokens by length": ("padded", "--micro-batch-tokens", "2048"),
    "packed, 2,048 tokens": ("packed", "--micro-batch-tokens", "2048"),
}


def double() -> ab.Job:
    """Return the job of `digits` in float64."""

    def cast(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**batch, "image": batch["image"].double()}

    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss(model, cast(batch))

    def metric(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return accuracy(model, cast(batch))

    job = digits()
    return dataclasses.replace(
        job,
        model=lambda: Network().double(),
        loss=ab.mean_over_samples(loss_of),
        evaluate=dataclasses.replace(job.evaluate, metric=metric),
    )


def padded() -> ab.Job:
    """Return the job of `finetune` in float64."""
    return in_double(finetune(layout="padded"))


def packed() -> ab.Job:
    """Return the job of `finetune` in float64, packed."""
    return in_double(finetune(layout="packed"))


def in_double(job: ab.Job) -> ab.Job:
    """Return the job with a model in float64."""
    make = job.model
    return dataclasses.replace(job, model=lambda: make().double())


@dataclass(frozen=True)
class Curve:
    """The contents of a run's log."""

    losses: list[float]
    metrics: dict[str, float]
    samples_per_second: str

    def distance(self, other: "Curve", num_steps: int | None = None) -> float:
        """Return the largest relative difference of a loss within the first steps."""
        pairs = list(zip(self.losses, other.losses, strict=True))[:num_steps]
        return max(abs(one - two) / abs(two) for one, two in pairs)


def train(root: Path, recipe: str, *options: str) -> Curve:
    """Run `anybatch train` in a separate process."""
    folder = Path(tempfile.mkdtemp(dir=root)) / "run"
    command = [sys.executable, "-m", "anybatch", "train", recipe, "--out", str(folder), *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return Curve(
        losses=[line["loss"] for line in lines if line["kind"] == "step"],
        metrics=[line["metrics"] for line in lines if line["kind"] == "evaluate"][-1],
        samples_per_second=done.stdout.splitlines()[0].split(", ")[-1].removesuffix(" samples/s while training"),
    )


def digits_rows(root: Path) -> list[str]:
    """Return the table of `digits`."""
    differences = f"largest difference, first {FIRST_STEPS} steps | all steps"
    table = [
        f"| `digits` in | ranks | micro-batch | held-out accuracy | {differences} | samples/s |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, recipe in (("float32", "digits"), ("float64", f"{Path(__file__)}:double")):
        plain: Curve | None = None
        for ranks in ("1", "2"):
            for size in ("256", "16", "4"):
                curve = train(root, recipe, "--ranks", ranks, "--micro-batch-size", size)
                plain = plain or curve
                first, every = curve.distance(plain, FIRST_STEPS), curve.distance(plain)
                right = f"{100 * curve.metrics['accuracy']:.2f}%"
                speed = curve.samples_per_second
                table.append(f"| {name} | {ranks} | {size} | {right} | {first:.1e} | {every:.1e} | {speed} |")
                print(table[-1], flush=True)
    return table


def text_rows(root: Path) -> list[str]:
    """Return the table of `text`."""
    curve = train(root, "text")
    table = ["| recipe | steps | validation, bits per byte | samples/s (128 bytes each) |", "|---|--:|--:|--:|"]
    bits = curve.metrics["bits_per_byte"]
    return [*table, f"| `text` | {len(curve.losses)} | {bits:.3f} | {curve.samples_per_second} |"]


def finetune_rows(root: Path) -> list[str]:
    """Return the table of `finetune`."""
    options = ("--steps", "12", "--ranks", "1")
    turns: list[dict[str, Curve]] = []
    for _ in range(2):
        turns.append({})
        for name, (layout, *cut) in CUTS.items():
            curve = turns[-1][name] = train(root, f"{Path(__file__)}:{layout}", *cut, *options)
            print(f"{name}: {curve.losses[0]:.6f} to {curve.losses[-1]:.6f}, {curve.samples_per_second}", flush=True)
    plain = next(iter(turns[0].values()))
    table = [
        "| `finetune` | first loss | last loss | largest difference, all steps | samples/s | again |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, curve in turns[0].items():
        losses = f"{curve.losses[0]:.6f} | {curve.losses[-1]:.6f}"
        speeds = " | ".join(turn[name].samples_per_second for turn in turns)
        table.append(f"| {name} | {losses} | {curve.distance(plain):.1e} | {speeds} |")
    return table


RECIPES = {"digits": digits_rows, "text": text_rows, "finetune": finetune_rows}


def main() -> None:
    """Print the tables, and write them to a file if asked."""
    parser = report.parser(__doc__)
    parser.add_argument("--only", choices=RECIPES, nargs="+", default=list(RECIPES))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        tables = [[*RECIPES[name](Path(root)), ""] for name in given.only]
        report.publish(
            [line for table in tables for line in table][:-1],
            title="The recipes: one loss curve on any cut and any number of ranks",
            command="python benchmarks/same_curve.py",
            setting="differences are relative to the first row; `digits` takes 256 samples a step, 180 steps",
            out=given.out,
        )


if __name__ == "__main__":
    main()
