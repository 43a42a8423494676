"""The recipe "contrastive": its loss and metric, exact cuts, and worse results with naive accumulation."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

import anybatch as ab
from anybatch.core.batch import Placement
from anybatch.core.run_config import RunConfig
from anybatch.core.splitting import SplitOptions
from anybatch.errors import LossError
from anybatch.recipes import digits
from anybatch.recipes.contrastive import Encoders, contrastive, encode, loss, retrieval
from anybatch.recipes.start import start
from anybatch.testing.gradients import assert_same_gradients
from tests.extras import skip_without

skip_without("sklearn", "anybatch[recipes]")


def doubled(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate samples into float64 images."""
    batch: dict[str, torch.Tensor] = default_collate(samples)
    return batch | {"image": batch["image"].double()}


def naive_loss(model: Encoders, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss over the micro-batch alone."""
    return loss(model, encode(model, batch))


def test_loss_and_retrieval_by_hand() -> None:
    """For three pairs with two of them swapped, loss and metric match values computed by hand."""
    model, axes = Encoders(), torch.eye(32)[:3]
    scale = float(model.logit_scale.detach().exp())
    vectors = axes, axes[[0, 2, 1]]

    assert scale == pytest.approx(1 / 0.07)
    each = torch.tensor([scale, 0.0, 0.0]) - math.log(math.exp(scale) + 2)
    torch.testing.assert_close(loss(model, vectors).detach(), -each.mean())
    assert float(retrieval(model, vectors)["retrieval_accuracy"]) == pytest.approx(1 / 3)
    assert float(retrieval(model, (axes, axes))["retrieval_accuracy"]) == 1.0


@pytest.mark.parametrize(
    ("recipe", "model", "plain_loss"),
    [(contrastive(), Encoders, naive_loss), (digits.digits(), digits.Network, digits.loss)],
)
def test_any_cut_is_exact(recipe: ab.Job, model: Any, plain_loss: Any) -> None:
    """In float64 the gradients of both recipes of images match the plain loop at any micro-batch size."""
    job = dataclasses.replace(recipe, model=lambda: model().double(), collate=doubled)
    whole, cut = (start(job, RunConfig(effective_batch_size=50, steps=1, micro_batch_size=size)) for size in (50, 7))
    (batch,) = whole.batches
    (samples,) = Placement(SplitOptions(), 1, 0).micro_batches(batch)
    trained = whole.engine.model
    assert isinstance(trained, nn.Module)
    names, parameters = zip(*trained.named_parameters(), strict=True)
    plain = dict(zip(names, torch.autograd.grad(plain_loss(trained, samples), parameters), strict=True))
    assert_same_gradients(whole.engine.gradients(batch), plain)
    assert_same_gradients(cut.engine.gradients(next(iter(cut.batches))), plain)


def test_naive_declaration_is_refused() -> None:
    """The first step rejects a mean over samples for this loss and recommends the right declaration."""
    naive = dataclasses.replace(contrastive(), loss=ab.mean_over_samples(naive_loss))
    run = start(naive, RunConfig(epochs=1, micro_batch_size=4))
    with pytest.raises(LossError):
        run.engine.step(next(iter(run.batches)))
