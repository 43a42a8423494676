"""The recipe "contrastive": its loss, its metric, that any cut is exact, and that naive accumulation learns less."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

import anybatch as ab
from anybatch.core.batch import Placement
from anybatch.core.splitting import Cut
from anybatch.errors import LossError
from anybatch.recipes.contrastive import Encoders, contrastive, encode, loss, retrieval
from anybatch.recipes.run.start import start
from anybatch.testing.gradients import assert_same_gradients
from tests.extras import skip_without

skip_without("sklearn", "anybatch[recipes]")


def doubled(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate samples into float64 images."""
    batch: dict[str, torch.Tensor] = default_collate(samples)
    return batch | {"image": batch["image"].double()}


def naive_loss(model: Encoders, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of a micro-batch by itself."""
    return loss(model, encode(model, batch))


def test_what_each_encoder_sees() -> None:
    """The vectors of the even columns depend on these alone, and have length 1; so do those of the odd ones."""
    model, images = Encoders(), torch.rand(3, 1, 8, 8)
    changed = images.clone()
    changed[..., 1::2] = 0
    (even, odd), (same, other) = encode(model, {"image": images}), encode(model, {"image": changed})

    assert torch.equal(even, same)
    assert not torch.equal(odd, other)
    torch.testing.assert_close(torch.cat([even, odd]).norm(dim=1), torch.ones(6))


def test_loss_and_retrieval_by_hand() -> None:
    """On three pairs of which two are mixed up, both are what one computes by hand."""
    model, axes = Encoders(), torch.eye(32)[:3]
    scale = float(model.logit_scale.detach().exp())
    vectors = axes, axes[[0, 2, 1]]

    assert scale == pytest.approx(1 / 0.07)
    each = torch.tensor([scale, 0.0, 0.0]) - math.log(math.exp(scale) + 2)
    torch.testing.assert_close(loss(model, vectors).detach(), -each.mean())
    assert float(retrieval(model, vectors)["retrieval_accuracy"]) == pytest.approx(1 / 3)
    assert float(retrieval(model, (axes, axes))["retrieval_accuracy"]) == 1.0


def test_any_cut_is_exact() -> None:
    """In float64 the gradient of an effective batch is that of the plain loop, whatever the micro-batch size."""
    job = dataclasses.replace(contrastive(), model=lambda: Encoders().double(), collate=doubled)
    whole, cut = (start(job, effective_batch_size=50, steps=1, micro_batch_size=size) for size in (50, 7))
    (batch,) = whole.batches
    (samples,) = Placement(Cut(), 1, 0).micro_batches(batch)
    model = whole.engine.model
    assert isinstance(model, Encoders)
    names, parameters = zip(*model.named_parameters(), strict=True)
    plain = dict(zip(names, torch.autograd.grad(naive_loss(model, samples), parameters), strict=True))
    assert_same_gradients(whole.engine.gradients(batch), plain)
    assert_same_gradients(cut.engine.gradients(next(iter(cut.batches))), plain)


def accuracy(declared: ab.Job) -> float:
    """Return the held-out retrieval accuracy after eight epochs in micro-batches of 4."""
    run = start(declared, epochs=8, micro_batch_size=4, check_loss=False)
    for batch in run.batches:
        run.engine.step(batch)
    model = run.engine.model
    assert isinstance(model, nn.Module)
    assert run.evaluate() == start_again(model)
    return run.evaluate()["retrieval_accuracy"]


def start_again(model: nn.Module) -> dict[str, float]:
    """Return the metric of the model in one forward over all held-out images."""
    held_out = contrastive().evaluate
    assert held_out is not None
    data = held_out.dataset()
    with torch.no_grad():
        found = retrieval(Encoders(), encode(model, {"image": data.images}))  # type: ignore[arg-type]
    return {name: float(value) for name, value in found.items()}


def test_naive_declaration_is_refused() -> None:
    """The first step sees that this loss is no mean over samples, and names what to declare."""
    naive = dataclasses.replace(contrastive(), loss=ab.mean_over_samples(naive_loss))
    run = start(naive, epochs=1, micro_batch_size=4)
    with pytest.raises(LossError, match=r"declare ab\.joint\(encode, loss\)"):
        run.engine.step(next(iter(run.batches)))


@pytest.mark.slow
@pytest.mark.published
def test_naive_accumulation_learns_less() -> None:
    """With each micro-batch's own loss the task is an easier one, and less is learnt of the one that was meant."""
    exact = accuracy(contrastive())
    naive = accuracy(dataclasses.replace(contrastive(), loss=ab.mean_over_samples(naive_loss)))

    assert exact > naive + 0.02
    assert naive > 5 / 360
