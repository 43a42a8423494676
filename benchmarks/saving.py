"""The cost of a checkpoint for each way of saving: the pause in training, and rank 0's memory.

Two ranks under `fsdp` run steps and save whole (gathered, by rank 0), in parts, and whole without waiting, one after
the other, repeatedly. The table compares the time of a call of `engine.save` with the time of a step; for the last way
also the time of a step while a checkpoint is being written. Memory is the increase of the resident set during the call,
at its maximum.

    python benchmarks/saving.py [--out benchmarks/results/NAME.md]
"""

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import report
import torch
from torch import nn

import anybatch as ab

WIDTH, NUM_LAYERS, NUM_ROUNDS = 1024, 12, 7
WAYS = {
    "whole": {"sharded": False},
    "in parts": {"sharded": True},
    "whole, not waiting": {"sharded": False, "wait": False},
}
PROGRAM = "import sys; sys.path.insert(0, {place!r}); import saving; saving.measure({folder!r}, {rank})"


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a mean over samples."""
    return model(batch["x"]).square().mean()


def resident_bytes() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def watched(function: Callable[[], object]) -> tuple[float, int]:
    """Return the seconds of a call, and how far memory rises above its level before."""
    before, highest, is_over = resident_bytes(), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.002):
            highest[0] = max(highest[0], resident_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    start = time.perf_counter()
    function()
    seconds = time.perf_counter() - start
    is_over.set()
    thread.join()
    return seconds, max(highest[0], resident_bytes()) - before


def measure(folder: str, rank: int) -> None:
    """Run on each rank; rank 0 writes the rows of the table."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    state_bytes = 3 * sum(parameter.nbytes for parameter in model.parameters())
    seconds, risen, steps, during = (defaultdict(list) for _ in range(4))
    batch = {"x": torch.randn(32, WIDTH)}
    with ab.Engine(
        model,
        lambda named: torch.optim.AdamW(named, lr=1e-3),
        ab.mean_over_samples(loss),
        micro_batch_size=16,
        strategy="fsdp",
    ) as engine:
        for number in range(NUM_ROUNDS + 1):
            for name, way in WAYS.items():
                step, _ = watched(lambda: engine.step(batch))
                torch.distributed.barrier()
                took, more = watched(partial(engine.save, Path(folder, name), keep_last=1, **way))
                beside, _ = watched(lambda: engine.step(batch))
                # Wait for the thread, so that no way pays for another one.
                while any(thread.name == "anybatch checkpoint" for thread in threading.enumerate()):
                    time.sleep(0.005)
                torch.distributed.barrier()
                if number:  # the first round warms up
                    steps[name].append(step)
                    seconds[name].append(took)
                    risen[name].append(more / state_bytes)
                    during[name].append(beside / step)
    if rank == 0:
        rows = [
            "| saving | save / step | save / whole save | next step / step | rank 0's memory rises by, of the state |",
            "|---|--:|--:|--:|--:|",
        ]
        for name in WAYS:
            of_step = [one / step for one, step in zip(seconds[name], steps[name], strict=True)]
            of_whole = [one / other for one, other in zip(seconds[name], seconds["whole"], strict=True)]
            cells = [of_step, of_whole, during[name], risen[name]]
            rows.append(f"| {name} | " + " | ".join(map(quartiles, cells)) + " |")
        rows += ["", f"The state has {state_bytes / 2**20:.0f} MiB: weights and AdamW's two moments."]
        Path(folder, "rows").write_text("\n".join(rows))


def quartiles(ratios: list[float]) -> str:
    """Return the median, with the quartiles, as text."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    """Print the table, and write it to a file if asked."""
    out = report.parser(__doc__).parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(__file__).parent)
        runs = [
            subprocess.Popen([sys.executable, "-c", PROGRAM.format(place=place, folder=folder, rank=rank)])
            for rank in range(2)
        ]
        assert [run.wait() for run in runs] == [0, 0]
        rows = Path(folder, "rows").read_text().splitlines()
    report.publish(
        rows,
        title="What saving costs",
        command="python benchmarks/saving.py",
        setting=f"two ranks under fsdp on one machine, {NUM_ROUNDS} interleaved rounds, medians and quartiles",
        out=out,
    )


if __name__ == "__main__":
    main()
