"""`check` is undecided only if gradients cannot be compared."""

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import anybatch as ab
from anybatch.diagnostics import CheckReport
from anybatch.errors import CompositionError
from tests.diagnostics.faulty import (
    Batch,
    Encoder,
    LanguageModel,
    Network,
    classify,
    images,
    sentences,
    separate,
    vectors,
)
from tests.faults import sees


def codes(report: CheckReport) -> list[str]:
    """Return the codes of the findings that matter to the verdict."""
    return [finding.code for finding in report.findings if finding.breaks_equality or finding.prevents_verdict]


def of_python() -> float:
    """Return a random number from Python."""
    return 0.5 + random.random()


def of_numpy() -> float:
    """Return a random number from numpy."""
    return 0.5 + float(np.random.rand())


SCALARS = {"Python": of_python, "numpy": of_numpy}


def scaled(draw: Callable[[], float], model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over samples of inputs times one random number."""
    return F.cross_entropy(model(batch["x"] * draw()), batch["label"])


def two_terms(draw: Callable[[], float], model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return two terms, each times its own random number."""
    logits = model(batch["words"])
    return {"lm": draw() * F.cross_entropy(logits.mT, batch["labels"]), "size": draw() * logits.square().mean()}


def both_scaled(draw: Callable[[], float], model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the representations of both sides, times one random number."""
    return model(batch["x"]) * draw(), model(batch["y"]) * draw()


def spread(model: nn.Module, outputs: tuple[Tensor, Tensor]) -> Tensor:  # noqa: ARG001 (the form that ab.joint takes)
    """Return a loss of all outputs together that depends on their scale."""
    one, other = outputs
    return F.cross_entropy(one @ other.T, torch.arange(len(one)))


class ScaledLoss(nn.Module):
    """A loss with a parameter, times one random number."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.scale, self.draw = nn.Parameter(torch.ones(())), draw

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.scale * scaled(self.draw, model, batch)


ALIGNED: dict[str, Callable[[Callable[[], float]], tuple[Any, Any, Batch]]] = {
    "samples": lambda draw: (Encoder(), ab.mean_over_samples(functools.partial(scaled, draw)), vectors()),
    "sum_of": lambda draw: (
        LanguageModel(),
        ab.sum_of(functools.partial(two_terms, draw), lm=ab.tokens(shift=False), size=ab.samples(weight=0.1)),
        sentences(),
    ),
    "an encoder": lambda draw: (Encoder(), ab.joint(functools.partial(both_scaled, draw), spread), vectors()),
    "a loss that is a module": lambda draw: (Encoder(), ab.mean_over_samples(ScaledLoss(draw)), vectors()),
}


@sees(
    "check: random numbers of Python and numpy differ in each micro-batch",
    "src/anybatch/diagnostics/gradient_runs.py",
    "        seed_generators(self.seed)\n",
    "        pass\n",
)
@pytest.mark.parametrize("kind", SCALARS)
@pytest.mark.parametrize("name", ALIGNED)
@pytest.mark.slow
def test_one_number_of_python_or_numpy_per_forward_is_repeated(name: str, kind: str) -> None:
    """A forward that draws one number draws the same one in every micro-batch, so a right loss is exact."""
    report = ab.check(*ALIGNED[name](SCALARS[kind]))
    assert report.equal, str(report)
    assert [(finding.code, finding.breaks_equality) for finding in report.findings] == [("randomness", False)]


def noisy_in_a_loop(model: nn.Module, batch: Batch) -> Tensor:
    """Draw one number for each sample, in a loop."""
    factors = torch.tensor([[of_python()] for _ in batch["x"]], dtype=batch["x"].dtype)
    return F.cross_entropy(model(batch["x"] * factors), batch["label"])


def noisy_by_row(model: nn.Module, batch: Batch) -> Tensor:
    """Draw numbers for all samples in one call."""
    factors = torch.from_numpy(np.random.rand(*batch["x"].shape)).to(batch["x"].dtype)
    return F.cross_entropy(model(batch["x"] * factors), batch["label"])


def masked_by_bits(model: nn.Module, batch: Batch) -> Tensor:
    """Draw a bit for each sample, of which numpy packs 32 into one number."""
    kept = torch.from_numpy(np.random.randint(0, 2, len(batch["x"]), dtype=bool))[:, None]
    return F.cross_entropy(model(batch["x"] * kept), batch["label"])


def mixed_by_numpy(model: nn.Module, batch: Batch) -> Tensor:
    """Mix samples in an order that numpy draws."""
    order = torch.from_numpy(np.random.permutation(len(batch["x"])))
    return F.cross_entropy(model(0.7 * batch["x"] + 0.3 * batch["x"][order]), batch["label"])


def with_a_private_generator() -> Callable[..., Tensor]:
    """Return a loss with numbers of a generator that no seed reaches."""
    private = np.random.default_rng(0)
    return functools.partial(scaled, lambda: 0.5 + float(private.random()))


def with_a_global_list() -> Callable[..., Tensor]:
    """Return a loss that depends on a list outside of all modules."""
    calls: list[int] = []

    def counting(model: nn.Module, batch: Batch) -> Tensor:
        calls.append(1)
        return (1 + 0.1 * len(calls)) * separate(model, batch)

    return counting


BY_SAMPLE = (noisy_in_a_loop, noisy_by_row, masked_by_bits, mixed_by_numpy)
UNDECIDED: list[tuple[Callable[[], Callable[..., Tensor]], str]] = [
    *((functools.partial(lambda found: found, function), "draws_by_sample") for function in BY_SAMPLE),
    (with_a_private_generator, "unrepeatable"),
    (with_a_global_list, "unrepeatable"),
    (lambda: lambda model, batch: 0.0 * separate(model, batch), "no_gradient"),
]


@sees(
    "check: random numbers per sample make cuts unequal",
    "src/anybatch/diagnostics/check.py",
    "    if runs.draws is not None and runs.draws.by_host:\n",
    "    if False:\n",
)
@pytest.mark.parametrize(("make", "code"), UNDECIDED)
@pytest.mark.slow
def test_incomparable_gradients_are_undecided(make: Callable[[], Callable[..., Tensor]], code: str) -> None:
    """Numbers that belong to samples, state that no seed reaches, or no gradient at all leave no verdict."""
    report = ab.check(Encoder(), ab.mean_over_samples(make()), vectors())
    assert (report.verdict, report.equal) == ("undecided", False)
    assert codes(report) == [code]
    assert report.reason == next(finding.observation for finding in report.findings if finding.prevents_verdict)


def test_a_cut_that_cannot_run_is_not_equal() -> None:
    """A loss that refuses a micro-batch of one sample makes that cut unequal, and its error is the only finding."""

    def of_pairs(model: nn.Module, batch: Batch) -> Tensor:
        if len(batch["x"]) < 2:
            raise ValueError(len(batch["x"]))
        return separate(model, batch)

    report = ab.check(Encoder(), ab.mean_over_samples(of_pairs), vectors())
    assert [split.verdict == "not equal" for split in report.splits] == [True, False, False]
    assert (report.verdict, codes(report)) == ("not equal", ["cannot_run"])


def test_batch_norm_without_statistics_is_batch_norm() -> None:
    """BatchNorm without running statistics, which also couples samples in eval mode, is recognized."""
    model = Network(functools.partial(nn.BatchNorm2d, track_running_stats=False))
    report = ab.check(model, ab.mean_over_samples(classify), images())
    assert (report.verdict, codes(report)) == ("not equal", ["batch_norm"])


class Checkpointed(nn.Module):
    """Checkpoints its first layer."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(checkpoint(self.block, self.first(x), use_reentrant=self.reentrant))
        return out


@sees(
    "check: reentrant checkpointing raises torch's error",
    "src/anybatch/diagnostics/gradient_runs.py",
    "raise refused from error",
    "raise",
)
def test_reentrant_checkpointing_is_refused() -> None:
    """Reentrant checkpointing raises as in the engine, with the argument to pass; the other kind is exact."""
    loss = ab.mean_over_samples(separate)
    with pytest.raises(CompositionError) as caught:
        ab.check(Checkpointed(reentrant=True), loss, vectors())
    assert "use_reentrant=False" in str(caught.value)
    assert ab.check(Checkpointed(reentrant=False), loss, vectors()).verdict == "exact"


def zeros_counted(batch: Batch) -> Tensor:
    """Return the number of samples of class 0."""
    return (batch["label"] == 0).sum()


def of_zeros(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over samples of class 0; without any, a constant."""
    kept = batch["label"] == 0
    return F.cross_entropy(model(batch["x"][kept]), batch["label"][kept]) if kept.any() else torch.zeros(())


def of_zeros_with_size(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the mean over samples of class 0, and one over all samples."""
    return {"zeros": of_zeros(model, batch), "size": model(batch["y"]).square().mean()}


def sums_of_zeros(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sum over samples of class 0; without any, a constant."""
    return of_zeros(model, batch) * zeros_counted(batch)


WITHOUT_GRAPH: dict[str, Any] = {
    "LossSum": lambda: lambda model, batch: ab.LossSum(sums_of_zeros(model, batch), zeros_counted(batch)),
    "sum_of": lambda: ab.sum_of(
        of_zeros_with_size, zeros=ab.counted(zeros_counted, weight=0.5), size=ab.samples(weight=0.1)
    ),
}


@pytest.mark.parametrize("name", WITHOUT_GRAPH)
@pytest.mark.slow
def test_a_micro_batch_without_a_graph_adds_nothing(name: str) -> None:
    """A micro-batch whose loss is a constant has a zero gradient, and the others decide."""
    assert ab.check(Encoder(), WITHOUT_GRAPH[name](), vectors()).verdict == "exact"
    wrong = ab.check(Encoder(), ab.mean_over_samples(of_zeros), vectors())
    assert wrong.verdict == "not equal"
