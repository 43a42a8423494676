"""Predicted against measured seconds of a step.

Each configuration is traced twice without data, with micro-batches of 2 and of 3 samples, and the time of a step of
three micro-batches, the last of them half as large, is predicted at the size in the table. Rates of the device
are measured on small programs at separate sizes; nothing in the table is measured beforehand.

Times are CPU seconds of the one thread, so that others who use the machine disturb them less; medians. The second
column of errors is the bare roofline: highest rates seen, no correction.

    python benchmarks/step_time.py [--out benchmarks/results/NAME.md]
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import report
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch.memory.ledger import MemoryLedger
from anybatch.planner.calibration import measure_rates
from anybatch.planner.operations import OperationRecorder
from anybatch.planner.step_time import CostLine, CostTrace, Rates, fit_costs, step_seconds

TRACED = (2, 3)
NUM_STEPS = 9
LEARNING_RATE = 1e-9  # weights hardly change, so that no gradient underflows, which is slow on CPUs
Sample = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A transformer block as in GPT-2, with causal attention."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.before_mixing, self.before_widening = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inwards, self.outwards = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        parts = self.inwards(self.before_mixing(x)).split(x.shape[-1], dim=-1)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.outwards(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.narrow(functional.gelu(self.wide(self.before_widening(x))))
        return out


class Transformer(nn.Module):
    """A causal language model."""

    def __init__(self, vocabulary: int, depth: int, width: int, num_heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        places = torch.arange(x.shape[1], device=x.device)
        out: Tensor = self.head(self.norm(self.blocks(self.tokens(x) + self.places(places))))
        return out


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and a residual connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.way = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.around = short if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return functional.relu(self.way(x) + self.around(x))


def resnet(width: int) -> nn.Module:
    """Return a small ResNet for images of 32 by 32."""
    stem = (nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    blocks = (Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def plain_cnn(width: int) -> nn.Module:
    """Return three convolutions with pooling, without BatchNorm."""
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2 * width * 64, 10)),
    )


def mlp(width: int) -> nn.Module:
    """Return a perceptron of five layers."""
    inner = itertools.chain.from_iterable((nn.Linear(width, width), nn.GELU()) for _ in range(3))
    return nn.Sequential(nn.Linear(256, width), nn.GELU(), *inner, nn.Linear(width, 10))


def images(num: int) -> Sample:
    """Return images and classes."""
    return torch.randn(num, 3, 32, 32), torch.randint(0, 10, (num,))


def vectors(num: int) -> Sample:
    """Return vectors and classes."""
    return torch.randn(num, 256), torch.randint(0, 10, (num,))


@dataclass(frozen=True, slots=True)
class Tokens:
    """Makes texts, and the tokens that follow."""

    length: int
    vocabulary: int

    def __call__(self, num: int) -> Sample:
        """Return this many texts."""
        shape = (num, self.length)
        return torch.randint(0, self.vocabulary, shape), torch.randint(0, self.vocabulary, shape)


@dataclass(frozen=True, slots=True)
class Configuration:
    """A training job and its micro-batch size."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Sample]
    size: int
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the samples of each micro-batch of a step."""
        return self.size, self.size, self.size // 2


def transformer(name: str, dims: tuple[int, int, int, int, int], size: int) -> Configuration:
    """Return a configuration of a transformer of (vocabulary, depth, width, heads, length)."""
    return Configuration(name, lambda: Transformer(*dims), Tokens(dims[4], dims[0]), size)


SMALL, MIDDLE, LARGE, LONG = (
    *((1000, 2, 128, 4, 64), (4096, 4, 256, 8, 128)),
    *((8192, 4, 512, 8, 128), (2048, 3, 384, 6, 256)),
)
CONFIGURATIONS = (
    Configuration("MLP 512", lambda: mlp(512), vectors, 32),
    Configuration("MLP 512", lambda: mlp(512), vectors, 512),
    Configuration("MLP 2048", lambda: mlp(2048), vectors, 64),
    Configuration("MLP 2048, SGD", lambda: mlp(2048), vectors, 64, torch.optim.SGD),
    Configuration("ResNet 16", lambda: resnet(16), images, 8),
    Configuration("ResNet 16", lambda: resnet(16), images, 64),
    Configuration("ResNet 32", lambda: resnet(32), images, 32),
    Configuration("CNN 32", lambda: plain_cnn(32), images, 16),
    Configuration("CNN 64", lambda: plain_cnn(64), images, 64),
    transformer("transformer 2 x 128", SMALL, 4),
    transformer("transformer 2 x 128", SMALL, 32),
    transformer("transformer 4 x 256", MIDDLE, 2),
    transformer("transformer 4 x 256", MIDDLE, 12),
    transformer("transformer 4 x 512", LARGE, 2),
    transformer("transformer 4 x 512", LARGE, 8),
    transformer("transformer 3 x 384, 256 tokens", LONG, 4),
)


class Answers(TorchDispatchMode):
    """Returns a value when an optimizer reads its step counter, which has no value in a trace."""

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 (torch's type has no name in public)
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (any result of the operation)
        """Run an operation, or answer."""
        del types
        return 1.0 if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))  # noqa: SLF001 (its name)


class Loop:
    """A plain accumulating step, on tensors with or without data."""

    def __init__(self, configuration: Configuration, sizes: tuple[int, ...]) -> None:
        self.model = configuration.make()
        self.optimizer = configuration.optimizer(self.model.parameters(), lr=LEARNING_RATE)
        self.batches = [configuration.batch(size) for size in sizes]

    def step(self, ledger: MemoryLedger | None = None) -> None:
        """Run a step; notify a ledger when the update begins."""
        num_samples = sum(len(x) for x, _ in self.batches)
        for x, y in self.batches:
            out = self.model(x)
            loss = functional.cross_entropy(out.flatten(0, -2), y.flatten()) * (len(x) / num_samples)
            loss.backward()
        if ledger is not None:
            ledger.phase = "update"
        self.optimizer.step()
        self.optimizer.zero_grad()


def traced(configuration: Configuration, size: int) -> CostTrace:
    """Return the operations of a step of two micro-batches of `size` samples, without computing."""
    recorder = OperationRecorder()
    with FakeTensorMode(), Answers():
        loop = Loop(configuration, (size, size))
        loop.step()  # the optimizer's state exists from here on
        with MemoryLedger(on_operation=recorder) as ledger:
            loop.step(ledger)
        ledger.forget()
    return recorder.trace()


def line(configuration: Configuration) -> CostLine:
    """Return the costs at any micro-batch size."""
    one, other = (traced(configuration, size) for size in TRACED)
    return fit_costs(one, TRACED[0], other, TRACED[1])


def measured_seconds(configuration: Configuration) -> float:
    """Return the time of a step: the median of a few, after two warm-ups."""
    loop = Loop(configuration, configuration.sizes)
    seconds = []
    for number in range(NUM_STEPS + 2):
        begin = time.thread_time()
        loop.step()
        if number > 1:
            seconds.append(time.thread_time() - begin)
    return statistics.median(seconds)


def rows(rates: Rates) -> list[str]:
    """Predict and measure everything, and return the table with a summary."""
    table = [
        "| configuration | micro-batches | predicted, ms | band | measured, ms | error | roofline alone |",
        "|---|---|--:|---|--:|--:|--:|",
    ]
    bare = replace(rates, efficiency={}, host_seconds={})
    found: list[tuple[float, float, float]] = []
    for one in CONFIGURATIONS:
        costs = line(one)
        predicted = step_seconds(costs, rates, one.sizes)
        roofline = step_seconds(costs, bare, one.sizes).total
        measured = measured_seconds(one)
        found.append((predicted.total, roofline, measured))
        band = f"{predicted.least * 1e3:.1f} to {predicted.greatest * 1e3:.1f}"
        errors = f"{predicted.total / measured - 1:+.0%} | {roofline / measured - 1:+.0%}"
        times = f"{predicted.total * 1e3:.1f} | {band} | {measured * 1e3:.1f}"
        table.append(f"| {one.name} | {' + '.join(map(str, one.sizes))} | {times} | {errors} |")
        print(table[-1], flush=True)
    pairs = list(itertools.combinations(found, 2))
    right = [sum((a[at] < b[at]) == (a[2] < b[2]) for a, b in pairs) / len(pairs) for at in (0, 1)]
    errors_of = [sorted(abs(row[at] / row[2] - 1) for row in found) for at in (0, 1)]
    inside = sum(rates.band[0] <= row[2] / row[0] <= rates.band[1] for row in found)
    return [
        *table,
        "",
        *(
            f"{name}: mean error {statistics.mean(errors):.0%}, median {statistics.median(errors):.0%}, "
            f"largest {errors[-1]:.0%}, "
            f"right order in {share:.0%} of {len(pairs)} pairs."
            for name, errors, share in zip(("Calibrated", "Roofline alone"), errors_of, right, strict=True)
        ),
        f"Inside the band: {inside} of {len(found)}.",
    ]


def main() -> None:
    """Print the table, and write it to a file if asked."""
    out = report.parser(__doc__).parse_args().out
    torch.manual_seed(0)
    torch.set_num_threads(1)
    begin = time.thread_time()
    rates = measure_rates("cpu", time.thread_time)
    seconds = time.thread_time() - begin
    report.publish(
        [*rows(rates), f"Measuring the device took {seconds:.1f} s."],
        title="Predicted against measured time of a step",
        command="python benchmarks/step_time.py",
        setting="1 thread, CPU seconds, medians",
        out=out,
    )


if __name__ == "__main__":
    main()
