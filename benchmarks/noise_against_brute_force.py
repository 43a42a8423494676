"""Does a run measure the true noise scale of its data? Compared with the gradients of all samples, one by one.

Three models at fixed parameters (a learning rate of 0) on 1 and 2 ranks, in ragged micro-batches: a network on vectors,
the convolutions of the recipe `digits`, and a small transformer over bytes whose targets are masked at random. The true
scale comes from the gradients of all samples; batches are drawn from these samples with replacement.

The number of steps for an estimate within 10% is predicted from the same gradients, before any run: from the
variance of one step's estimate (the squared norm's, the variance's and their covariance, for Gaussian noise). Runs of
this number of steps are repeated, and the root mean square of their errors should be 10%. The interval is tried on many
short runs of a toy.

    python benchmarks/noise_against_brute_force.py [--kept FILE] [--out benchmarks/results/NAME.md]
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

import anybatch as ab
from anybatch.core.gradient_noise import GradientNoise, NoiseEstimate, noise_interval
from anybatch.recipes.digits import Digits, Network
from anybatch.recipes.text import Transformer
from anybatch.testing import RankPool

REPEATS, MOST_STEPS = 8, 1500
RUNS, STEPS_PER_RUN = 400, 60
Batch = dict[str, Tensor]
Loss = Callable[[Any, Batch], Tensor]


@dataclass(frozen=True)
class Case:
    """A model at fixed parameters, its data, its loss per sample as (sum, count), and batch sizes."""

    model: nn.Module
    data: Batch
    sums: Callable[[Any, Batch], Tensor]
    count: Callable[[Batch], Tensor]
    size: int
    micro_batch_size: int


def trained(case: Case, steps: int, rate: float) -> Case:
    """Return the case after some steps, with a small gradient."""
    optimizer, generator = torch.optim.SGD(case.model.parameters(), lr=rate), torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch = drawn(case.data, 64, generator)
        optimizer.zero_grad()
        (case.sums(case.model, batch) / case.count(batch).sum()).backward()
        optimizer.step()
    optimizer.zero_grad()
    return case


def drawn(data: Batch, number: int, generator: torch.Generator) -> Batch:
    """Return samples drawn with replacement."""
    chosen = torch.randint(0, len(next(iter(data.values()))), (number,), generator=generator)
    return {name: value[chosen] for name, value in data.items()}


def cross_entropy(model: Any, batch: Batch) -> Tensor:  # noqa: ANN401 (a module or its replacement)
    """Return the sum of the cross-entropy over unmasked targets."""
    logits = model(batch["x"])
    return functional.cross_entropy(logits.flatten(0, -2), batch["y"].flatten(), ignore_index=-100, reduction="sum")


def unmasked(batch: Batch) -> Tensor:
    """Return the number of unmasked targets of each sample."""
    return (batch["y"].flatten(1) != -100).sum(1) if batch["y"].dim() > 1 else torch.ones(len(batch["y"]))


def vectors() -> Case:
    """Return a network on vectors with noisy labels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8))
    x, truth = torch.randn(2048, 16), torch.randn(16, 8)
    y = (x @ truth + 2 * torch.randn(2048, 8)).argmax(1)
    return trained(Case(model, {"x": x, "y": y}, cross_entropy, unmasked, 131, 16), 150, 0.2)


def digits() -> Case:
    """Return the convolutions of the recipe `digits`."""
    torch.manual_seed(0)
    dataset = Digits("train")
    data = {"x": dataset.images[:1024], "y": dataset.labels[:1024]}
    return trained(Case(Network(), data, cross_entropy, unmasked, 67, 8), 20, 0.02)


