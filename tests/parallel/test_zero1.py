"""ZeRO-1: each rank holds a part of the optimizer state, and updates are bitwise the same."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.optimizers import CombinedOptimizer
from anybatch.testing import relative_error
from tests.engine.cases import InMemory, vectors
from tests.faults import sees
from tests.parallel.sharded_models import loss_of, tower
from tests.ranks_fixture import Ranks

Named = Iterable[tuple[str, nn.Parameter]]


def in_groups(named: Named) -> torch.optim.Optimizer:
    """Return an optimizer with two parameter groups."""
    held = list(named)
    matrices, others = [p for _, p in held if p.dim() > 1], [p for _, p in held if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def combined(named: Named) -> torch.optim.Optimizer:
    """Combine two optimizers."""
    held = list(named)
    return CombinedOptimizer(
        torch.optim.SGD([p for _, p in held if p.dim() > 1], lr=0.1, momentum=0.9),
        torch.optim.AdamW([p for _, p in held if p.dim() <= 1], lr=0.01),
    )


OPTIMIZERS: dict[str, Callable[[Named], torch.optim.Optimizer]] = {
    "AdamW": lambda named: torch.optim.AdamW(list(named), lr=0.01),
    "state created immediately": lambda named: torch.optim.Adagrad(list(named), lr=0.01),
    "groups": in_groups,
    "two optimizers": combined,
}


def engine_over(model: nn.Module, optimizer: Any, strategy: str, **options: Any) -> ab.Engine:
    """Return an engine that clips, averages and schedules."""
    return ab.Engine(
        model,
        optimizer,
        ab.mean_over_samples(loss_of),
        micro_batch_size=2,
        strategy=strategy,
        clip=0.05,
        average_decay=0.5,
        scheduler=lambda made: torch.optim.lr_scheduler.ExponentialLR(made, 0.9),
        world=ab.World.from_environment(),
        **options,
    )


def numbers_in(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of elements in an optimizer's state, without counters."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.numel() for value in values if isinstance(value, torch.Tensor) and value.dim() > 0)


def ends(name: str, dtype: torch.dtype) -> tuple[float, int, int]:
    """Run on every rank: return the difference of zero1 to all_reduce, and the state size under both."""
    found, numbers = [], []
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in vectors(11).items()}
    for strategy in ("all_reduce", "zero1"):
        model = tower("plain").to(dtype)
        with engine_over(model, OPTIMIZERS[name], strategy) as engine:
            for _ in range(3):
                engine.step(InMemory(batch))
            assert engine.average is not None
            tensors = {**dict(model.named_parameters()), **{f"{n} avg": w for n, w in engine.average.weights.items()}}
            found.append({key: value.detach().double() for key, value in tensors.items()})
            numbers.append(numbers_in(engine.optimizer))
    return relative_error(found[1], found[0]), numbers[0], numbers[1]


@sees(
    "every rank updates everything",
    "src/anybatch/parallel/zero1.py",
    "parameters[:] = [parameter for parameter in parameters if id(parameter) in self._own_ids]",
    "pass",
)
@sees(
    "weights gathered in one message are not copied back",
    "src/anybatch/parallel/zero1.py",
    "part.copy_(piece.view(part.shape))",
    "pass",
)
@sees(
    "updated weights are not sent to the other ranks",
    "src/anybatch/engine/updater.py",
    "self.sharding.exchange()",
    "pass",
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_equal_those_of_replicas(name: str, two_ranks: Ranks, three_ranks: Ranks) -> None:
    """With sharded state any optimizer makes bitwise the same updates, also clipped, scheduled and averaged."""
    for ranks in (two_ranks, three_ranks):
        found = ranks.run(ends, name, torch.float64)
        assert [error for error, _, _ in found] == [0.0] * ranks.world_size
        whole = {numbers for _, numbers, _ in found}
        assert len(whole) == 1
        assert sum(numbers for _, _, numbers in found) == whole.pop()
        assert max(numbers for _, _, numbers in found) <= 1.5 * min(numbers for _, _, numbers in found)


def test_master_weights_are_exchanged(two_ranks: Ranks) -> None:
    """With bf16 parameters owners update the float32 copies, and all ranks have the same weights afterwards."""
    for error, _, _ in two_ranks.run(ends, "AdamW", torch.bfloat16):
        assert error == 0.0
