"""The ledger of tensor memory, checked against torch's profiler and for traces that start late."""

import pytest
import torch
from torch import nn

from anybatch.memory.ledger import MemoryLedger
from tests.planner.profiled import most_allocated


def train(num_steps: int) -> None:
    """Run a training loop that keeps no tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 50))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(num_steps):
        ids = torch.randint(50, (16, 20))
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
def test_the_ledger_matches_the_allocator() -> None:
    """The peak of a training loop matches the CPU allocator's, as counted by torch's profiler, to the byte."""
    train(1)  # allocates what torch creates only once

    expected = most_allocated(lambda: train(2))
    with MemoryLedger() as ledger:
        train(2)

    assert ledger.peak_bytes == expected
    assert ledger.trace().peak_bytes == expected
    assert ledger.held_bytes == 0


def test_a_trace_may_begin_in_the_middle() -> None:
    """A trace that starts late begins with the tensors held then, once each, and has the same peak."""
    with MemoryLedger() as ledger:
        kept = torch.zeros(100)
        torch.ones(1000).sum()
        ledger.categorize("weights", [kept])
        ledger.mark("before")
        start = ledger.num_events
        ledger.mark("from here")
        more = torch.zeros(10)
        del kept
    trace = ledger.trace(start)

    assert [one.num_bytes for one in trace.allocations] == [400, 40]
    assert [one.category for one in trace.allocations] == ["weights", "activations"]
    assert trace.allocations[0].phase == "setup"
    assert trace.events == (1, 2, -1)
    assert trace.marks == ((1, "before"), (1, "from here"))
    assert trace.peak_bytes == 440
    assert ledger.trace(0, start).peak_bytes == ledger.peak_bytes
    del more


def test_categorize_rest_takes_uncategorized_tensors() -> None:
    """`categorize_rest` categorizes only held tensors without a category, not later ones."""
    with MemoryLedger() as ledger:
        one, two = torch.zeros(3), torch.zeros(4)
        ledger.categorize("weights", [one])
        ledger.categorize_rest("gradients")
        three = torch.zeros(5)

    assert [piece.category for piece in ledger.trace().allocations] == ["weights", "gradients", "activations"]
    del one, two, three
