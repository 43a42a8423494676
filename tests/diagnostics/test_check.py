"""`check` tells exact from unequal gradients, names the cause, and passes after its fix."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.diagnostics import CheckReport, check
from anybatch.diagnostics.figures import draw_errors
from anybatch.errors import BatchSizeError, UserError
from anybatch.norms import Ghost, Policy, PolicyName
from tests.diagnostics.faulty import (
    FAULTS,
    HELD,
    NUM_CLASSES,
    Alone,
    Batch,
    Encoder,
    InEvaluationMode,
    LanguageModel,
    Network,
    Subject,
    as_sum,
    classify,
    classify_weighted,
    group_norm,
    images,
    mean,
    predict,
    predict_and_regularise,
    predict_by_mask,
    predict_shifted,
    sentences,
    separate,
    smoothness,
    vectors,
    weights_of,
)
from tests.raising import raises


def checked(subject: Subject) -> CheckReport:
    """Return the report on a subject."""
    return check(subject.model(), subject.loss(), subject.batch())


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named(name: str) -> None:
    """A planted fault makes the check fail with its code, place and fix."""
    fault = FAULTS[name]
    report = checked(fault.subject)
    breaking = [finding for finding in report.findings if finding.breaks_equality]
    assert not report.equal
    assert [(finding.code, finding.where) for finding in breaking] == [(fault.code, fault.where)]
    assert fault.change in breaking[0].change


@pytest.mark.parametrize("name", FAULTS)
def test_change_mends(name: str) -> None:
    """After the recommended fix, gradients are equal up to rounding and no finding breaks equality."""
    report = checked(FAULTS[name].mended)
    assert report.equal
    assert not any(finding.breaks_equality for finding in report.findings)


@pytest.mark.parametrize("name", HELD)
def test_noise_is_held(name: str) -> None:
    """Random numbers drawn per sample are the same in every cut, so cuts are exact, with a note."""
    report = checked(HELD[name])
    assert report.verdict == "exact", str(report)
    assert [(finding.code, finding.breaks_equality) for finding in report.findings] == [("randomness", False)]
    assert "were held" in report.findings[0].says


def healthy() -> dict[str, Subject]:
    """Return correct models, losses and batches in all compatible combinations."""
    norms = {"no norm": None, "GroupNorm": group_norm, "LayerNorm": lambda channels: nn.LayerNorm([channels, 6, 6])}
    losses = {
        "mean": mean(classify),
        "each": mean(lambda model, batch: F.cross_entropy(model(batch["image"]), batch["label"], reduction="none")),
        "sum and count": lambda: as_sum,
        "weighted": lambda: ab.mean_over(classify_weighted, weights_of),
        "smoothed": mean(
            lambda model, batch: F.cross_entropy(model(batch["image"]), batch["label"], label_smoothing=0.1)
        ),
    }
    found = {
        f"{norm}, dropout {dropout}, {loss}": Subject(partial(Network, norms[norm], dropout), losses[loss], images)
        for norm in norms
        for dropout in (0.0, 0.3)
        for loss in losses
    }
    between: dict[str, Callable[[], nn.Module]] = {
        "plain": nn.Identity,
        "dropout": partial(nn.Dropout, 0.2),
        "RMSNorm": partial(nn.RMSNorm, 8),
    }
    token_losses = {
        "tokens": lambda: ab.mean_over_tokens(predict, shift=False),
        "shifted": lambda: ab.mean_over_tokens(predict_shifted),
        "mask": lambda: ab.mean_over(predict_by_mask, lambda batch: batch["mask"].sum()),
        "two terms": lambda: ab.sum_of(predict_and_regularise, lm=ab.tokens(shift=False), size=ab.samples(weight=0.1)),
    }
    for module, loss in itertools.product(between, token_losses):
        found[f"language model, {module}, {loss}"] = Subject(
            partial(LanguageModel, between[module]), token_losses[loss], sentences
        )
    activations: dict[str, Callable[[], nn.Module]] = {
        "alpha dropout": partial(nn.AlphaDropout, 0.2),
        "BatchNorm in evaluation mode": lambda: InEvaluationMode(nn.BatchNorm1d(10)),
        "GELU": nn.GELU,
        "PReLU": nn.PReLU,
        "attention over features": lambda: Alone(nn.MultiheadAttention(10, 2, dropout=0.1, batch_first=True)),
    }
    for name, make in activations.items():
        found[f"perceptron, {name}"] = Subject(partial(Encoder, make), mean(separate), vectors)
        found[f"perceptron, {name}, squared"] = Subject(
            partial(Encoder, make), mean(lambda model, batch: model(batch["x"]).square().mean()), vectors
        )
    return found


HEALTHY = healthy()


@pytest.mark.parametrize("name", HEALTHY)
def test_no_false_alarm(name: str) -> None:
    """A correct combination is equal, also with dropout, and has no finding that breaks equality."""
    report = checked(HEALTHY[name])

    assert report.equal, str(report)
    assert not any(finding.breaks_equality for finding in report.findings)


def test_a_loss_with_parameters_is_held_too() -> None:
    """A loss that is a module stays one while random numbers are fixed, so its parameters are compared."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, model: nn.Module, batch: Batch) -> Tensor:
            return self.scale * F.cross_entropy(F.dropout(model(batch["x"])), batch["label"])

    report = check(Encoder(lambda: nn.Dropout(0.2)), ab.mean_over_samples(Scaled()), vectors())
    assert report.equal, str(report)


