"""The cost of the loss check in the first step: seconds and memory of a process, with and without it.

    python benchmarks/first_step_check.py [--src FOLDER]... [--out benchmarks/results/NAME.md]

Variants alternate, each in a separate process: without the check, and with the check of each source folder (`--src`
adds folders, such as one of an earlier version). A process runs three steps; the table gives the first step over the
median of the others, and the peak of resident memory over the peak without the check.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import report

NUM_ROUNDS = 5
OWN = str(Path(__file__).parents[1] / "src")

PROGRAM = """
import json, resource, sys, time, warnings
import torch
from torch import nn
from torch.nn import functional as F
import anybatch as ab

torch.set_num_threads(1)
torch.manual_seed(0)
warnings.simplefilter("ignore")
kind, checks = sys.argv[1], sys.argv[2] == "check"
if kind == "convolution":
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10),
    )
    batch = {"x": torch.randn(128, 3, 32, 32), "y": torch.randint(0, 10, (128,))}
    loss = ab.mean_over_samples(lambda m, b: F.cross_entropy(m(b["x"]), b["y"]))
else:
    width, layers = {"small transformer": (64, 2), "transformer": (384, 6)}[kind]
    block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.Embedding(2000, width), nn.TransformerEncoder(block, layers), nn.Linear(width, 2000))
    ids = torch.randint(0, 2000, (64, 64))
    mask = torch.arange(64) >= torch.randint(20, 65, (64, 1))
    batch = {"x": ids, "labels": ids.masked_fill(mask, -100)}
    loss = ab.mean_over_tokens(
        lambda m, b: F.cross_entropy(m(b["x"]).flatten(0, 1), b["labels"].flatten()), shift=False
    )
optimizer = torch.optim.AdamW(model.parameters())
engine = ab.Engine(model, optimizer, loss, micro_batch_size=16, check_loss=checks, norms="keep")
seconds = []
for _ in range(3):
    begun = time.perf_counter()
    engine.step(batch)
    seconds.append(time.perf_counter() - begun)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([seconds, peak]))
"""


def measured(kind: str, folder: str, *, checks: bool) -> tuple[list[float], float]:
    """Return the seconds of three steps, and the peak of resident memory in MiB."""
    environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, kind, "check" if checks else "none"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    seconds, peak = json.loads(done.stdout.splitlines()[-1])
    return seconds, peak


def rows(folders: list[str]) -> list[str]:
    """Measure the variants alternately and return the table's rows."""
    table = ["| model | check of | first step over a step, without | with | MiB more |", "|---|---|--:|--:|--:|"]
    for kind in ("convolution", "small transformer", "transformer"):
        ratios: dict[str, list[float]] = {name: [] for name in ("", *folders)}
        peaks: dict[str, list[float]] = {name: [] for name in ("", *folders)}
        for _ in range(NUM_ROUNDS):
            for name, found in ratios.items():
                seconds, peak = measured(kind, name or OWN, checks=bool(name))
                found.append(seconds[0] / statistics.median(seconds[1:]))
                peaks[name].append(peak)
        for name in folders:
            more = statistics.median(peaks[name]) - statistics.median(peaks[""])
            without, with_check = (statistics.median(ratios[key]) for key in ("", name))
            source = "this version" if name == OWN else Path(name).parent.name
            table.append(f"| {kind} | {source} | {without:.2f} | {with_check:.2f} | {more:.0f} |")
    return table


def main() -> None:
    """Print the table, and write it to a file if asked."""
    parser = report.parser(__doc__)
    parser.add_argument("--src", action="append", default=[], help="source folder of another version")
    arguments = parser.parse_args()
    report.publish(
        rows([OWN, *arguments.src]),
        title="Cost of the check of the loss in the first step",
        command="python benchmarks/first_step_check.py",
        setting=f"{NUM_ROUNDS} rounds of fresh processes, alternating, medians",
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
