"""The BatchNorm experiment of the page: its configurations against a plain step on the full batch."""

import pytest
import torch
from torch import nn

from anybatch_guide.experiments import batch_norm
from anybatch_guide.experiments.batch_norm import CONFIGS, NormConfig
from anybatch_guide.tasks.shapes import network
from guide.tests.recorded_again import recording


def named(name: str) -> NormConfig:
    """Return the configuration with that name."""
    return next(config for config in CONFIGS if config.name == name)


@pytest.mark.slow
def test_a_step_uses_the_gradient_of_plain_torch() -> None:
    """An SGD step with learning rate 1 subtracts the gradient of the mean over the batch."""
    train_set, _ = batch_norm.train_and_held_out_images()
    torch.manual_seed(0)
    model = network("group").double()
    batch = {"inputs": train_set.inputs[:64].double(), "targets": train_set.targets[:64]}
    nn.functional.cross_entropy(model(batch["inputs"]), batch["targets"]).backward()
    plain = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
    taken = batch_norm.gradient_of_step(named("group_norm"), 4, model, batch)
    assert (taken - plain).norm() <= 1e-12 * plain.norm()


@pytest.mark.slow
def test_exact_statistics_give_the_gradient_of_the_batch_and_micro_batches_do_not() -> None:
    """In micro-batches of 4, norms="exact" is within 1e-12 of the full batch; a plain loop is more than 5% off."""
    assert batch_norm.gradient_error(named("exact"), 4) <= 1e-12
    assert batch_norm.gradient_error(named("plain"), 4) > 0.05


@pytest.mark.slow
def test_recorded_gradient_errors_are_reproduced() -> None:
    """In a plain loop, micro-batches of 16, 4 and 2 have the recorded errors."""
    recorded = recording("batch_norm")["data"]["gradient_errors"]
    errors = {one["micro_batch_size"]: one["relative_error"] for one in recorded if one["way"] == "plain"}

    for size in (16, 4, 2):
        assert batch_norm.gradient_error(named("plain"), size) == pytest.approx(errors[size], rel=1e-2)