@pytest.mark.parametrize("norms", ["exact", "freeze", Ghost(group_size=4)], ids=str)
def test_policies_mend_batch_norm(norms: Policy | PolicyName) -> None:
    """Under the recommended policies, every cut into complete groups is equal."""
    model = Network(nn.BatchNorm2d, dropout=0.3)
    report = check(model, ab.mean_over_samples(classify), images(), norms=norms, micro_batch_sizes=[4, 8])
    assert report.equal, str(report)
    assert [finding.code for finding in report.findings] == ["randomness"]
    assert not any(finding.breaks_equality for finding in report.findings)


def test_user_is_untouched() -> None:
    """A check leaves parameters, buffers, modes, gradients and random state unchanged."""
    model = Network(nn.BatchNorm2d, 0.5).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.default_generator.get_state()

    check(model, ab.mean_over_samples(classify), images())

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.default_generator.get_state(), state)


def test_float32_where_needed() -> None:
    """A model that cannot run in float64 is checked in its own dtype, and the report says why."""

    def narrow(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["image"]), batch["label"], weight=torch.ones(NUM_CLASSES))

    report = check(Network(), ab.mean_over_samples(narrow), images())

    assert report.precision.startswith("float32, because in float64: ")
    assert report.verdict == "equal up to rounding"


def test_too_few_samples() -> None:
    """Three samples cannot be split unevenly, and the error has the required number."""
    batch = {name: value[:3] for name, value in images().items()}
    with raises(BatchSizeError, "too_few_samples"):
        check(Network(), ab.mean_over_samples(classify), batch)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
@pytest.mark.slow
def test_figure(tmp_path: Path, suffix: str) -> None:
    """The errors by layer are drawn to a file; an unsupported extension raises."""
    report = checked(FAULTS["BatchNorm"].subject)
    path = tmp_path / f"errors{suffix}"

    draw_errors(report, path)

    assert path.stat().st_size > 1_000
    with raises(UserError, "picture_format"):
        draw_errors(report, tmp_path / "errors.txt")


def test_a_count_that_is_an_integer_tensor_is_divided_by_exactly() -> None:
    """With an integer count the un-split gradient matches plain torch in float64, and cuts are equally accurate."""
    batch = {"x": torch.randn(11, 3, dtype=torch.float64), "mask": torch.ones(11, 7, dtype=torch.long)}

    def summed(model: nn.Module, piece: dict[str, torch.Tensor]) -> ab.LossSum:
        return ab.LossSum(model(piece["x"]).square().sum(), piece["mask"].sum())

    report = ab.check(nn.Linear(3, 1).double(), summed, batch)
    assert max(split.error for split in report.splits) <= 1e-12


def test_a_frozen_layer_stays_frozen() -> None:
    """BatchNorm in eval mode within a model in training mode couples no samples, so cuts are equal."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].eval()
    batch = {"x": torch.randn(11, 3)}
    report = ab.check(model, ab.mean_over_samples(lambda model, piece: model(piece["x"]).square().mean()), batch)
    assert report.equal


def test_a_loss_may_differentiate_inside() -> None:
    """A penalty on the input's gradient is compared like any other loss."""
    report = ab.check(Encoder(), ab.mean_over_samples(smoothness), vectors())
    assert report.verdict == "exact", str(report)


@pytest.mark.filterwarnings("ignore:.*(spectral|weight)_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["spectral_norm", "weight_norm"])
def test_layers_that_keep_what_they_have_computed(name: str) -> None:
    """Old parametrizations cache the weight of their last forward, which a copy of the model must not share."""
    model = Encoder(lambda: getattr(torch.nn.utils, name)(nn.Linear(10, 10)))
    separate(model, vectors()).backward()
    report = ab.check(model, ab.mean_over_samples(separate), vectors())
    # Each forward updates the estimate of a spectral norm; a weight norm has no state.
    assert [finding.code for finding in report.findings] == (["state"] if name == "spectral_norm" else [])
