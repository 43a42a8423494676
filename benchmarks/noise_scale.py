"""The cost of measuring gradient noise: a measured step against the same engine's step without `noise`.

A transformer over bytes (the recipe `text`: 0.8 million parameters, micro-batches of 4 x 64 bytes) is the realistic
case; the 10 million parameters of `overhead.py` with micro-batches of 4 vectors are the worst case, since a backward
hardly does more than write the gradient. Each at 1, 8 and 64 micro-batches: one micro-batch needs no measurement.

Steps without, with and again without the measurement alternate; the second "without" shows the effect of chance. A
step in ten is measured by default, so a run costs a tenth of the ratio. Memory is the peak of tensors in a step.

    python benchmarks/noise_scale.py [--seconds 40] [--micro-batches 8] [--out benchmarks/results/NAME.md]
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import overhead
import report
import torch
from torch import nn

import anybatch as ab
from anybatch.core.gradient_noise import GradientNoise
from anybatch.core.units import in_bytes
from anybatch.memory.ledger import MemoryLedger
from anybatch.recipes.text import Transformer
from anybatch.recipes.text import loss as text_loss

SIZE, CONTEXT = 4, 64
SIDES: dict[str, GradientNoise | None] = {
    "without": None,
    "measured": GradientNoise(every=1),
    "without again": None,
}
Batch = dict[str, torch.Tensor]


def text_batch(size: int) -> Batch:
    """Return sequences of random bytes."""
    text = torch.randint(0, 256, (size, CONTEXT + 1))
    return {"inputs": text[:, :-1], "targets": text[:, 1:]}


def vector_batch(size: int) -> Batch:
    """Return random vectors and labels."""
    return {"x": torch.randn(size, 16), "y": torch.randint(0, 10, (size,))}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch], ab.Job | object]] = {
    "transformer": (
        lambda: Transformer(width=128, num_layers=4, num_heads=4),
        text_batch,
        ab.mean_over_tokens(text_loss, labels="targets", shift=False),
    ),
    "layers, worst case": (overhead.mid, vector_batch, ab.mean_over_samples(overhead.loss)),
}


def engine(make: Callable[[], nn.Module], loss: object, noise: GradientNoise | None) -> ab.Engine:
    """Return an engine with Adam."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return ab.Engine(model, optimizer, loss, micro_batch_size=SIZE, clip=1.0, noise=noise, check_loss=False)  # type: ignore[arg-type]


def peak_bytes(one: ab.Engine, batch: Batch) -> int:
    """Return the peak of a step's tensor memory above the level before it."""
    with MemoryLedger() as ledger:
        one.step(batch)
    return ledger.peak_bytes


def rows(case: str, num_micro_batches: int, seconds: float) -> list[str]:
    """Measure all sides of a case interleaved, and return their lines."""
    make, make_batch, loss = CASES[case]
    batch = make_batch(SIZE * num_micro_batches)
    engines = {name: engine(make, loss, noise) for name, noise in SIDES.items()}
    taken: dict[str, list[float]] = {name: [] for name in SIDES}
    for one in engines.values():
        one.step(batch)
        one.step(batch)
    begun, names = time.perf_counter(), list(SIDES)
    number = 0
    while time.perf_counter() - begun < seconds or number < 6:
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            start = time.perf_counter()
            engines[name].step(batch)
            taken[name].append(time.perf_counter() - start)
        number += 1
    base, lines = taken["without"], []
    least = peak_bytes(engines["without"], batch)
    for name, mine in taken.items():
        ratios = [one / other - 1.0 for one, other in zip(mine, base, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if name != "without" else (0.0, 0.0, 0.0)
        more = in_bytes(max(0, peak_bytes(engines[name], batch) - least))
        lines.append(
            f"| {case} | {num_micro_batches} | {name} | {1e3 * statistics.median(mine):.1f} | "
            f"{middle:+.1%} ({low:+.1%} to {high:+.1%}) | {middle / 10:+.2%} | {more} | {number} |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Print the table, and write it to a file if asked."""
    parser = report.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="for each row of the table")
    parser.add_argument("--micro-batches", type=int, action="append", help="only these numbers of them")
    parser.add_argument("--kept", type=Path, help="keep each case there, and take those that are there already")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    table = [
        "| model | micro-batches | step | ms | longer, measured (quartiles) | one in ten | more memory | rounds |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for case in CASES:
        for number in given.micro_batches or (1, 8, 64):
            make = partial(rows, case, number, given.seconds)
            table += report.kept(given.kept, f"{case}, {number}", make)
    report.publish(
        table,
        title="Cost of measuring the gradient's noise",
        command="python benchmarks/noise_scale.py",
        setting="1 thread, micro-batches of 4, medians over steps in turns",
        out=given.out,
    )


if __name__ == "__main__":
    main()
