"""The cost and accuracy of a loss across samples: error, time and memory against the unsplit batch.

Two encoders (perceptrons, averaged over a sequence) with a learnable temperature, under CLIP's loss. Three programs
make one step each: the unsplit batch in bare PyTorch, a loop that computes a separate loss for each micro-batch (naive:
a different loss), and the engine with `ab.joint`.

Errors are in float64, with dropout, over 1 and 2 ranks, against one graph over all samples in which the samples of a
micro-batch draw their dropout together, as in the engine. Times are of this process's CPU, in float32 and without
dropout (drawing numbers takes longer than the layers on a CPU), steps alternating; the figure is the median of the
ratios of neighbours, with the quartiles. Memory is the peak of bytes kept for backwards, each storage counted once
and parameters left out, plus the engine's outputs with their gradient.

    python benchmarks/joint.py [--out benchmarks/results/NAME.md]
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import report
import torch
from torch import nn
from torch.nn import functional

import anybatch as ab
from anybatch.core.batch import LaterUnits, Placement, Positions
from anybatch.core.randomness import micro_batch_seed
from anybatch.core.splitting import SplitOptions
from anybatch.testing import RankPool, relative_error

NUM_SAMPLES, NUM_POSITIONS, NUM_FEATURES, WIDTH, NUM_LAYERS, VECTOR = 256, 16, 32, 256, 4, 32
NUM_ROUNDS, WARM_UP_ROUNDS = 11, 2
Batch = dict[str, torch.Tensor]
Vectors = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[], object]


def encoder(dropout: float) -> nn.Module:
    """Return a perceptron, whose backward has two matrix products for each of the forward."""
    layers: list[nn.Module] = [nn.Linear(NUM_FEATURES, WIDTH), nn.Tanh()]
    for _ in range(NUM_LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers, nn.Linear(WIDTH, VECTOR))


class Encoders(nn.Module):
    """Two encoders, and the temperature."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = encoder(dropout), encoder(dropout)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))


def encode(model: Encoders, batch: Batch) -> Vectors:
    """Return the vectors of both sides."""
    image, text = (functional.normalize(net(batch[name]).mean(1), dim=1) for name, net in model.named_children())
    return image, text


def clip(model: Encoders, vectors: Vectors) -> torch.Tensor:
    """Return the mean cross-entropy of finding each sample's partner, from both sides."""
    logits = model.logit_scale.exp() * vectors[0] @ vectors[1].T
    partner = torch.arange(len(logits))
    return (functional.cross_entropy(logits, partner) + functional.cross_entropy(logits.T, partner)) / 2


def pairs(dtype: torch.dtype) -> Batch:
    """Return pairs of correlated sequences."""
    generator = torch.Generator().manual_seed(1)
    shape = NUM_SAMPLES, NUM_POSITIONS, NUM_FEATURES
    image = torch.randn(shape, generator=generator, dtype=dtype)
    return {"image": image, "text": image + torch.randn(shape, generator=generator, dtype=dtype)}


def cut(batch: Batch, start: int, stop: int) -> Batch:
    """Return the samples from `start` to `stop`."""
    return {name: value[start:stop] for name, value in batch.items()}


# Error


class InMemoryPairs:
    """The pairs as an effective batch whose samples are in memory."""

    sample_ids = range(NUM_SAMPLES)
    seed = 0
    end = None

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def feed(self, units: Sequence[Positions], later_units: LaterUnits | None = None) -> Iterator[Batch]:
        """Return this rank's micro-batches."""
        del later_units
        return iter([{name: value[list(positions)] for name, value in self.batch.items()} for positions in units])


def errors(sizes: list[int]) -> list[tuple[float, float]]:
    """Run on every rank: return the errors of the engine and of the loop with each micro-batch's own loss."""
    world, batch = ab.World.from_environment(), pairs(torch.float64)
    found = []
    for size in sizes:
        model = Encoders(0.1).double()
        loss = ab.joint(encode, clip)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ab.Engine(model, optimizer, loss, micro_batch_size=size, world=world) as engine:
            gradients = engine.gradients(InMemoryPairs(batch))
        units = Placement(SplitOptions(micro_batch_size=size), world.size, 0).plan(NUM_SAMPLES).units
        whole, naive = [], dict.fromkeys(gradients, torch.zeros(()))
        for unit in units:
            torch.default_generator.manual_seed(micro_batch_seed(0, 0, unit.start))
            vectors = encode(model, cut(batch, unit.start, unit.stop))
            whole.append(vectors)
            own = torch.autograd.grad(clip(model, vectors), list(model.parameters()), retain_graph=True)
            naive = {n: naive[n] + g / len(units) for n, g in zip(naive, own, strict=True)}
        together = clip(model, tuple(torch.cat(column) for column in zip(*whole, strict=True)))
        plain = dict(zip(gradients, torch.autograd.grad(together, list(model.parameters())), strict=True))
        found.append((relative_error(gradients, plain), relative_error(naive, plain)))
    return found


