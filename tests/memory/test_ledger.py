"""The ledger of tensor memory, checked against torch's profiler and for traces that start late."""

from collections.abc import Callable

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


BACKWARDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gather": lambda x, i: (
        x.unsqueeze(1).expand(-1, 16, -1, -1).gather(2, i.unsqueeze(-1).expand(-1, -1, -1, 8)).sum(2)
    ),
    "take_along_dim": lambda x, i: x.unsqueeze(1).expand(-1, 16, -1, -1).take_along_dim(i.unsqueeze(-1), 2).sum(2),
    "index": lambda x, i: x[torch.arange(4)[:, None, None], i].sum(2),
    "index_add": lambda x, i: torch.zeros(4, 16, 8).index_add(1, i[0, 0], x),
    "a tensor used three times": lambda x, _: x.exp() * x.sin() * x.cos(),
    "a product with itself": lambda x, _: (x * 2) * (x + x),
    "amax": lambda x, _: (x.unsqueeze(2) * torch.ones(1, 1, 64, 1)).amax(2),
    "a sum of a mask": lambda x, _: (
        x.unsqueeze(1).mul(x.unsqueeze(2)).sum(2) / (x.unsqueeze(1) > x.unsqueeze(2)).sum(2).add(1)
    ),
    "bilinear": lambda x, _: nn.functional.bilinear(x, x.flip(1), torch.ones(3, 8, 8)),
    "log_softmax of a transposed tensor": lambda x, _: (
        x.sum(2) + x.detach().unsqueeze(3).repeat(1, 1, 1, 16).mT.log_softmax(1).sum((2, 3))
    ),
    "distances": lambda x, _: x.sum(2) + torch.cdist(x.detach().repeat(1, 1, 16), torch.ones(4, 30, 128)).sum(2),
    "cholesky": lambda x, _: torch.linalg.cholesky(x @ x.mT + 9 * torch.eye(16)),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_backwards_allocate_as_without_a_mode(name: str) -> None:
    """Autograd's formulas for modes allocate more; the ledger runs the usual ones, and counts copies inside of sums."""

    def run() -> torch.Tensor:
        torch.manual_seed(0)
        values, index = torch.randn(4, 16, 8, requires_grad=True), torch.randint(16, (4, 16, 16))
        (found,) = torch.autograd.grad(BACKWARDS[name](values, index).square().sum(), values)
        return found

    plain, expected = run(), most_allocated(run)
    with MemoryLedger() as ledger:
        watched = run()

    assert torch.equal(plain, watched)
    assert abs(ledger.peak_bytes - expected) <= 0.01 * expected


def test_a_gradient_that_others_hold_is_not_overwritten() -> None:
    """A hook that keeps a gradient keeps its values, although autograd accumulates in place."""
    kept: list[torch.Tensor] = []
    x = torch.ones(3, requires_grad=True)
    y = x * 1
    z = y * 1
    z.register_hook(kept.append)
    total = (z * 2).sum() + (y * 3).sum() + z.exp().sum()

    with MemoryLedger():
        total.backward()

    assert torch.allclose(kept[0], 2 + torch.ones(3).exp())


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
