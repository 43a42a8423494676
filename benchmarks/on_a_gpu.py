"""Everything that needs a GPU, in one command: exactness on the device, precision, overlap of copies, memory, recipes.

Exactness is that of strategies, of losses across samples, of BatchNorm and of dropout by sample. It takes minutes.
Without a CUDA device it says so and exits with status 1. `--device cpu` runs what a CPU can run, to find mistakes in
the checks themselves.

    python benchmarks/on_a_gpu.py [--device cpu] [--out benchmarks/results/NAME.md]
"""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import report
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import anybatch as ab
from anybatch.core.batch import LaterUnits, Position, Positions
from anybatch.diagnostics import record_memory
from anybatch.norms import Ghost, Policy, PolicyName
from anybatch.parallel.fsdp import FSDP
from anybatch.parallel.sharding import Sharding
from anybatch.testing import RankPool, relative_error

Batch = dict[str, torch.Tensor]
Gradients = dict[str, torch.Tensor | None]
NUM_SAMPLES = 29
EXACT = 1e-12
OFFLOADED = "fsdp, offloaded to the host"
STRATEGIES = ("all_reduce", "ddp", "zero1", "fsdp", OFFLOADED)


class InMemory:
    """An effective batch whose samples are in (pinned) memory."""

    seed = 0
    end = Position(0, 0)

    def __init__(self, batch: Batch) -> None:
        pins = torch.cuda.is_available()
        self.batch = {name: value.pin_memory() if pins else value for name, value in batch.items()}
        self.sample_ids = range(len(batch["x"]))

    def feed(self, units: Sequence[Positions], later_units: LaterUnits | None = None) -> Iterator[Batch]:
        """Yield slices."""
        del later_units
        for positions in units:
            yield {name: value[positions[0] : positions[-1] + 1] for name, value in self.batch.items()}


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


def gradients_of(engine: ab.Engine, batch: Batch) -> Gradients:
    """Return an engine's gradient of one effective batch, on the CPU."""
    with engine:
        found = engine.gradients(InMemory(batch))
        return {name: None if g is None else whole(g).cpu() for name, g in found.items()}