def text() -> Case:
    """Return a small transformer over bytes with a third of the targets masked, unevenly over samples."""
    torch.manual_seed(0)
    source = torch.frombuffer(bytearray(str(__doc__).encode() * 40), dtype=torch.uint8).long()
    windows = torch.stack([source[start : start + 17] for start in torch.randint(0, len(source) - 17, (1024,))])
    targets = windows[:, 1:].masked_fill(torch.rand(1024, 16) < torch.rand(1024, 1) * 0.66, -100)
    targets[:, 0] = windows[:, 1]
    model = Transformer(width=16, num_layers=1, num_heads=2)
    return trained(Case(model, {"x": windows[:, :-1], "y": targets}, cross_entropy, unmasked, 61, 7), 60, 0.5)


CASES = {"network on vectors": vectors, "digits": digits, "masked text": text}


@dataclass(frozen=True)
class Truth:
    """The true squared norm, variance per sample, and relative standard deviation of one step's noise scale."""

    squared_norm: float
    variance: float
    of_step: float

    @property
    def scale(self) -> float:
        """The noise scale in samples."""
        return self.variance / self.squared_norm


def truth_of(case: Case, sizes: list[int]) -> Truth:
    """Compute the truth from gradients of single samples, for micro-batches of these sizes."""
    parameters = {name: value.detach() for name, value in case.model.named_parameters()}

    def of_one(values: dict[str, Tensor], sample: Batch) -> Tensor:
        single = {name: value[None] for name, value in sample.items()}
        return case.sums(lambda x: functional_call(case.model, values, (x,)), single)

    pieces = []
    for start in range(0, len(case.data["y"]), 64):
        chosen = {name: value[start : start + 64] for name, value in case.data.items()}
        gradients = vmap(grad(of_one), (None, 0))(parameters, chosen)
        pieces.append(torch.cat([one.flatten(1) for one in gradients.values()], dim=1))
    sums, counts = torch.cat(pieces).double(), case.count(case.data).double()
    mean = sums.sum(0) / counts.sum()
    # The contribution of a sample to the error of a mean over counted items.
    off = (sums - counts[:, None] * mean) / counts.mean()
    gram, number, total = off @ off.T / len(off), len(off), float(sum(sizes))
    norm, variance = float(mean @ mean), float(gram.trace())
    squared, along = float(gram.square().sum()), float((off @ mean).square().sum() / number)
    pairs = total**2 - sum(size**2 for size in sizes)
    of_norm = (4 * along / total + 2 * squared / pairs) / norm**2
    of_variance = 2 * squared / variance**2 / (len(sizes) - 1)
    return Truth(norm, variance, math.sqrt(of_norm + of_variance))


def engine_of(case: Case, world: ab.World | None = None) -> ab.Engine:
    """Return an engine that measures every step and changes nothing."""

    def loss(model: Any, batch: Batch) -> Tensor:  # noqa: ANN401 (a module)
        return case.sums(model, batch) / case.count(batch).sum()

    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.0)
    return ab.Engine(
        case.model,
        optimizer,
        ab.mean_over(loss, count=lambda batch: case.count(batch).sum()),
        micro_batch_size=case.micro_batch_size,
        noise=GradientNoise(every=1, decay=1.0 - 1e-12),
        measure_gradient_norm=False,
        check_loss=False,
        world=world,
    )