# Time and memory


def native(model: Encoders, batch: Batch, *, size: int | None = None) -> Step:
    """Return a plain PyTorch step: on the unsplit batch or, naively, with each micro-batch's own loss over K."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    size = size or NUM_SAMPLES

    def step() -> None:
        for start in range(0, NUM_SAMPLES, size):
            loss = clip(model, encode(model, cut(batch, start, start + size)))
            (loss * (size / NUM_SAMPLES)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def by_engine(model: Encoders, batch: Batch, *, size: int) -> Step:
    """Return the engine's step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss = ab.joint(encode, clip)
    engine = ab.Engine(model, optimizer, loss, micro_batch_size=size, measure_gradient_norm=False, world=ab.World())
    return lambda: engine.step(batch)


def ratios(steps: dict[str, Step], first: str) -> dict[str, list[float]]:
    """Return the CPU seconds of each step over the seconds of `first` in the same round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(NUM_ROUNDS + WARM_UP_ROUNDS):
        for name, step in steps.items():
            begin = time.process_time()
            step()
            if round_number >= WARM_UP_ROUNDS:
                seconds[name].append(time.process_time() - begin)
    return {name: [a / b for a, b in zip(values, seconds[first], strict=True)] for name, values in seconds.items()}


def backward_over_forward(batch: Batch) -> float:
    """Return the time of the unsplit batch's backward relative to its forward."""
    model = Encoders()

    def forward() -> None:
        clip(model, encode(model, batch))

    found = ratios({"forward": forward, "whole": native(model, batch)}, "forward")
    return statistics.median(found["whole"]) - 1


def kept_bytes(model: Encoders, step: Step) -> int:
    """Return the peak of bytes saved for backwards in a step."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: dict[int, int] = {}
    now, peak = 0, 0

    class Kept:
        def __init__(self, tensor: torch.Tensor) -> None:
            nonlocal now, peak
            self.tensor = tensor.detach()  # an output would keep its own graph alive
            self.place = tensor.untyped_storage().data_ptr()
            self.counted = self.place not in own
            if self.counted:
                held[self.place] = held.get(self.place, 0) + 1
                if held[self.place] == 1:
                    now += tensor.untyped_storage().nbytes()
                    peak = max(peak, now)

        def __del__(self) -> None:
            nonlocal now
            if self.counted:
                held[self.place] -= 1
                if not held[self.place]:
                    now -= self.tensor.untyped_storage().nbytes()

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        step()
    return peak


def quartiles(values: list[float]) -> str:
    """Return the median and the quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def rows() -> list[str]:
    """Run everything and return the tables' lines."""
    counts = (2, 4, 8)
    batch = pairs(torch.float32)
    lines = [
        f"The backward takes {backward_over_forward(batch):.2f} times as long as the forward.",
        "",
        "| micro-batches | ranks | error, `ab.joint` | error, naive |",
        "|--:|--:|--:|--:|",
    ]
    for num_ranks in (1, 2):
        sizes = [NUM_SAMPLES // num_ranks // count for count in counts]
        with RankPool(num_ranks) as pool:
            found = pool.run(errors, sizes)[-1]
        lines += [
            f"| {count} | {num_ranks} | {own:.1e} | {naive:.2f} |"
            for count, (own, naive) in zip(counts, found, strict=True)
        ]
    lines += [
        "",
        "| micro-batches | time, naive | time, `ab.joint` | MiB kept, unsplit | MiB, naive | MiB, `ab.joint` |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for count in counts:
        size = NUM_SAMPLES // count
        models = [Encoders() for _ in range(3)]
        steps = {
            "whole": native(models[0], batch),
            "naive": native(models[1], batch, size=size),
            "joint": by_engine(models[2], batch, size=size),
        }
        found = ratios(steps, "whole")
        kept = [kept_bytes(model, step) / 2**20 for model, step in zip(models, steps.values(), strict=True)]
        kept[2] += 4 * NUM_SAMPLES * 2 * VECTOR * 2 / 2**20
        lines.append(
            f"| {count} | {quartiles(found['naive'])} | {quartiles(found['joint'])} "
            f"| {kept[0]:.1f} | {kept[1]:.1f} | {kept[2]:.1f} |"
        )
    return lines


def main() -> None:
    """Print the tables, and write them to a file if asked."""
    out = report.parser(__doc__).parse_args().out
    torch.set_num_threads(1)
    report.publish(
        rows(),
        title="A loss across samples: error, time and memory",
        command="python benchmarks/joint.py",
        setting=f"{NUM_SAMPLES} pairs of sequences of {NUM_POSITIONS}, 1 thread, times in those of the unsplit batch",
        out=out,
    )


if __name__ == "__main__":
    main()
