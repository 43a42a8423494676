"""The time to the first step from a cold start: a bare torch script, the engine, and the command.

All three train the network of the recipe `digits` for one step of 256 samples on the CPU, each in a fresh process: from
its start to the end of its first step. They alternate, so that a busy machine slows all of them alike.

    python benchmarks/start_up.py [--out benchmarks/results/NAME.md]
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import report

NUM_ROUNDS = 5

BARE = """
import os
import torch
from sklearn.datasets import load_digits
from torch import nn

found = load_digits()
images, labels = torch.from_numpy(found.images).float()[:, None] / 16, torch.from_numpy(found.target).long()
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.GELU(),
    nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.GroupNorm(8, 64), nn.GELU(),
    nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.GELU(),
    nn.Flatten(), nn.Linear(64 * 4 * 4, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = torch.utils.data.TensorDataset(images, labels)
for image, label in torch.utils.data.DataLoader(data, batch_size=256, shuffle=True):
    nn.functional.cross_entropy(model(image), label).backward()
    optimizer.step()
    os._exit(0)
"""

ENGINE = """
import os
import torch
import anybatch as ab
from anybatch.recipes.digits import Digits, Network, loss

model = Network()
engine = ab.Engine(model, torch.optim.AdamW(model.parameters(), lr=3e-3), ab.mean_over_samples(loss))
for batch in ab.batches(Digits("train"), effective_batch_size=256):
    engine.step(batch)
    os._exit(0)
"""


def seconds_of(program: str) -> float:
    """Return the seconds of a process that ends after its first step."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    return time.perf_counter() - begun


def seconds_of_command() -> float:
    """Return the seconds from the start of `anybatch train` to the first step in its log."""
    with tempfile.TemporaryDirectory() as root:
        log = Path(root, "run", "events.jsonl")
        begun = time.monotonic()  # the log's clock
        command = ["train", "digits", "--steps", "1", "--out", str(log.parent)]
        subprocess.run([sys.executable, "-m", "anybatch", *command], check=True, capture_output=True)
        lines = map(json.loads, log.read_text(encoding="utf-8").splitlines())
        return next(line["time_seconds"] for line in lines if line["kind"] == "step") - begun


def rows() -> list[str]:
    """Measure interleaved and return the table's rows."""
    seconds: dict[str, list[float]] = {"bare torch": [], "`ab.Engine`": [], "`anybatch train`": []}
    for _ in range(NUM_ROUNDS):
        seconds["bare torch"].append(seconds_of(BARE))
        seconds["`ab.Engine`"].append(seconds_of(ENGINE))
        seconds["`anybatch train`"].append(seconds_of_command())
    table = ["| | seconds to the first step | times bare torch | quartiles |", "|---|--:|--:|---|"]
    for name, taken in seconds.items():
        ratios = [one / bare for one, bare in zip(taken, seconds["bare torch"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        table.append(f"| {name} | {statistics.median(taken):.2f} | {middle:.2f} | {low:.2f} to {high:.2f} |")
    return table


def main() -> None:
    """Print the table, and write it to a file if asked."""
    out = report.parser(__doc__).parse_args().out
    seconds_of(BARE)  # reads files from disk once
    seconds_of(ENGINE)
    report.publish(
        rows(),
        title="From the start of a process to its first step",
        command="python benchmarks/start_up.py",
        setting=f"{NUM_ROUNDS} rounds of fresh processes in turns, medians",
        out=out,
    )


if __name__ == "__main__":
    main()