def whole(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient that is sharded over ranks as one tensor."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def accumulated(device: str, strategy: str, micro_batch_size: int) -> Gradients:
    """Run on a rank: return the engine's gradient, computed on the device."""
    world = ab.World.from_environment(device=device)
    how: Any = FSDP(Sharding(cpu_offload=True)) if strategy == OFFLOADED else strategy
    engine = ab.Engine(
        small(),
        lambda named: torch.optim.SGD(named, lr=1e-3),
        ab.mean_over_samples(loss),
        micro_batch_size=micro_batch_size,
        strategy=how,
        world=world,
    )
    return gradients_of(engine, samples())


def exactness(device: str) -> Iterator[tuple[str, str]]:
    """Compare gradients with the un-split ones: one process, NCCL with one rank, two ranks on one GPU over gloo."""
    expected = unsplit()
    for size in (1, 3, 7):
        yield f"single, micro-batches of {size}", error_of(accumulated(device, "single", size), expected)
    yield "data_parallel, all devices", error_of(accumulated(device, "data_parallel", 7), expected)
    for strategy in STRATEGIES:
        if device != "cpu":
            yield f"NCCL, 1 rank, {strategy}", judged(nccl_error(strategy))
    with RankPool(2) as pool:
        for strategy in STRATEGIES:
            errors = [relative_error(found, expected) for found in pool.run(accumulated, device, strategy, 3)]
            yield f"gloo, 2 ranks on one device, {strategy}", judged(max(errors))


def error_of(found: Gradients, expected: Gradients) -> str:
    """Return the error of a gradient, in words."""
    return judged(relative_error(found, expected))


def judged(error: float) -> str:
    """Return an error; one that is not exact in float64 ends the check."""
    if not error <= EXACT:
        message = f"error {error:.1e} is above {EXACT:.0e}"
        raise AssertionError(message)
    return f"error {error:.1e}"


def nccl_error(strategy: str) -> float:
    """Return the error of one rank under NCCL, in a process of its own that a launcher would have started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    code = f"import on_a_gpu as g; print(g.relative_error(g.accumulated('cuda:0', {strategy!r}, 3), g.unsplit()))"
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


def encode(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return two views of each sample."""
    return torch.stack([model(batch["x"]), model(batch["x"].flip(1))], dim=1)


def contrast(_: nn.Module, views: torch.Tensor) -> torch.Tensor:
    """Return the contrastive loss of all samples: each view is to find its partner."""
    one, other = functional.normalize(views, dim=2).unbind(1)
    return functional.cross_entropy(one @ other.T / 0.1, torch.arange(len(one), device=one.device))


def accumulated_jointly(device: str, strategy: str, micro_batch_size: int) -> Gradients:
    """Run on a rank: return the gradient of a loss across samples, in two passes."""
    model = small()
    engine = ab.Engine(
        model,
        torch.optim.SGD(model.parameters()),
        ab.joint(encode, contrast),
        micro_batch_size=micro_batch_size,
        strategy=strategy,
        world=ab.World.from_environment(device=device),
    )
    return gradients_of(engine, samples())


def joint_losses(device: str) -> Iterator[tuple[str, str]]:
    """Compare the gradient of a loss across samples with that of the un-split batch."""
    model = small()
    contrast(model, encode(model, samples())).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for size in (1, 3, 29):
        found = accumulated_jointly(device, "single", size)
        yield f"joint, micro-batches of {size}", error_of(found, expected)
    with RankPool(2) as pool:
        found, _ = pool.run(accumulated_jointly, device, "all_reduce", 3)
        yield "joint, gloo, 2 ranks on one device", error_of(found, expected)


def normed() -> nn.Module:
    """Return the same small model with BatchNorm every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 5)).double()


def accumulated_normed(
    device: str, norms: "Policy | PolicyName", micro_batch_size: int | None, strategy: str = "single"
) -> Gradients:
    """Run on a rank: return the gradient of a model with BatchNorm under a policy."""
    model = normed()
    engine = ab.Engine(
        model,
        torch.optim.SGD(model.parameters()),
        ab.mean_over_samples(loss),
        micro_batch_size=micro_batch_size,
        norms=norms,
        strategy=strategy,
        world=ab.World.from_environment(device=device),
    )
    return gradients_of(engine, samples())


def in_groups(size: int) -> Gradients:
    """Return the gradient with BatchNorm over groups of samples, on the CPU; one that is left over joins the last."""
    model, batch = normed(), samples()
    starts = range(0, NUM_SAMPLES - 1, size)
    for start, stop in zip(starts, [*starts[1:], NUM_SAMPLES], strict=True):
        total = functional.cross_entropy(model(batch["x"][start:stop]), batch["y"][start:stop], reduction="sum")
        (total / NUM_SAMPLES).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def norms(device: str) -> Iterator[tuple[str, str]]:
    """Compare each policy about BatchNorm with the plain computation of what it says it does."""
    whole = in_groups(NUM_SAMPLES)
    for size in (3, 7):
        yield f"norms='exact', micro-batches of {size}", error_of(accumulated_normed(device, "exact", size), whole)
    ghosts = in_groups(4)
    for size in (4, 12):
        found = accumulated_normed(device, Ghost(4), size)
        yield f"norms=Ghost(4), micro-batches of {size}", error_of(found, ghosts)
    with RankPool(2) as pool:
        found, _ = pool.run(accumulated_normed, device, "sync", None, "all_reduce")
        yield "norms='sync', gloo, 2 ranks on one device", error_of(found, whole)
        found, _ = pool.run(accumulated_normed, device, "exact", 3, "all_reduce")
        yield "norms='exact', gloo, 2 ranks on one device", error_of(found, whole)


def dropped(device: str, micro_batch_size: int | None, strategy: str = "single") -> Gradients:
    """Run on a rank: return a gradient with dropout whose masks belong to samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 5)).double()
    engine = ab.Engine(
        model,
        torch.optim.SGD(model.parameters()),
        ab.mean_over_samples(loss),
        micro_batch_size=micro_batch_size,
        rng="per_sample",
        strategy=strategy,
        world=ab.World.from_environment(device=device),
    )
    return gradients_of(engine, samples())


def per_sample(device: str) -> Iterator[tuple[str, str]]:
    """Compare gradients with dropout at several cuts with that of the un-split batch on the same device."""
    whole = dropped(device, None)
    for size in (1, 3, 7):
        yield f"rng='per_sample', micro-batches of {size}", error_of(dropped(device, size), whole)
    with RankPool(2) as pool:
        found, _ = pool.run(dropped, device, 3, "all_reduce")
        yield "rng='per_sample', gloo, 2 ranks on one device", error_of(found, whole)


