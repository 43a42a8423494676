"""Micro-batches that count no items of a loss but still contribute to it, such as pure background images."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.core.tensors import relative_error
from anybatch.errors import LossError
from tests.engine.cases import Batch, cut, share_bounds
from tests.faults import sees
from tests.raising import raises
from tests.ranks_fixture import Ranks


def pictures(number: int = 24) -> Batch:
    """Return anchors; many samples have no positive ones."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(number, 6, 5, generator=generator, dtype=torch.float64)
    y = (torch.rand(number, 6, generator=generator) < 0.4).double()
    y[4:10] = 0
    y[14:] = 0
    return {"x": x, "y": y}


def detector() -> nn.Module:
    """Return a model that scores each anchor."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 1), nn.Flatten(1)).double()


def focal_sum(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the focal loss summed over all anchors."""
    each = F.binary_cross_entropy_with_logits(model(batch["x"]), batch["y"], reduction="none")
    found: torch.Tensor = ((1 - torch.exp(-each)).square() * each).sum()
    return found


def positives(batch: Batch) -> torch.Tensor:
    """Count the positive anchors."""
    return batch["y"].sum()


def summed(model: nn.Module, batch: Batch) -> ab.LossSum:
    """Return the sum and its count."""
    return ab.LossSum(focal_sum(model, batch), positives(batch))


def divided(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss as in RetinaNet and DETR, divided by at least one."""
    divisor: torch.Tensor = positives(batch).clamp(min=1)
    return focal_sum(model, batch) / divisor


def both(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return two terms, one of which counts nothing in some micro-batches."""
    return {"focal": summed(model, batch), "size": model(batch["x"]).square().mean()}


def reference(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the full-batch loss."""
    return focal_sum(model, batch) / positives(batch)


def reference_of_both(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the full-batch loss with the second term."""
    size: torch.Tensor = model(batch["x"]).square().mean()
    return reference(model, batch) + 0.1 * size


DECLARED: dict[str, tuple[Callable[[], Any], Callable[[nn.Module, Batch], torch.Tensor]]] = {
    "declared": (lambda: ab.mean_over(summed, count=positives), reference),
    "undeclared": (lambda: summed, reference),
    "two terms": (
        lambda: ab.sum_of(both, focal=ab.counted(positives), size=ab.samples(weight=0.1)),
        reference_of_both,
    ),
}


def error_of(loss: Any, expected: Callable[[nn.Module, Batch], torch.Tensor], **options: Any) -> float:
    """Return the relative error of the engine's gradient."""
    world = options.setdefault("world", ab.World())
    batch, model = pictures(), detector()
    start, stop = share_bounds(len(batch["x"]), [1] * world.size)[world.rank]
    engine = ab.Engine(model, torch.optim.SGD(model.parameters()), loss, micro_batch_size=3, **options)
    found = engine.gradients(cut(batch, start, stop))
    engine.close()
    plain = detector()
    expected(plain, batch).backward()
    return relative_error(found, {name: parameter.grad for name, parameter in plain.named_parameters()})


@sees(
    "the sum of a micro-batch without a count is dropped",
    "src/anybatch/core/loss.py",
    "return self.count > 0 or self.adds_without_count",
    "return self.count > 0",
    cases=["declared", "two terms"],
)
@pytest.mark.parametrize("name", DECLARED)
def test_sums_are_exact_for_any_counts(name: str) -> None:
    """The gradient of a loss divided by its positives equals the full batch's."""
    loss, expected = DECLARED[name]
    assert error_of(loss(), expected) <= 1e-12


def test_a_right_sum_passes_the_check() -> None:
    """The check confirms the declaration, although it cuts off pieces without positive anchors."""
    batch = cut(pictures(), 3, 9)
    assert [float(positives(cut(batch, *ends))) > 0 for ends in ((0, 1), (1, 6))] == [True, False]
    model = detector()
    with ab.Engine(
        model, torch.optim.SGD(model.parameters()), ab.mean_over(summed, count=positives), micro_batch_size=6
    ) as engine:
        engine.step(batch)
        assert "confirmed by the check" in engine.decisions["loss"]


def errors_on_rank(name: str, strategy: str, check_loss: bool) -> float:
    """Run on every rank: return the error of the gradient."""
    loss, expected = DECLARED[name]
    return error_of(loss(), expected, world=ab.World.from_environment(), strategy=strategy, check_loss=check_loss)


@pytest.mark.parametrize(("strategy", "check_loss"), [("all_reduce", True), ("ddp", False)])
@pytest.mark.parametrize("name", DECLARED)
def test_ranks_without_a_count_take_part(name: str, strategy: str, check_loss: bool, three_ranks: Ranks) -> None:
    """A rank whose share counts nothing still adds its sums, with and without the loss check."""
    assert max(three_ranks.run(errors_on_rank, name, strategy, check_loss)) <= 1e-12


@pytest.mark.parametrize("check_loss", [True, False])
def test_a_finite_mean_over_no_items_is_refused(check_loss: bool) -> None:
    """If a mean over no items is a finite number, its divisor is unknown; the error suggests `LossSum`."""
    with raises(LossError, "mean_over_nothing"):
        error_of(ab.mean_over(divided, count=positives), reference, check_loss=check_loss)
