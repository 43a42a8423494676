"""The loss check on batches of many forms, losses over pairs, and later batches: a verdict, or a warning."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import anybatch as ab
from anybatch.data import AnyRows
from anybatch.errors import LossError
from tests.engine.cases import Batch, vectors
from tests.engine.loss_declarations import HOLDS, Classifier, Declared, engine_for
from tests.raising import warns


def engine_of(loss: Any, model: nn.Module | None = None, **options: Any) -> ab.Engine:
    """Return an engine with micro-batches of 8."""
    case = Declared(lambda: model or Classifier(), dict, lambda: loss)
    return engine_for(case, **{"micro_batch_size": 8, "norms": "freeze", **options})


def of_spread(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a loss that fails on fewer than six samples."""
    scores = model(batch["x"])
    if len(scores) < 6:
        message = "too few"
        raise ValueError(message)
    spread: torch.Tensor = -scores.std(0).log().mean()
    return spread


def test_wrong_losses_are_caught_by_real_micro_batches() -> None:
    """A wrong loss that small pieces cannot reveal is found with real micro-batches, before the update."""
    model = Classifier()
    before = [one.detach().clone() for one in model.parameters()]
    engine = engine_of(ab.mean_over_samples(of_spread), model=model)
    with pytest.raises(LossError) as caught:
        engine.step(vectors(24))
    engine.close()
    assert caught.value.cause == "joint"
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


class Images(Dataset[tuple[torch.Tensor, dict[str, torch.Tensor]]]):
    """Vectors, each with some boxes."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(number)
        boxes = torch.randn(1 + number % 4, 3, generator=generator, dtype=torch.float64)
        return torch.randn(5, generator=generator, dtype=torch.float64), {"boxes": boxes}


def in_lists(samples: Sequence[tuple[torch.Tensor, dict[str, torch.Tensor]]]) -> tuple[list[Any], list[Any]]:
    """Return images and targets as lists with one entry per sample, as in detection."""
    return [image for image, _ in samples], [target for _, target in samples]


def of_boxes(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return a mean over boxes."""
    images, targets = batch
    found = model(torch.stack(list(images)))
    distances = [(one - target["boxes"]).abs().sum(1) for one, target in zip(found, targets, strict=True)]
    return torch.cat(distances).mean()


class Augmented(Dataset[dict[str, torch.Tensor]]):
    """Draws from a private generator, so that a sample differs each time it is read."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        x = torch.randn(5, generator=self.generator, dtype=torch.float64)
        return {"x": x, "y": torch.tensor(number % 3)}


def test_a_data_set_that_changes_is_read_once() -> None:
    """Samples that differ on each access are compared in memory, so a right loss passes."""
    engine = engine_of(ab.mean_over_samples(lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"])))
    (batch,) = ab.batches(Augmented(), effective_batch_size=24, shuffle=False)
    engine.step(batch)
    assert HOLDS in engine.decisions["loss"]
    engine.close()


class Sentences(Dataset[torch.Tensor]):
    """Sequences of different lengths."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(1 + number, 5, generator=generator, dtype=torch.float64)


def behind_each_other(samples: Sequence[torch.Tensor]) -> Batch:
    """Return sequences concatenated into one row, without padding."""
    return {"x": torch.cat(list(samples))[None], "lengths": torch.tensor([len(one) for one in samples])[None]}


def of_positions(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a mean over all positions."""
    values: torch.Tensor = model(batch["x"]).square().sum(-1)
    return values.mean()


ROWS_OF_THEIR_OWN: dict[str, tuple[Any, Any, Any, Any]] = {
    "detection": (Images(), in_lists, of_boxes, lambda batch: sum(len(one["boxes"]) for one in batch[1])),
    "padding-free": (Sentences(), AnyRows(behind_each_other), of_positions, lambda batch: batch["x"].shape[1]),
}


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("name", ROWS_OF_THEIR_OWN)
def test_batches_without_one_row_for_each_sample(name: str, right: bool) -> None:
    """For boxes in lists and concatenated sequences, a mean over items passes; declared over samples, it raises."""
    data, collate, loss, count = ROWS_OF_THEIR_OWN[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    engine = engine_of(ab.mean_over(loss, count) if right else ab.mean_over_samples(loss), model=model)
    (batch,) = ab.batches(data, effective_batch_size=24, collate=collate, shuffle=False)
    if right:
        engine.step(batch)
        assert HOLDS in engine.decisions["loss"]
    else:
        with pytest.raises(LossError) as caught:
            engine.step(batch)
        assert caught.value.cause == "other_items"
    engine.close()


def with_numpy(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return a mean over samples that are mixed with others chosen by NumPy."""
    other = torch.from_numpy(np.random.permutation(len(batch["x"])))
    return F.cross_entropy(model(0.6 * batch["x"] + 0.4 * batch["x"][other]), batch["y"])


def test_losses_that_cannot_be_checked_warn_once() -> None:
    """A loss that cannot be checked causes one warning with the reason; an uncut batch causes none."""
    options: dict[str, Any] = {"rng": None, "model": nn.Linear(5, 4).double()}
    engine = engine_of(ab.mean_over_samples(with_numpy), **options)
    with warns("loss_not_checked"):
        engine.step(vectors(24))
    for _ in range(4):
        engine.step(vectors(24))  # a second warning would be an error here
    engine.close()
    engine = engine_of(ab.mean_over_samples(with_numpy), **options)
    engine.step(vectors(8))
    engine.close()


# Later batches


@pytest.mark.parametrize("check_loss", [True, False])
def test_a_count_that_is_a_tensor_is_compared_too(check_loss: bool) -> None:
    """A `LossSum` with a tensor count that contradicts the declaration raises an error, with and without the check."""

    def contradicting(model: nn.Module, batch: Batch) -> ab.LossSum:
        each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return ab.LossSum(each.sum(), (batch["y"] > 0).sum())

    engine = engine_of(ab.mean_over_samples(contradicting), check_loss=check_loss)
    with pytest.raises(LossError):
        engine.step(vectors(24))
    engine.close()


# Losses across samples


def alike(_model: nn.Module, outputs: Batch) -> torch.Tensor:
    """Return a loss across samples."""
    near = F.normalize(outputs["z"], dim=1)
    return F.binary_cross_entropy_with_logits(near @ near.T, (outputs["y"][:, None] == outputs["y"]).double())


def test_an_encoder_that_combines_samples_is_refused() -> None:
    """An `encode` that combines samples raises an error; dropout, noise and BatchNorm do not matter."""

    def centred(model: nn.Module, batch: Batch) -> Batch:
        z = model(batch["x"])
        return {"z": z - z.mean(0), "y": batch["y"]}

    def by_itself(model: nn.Module, batch: Batch) -> Batch:
        return {"z": model(batch["x"] + 0.1 * torch.randn_like(batch["x"])), "y": batch["y"]}

    engine = engine_of(ab.joint(centred, alike))
    with pytest.raises(LossError) as caught:
        engine.step(vectors(24))
    assert caught.value.cause == "encode"
    engine.close()
    engine = engine_of(ab.joint(by_itself, alike))
    engine.step(vectors(24))
    assert HOLDS in engine.decisions["loss"]
    engine.close()
