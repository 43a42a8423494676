"""`check` tells exact from unequal gradients, names the cause, and passes after its fix."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.diagnostics import CheckReport, check
from anybatch.errors import BatchSizeError
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
    """A planted fault makes the check fail with its code, place and fix; after the fix gradients are equal."""
    fault = FAULTS[name]
    report = checked(fault.subject)
    breaking = [finding for finding in report.findings if finding.breaks_equality]
    assert not report.equal
    assert [(finding.code, finding.where) for finding in breaking] == [(fault.code, fault.where)]
    assert fault.change in breaking[0].change
    assert_right(checked(fault.mended))


def assert_right(report: CheckReport) -> None:
    """Assert that all cuts are equal, and that no finding breaks equality."""
    assert report.equal, str(report)
    assert not any(finding.breaks_equality for finding in report.findings)


@pytest.mark.parametrize("name", HELD)
def test_noise_drawn_per_sample_is_exact(name: str) -> None:
    """Random numbers drawn per sample are the same in every cut, so cuts are exact, with a note."""
    report = checked(HELD[name])
    assert report.verdict == "exact", str(report)
    assert [(finding.code, finding.breaks_equality) for finding in report.findings] == [("randomness", False)]
    assert "were fixed" in report.findings[0].observation


class ScaledLoss(nn.Module):
    """A loss with a parameter, which has to stay a module while random numbers are held."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.scale * F.cross_entropy(F.dropout(model(batch["x"])), batch["label"])


def summed_by_mask(model: nn.Module, batch: Batch) -> ab.LossSum:
    """Return a sum with a count that is an integer tensor, which would divide in float32."""
    each = F.cross_entropy(model(batch["words"]).mT, batch["words"], reduction="none")
    return ab.LossSum((each * batch["mask"]).sum(), batch["mask"].sum())


def healthy() -> dict[str, Subject]:
    """Return correct models, losses and batches in all compatible combinations."""
    norms = {"no norm": None, "GroupNorm": group_norm}
    losses = {
        "mean": mean(classify),
        "sum and count": lambda: as_sum,
        "weighted": lambda: ab.mean_over(classify_weighted, weights_of),
    }
    found = {
        f"{norm}, dropout {dropout}, {loss}": Subject(partial(Network, norms[norm], dropout), losses[loss], images)
        for norm in norms
        for dropout in (0.0, 0.3)
        for loss in losses
    }
    between: dict[str, Callable[[], nn.Module]] = {"plain": nn.Identity, "dropout": partial(nn.Dropout, 0.2)}
    token_losses = {
        "shifted": lambda: ab.mean_over_tokens(predict_shifted),
        "mask": lambda: ab.mean_over(predict_by_mask, lambda batch: batch["mask"].sum()),
        "sum and count": lambda: summed_by_mask,
        "two terms": lambda: ab.sum_of(predict_and_regularise, lm=ab.tokens(shift=False), size=ab.samples(weight=0.1)),
    }
    for module, loss in itertools.product(between, token_losses):
        found[f"language model, {module}, {loss}"] = Subject(
            partial(LanguageModel, between[module]), token_losses[loss], sentences
        )
    activations: dict[str, Callable[[], nn.Module]] = {
        "alpha dropout": partial(nn.AlphaDropout, 0.2),
        "BatchNorm in evaluation mode": lambda: InEvaluationMode(nn.BatchNorm1d(10)),
        "attention over features": lambda: Alone(nn.MultiheadAttention(10, 2, dropout=0.1, batch_first=True)),
    }
    for name, make in activations.items():
        found[f"perceptron, {name}"] = Subject(partial(Encoder, make), mean(separate), vectors)
    found["a loss with parameters"] = Subject(
        partial(Encoder, partial(nn.Dropout, 0.2)), lambda: ab.mean_over_samples(ScaledLoss()), vectors
    )
    found["a loss that differentiates inside"] = Subject(Encoder, mean(smoothness), vectors)
    return found


HEALTHY = healthy()


@pytest.mark.parametrize("name", HEALTHY)
def test_no_false_alarm(name: str) -> None:
    """A correct combination is exact, also with dropout, and has no finding that breaks equality."""
    report = checked(HEALTHY[name])
    assert_right(report)
    assert report.verdict == "exact", str(report)


@pytest.mark.parametrize("norms", ["exact", "freeze", Ghost(group_size=4)], ids=str)
def test_policies_fix_batch_norm(norms: Policy | PolicyName) -> None:
    """Under the recommended policies, every cut into complete groups is equal."""
    model = Network(nn.BatchNorm2d, dropout=0.3)
    report = check(model, ab.mean_over_samples(classify), images(), norms=norms, micro_batch_sizes=[4, 8])
    assert_right(report)
    assert [finding.code for finding in report.findings] == ["randomness"]


def test_a_check_changes_no_state() -> None:
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


@pytest.mark.filterwarnings("ignore:.*(spectral|weight)_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["spectral_norm", "weight_norm"])
def test_layers_that_cache_weights(name: str) -> None:
    """Old parametrizations cache the weight of their last forward, which a copy of the model must not share."""
    model = Encoder(lambda: getattr(torch.nn.utils, name)(nn.Linear(10, 10)))
    separate(model, vectors()).backward()
    report = ab.check(model, ab.mean_over_samples(separate), vectors())
    # Each forward updates the estimate of a spectral norm; a weight norm has no state.
    assert [finding.code for finding in report.findings] == (["state"] if name == "spectral_norm" else [])
