"""The planner's upper bound for "auto": the largest size that runs, or the reason why it is unknown."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import anybatch as ab
from anybatch.core.loss_kinds import LossFunction
from anybatch.engine.arguments import TrainSpec
from anybatch.engine.micro_batch_size.search import Auto
from anybatch.errors import CannotPlanError, PlanError
from anybatch.recipes import prepare
from anybatch.recipes.planning.plan import Largest, planned_largest
from anybatch.recipes.session import train
from anybatch.testing import memory_budget

CPU = torch.device("cpu")
NUM_SAMPLES = 64
BATCH = torch.linspace(-1, 1, NUM_SAMPLES * 256).reshape(NUM_SAMPLES, 256)
BUDGET = 6_250_000


def net() -> nn.Module:
    """Return a network whose steps are long enough to time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))


def sgd(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Return an optimizer."""
    return torch.optim.SGD([parameter for _, parameter in named], lr=1e-3)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return a mean over samples."""
    hidden = batch.unsqueeze(1).expand(-1, 8, -1).reshape(-1, 256)
    return F.cross_entropy(model(hidden), torch.zeros(len(hidden), dtype=torch.int64))


def asked(function: LossFunction = loss, **options: Any) -> Largest:
    """Return the planner's function for training the network with this loss on a CPU."""
    declared = ab.mean_over_samples(function)
    return planned_largest(lambda: TrainSpec(model=net(), optimizer=sgd, loss=declared), device=CPU, **options)


def planned(num_bytes: int, **options: Any) -> int | None:
    """Return the planned size for this many bytes."""
    return asked(budget_bytes=num_bytes, **options)(BATCH, NUM_SAMPLES)


def runs(size: int, num_bytes: int) -> bool:
    """Return whether a step in micro-batches of `size` runs in a budget that includes the batch."""
    model = net()
    engine = ab.Engine(model, sgd, ab.mean_over_samples(loss), micro_batch_size=size, check_loss=False)
    with engine, memory_budget(num_bytes, model, BATCH):
        return not engine.step(BATCH).too_large


@pytest.mark.slow
def test_the_planned_size_is_the_largest_that_runs() -> None:
    """Under an enforced budget the planned size is the largest that runs."""
    size = planned(BUDGET, headroom=0.0)

    assert size is not None
    assert 4 < size < NUM_SAMPLES // 2
    sample = 4 * 256  # the plan counts two micro-batches of them, this test the full batch
    enforced = BUDGET + (NUM_SAMPLES - 2 * size) * sample
    assert runs(size, enforced)
    assert not runs(size + 1, enforced)


@pytest.mark.slow
def test_auto_uses_the_planned_limit() -> None:
    """An engine with the planner tries no larger size, and trains as with that size given."""
    ask = asked(budget_bytes=BUDGET, headroom=0.0)
    with ab.Engine(net(), sgd, ab.mean_over_samples(loss), micro_batch_size=Auto(largest=ask)) as engine:
        report = engine.step(BATCH)
        size = report.plan.split.micro_batch_size
        words = engine.decisions["micro_batch_size"]
    with ab.Engine(net(), sgd, ab.mean_over_samples(loss), micro_batch_size=size) as named:
        named.step(BATCH)

    assert size is not None
    assert size <= (planned(BUDGET, headroom=0.0) or 0)
    assert "fits, as planned" in words
    pairs = zip(engine.model.parameters(), named.model.parameters(), strict=True)  # type: ignore[union-attr]
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.slow
def test_a_failed_plan_is_recorded() -> None:
    """If planning is impossible or no sample fits, the reason is recorded and the step runs anyway."""

    def chosen(model: nn.Module, batch: Tensor) -> Tensor:
        return loss(model, batch[batch.sum(1) > -(10**9)])

    ask = asked(chosen, budget_bytes=BUDGET)
    with pytest.raises(CannotPlanError):
        ask(BATCH, NUM_SAMPLES)
    with pytest.raises(PlanError):
        planned(1000)
    auto = Auto(largest=ask)
    with ab.Engine(net(), sgd, ab.mean_over_samples(chosen), micro_batch_size=auto, check_loss=False) as engine:
        engine.step(BATCH)
        assert "sizes were doubled, because there is no plan (cannot plan" in engine.decisions["micro_batch_size"]


def test_only_cuda_devices_use_the_planner(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A run on a CUDA device uses the planner; one on a CPU does not."""
    given: list[Auto | None] = []

    class Stop(Exception):  # noqa: N818 (not an error)
        """Ends the run before the engine is created."""

    def stopping(*_: Any, micro_batch_size: Auto | None = None, **__: Any) -> None:
        given.append(micro_batch_size)
        raise Stop

    monkeypatch.setattr(prepare, "start", stopping)
    job = ab.Job(
        model=net,
        optimizer=torch.optim.SGD,
        loss=ab.mean_over_samples(loss),
        dataset=lambda: BATCH,
        defaults=ab.RunConfig(effective_batch_size=16, learning_rate=1e-3, epochs=1),
    )
    for number, device in enumerate((CPU, torch.device("cuda"))):
        with pytest.raises(Stop):
            train(job, tmp_path / str(number), world=ab.World(device=device), stop=lambda: False)

    assert given[0] is None
    assert given[1] is not None
