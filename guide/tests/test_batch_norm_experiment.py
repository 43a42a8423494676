"""The BatchNorm experiment of the page: its configurations against a plain step on the full batch."""

import itertools

import pytest
import torch
from torch import nn

from anybatch.norms import Exact
from anybatch_guide.experiments import batch_norm
from anybatch_guide.experiments.batch_norm import CONFIGS, NormConfig
from anybatch_guide.recording import read_recording
from anybatch_guide.tasks.shapes import network
from guide.tests.recorded_again import RECORDINGS


def named(name: str) -> NormConfig:
    """Return the configuration with that name."""
    return next(config for config in CONFIGS if config.name == name)


def test_a_step_takes_the_gradient_of_plain_torch() -> None:
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
def test_recalibrated_statistics_are_those_of_all_images() -> None:
    """After recalibration the first layer's running mean matches the mean over all training images."""
    train_set, _ = batch_norm.train_and_held_out_images()
    torch.manual_seed(0)
    model = network("batch")
    batch_norm.recalibrate(model, train_set)
    first, norm = model[0], model[1]
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    with torch.no_grad():
        expected = first(train_set.inputs).mean(dim=(0, 2, 3))
    assert torch.allclose(norm.running_mean, expected, atol=1e-5)


def test_no_convolution_in_front_of_a_norm_has_a_bias() -> None:
    """No layer before a norm has a bias: its gradient would be rounding noise, which AdamW turns into full steps."""
    layers = list(network("batch"))
    assert all(
        one.bias is None
        for one, after in itertools.pairwise(layers)
        if isinstance(one, nn.Conv2d) and isinstance(after, nn.BatchNorm2d)
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 4])
def test_exact_runs_agree_with_the_plain_whole_batch(size: int) -> None:
    """Ten float32 steps with norms="exact" give the weights of ten plain steps on full batches, up to rounding."""
    train_set, _ = batch_norm.train_and_held_out_images()
    models = []
    for config, micro_batch_size in ((NormConfig(name="", norm="batch", policy=None), 64), (named("exact"), size)):
        torch.manual_seed(0)
        model = network("batch")
        step = batch_norm.make_step(config, micro_batch_size, model)
        for batch in batch_norm.batches(train_set, 0, 10):
            step(batch)
        models.append(model)
    plain, exact = (nn.utils.parameters_to_vector(one.parameters()) for one in models)
    assert (plain - exact).norm() <= 1e-4 * plain.norm()
    assert isinstance(named("exact").policy, Exact)


@pytest.mark.slow
def test_recorded_gradient_errors_come_again() -> None:
    """In a plain loop, micro-batches of 16, 4 and 2 have the recorded errors."""
    recorded = read_recording(RECORDINGS / "batch_norm.json").data["gradient_errors"]
    errors = {one["micro_batch_size"]: one["relative_error"] for one in recorded if one["way"] == "plain"}

    for size in (16, 4, 2):
        assert batch_norm.gradient_error(named("plain"), size) == pytest.approx(errors[size], rel=1e-2)


@pytest.mark.slow
def test_a_run_is_one_of_the_recorded() -> None:
    """Training in a plain loop from a recorded seed ends within the recorded range of all seeds."""
    rows = read_recording(RECORDINGS / "batch_norm.json").data["rows"]
    (row,) = (one for one in rows if (one["way"], one["micro_batch_size"]) == ("plain", 64))
    found = batch_norm.train_and_evaluate(named("plain"), 64, batch_norm.SEEDS[0], lambda _: None)

    for name, value in found.items():
        assert 0.99 * row[name]["least"] <= value <= 1.01 * row[name]["most"], name
