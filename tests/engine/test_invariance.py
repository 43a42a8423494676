"""The second promise: seed, data and effective batch size determine the run, on any number of ranks."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import anybatch as ab
from tests.engine.cases import Batch, classify
from tests.faults import sees
from tests.ranks_fixture import Ranks

NUM_SAMPLES, SIZE, NUM_STEPS = 47, 20, 12


class Noisy(torch.utils.data.Dataset[Batch]):
    """Labelled vectors with noise from torch's global generator, drawn at each access."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.x = torch.randn(NUM_SAMPLES, 5, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 4, (NUM_SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Batch:
        return {"x": self.x[index] + 0.3 * torch.randn(5, dtype=self.x.dtype), "y": self.y[index]}


class Run(NamedTuple):
    """The sample ids and losses of a run."""

    sample_ids: list[tuple[int, ...]]
    losses: list[float]


def train(micro_batch_size: int, dropout: float) -> Run:
    """Run on every rank: make some steps over several epochs, each with a smaller last batch."""
    torch.manual_seed(1)
    layers = nn.Linear(5, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 4)
    model = nn.Sequential(*layers).double()
    run = Run([], [])
    batches = ab.batches(Noisy(), effective_batch_size=SIZE, steps=NUM_STEPS, seed=3)
    options: dict[str, Any] = {"micro_batch_size": micro_batch_size, "deal": "fixed"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with ab.Engine(model, optimizer, ab.mean_over_samples(classify), **options) as engine:
        for batch in batches:
            run.losses.append(engine.step(batch).loss)
            run.sample_ids.append(tuple(int(sample) for sample in batch.sample_ids))
    return run


@sees(
    "the key of a micro-batch depends on the rank",
    "src/anybatch/engine/micro_batches.py",
    "micro_batch_seed(planned.seed, step, ",
    "micro_batch_seed(planned.seed + planned.plan.shares.index(planned.units), step, ",
)
def test_a_run_does_not_depend_on_the_ranks(one_rank: Ranks, two_ranks: Ranks, three_ranks: Ranks) -> None:
    """On 1, 2 and 3 ranks each step has the same samples and loss, with augmentation and dropout."""
    plain = train(3, 0.3)
    assert len(plain.losses) == NUM_STEPS
    for ranks in (one_rank, two_ranks, three_ranks):
        for found in ranks.run(train, 3, 0.3):
            assert found.sample_ids == plain.sample_ids
            assert found.losses == pytest.approx(plain.losses, rel=1e-9)
