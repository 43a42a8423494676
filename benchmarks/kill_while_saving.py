"""A run killed while it writes a checkpoint in the background loads the old checkpoint or the new one, complete.

Two ranks under `fsdp` train and save shards; at a random moment after the folder of a save appears, all
processes get SIGKILL together, as in a power failure. Then the newest checkpoint is loaded: it must be complete, of
the step in its name, without skipping any.

    python benchmarks/kill_while_saving.py [--out benchmarks/results/NAME.md]
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import report
import torch
from torch import nn

import anybatch as ab
from anybatch.checkpoints import load_latest

NUM_KILLS = 20
WIDTH, NUM_LAYERS = 512, 8
MOST_SECONDS = 0.1
PROGRAM = "import sys; sys.path.insert(0, {place!r}); import kill_while_saving as k; k.train({folder!r}, {rank})"


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a mean over samples."""
    return model(batch["x"]).square().mean()


def train(folder: str, rank: int) -> None:
    """Train and save until the process is killed; record each save before it begins."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    engine = ab.Engine(
        model,
        lambda named: torch.optim.AdamW(named, lr=1e-3),
        ab.mean_over_samples(loss),
        micro_batch_size=4,
        strategy="fsdp",
    )
    batch = {"x": torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))}  # this rank's share
    while True:
        engine.step(batch)
        if engine.num_steps > 1 and rank == 0:
            Path(folder, "begun").write_text(str(engine.num_steps))
        engine.save(Path(folder, "checkpoints"))
        for _ in range(3):
            engine.step(batch)


def killed(folder: Path, seconds: float) -> tuple[int, int, str]:
    """Kill a run this long after the first file of a later save; return its step, the loaded step and a remark."""
    place = str(Path(__file__).parent)
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(place=place, folder=str(folder), rank=rank)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    while not ((folder / "begun").exists() and any((folder / "checkpoints").glob("*.saving"))):
        if any(run.poll() is not None for run in runs):
            message = "a rank has ended before the second save"
            raise RuntimeError(message)
        time.sleep(0.002)
    time.sleep(seconds)
    for run in runs:
        run.send_signal(signal.SIGKILL)
    for run in runs:
        run.wait()
    begun = int((folder / "begun").read_text())
    half = ", ".join(path.name for path in sorted((folder / "checkpoints").glob("*.saving")))
    loaded = load_latest(folder / "checkpoints")
    steps = {float(values["step"]) for values in loaded.state["optimizer"]["state"].values()}
    is_whole = not loaded.skipped and steps == {float(loaded.state["num_steps"])}
    return begun, loaded.state["num_steps"], f"{'yes' if is_whole else 'NO'} | {half}"


def main() -> None:
    """Print the table, and write it to a file if asked."""
    out = report.parser(__doc__).parse_args().out
    draw = random.Random(0)  # noqa: S311 (nothing here is secret)
    table = ["| seconds after the first file | last save begun | loaded | whole | left half-written |"]
    table.append("|--:|--:|--:|---|---|")
    with tempfile.TemporaryDirectory() as root:
        for number in range(NUM_KILLS):
            folder, seconds = Path(root, str(number)), draw.uniform(0, MOST_SECONDS)
            folder.mkdir()
            begun, found, how = killed(folder, seconds)
            table.append(f"| {seconds:.3f} | {begun} | {found} | {how} |")
    report.publish(
        table,
        title="Killed while a checkpoint is written in the background",
        command="python benchmarks/kill_while_saving.py",
        setting=f"two ranks under fsdp, {NUM_KILLS} kills",
        out=out,
    )


if __name__ == "__main__":
    main()
