"""Stage 5: copies that overlap with compute, waiting for data, token budgets, and the cost of the exact policies."""

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu.stage import Row, Rows, Setting
from gpu.token_budgets import new_lengths, token_budgets
from gpu.two_models import (
    Decoder,
    class_loss,
    convolutions,
    engine_of,
    milliseconds,
    new_model,
    next_token_loss,
    ratio,
    seconds_of,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset, TensorDataset

import anybatch as ab
from anybatch.norms import Exact
from anybatch.records import PhaseRecord

TITLE = "Data"
SAMPLE_SECONDS = 0.002
SHARED_MEMORY = "/dev/shm"  # noqa: S108 (where Linux has it)
Batch = dict[str, Any]
Interval = tuple[float, float]
Loss = Callable[[nn.Module, Any], Tensor]


# Overlap of copies and compute


def traced(step: Callable[[], object], setting: Setting) -> tuple[list[Interval], list[Interval]]:
    """Return the times of copies to the device and of kernels in a step, in microseconds."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.on_gpu else [])]
    with profile(activities=activities) as trace:
        step()
        setting.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    # By category: annotations on the device's timeline look like kernels to `profile.events()`.
    kernel = "kernel" if setting.on_gpu else "cpu_op"
    spans = [(one.get("cat"), one["name"], (one["ts"], one["ts"] + one["dur"])) for one in events if "dur" in one]
    copies = [span for category, name, span in spans if category == "gpu_memcpy" and "HtoD" in name]
    return copies, [span for category, _, span in spans if category == kernel]


def united(spans: Sequence[Interval]) -> list[Interval]:
    """Return the same time as disjoint intervals."""
    found: list[Interval] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def shared(ones: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Return how long intervals of both lists overlap."""
    pairs = ((one, other) for one in united(ones) for other in united(others))
    return sum(max(0.0, min(one[1], other[1]) - max(one[0], other[0])) for one, other in pairs)


def overlap(setting: Setting) -> Rows:
    """Profile a step of large micro-batches whose samples are on the host."""
    width, num_layers, size, number = setting.pick((4096, 8, 2048, 16), (128, 2, 32, 8), (32, 1, 8, 4))
    rows = torch.randn(size * number, width, generator=torch.Generator().manual_seed(0))

    def loss(model: nn.Module, batch: Any) -> Tensor:  # noqa: ANN401 (a tensor, or a list with one)
        return model(batch if isinstance(batch, Tensor) else batch[0]).square().mean()

    def perceptron() -> nn.Module:
        return nn.Sequential(*[layer for _ in range(num_layers) for layer in (nn.Linear(width, width), nn.GELU())])

    engine = engine_of(new_model(perceptron, setting.device), loss, size, precision="bf16")
    loaders = {
        f"ab.batches, {num_workers} workers": iter(
            ab.batches(
                TensorDataset(rows), effective_batch_size=len(rows), epochs=1000, num_workers=num_workers, shuffle=False
            )
        )
        for num_workers in (0, 2)
        if not num_workers or shutil.disk_usage(SHARED_MEMORY).free > 1 << 30  # workers send tensors through it
    }
    on_device, pinned = rows.to(setting.device), rows.pin_memory() if setting.on_gpu else rows
    sources: dict[str, Callable[[], Any]] = {
        "on the device already": lambda: on_device,
        "tensor, pinned": lambda: pinned,
        "tensor, not pinned": lambda: rows,
        **{name: partial(next, batches) for name, batches in loaders.items()},
    }
    steps = {name: lambda source=source: engine.step(source()) for name, source in sources.items()}
    with engine:
        seconds = seconds_of(setting, steps, setting.pick(5, 3, 1))
        for name, step in steps.items():
            print(f"  {name}", flush=True)
            copies, kernels = traced(step, setting)
            total = sum(stop - start for start, stop in copies)
            yield Row(
                f"Copies to the device under kernels: one step, {number} micro-batches of {size} x {width} float32",
                {
                    "batch": name,
                    "copies": str(len(copies)),
                    "copying, ms": f"{total / 1e3:.2f}",
                    "of it under kernels": f"{shared(copies, kernels) / total:.0%}" if total else "none",
                    "kernels, ms": f"{sum(stop - start for start, stop in united(kernels)) / 1e3:.2f}",
                    "step, ms": milliseconds(seconds[name]),
                    "step / on the device": ratio(seconds[name], seconds["on the device already"]),
                },
            )
    for batches in loaders.values():
        batches.close()


# Waiting for data


def pixel_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy over images of bytes."""
    return functional.cross_entropy(model(batch["x"].float() / 255), batch["y"])


class Slow(Dataset[Batch]):
    """Images of bytes that take a processor about 2 ms each, as decoding does."""

    def __init__(self, side: int) -> None:
        self._image = torch.randint(0, 256, (3, side, side), dtype=torch.uint8)

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> Batch:
        end = time.perf_counter() + SAMPLE_SECONDS
        while time.perf_counter() < end:
            pass
        return {"x": self._image, "y": torch.tensor(index % 10)}


class LoadTime:
    """Observes how long the host waits for micro-batches."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def observe(self, record: object) -> None:
        """Add up the time between the beginning and the end of loading."""
        if isinstance(record, PhaseRecord) and record.name == "load":
            self.seconds += time.perf_counter() * (1 if record.event == "end" else -1)


def waiting(setting: Setting) -> Rows:
    """Train on samples that take 2 ms each, with more and more workers."""
    channels, side, size, num_steps = setting.pick((256, 64, 64, 6), (8, 16, 8, 3), (4, 8, 4, 1))
    model = new_model(lambda: convolutions(channels), setting.device)
    workers = setting.pick((16, 8, 1, 0), (2, 1, 0), (1, 0))
    batch = {
        "x": torch.zeros(4 * size, 3, side, side, dtype=torch.uint8, device=setting.device),
        "y": torch.zeros(4 * size, dtype=torch.int64, device=setting.device),
    }
    load_time = LoadTime()
    with engine_of(model, pixel_loss, size, precision="bf16", observer=load_time) as engine:
        at_hand = seconds_of(setting, {"": lambda: engine.step(batch)}, num_steps)[""]
        for num_workers in workers:
            print(f"  {num_workers} workers", flush=True)
            data = ab.batches(Slow(side), effective_batch_size=4 * size, epochs=1, num_workers=num_workers)
            batches = iter(data)
            engine.step(next(batches))  # workers start
            load_time.seconds = 0.0
            seconds = seconds_of(
                setting, {"": lambda batches=batches: engine.step(next(batches))}, num_steps, warm_up=0
            )
            batches.close()
            total = sum(seconds[""])
            yield Row(
                f"Waiting for samples of 2 ms: {4 * size} a step in micro-batches of {size}, CNN in bf16",
                {
                    "workers": str(num_workers),
                    "step, ms": milliseconds(seconds[""]),
                    "step with data at hand, ms": milliseconds(at_hand),
                    "host waits for data, of the step": f"{load_time.seconds / total:.0%}",
                    "added to the step by data": f"{max(0.0, 1 - statistics.median(at_hand) * num_steps / total):.0%}",
                    "samples/s": f"{4 * size * num_steps / total:,.0f}",
                    "samples/s that workers can load": f"{max(1, num_workers) / SAMPLE_SECONDS:,.0f}",
                },
            )


# Exact policies against plain loops


def plain(model: nn.Module, loss: Loss, batch: dict[str, Tensor], size: int) -> Callable[[], None]:
    """Return a step of a hand-written loop over slices of a batch on the device, in bf16."""
    optimizer, number = torch.optim.AdamW(model.parameters(), lr=1e-5), len(batch["x"])

    def step() -> None:
        for start in range(0, number, size):
            piece = {name: value[start : start + size] for name, value in batch.items()}
            with torch.autocast(batch["x"].device.type, torch.bfloat16):
                value = loss(model, piece)
            (value * (size / number)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Encoders(nn.Module):
    """Two perceptrons over sequences, as CLIP has two encoders, and a temperature."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        layers = [layer for _ in range(num_layers) for layer in (nn.Linear(width, width), nn.GELU())]
        more = [layer for _ in range(num_layers) for layer in (nn.Linear(width, width), nn.GELU())]
        self.x, self.y = nn.Sequential(*layers), nn.Sequential(*more)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))


def encode(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:  # noqa: ANN401 (the encoders)
    """Return the vectors of both sides."""
    x, y = (functional.normalize(net(batch[name]).mean(1), dim=1) for name, net in (("x", model.x), ("y", model.y)))
    return x, y


def contrast(model: Any, vectors: tuple[Tensor, Tensor]) -> Tensor:  # noqa: ANN401 (the encoders)
    """Return CLIP's loss of all pairs."""
    logits = model.logit_scale.exp() * vectors[0] @ vectors[1].T
    partner = torch.arange(len(logits), device=logits.device)
    return (functional.cross_entropy(logits, partner) + functional.cross_entropy(logits.T, partner)) / 2


def joint_loss(setting: Setting) -> Rows:
    """Compare two passes with the unsplit contrastive batch, and with a loop that takes each micro-batch's own loss."""
    width, num_layers, time_steps, number = setting.pick((2048, 6, 32, 1024), (64, 2, 8, 32), (16, 1, 4, 16))
    draw = torch.Generator().manual_seed(0)
    batch = {name: torch.randn(number, time_steps, width, generator=draw).to(setting.device) for name in "xy"}

    def loss(model: nn.Module, piece: Batch) -> Tensor:
        return contrast(model, encode(model, piece))

    for num_units in (4, 16):
        models = [new_model(lambda: Encoders(width, num_layers), setting.device) for _ in range(3)]
        size = number // num_units
        with engine_of(models[2], ab.joint(encode, contrast), size, precision="bf16") as engine:
            steps = {
                "unsplit": plain(models[0], loss, batch, number),
                "loop": plain(models[1], loss, batch, size),
                "joint": partial(engine.step, batch),
            }
            seconds = seconds_of(setting, steps, setting.pick(9, 3, 1), warm_up=2)
        yield Row(
            f"`ab.joint` (two passes, {number} pairs in bf16) / plain PyTorch",
            {
                "micro-batches": str(num_units),
                "joint / unsplit batch": ratio(seconds["joint"], seconds["unsplit"]),
                "joint / loop with another loss": ratio(seconds["joint"], seconds["loop"]),
                "unsplit, ms": milliseconds(seconds["unsplit"]),
                "loop, ms": milliseconds(seconds["loop"]),
                "joint, ms": milliseconds(seconds["joint"]),
            },
        )


def against_loop(
    setting: Setting,
    heading: str,
    model: Callable[[], nn.Module],
    loss: Loss,
    batch: dict[str, Tensor],
    *,
    ways: dict[str, dict[str, Any]],
) -> Rows:
    """Yield a row for each way to run the engine: its time relative to a plain accumulated step."""
    size, batch = len(batch["x"]) // 4, {name: value.to(setting.device) for name, value in batch.items()}
    engines = {
        name: engine_of(new_model(model, setting.device), loss, size, precision="bf16", **options)
        for name, options in ways.items()
    }
    steps: dict[str, Callable[[], object]] = {
        "plain loop": plain(new_model(model, setting.device), loss, batch, size),
        **{name: partial(engine.step, batch) for name, engine in engines.items()},
    }
    seconds = seconds_of(setting, steps, setting.pick(9, 3, 1), warm_up=2)
    for name in steps:
        yield Row(
            heading,
            {
                "step": name,
                "time / plain loop": ratio(seconds[name], seconds["plain loop"]),
                "ms": milliseconds(seconds[name]),
            },
        )
    for engine in engines.values():
        engine.close()


def exact_norms(setting: Setting) -> Rows:
    """Compare norms="exact" with the plain accumulated step, which normalizes each micro-batch separately."""
    channels, side, number = setting.pick((128, 64, 256), (8, 16, 16), (4, 8, 8))
    batch = {"x": torch.randn(number, 3, side, side), "y": torch.arange(number) % 10}
    ways: dict[str, dict[str, Any]] = {
        'norms="keep"': {"norms": "keep"},
        'norms="exact"': {"norms": "exact"},
        "Exact(offload=False)": {"norms": Exact(offload=False)},
        'Exact(method="checkpoint")': {"norms": Exact(method="checkpoint")},
    }
    heading = f"BatchNorm, {number} images of {side} x {side} in 4 micro-batches, bf16"
    yield from against_loop(setting, heading, lambda: convolutions(channels), class_loss, batch, ways=ways)


def per_sample(setting: Setting) -> Rows:
    """Compare rng="per_sample" with the plain accumulated step."""
    width, num_layers, tokens, number = setting.pick((768, 6, 512, 64), (64, 2, 32, 16), (32, 1, 16, 8))
    words = torch.randint(0, 256, (number, tokens))

    def decoder() -> nn.Module:
        return Decoder(vocabulary=256, width=width, num_layers=num_layers, longest=tokens, dropout=0.1)

    ways: dict[str, dict[str, Any]] = {rng: {"rng": rng} for rng in ("micro_batch", "per_sample")}
    ways = {f'rng="{name}"': options for name, options in ways.items()}
    heading = f"Dropout in {num_layers} blocks, {number} texts of {tokens} tokens in 4 micro-batches, bf16"
    yield from against_loop(setting, heading, decoder, next_token_loss, {"x": words, "y": words.roll(-1, 1)}, ways=ways)


CHECKS = (overlap, new_lengths, token_budgets, waiting, joint_loss, exact_norms, per_sample)
