"""Everything that needs a GPU, in one command: exactness on the device, precision, overlap of copies, both recipes.

Without a CUDA device it says so and exits with status 1.

    python benchmarks/on_a_gpu.py [--out benchmarks/results/NAME.md]
"""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import report
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import anybatch as ab
from anybatch.core.batch import Placement, Position
from anybatch.testing import RankPool, relative_error

Batch = dict[str, torch.Tensor]
Gradients = dict[str, torch.Tensor | None]
NUM_SAMPLES = 29


class InMemory:
    """An effective batch whose samples are in (pinned) memory."""

    seed = 0
    end = Position(0, 0)

    def __init__(self, batch: Batch) -> None:
        self.batch = {name: value.pin_memory() for name, value in batch.items()}
        self.sample_ids = range(len(batch["x"]))

    def feed(self, placement: Placement) -> Iterator[Batch]:
        """Yield slices."""
        for unit in placement.plan(len(self.sample_ids)).shares[placement.rank]:
            yield {name: value[unit.start : unit.stop] for name, value in self.batch.items()}


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def small(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return the same small model every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 5)).to(dtype)


def samples(dtype: torch.dtype = torch.float64) -> Batch:
    """Return the same samples every time."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 8, generator=generator, dtype=torch.float64).to(dtype)
    return {"x": x, "y": torch.randint(0, 5, (NUM_SAMPLES,), generator=generator)}


def unsplit() -> Gradients:
    """Return the gradient of the whole batch at once, on the CPU in float64."""
    model, batch = small(), samples()
    functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def accumulated(strategy: str, micro_batch_size: int) -> Gradients:
    """Run on a rank: return the engine's gradient, computed on the GPU."""
    world = ab.World.from_environment(device="cuda:0")
    model = small()
    optimizer = torch.optim.SGD(model.parameters())
    with ab.Engine(
        model,
        optimizer,
        ab.mean_over_samples(loss),
        micro_batch_size=micro_batch_size,
        strategy=strategy,
        world=world,
    ) as engine:
        return {name: None if g is None else g.cpu() for name, g in engine.gradients(InMemory(samples())).items()}


def exactness() -> Iterator[tuple[str, str]]:
    """Compare gradients with the un-split ones: one process, NCCL with one rank, two ranks on one GPU over gloo."""
    expected = unsplit()
    for size in (1, 3, 7):
        yield f"single, micro-batches of {size}", f"error {relative_error(accumulated('single', size), expected):.1e}"
    for strategy in ("all_reduce", "ddp"):
        yield f"NCCL, 1 rank, {strategy}", f"error {nccl_error(strategy):.1e}"
    with RankPool(2) as pool:
        for strategy in ("all_reduce", "ddp"):
            errors = [relative_error(found, expected) for found in pool.run(accumulated, strategy, 3)]
            yield f"gloo, 2 ranks on one GPU, {strategy}", f"error {max(errors):.1e}"


def nccl_error(strategy: str) -> float:
    """Return the error of one rank under NCCL, in a process of its own that a launcher would have started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    code = f"import on_a_gpu as g; print(g.relative_error(g.accumulated({strategy!r}, 3), g.unsplit()))"
    environment = {**os.environ, **launched, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.splitlines()[-1])


def precision() -> Iterator[tuple[str, str]]:
    """Train 20 steps in each precision; the last losses should be close, and fp16 may skip its first steps."""
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.float32), ("fp16", torch.float32)):
        model = small(dtype)
        engine = ab.Engine(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            ab.mean_over_samples(loss),
            micro_batch_size=7,
            precision=name,  # type: ignore[arg-type]
            clip=1.0,
        )
        with engine:
            reports = [engine.step(InMemory(samples(dtype))) for _ in range(20)]
        skipped = sum(step.skipped for step in reports)
        yield f"precision {name}", f"loss {reports[0].loss:.4f} -> {reports[-1].loss:.4f}, {skipped} skipped"


def overlap() -> Iterator[tuple[str, str]]:
    """Profile one step of large micro-batches: how much of the copying to the device runs while kernels compute."""
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(4096, 4096), nn.GELU())])
    generator = torch.Generator().manual_seed(0)
    batch = InMemory({"x": torch.randn(16 * 2048, 4096, generator=generator)})
    with ab.Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-5),
        ab.mean_over_samples(lambda net, piece: net(piece["x"]).square().mean()),
        micro_batch_size=2048,
    ) as engine:
        engine.step(batch)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
            engine.step(batch)
            torch.cuda.synchronize()
    device = [event for event in trace.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = [e.time_range for e in device if "HtoD" in e.name]
    kernels = sorted((e.time_range.start, e.time_range.end) for e in device if "Memcpy" not in e.name)
    total = sum(copy.end - copy.start for copy in copies)
    hidden = sum(max(0.0, min(copy.end, end) - max(copy.start, start)) for copy in copies for start, end in kernels)
    yield (
        "copies to the device",
        f"{len(copies)} copies, {total / 1e3:.1f} ms, {100 * hidden / total:.0f}% during kernels",
    )


def recipes() -> Iterator[tuple[str, str]]:
    """Run both recipes from the command line."""
    for name, options in (("digits", []), ("text", ["--steps", "200"])):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "anybatch", "train", name, "--out", f"{folder}/run", *options]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            wanted = ("done", "metrics")
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith(wanted)]
        yield f"anybatch train {name}", "; ".join(" ".join(line.split()) for line in lines)


def search() -> Iterator[tuple[str, str]]:
    """Let "auto" find a micro-batch size for a model whose whole batch does not fit, and step with it."""
    free, _ = torch.cuda.mem_get_info()
    width = 8192
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(width, width), nn.GELU())])
    num_samples = int(2 * free / (12 * width * 4))  # the activations of all at once take about twice what is free
    batch = {"x": torch.randn(1, width).expand(num_samples, width)}
    with ab.Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-5),
        ab.mean_over_samples(lambda net, piece: net(piece["x"]).square().mean()),
    ) as engine:
        step = engine.step(batch)
        yield "micro_batch_size='auto'", f"{step.plan}: {engine.decisions['micro_batch_size']}"


def main() -> int:
    """Run every check, print the table, and write it to a file if asked."""
    out = report.parser(__doc__).parse_args().out
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was run")
        return 1
    lines = ["| check | result |", "|---|---|"]
    checks: tuple[Callable[[], Iterator[tuple[str, str]]], ...] = (
        exactness,
        precision,
        overlap,
        search,
        recipes,
    )
    failed = 0
    for check in checks:
        try:
            lines += [f"| {name} | {result} |" for name, result in check()]
        except Exception as error:  # noqa: BLE001 (the other checks should still be run, and this one reported)
            failed += 1
            lines.append(f"| {check.__name__} | FAILED: {type(error).__name__}: {str(error).splitlines()[0]} |")
    report.publish(lines, title="What needs a GPU", command="python benchmarks/on_a_gpu.py", setting="one GPU", out=out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
