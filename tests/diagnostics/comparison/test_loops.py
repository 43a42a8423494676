"""The hand-written comparison loops train correctly, and their changed lines are counted."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.core.tree import Batch
from anybatch.diagnostics import compared_ways as loops
from anybatch.diagnostics.compared_ways import lines_changed
from tests.engine.cases import InMemory
from tests.ranks_fixture import Ranks

NUM_SAMPLES, NUM_STEPS = 24, 3
ON_ONE = {"plain": 24, "accumulated": 6, "data_parallel": 24}
ON_RANKS = {"ddp": 12, "ddp_without_no_sync": 4, "ddp_accumulated": 4, "zero1": 4, "fsdp": 4}


def network() -> nn.Module:
    """Return a small model with fixed weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def data() -> list[Batch]:
    """Return the batches of some steps."""
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(NUM_SAMPLES, 5, generator=generator, dtype=torch.float64),
            "y": torch.randint(0, 3, (NUM_SAMPLES,), generator=generator),
        }
        for _ in range(NUM_STEPS)
    ]


def loss_share(model: Any, batch: Batch) -> torch.Tensor:
    """Return the sum of a micro-batch's losses over the samples of the effective batch."""
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum") / NUM_SAMPLES


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer with momentum, so that an error in any step shows."""
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def steps(size: int, rank: int = 0, num_ranks: int = 1) -> Iterator[Sequence[Batch]]:
    """Yield this rank's micro-batches of each step."""
    share = NUM_SAMPLES // num_ranks
    for batch in data():
        starts = range(rank * share, (rank + 1) * share, size)
        yield [{name: value[start : start + size] for name, value in batch.items()} for start in starts]


def trained(name: str, size: int, rank: int = 0, num_ranks: int = 1) -> dict[str, torch.Tensor]:
    """Return the parameters after a loop."""
    model = network()
    own = steps(size, rank, num_ranks)
    if name == "zero1":
        loops.zero1(model, torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}, loss_share, own)
    else:
        getattr(loops, name)(model, sgd, loss_share, own)
    found: dict[str, Any] = dict(model.named_parameters())
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in found.items()}


def trained_on_rank(name: str, size: int) -> dict[str, torch.Tensor]:
    """Run on every rank: return the parameters after a loop."""
    return trained(name, size, dist.get_rank(), dist.get_world_size())


def expected() -> dict[str, torch.Tensor]:
    """Return the parameters after three updates on full batches."""
    model = network()
    optimizer = sgd(model.parameters())
    for batch in data():
        optimizer.zero_grad()
        F.cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_same(found: dict[str, torch.Tensor]) -> None:
    """Fail unless these are the parameters of the un-split loop."""
    for name, value in expected().items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ON_ONE)
def test_loops_on_one_device_train_as_the_unsplit_loop(name: str) -> None:
    """Native, accumulated and DataParallel loops give the same parameters after three updates with momentum."""
    assert_same(trained(name, ON_ONE[name]))


def test_loops_on_two_ranks_train_as_the_unsplit_loop(two_ranks: Ranks) -> None:
    """DDP, accumulated with and without no_sync, ZeRO-1 and FSDP give the same parameters on both ranks."""
    for name, size in ON_RANKS.items():
        for found in two_ranks.run(trained_on_rank, name, size):
            assert_same(found)


def test_the_loop_with_anybatch_trains_as_the_unsplit_loop() -> None:
    """The anybatch loop whose lines are counted also trains correctly."""
    model = network()
    batches = [InMemory(batch) for batch in data()]
    loss = ab.mean_over_samples(lambda net, batch: F.cross_entropy(net(batch["x"]), batch["y"]))
    loops.with_engine(model, sgd, loss, batches, "single")
    assert_same({name: parameter.detach() for name, parameter in model.named_parameters()})


def a_loop(before: int, changed: int) -> Callable[..., None]:
    """Return a function whose source is `plain` with this many lines added and changed."""
    assert (before, changed) == (1, 1)

    def loop(model: Any, make_optimizer: Any, loss_share: Any, steps: Any) -> None:
        """Train like `plain`."""
        model = nn.DataParallel(model)
        optimizer = make_optimizer(model.parameters())
        for (batch,) in steps:
            # A comment does not count as a line of code.
            (loss_share(model, batch) * 2).backward()
            optimizer.step()
            optimizer.zero_grad()

    return loop


def test_lines_are_those_that_have_to_be_written() -> None:
    """New and changed lines count, comments and the docstring do not; the plain loop changes nothing."""
    assert lines_changed(loops.plain) == 0
    assert lines_changed(a_loop(1, 1)) == 2
    assert lines_changed(loops.with_engine) == 3
    assert lines_changed(loops.ddp_accumulated) > lines_changed(loops.ddp)