def memory(device: str) -> Iterator[tuple[str, str]]:
    """Record a step, tensor by tensor, and compare its peak with the allocator's."""
    width = 2048 if device != "cpu" else 64
    layers = [
        layer for _ in range(6) for layer in (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    ]
    model = nn.Sequential(*layers)
    batch = InMemory({"x": torch.randn(64, 32, width)})
    with ab.Engine(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-5),
        ab.mean_over_samples(lambda net, piece: net(piece["x"]).square().mean()),
        micro_batch_size=16,
        world=ab.World.from_environment(device=device),
    ) as engine:
        engine.step(batch)
        with record_memory(engine) as recording:
            engine.step(batch)
    found = recording.report
    for name, num_bytes in found.at_peak.items():
        yield f"memory at the peak: {name}", f"{num_bytes / 2**20:.2f} MiB"
    if found.allocator is not None:
        seen = found.timeline.peak_bytes / found.allocator.peak_bytes
        yield "memory: tensors seen, of what was handed out at most", f"{100 * seen:.2f}%"
        yield "memory", str(found.allocator)
    yield "memory", str(found).splitlines()[1]


def precision(device: str) -> Iterator[tuple[str, str]]:
    """Train 20 steps in each precision; the last losses should be close, and fp16 may skip its first steps."""
    for name in ("fp32", "bf16", "fp16"):
        model = small(torch.float32)
        engine = ab.Engine(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            ab.mean_over_samples(loss),
            micro_batch_size=7,
            precision=name,  # type: ignore[arg-type]
            clip=1.0,
            world=ab.World.from_environment(device=device),
        )
        with engine:
            reports = [engine.step(InMemory(samples(torch.float32))) for _ in range(20)]
        skipped = sum(step.skipped for step in reports)
        yield f"precision {name}", f"loss {reports[0].loss:.4f} -> {reports[-1].loss:.4f}, {skipped} skipped"


def overlap(device: str) -> Iterator[tuple[str, str]]:
    """Profile one step of large micro-batches: how much of the copying to the device runs while kernels compute."""
    if device == "cpu":
        yield "copies to the device", "left out: there is no device"
        return
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


def recipes(device: str) -> Iterator[tuple[str, str]]:
    """Run the recipes from the command line, and let a step of one be measured."""
    short = ["--steps", "2", "--effective-batch-size", "4"] if device == "cpu" else ["--steps", "200"]
    for name, options in (("digits", []), ("text", short), ("contrastive", ["--epochs", "2"])):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "anybatch", "train", name, "--out", f"{folder}/run", *options]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            wanted = ("done", "metrics", "memory")
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith(wanted)]
        yield f"anybatch train {name}", "; ".join(" ".join(line.split()) for line in lines)


def search(device: str) -> Iterator[tuple[str, str]]:
    """Let "auto" find a micro-batch size for a model whose whole batch does not fit, and step with it."""
    if device == "cpu":
        yield "micro_batch_size='auto'", "left out: on a CPU it is the whole share"
        return
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
    options = report.parser(__doc__)
    options.add_argument("--device", default="cuda:0", choices=("cuda:0", "cpu"), help="cpu: what can be run there")
    given = options.parse_args()
    if given.device != "cpu" and not torch.cuda.is_available():
        print("no CUDA device: nothing was run (--device cpu runs what a CPU can run)")
        return 1
    lines = ["| check | result |", "|---|---|"]
    checks: tuple[Callable[[str], Iterator[tuple[str, str]]], ...] = (
        exactness,
        joint_losses,
        norms,
        per_sample,
        precision,
        overlap,
        memory,
        search,
        recipes,
    )
    failed = 0
    for check in checks:
        try:
            for name, result in check(given.device):  # what came before a failure stays
                lines.append(f"| {name} | {result} |")
        except Exception as error:  # noqa: BLE001 (the other checks should still be run, and this one reported)
            failed += 1
            lines.append(f"| {check.__name__} | FAILED: {type(error).__name__}: {str(error).splitlines()[0]} |")
    report.publish(
        lines, title="What needs a GPU", command="python benchmarks/on_a_gpu.py", setting="one GPU", out=given.out
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