def moments_of(name: str, runs: int, steps: int) -> list[Tensor]:
    """Run on every rank: return the moments of several runs, with rank shares that differ by two thirds."""
    torch.set_num_threads(1)
    world = ab.World.from_environment()
    case, found = CASES[name](), []
    generator, before = torch.Generator().manual_seed(2), torch.zeros(1, 9, dtype=torch.float64)
    bounds = [0, case.size] if world.size == 1 else [0, 5 * case.size // 8, case.size]
    with engine_of(case, world) as engine:
        for _ in range(runs):
            for _ in range(steps):
                batch = drawn(case.data, case.size, generator)
                mine = {key: value[bounds[world.rank] : bounds[world.rank + 1]] for key, value in batch.items()}
                noise = engine.step(mine).noise
            assert noise is not None
            found.append(noise.moments - before)
            before = noise.moments
    return found


def sizes_of(case: Case, num_ranks: int) -> list[int]:
    """Return the sizes of all micro-batches."""
    shares = [case.size] if num_ranks == 1 else [5 * case.size // 8, case.size - 5 * case.size // 8]
    sizes = []
    for share in shares:
        full, rest = divmod(share, case.micro_batch_size)
        parts = full + bool(rest)
        sizes += [share // parts + (place < share % parts) for place in range(parts)]
    return sizes


def row(name: str, num_ranks: int, pool: RankPool) -> str:
    """Predict the number of steps, measure it several times, and return the line."""
    case = CASES[name]()
    truth = truth_of(case, sizes_of(case, num_ranks))
    needed = math.ceil((truth.of_step / 0.1) ** 2)
    steps = min(max(needed, 5), MOST_STEPS)
    runs = pool.run(moments_of, name, REPEATS, steps)[0]
    scales = [NoiseEstimate(moments=one).scale for one in runs]
    errors = [scale / truth.scale - 1.0 for scale in scales]
    root = math.sqrt(sum(error**2 for error in errors) / REPEATS)
    whole = NoiseEstimate(moments=torch.stack(runs).sum(0))
    low, high = whole.interval
    within = sum(abs(error) <= 0.1 for error in errors)
    norm = whole.squared_norm / truth.squared_norm - 1.0
    variance = whole.variance / truth.variance - 1.0
    return (
        f"| {name} | {num_ranks} | {truth.scale:.0f} | {needed} | {root:.1%} | {within} of {REPEATS} | "
        f"{whole.scale:.0f} ({low:.0f} to {high:.0f}) | {whole.scale / truth.scale - 1.0:+.1%} | {norm:+.1%} | "
        f"{variance:+.1%} |"
    )


def coverage() -> list[str]:
    """Return how often the 95% interval of short runs contains the truth, for the first model."""
    lines = ["", f"Intervals of {RUNS} runs of {STEPS_PER_RUN} steps each (network on vectors, 1 rank):", ""]
    case = CASES["network on vectors"]()
    truth = truth_of(case, sizes_of(case, 1))
    moments = torch.cat(moments_of("network on vectors", RUNS, STEPS_PER_RUN))
    _, low, high = noise_interval(moments)
    inside = ((low <= truth.scale) & (high >= truth.scale)).double()
    above, open_ended = float((low > truth.scale).double().mean()), float(high.isinf().double().mean())
    error = 1.96 * math.sqrt(0.95 * 0.05 / RUNS)
    lines.append(
        f"{float(inside.mean()):.1%} hold the truth, {truth.scale:.0f} (nominal 95%, chance alone {error:.1%}); "
        f"{above:.1%} lie above it, and {open_ended:.1%} have no upper end."
    )
    return lines


def main() -> None:
    """Print the table, and write it to a file if asked."""
    parser = report.parser(__doc__)
    parser.add_argument("--kept", type=Path, help="keep each line there, and take those that are there already")
    given = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("model", "ranks", "truth", "steps for 10%", "error of such runs (rms)", "within 10%", "all runs")
    lines = [
        f"| {' | '.join((*columns, 'error', 'of the squared norm', 'of the variance'))} |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for num_ranks in (1, 2):
        with RankPool(num_ranks, timeout_seconds=580.0) as pool:
            for name in CASES:
                key = f"{name} on {num_ranks}"
                lines.append(report.kept(given.kept, key, partial(row, name, num_ranks, pool)))
                print(lines[-1], flush=True)
    lines += report.kept(given.kept, "coverage", coverage)
    report.publish(
        lines,
        title="The noise scale of a run against the gradients of single samples",
        command="python benchmarks/noise_against_brute_force.py",
        setting="1 thread per rank, float32, ragged micro-batches",
        out=given.out,
    )


if __name__ == "__main__":
    main()
