"""Reports, engines, batches and losses print as one readable paragraph."""

from typing import Any

import pytest
import torch

import anybatch as ab
from tests.engine.cases import classify, perceptron, vectors


def dataset(number: int) -> list[dict[str, torch.Tensor]]:
    """Return samples."""
    batch = vectors(number)
    return [{name: value[index] for name, value in batch.items()} for index in range(number)]


def engine_of(loss: Any, **options: Any) -> ab.Engine:
    """Return an engine with micro-batches of 4."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ab.Engine(model, optimizer, loss, micro_batch_size=4, **options)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loading_a_batch(num_workers: int) -> None:
    """`load` returns all collated samples of an effective batch and does not change the step."""
    data, reports = dataset(12), []
    for looks in (True, False):
        with engine_of(ab.mean_over_samples(classify), check_loss=False) as engine:
            for batch in ab.batches(data, effective_batch_size=6, seed=1, num_workers=num_workers):
                if looks:
                    whole = batch.load()
                    assert torch.equal(whole["x"], torch.stack([data[index]["x"] for index in batch.sample_ids]))
                reports.append(engine.step(batch).loss)

    assert reports[:2] == reports[2:]
