"""Stage 1: the engine's gradient against the unsplit batch, by strategy, precision and kind of loss.

References are computed in plain PyTorch: in float64 on the CPU, and for lower precisions on the device itself.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from gpu.stage import Row, Rows, Setting
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import anybatch as ab
from anybatch.core.batch import LaterUnits, Position, Positions
from anybatch.norms import Ghost, Policy, PolicyName
from anybatch.parallel.fsdp import FSDP
from anybatch.parallel.sharding import Sharding
from anybatch.testing import RankPool, relative_error

TITLE = "Exactness on the device"
Batch = dict[str, torch.Tensor]
Gradients = dict[str, torch.Tensor | None]
NUM_SAMPLES = 29
OFFLOADED = "fsdp, offloaded to the host"
STRATEGIES = ("all_reduce", "ddp", "zero1", "fsdp", OFFLOADED)
EXACT = "Gradient of 29 samples in float64, against the unsplit batch on the CPU (relative error, bound 1e-12)"
ROUNDED = "Gradient in lower precisions (relative error against float64), split and unsplit by a plain loop"
TRAINED = "20 steps of AdamW with bf16 weights: distance from float32 training"


class InMemory:
    """An effective batch whose samples are in (pinned) memory."""

    seed = 0
    end = Position(0, 0)

    def __init__(self, batch: Batch) -> None:
        pins = torch.cuda.is_available()
        self.batch = {name: value.pin_memory() if pins else value for name, value in batch.items()}
        self.sample_ids = range(len(next(iter(batch.values()))))

    def feed(self, units: Sequence[Positions], later_units: LaterUnits | None = None) -> Iterator[Batch]:
        """Yield slices."""
        del later_units
        for positions in units:
            yield {name: value[list(positions)] for name, value in self.batch.items()}


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def small(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return the same small model every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 5)).to(dtype)


def normed() -> nn.Module:
    """Return the same small model with BatchNorm every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 5)).double()


def with_dropout() -> nn.Module:
    """Return the same small model with dropout every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 5)).double()


def samples(dtype: torch.dtype = torch.float64) -> Batch:
    """Return the same samples every time."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 8, generator=generator, dtype=torch.float64).to(dtype)
    return {"x": x, "y": torch.randint(0, 5, (NUM_SAMPLES,), generator=generator)}


