"""The same run on 1, 2, 3 and 4 ranks: sample ids, losses and parameters, step by step.

Dropout and a random augmentation are on; all runs have the same micro-batches (`deal="fixed"`). A second table compares
two micro-batch sizes, with dropout off.

    python benchmarks/invariance.py [--out benchmarks/results/NAME.md]
"""

import report
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import anybatch as ab
from anybatch.testing import RankPool

NUM_STEPS = 50
TYPES = {"float64": torch.float64, "float32": torch.float32}
Sample = dict[str, torch.Tensor]
Trained = tuple[list[list[int]], list[float], list[float]]


class Noisy(Dataset[Sample]):
    """211 points of 5 classes, with fresh noise each time they are loaded."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.centres = torch.randn(5, 12, generator=generator, dtype=torch.float64).to(dtype)
        self.labels = torch.randint(0, 5, (211,), generator=generator)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        """Return a noisy point, its label and its id."""
        label = self.labels[index]
        noise = torch.randn(12, dtype=torch.float64).to(self.centres.dtype)
        return {"x": self.centres[label] + noise, "y": label, "id": torch.tensor(index)}


def loss(model: nn.Module, batch: Sample) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def train(dtype: torch.dtype, micro_batch_size: int, dropout: float) -> Trained:
    """Run on every rank: return sample ids and loss of every step, and the final parameters."""
    torch.manual_seed(0)
    hidden = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 5))
    model = hidden.to(dtype)
    engine = ab.Engine(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        ab.mean_over_samples(loss),
        micro_batch_size=micro_batch_size,
        deal="fixed",
    )
    ids, losses = [], []
    with engine:
        for batch in ab.batches(Noisy(dtype), effective_batch_size=64, steps=NUM_STEPS, seed=1):
            ids.append([int(sample) for sample in batch.sample_ids])
            losses.append(engine.step(batch).loss)
    parameters = torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])
    return ids, losses, parameters.tolist()


def furthest(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))


def distance(found: list[float], expected: list[float]) -> float:
    """Return the relative difference of two vectors."""
    one, other = torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    return float((one - other).norm() / other.norm())


def table(runs: dict[tuple[str, int], Trained], cuts: dict[tuple[str, int], Trained]) -> list[str]:
    """Return the lines of both tables."""
    lines = ["| type | ranks | sample ids as on 1 rank | largest loss difference, 50 steps | parameters differ by |"]
    lines.append("|---|--:|---|--:|--:|")
    for (name, world_size), (ids, losses, parameters) in sorted(runs.items()):
        first = runs[name, 1]
        same = "yes" if ids == first[0] else "NO"
        apart = f"{furthest(losses, first[1]):.1e} | {distance(parameters, first[2]):.1e}"
        lines.append(f"| {name} | {world_size} | {same} | {apart} |")
    lines += ["", "| type | micro-batches of | against | largest loss difference, 50 steps, dropout off |"]
    lines.append("|---|--:|--:|--:|")
    for name in TYPES:
        lines.append(f"| {name} | 7 | 64 | {furthest(cuts[name, 7][1], cuts[name, 64][1]):.1e} |")
    return lines


def main() -> None:
    """Print the tables, and write them to a file if asked."""
    out = report.parser(__doc__).parse_args().out
    runs: dict[tuple[str, int], Trained] = {}
    cuts: dict[tuple[str, int], Trained] = {}
    for world_size in (1, 2, 3, 4):
        with RankPool(world_size) as pool:
            for name, dtype in TYPES.items():
                ranks = pool.run(train, dtype, 7, 0.2)
                assert all(rank == ranks[0] for rank in ranks), "ranks of one run differ"
                runs[name, world_size] = ranks[0]
                if world_size == 1:
                    for size in (7, 64):
                        cuts[name, size] = pool.run(train, dtype, size, 0.0)[0]
    report.publish(
        table(runs, cuts),
        title="The same run on any number of ranks",
        command="python benchmarks/invariance.py",
        setting="gloo, 1 thread per rank",
        out=out,
    )


if __name__ == "__main__":
    main()
