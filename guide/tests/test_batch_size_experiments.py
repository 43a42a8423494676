"""Recordings about batch size: properties on any machine, and their runs."""

import math

import pytest
import torch

from anybatch_guide import study
from anybatch_guide.claims.batch_size import cost_to_target
from anybatch_guide.experiments import noise_scale
from anybatch_guide.tasks.task import LabelledSamples, cross_entropy
from tests.extras import skip_without

skip_without("sklearn", "anybatch[guide]")


@pytest.mark.slow
def test_a_study_run_equals_the_plain_loop() -> None:
    """Order, rates and updates of a run equal a loop in plain PyTorch, up to rounding."""
    run = study.StudyRun(
        task="digits", optimizer="SGD", batch_size=256, learning_rate=0.1, epochs=2, betas=(0.9,), seed=3
    )
    plain = study.new_model(run)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    whole = 12
    losses = []
    for step, batch in enumerate(study.steps_of(run)):
        # One warm-up step from half the rate, then a cosine from the full rate to a tenth of it.
        cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 1) / (whole - 1))) / 2
        optimizer.param_groups[0]["lr"] = 0.1 * (0.5 if step == 0 else cosine)
        optimizer.zero_grad()
        loss = cross_entropy(plain(batch["inputs"]), batch["targets"])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    model, found = study.trained(run)
    assert len(found) == study.num_steps_of(run) == whole
    assert found == pytest.approx(losses, rel=1e-4)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_an_unreached_target_costs_infinity() -> None:
    """A run that ends above the target counts as infinite, so that a failing rate is never the fastest."""
    run = study.StudyRun(task="digits", optimizer="SGD", batch_size=1024, learning_rate=1e-3, epochs=1, betas=(0.9,))
    assert cost_to_target(run)[:3] == (math.inf, math.inf, math.inf)


@pytest.mark.slow
def test_the_true_noise_scale_matches_a_loop() -> None:
    """The result of `vmap` equals variance / |G|^2 of gradients computed in a loop."""
    model = study.new_model(noise_scale.RUN)
    whole = study.task_of("digits").rows
    rows = LabelledSamples(whole.inputs[:40], whole.targets[:40])
    gradients = []
    for image, label in zip(rows.inputs, rows.targets, strict=True):
        taken = torch.autograd.grad(cross_entropy(model(image[None]), label[None]), list(model.parameters()))
        gradients.append(torch.cat([one.flatten() for one in taken]).double())
    stacked = torch.stack(gradients)
    mean = stacked.mean(0)
    expected = float(stacked.var(0, correction=0).sum() / mean.square().sum())
    assert noise_scale.true_scale(model, rows) == pytest.approx(expected, rel=1e-4)