def encode(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return two views of each sample."""
    return torch.stack([model(batch["x"]), model(batch["x"].flip(1))], dim=1)


def contrast(_: nn.Module, views: torch.Tensor) -> torch.Tensor:
    """Return the contrastive loss of all samples: each view has to find its partner."""
    one, other = functional.normalize(views, dim=2).unbind(1)
    return functional.cross_entropy(one @ other.T / 0.1, torch.arange(len(one), device=one.device))


def plain_gradients(model: nn.Module, value: torch.Tensor) -> Gradients:
    """Return the gradients of one backward, on the CPU."""
    value.backward()
    return {name: None if p.grad is None else p.grad.cpu() for name, p in model.named_parameters()}


def unsplit(model: nn.Module) -> Gradients:
    """Return the gradient of the whole batch in float64 on the CPU."""
    return plain_gradients(model, loss(model, samples()))


def in_groups(size: int) -> Gradients:
    """Return the gradient with BatchNorm over groups of samples; a single leftover sample joins the last group."""
    model, batch = normed(), samples()
    starts = range(0, NUM_SAMPLES - 1, size)
    total = torch.zeros((), dtype=torch.float64)
    for start, stop in zip(starts, [*starts[1:], NUM_SAMPLES], strict=True):
        part = functional.cross_entropy(model(batch["x"][start:stop]), batch["y"][start:stop], reduction="sum")
        total = total + part / NUM_SAMPLES
    return plain_gradients(model, total)


def engine_gradients(  # runs on a rank too
    make: Callable[..., nn.Module],
    device: str,
    strategy: str = "single",
    micro_batch_size: int | None = 3,
    *,
    declared: Any = None,  # noqa: ANN401 (a declared loss)
    batch: Batch | None = None,
    **options: Any,  # noqa: ANN401 (of the engine)
) -> Gradients:
    """Return the engine's gradient of one effective batch, computed on a device."""
    model = make()
    how: Any = FSDP(Sharding(cpu_offload=True)) if strategy == OFFLOADED else strategy
    engine = ab.Engine(
        model,
        lambda named: torch.optim.SGD(named, lr=1e-3),
        ab.mean_over_samples(loss) if declared is None else declared,
        micro_batch_size=micro_batch_size,
        strategy=how,
        world=ab.World.from_environment(device=device),
        **options,
    )
    with engine:
        found = engine.gradients(InMemory(samples() if batch is None else batch))
        return {name: None if g is None else whole(g).detach().cpu().clone() for name, g in found.items()}


def whole(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient that is sharded over ranks as one tensor."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def joint_gradients(device: str, strategy: str, micro_batch_size: int) -> Gradients:
    """Run on a rank: return the gradient of a loss across samples, in two passes."""
    return engine_gradients(small, device, strategy, micro_batch_size, declared=ab.joint(encode, contrast))


def normed_gradients(
    device: str, strategy: str, norms: "Policy | PolicyName", micro_batch_size: int | None
) -> Gradients:
    """Run on a rank: return the gradient of a model with BatchNorm under a policy."""
    return engine_gradients(normed, device, strategy, micro_batch_size, norms=norms)


def dropout_gradients(device: str, strategy: str, micro_batch_size: int | None) -> Gradients:
    """Run on a rank: return a gradient with dropout masks keyed by sample."""
    return engine_gradients(with_dropout, device, strategy, micro_batch_size, rng="per_sample")


def exact(case: str, found: Gradients, expected: Gradients) -> Row:
    """Return the error of a gradient, and whether it is within the bound."""
    error = relative_error(found, expected)
    return Row(EXACT, {"case": case, "error": f"{error:.1e}", "exact": "yes" if error <= 1e-12 else "NO"})


def one_process(setting: Setting) -> Rows:
    """Compare strategies, losses, norms and dropout in one process."""
    device, expected = setting.device, unsplit(small())
    for size in (1, 3, 7):
        yield exact(f"single, micro-batches of {size}", engine_gradients(small, device, "single", size), expected)
    yield exact("data_parallel", engine_gradients(small, device, "data_parallel", 7), expected)
    model = small()
    expected = plain_gradients(model, contrast(model, encode(model, samples())))
    for size in (1, 7):
        yield exact(f"joint, micro-batches of {size}", joint_gradients(device, "single", size), expected)
    for size in (3, 7):
        found = normed_gradients(device, "single", "exact", size)
        yield exact(f"norms='exact', micro-batches of {size}", found, in_groups(NUM_SAMPLES))
    yield exact("norms=Ghost(4), micro-batches of 12", normed_gradients(device, "single", Ghost(4), 12), in_groups(4))
    expected = dropout_gradients(device, "single", None)
    for size in (1, 7):
        found = dropout_gradients(device, "single", size)
        yield exact(f"rng='per_sample', micro-batches of {size}, against unsplit", found, expected)


def static_buffers(setting: Setting) -> Rows:
    """Compare models whose gradients are in static buffers, as in captured graphs."""
    batch = {name: value[:28] for name, value in samples().items()}  # graphs need micro-batches of one size
    if setting.on_gpu:
        model = small()
        expected = plain_gradients(model, loss(model, batch))
        found = engine_gradients(compiled, setting.device, "single", 7, batch=batch)
        found = {name.removeprefix("_orig_mod."): value for name, value in found.items()}
        yield exact("torch.compile(mode='reduce-overhead'), single", found, expected)
        found = engine_gradients(lambda: graphed(setting.device), setting.device, "single", 7, batch=batch)
        yield exact("make_graphed_callables, single", found, expected)
    else:
        model = small()
        expected = plain_gradients(model, loss(model, batch))
        found = engine_gradients(lambda: torch.compile(small(), backend="aot_eager"), "cpu", "single", 7, batch=batch)
        found = {name.removeprefix("_orig_mod."): value for name, value in found.items()}
        yield exact("torch.compile(backend='aot_eager'), single", found, expected)


def compiled() -> Any:  # noqa: ANN401 (a module; torch.compile is typed as a function)
    """Return the small model, compiled to CUDA graphs."""
    return torch.compile(small(), mode="reduce-overhead")


def graphed(device: str) -> nn.Module:
    """Return the small model, whose forward and backward replay CUDA graphs."""
    model = small().to(device)
    sample = torch.randn(7, 8, dtype=torch.float64, device=device, requires_grad=False)
    made: Any = torch.cuda.make_graphed_callables(model, (sample,))
    return made  # type: ignore[no-any-return]


def two_ranks(setting: Setting) -> Rows:
    """Compare strategies, losses, norms and dropout on two ranks that share the device, over gloo."""
    device = setting.device
    # FSDP on a GPU needs NCCL, which takes one GPU for each rank.
    strategies = setting.pick(STRATEGIES[:3], STRATEGIES, STRATEGIES[:2])
    with RankPool(2, timeout_seconds=40) as pool:
        expected = unsplit(small())
        for strategy in strategies:
            for found in pool.run(engine_gradients, small, device, strategy)[:1]:
                yield exact(f"gloo, 2 ranks on one device, {strategy}", found, expected)
        model = small()
        expected = plain_gradients(model, contrast(model, encode(model, samples())))
        found = pool.run(joint_gradients, device, "all_reduce", 3)[0]
        yield exact("joint, gloo, 2 ranks", found, expected)
        for policy, size in (("sync", None), ("exact", 3)):
            found = pool.run(normed_gradients, device, "all_reduce", policy, size)[0]
            yield exact(f"norms={policy!r}, gloo, 2 ranks", found, in_groups(NUM_SAMPLES))
        found = pool.run(dropout_gradients, device, "all_reduce", 3)[0]
        yield exact("rng='per_sample', gloo, 2 ranks", found, dropout_gradients(device, "single", None))


NCCL = """
import torch
from gpu import exactness as stage
for strategy in stage.STRATEGIES:
    try:
        print(strategy, stage.relative_error(stage.engine_gradients(stage.small, "cuda:0", strategy),
                                             stage.unsplit(stage.small())), sep="|", flush=True)
    except Exception as error:
        print(strategy, f"{type(error).__name__}: {error}".splitlines()[0], sep="|", flush=True)
"""


def nccl(setting: Setting) -> Rows:
    """Compare strategies on one rank under NCCL, in a process that a launcher would have started."""
    if not setting.on_gpu:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environment = {**os.environ, **launched, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", NCCL],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=50,
    )
    for line in done.stdout.splitlines():
        if line.count("|") != 1:
            continue
        strategy, result = line.split("|")
        try:
            error = float(result)
        except ValueError:
            yield Row(EXACT, {"case": f"NCCL, 1 rank, {strategy}", "error": result, "exact": "NO"})
            continue
        cells = {"error": f"{error:.1e}", "exact": "yes" if error <= 1e-12 else "NO"}
        yield Row(EXACT, {"case": f"NCCL, 1 rank, {strategy}", **cells})


def low_precision(setting: Setting) -> Rows:
    """Compare rounding errors of split and unsplit gradients in the same precision."""
    expected = unsplit(small())
    for name, dtype in (("fp32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        model = small(torch.float32).to(setting.device)
        batch = {key: value.to(setting.device) for key, value in samples(torch.float32).items()}
        kind = setting.device.split(":")[0]
        with torch.autocast(kind, dtype, enabled=dtype is not None):
            value = loss(model, batch)
        plain = relative_error(plain_gradients(model, value), expected)
        cells = {"precision": name, "plain loop, unsplit": f"{plain:.1e}"}
        if name == "fp16" and not setting.on_gpu:
            continue
        for size in (3, 7):
            found = engine_gradients(
                lambda: small(torch.float32), setting.device, "single", size, batch=samples(torch.float32),
                precision=name,
            )  # fmt: skip
            cells[f"engine, micro-batches of {size}"] = f"{relative_error(found, expected):.1e}"
        yield Row(ROUNDED, cells)


def bf16_weights(setting: Setting) -> Rows:
    """Train with bf16 weights in each of the three ways, and in float32 and plain bf16 for comparison."""
    reference = trained(setting, torch.float32, None)
    start = torch.cat([p.detach().flatten() for p in small(torch.float32).parameters()])
    moved = float((reference - start).norm())
    for how in ("plain loop, bf16 optimizer", "copied", "split", "stochastic"):
        weights = trained(setting, torch.bfloat16, how)
        distance = float((weights.float() - reference).norm()) / moved
        yield Row(TRAINED, {"weights": how, "distance / movement of float32 training": f"{distance:.1e}"})


def trained(setting: Setting, dtype: torch.dtype, how: str | None) -> torch.Tensor:
    """Return the weights after 20 steps of AdamW, as one vector on the CPU."""
    model, batch = small(dtype), samples(dtype)
    if how is None or how.startswith("plain"):
        model, batch = model.to(setting.device), {key: value.to(setting.device) for key, value in batch.items()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(20):
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
    else:
        with ab.Engine(
            model,
            lambda named: torch.optim.AdamW(named, lr=1e-3),
            ab.mean_over_samples(loss),
            micro_batch_size=7,
            bf16_weights=how,  # type: ignore[arg-type]
            world=ab.World.from_environment(device=setting.device),
        ) as engine:
            for _ in range(20):
                engine.step(InMemory(batch))
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


CHECKS = (one_process, nccl, two_ranks, low_precision, bf16_weights, static_buffers)
