"""The recipes as `anybatch train` runs them: the same loss curve on any cut and any number of ranks.

`digits` runs for 30 epochs on 1 and 2 ranks, in micro-batches of 4, 16 and 256, and every loss is compared with that of
1 rank and one micro-batch. In float32 rounding grows over the steps of a training run, so the same job is also run in
float64. `text` runs for its 200 steps.

    python benchmarks/same_curve.py [--out benchmarks/results/NAME.md]
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

FIRST_STEPS = 6


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


@dataclass(frozen=True)
class Curve:
    """What a run's log says."""

    losses: list[float]
    metrics: dict[str, float]
    samples_per_second: str

    def distance(self, other: "Curve", num_steps: int | None = None) -> float:
        """Return the largest relative difference of a loss within the first steps."""
        pairs = list(zip(self.losses, other.losses, strict=True))[:num_steps]
        return max(abs(one - two) / abs(two) for one, two in pairs)


def train(root: Path, recipe: str, *options: str) -> Curve:
    """Run `anybatch train` in a process of its own."""
    folder = root / "-".join([recipe.rpartition(":")[2], *options])
    command = [sys.executable, "-m", "anybatch", "train", recipe, "--out", str(folder), *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return Curve(
        losses=[line["loss"] for line in lines if line["kind"] == "step"],
        metrics=[line["metrics"] for line in lines if line["kind"] == "evaluate"][-1],
        samples_per_second=done.stdout.splitlines()[0].split(", ")[-1].removesuffix(" samples/s while stepping"),
    )


def rows(root: Path) -> list[str]:
    """Run everything and return the tables' rows."""
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
    curve = train(root, "text")
    table += ["", "| recipe | steps | validation, bits per byte | samples/s (128 bytes each) |", "|---|--:|--:|--:|"]
    bits = curve.metrics["bits_per_byte"]
    return [*table, f"| `text` | {len(curve.losses)} | {bits:.3f} | {curve.samples_per_second} |"]


def main() -> None:
    """Print the tables, and write them to a file if asked."""
    out = report.parser(__doc__).parse_args().out
    with tempfile.TemporaryDirectory() as root:
        report.publish(
            rows(Path(root)),
            title="The recipes: one loss curve on any cut and any number of ranks",
            command="python benchmarks/same_curve.py",
            setting="effective batch size 256, 180 steps; differences are relative to 1 rank with one micro-batch",
            out=out,
        )


if __name__ == "__main__":
    main()
