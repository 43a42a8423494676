"""The cost of feeding: steps of a tiny model through `ab.batches`, relative to a plain loop on a `DataLoader`.

Both load the same 16 samples per micro-batch, in 1 to 64 micro-batches per step, in the calling process or in workers.
Three kinds of data: tensors (`TensorDataset`), a class that indexes tensors, and such a class with augmentation by
torch's generator. The plain loop divides by the number of micro-batches, which is right here, and does not seed random
numbers by sample. Loops alternate step by step; figures are medians, and the ratio is over neighbouring steps. Neither
the engine nor the loop measures the gradient norm.

    python benchmarks/feed.py [--out benchmarks/results/NAME.md]
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import report
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import anybatch as ab

MICRO_BATCH_SIZE, NUM_SAMPLES = 16, 4_096
WARM_UP_STEPS = 3
STEPS = {1: 600, 4: 300, 16: 120, 64: 40}


class Indexed(Dataset[dict[str, torch.Tensor]]):
    """Rows of tensors, by name."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.x = torch.randn(NUM_SAMPLES, 16, generator=draw)
        self.y = torch.randint(0, 10, (NUM_SAMPLES,), generator=draw)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class Augmented(Indexed):
    """Rows of tensors, by name, with random noise."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index] + 0.1 * torch.randn(16), "y": self.y[index]}


def tensors() -> Dataset[Any]:
    """Return the rows of `Indexed` as a `TensorDataset`."""
    rows = Indexed()
    return TensorDataset(rows.x, rows.y)


DATA: dict[str, Callable[[], Dataset[Any]]] = {"tensors": tensors, "a class": Indexed, "augmented": Augmented}


def network() -> nn.Module:
    """Return a model with negligible arithmetic."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 10))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:  # noqa: ANN401 (a dict or a list)
    """Return the mean cross-entropy."""
    x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
    return functional.cross_entropy(model(x), y)


def forever(make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Yield from one iterator after another."""
    while True:
        yield from make()


def plain(dataset: Dataset[Any], accumulation_steps: int, num_workers: int) -> Callable[[], None]:
    """Return a step of a hand-written loop."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(
        dataset,
        batch_size=MICRO_BATCH_SIZE,
        shuffle=True,
        drop_last=True,
        collate_fn=default_collate,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
    batches = forever(lambda: iter(loader))

    def step() -> None:
        for _ in range(accumulation_steps):
            (loss(model, next(batches)) / accumulation_steps).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def fed(dataset: Dataset[Any], accumulation_steps: int, num_workers: int) -> Callable[[], None]:
    """Return a step of the engine on `ab.batches`."""
    model = network()
    engine = ab.Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        ab.mean_over_samples(loss),
        micro_batch_size=MICRO_BATCH_SIZE,
        measure_gradient_norm=False,
    )
    data = iter(
        ab.batches(
            dataset,
            effective_batch_size=MICRO_BATCH_SIZE * accumulation_steps,
            epochs=1_000_000,
            drop_last=True,
            num_workers=num_workers,
        )
    )

    def step() -> None:
        engine.step(next(data))

    return step


def compare(first: Callable[[], None], second: Callable[[], None], num_steps: int) -> tuple[float, float, list[float]]:
    """Return the median seconds of both steps, and the quartiles of the ratios of neighbouring steps."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(WARM_UP_STEPS + num_steps):
        turns = ((0, first), (1, second)) if number % 2 else ((1, second), (0, first))
        for place, step in turns:
            begun = time.perf_counter()
            step()
            if number >= WARM_UP_STEPS:
                seconds[place].append(time.perf_counter() - begun)
    ratios = [other / one for one, other in zip(*seconds, strict=True)]
    return statistics.median(seconds[0]), statistics.median(seconds[1]), statistics.quantiles(ratios, n=4)


def main() -> None:
    """Measure all kinds of data, and print the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1])
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "| data | workers | micro-batches | DataLoader, us | ab.batches, us | ratio | quartiles |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for name, make in DATA.items():
        for num_workers in given.workers:
            for accumulation_steps, num_steps in STEPS.items():
                dataset = make()
                one = plain(dataset, accumulation_steps, num_workers)
                other = fed(dataset, accumulation_steps, num_workers)
                seconds, others, (low, middle, high) = compare(one, other, num_steps)
                lines.append(
                    f"| {name} | {num_workers} | {accumulation_steps} | {seconds * 1e6:,.0f} | {others * 1e6:,.0f} "
                    f"| {middle:.2f} | {low:.2f} to {high:.2f} |"
                )
                print(lines[-1], flush=True)
    report.publish(
        lines,
        title="What feeding costs",
        command="python benchmarks/feed.py",
        setting="one thread, micro-batches of 16",
        out=given.out,
    )


if __name__ == "__main__":
    main()
