"""`check` is undecided only if gradients cannot be compared."""

import functools
import random
from collections.abc import Callable
from pathlib import Path
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


def summed(draw: Callable[[], float], model: nn.Module, batch: Batch) -> Tensor:
    """Return the sum over samples, times one random number."""
    return draw() * F.cross_entropy(model(batch["x"]), batch["label"], reduction="sum")


def of_words(draw: Callable[[], float], model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over targets, times one random number."""
    return draw() * F.cross_entropy(model(batch["words"]).mT, batch["labels"])


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
    "samples, dropout": lambda draw: (
        Encoder(lambda: nn.Dropout(0.2)),
        ab.mean_over_samples(functools.partial(scaled, draw)),
        vectors(),
    ),
    "tokens": lambda draw: (
        LanguageModel(),
        ab.mean_over_tokens(functools.partial(of_words, draw), shift=False),
        sentences(),
    ),
    "sum_of": lambda draw: (
        LanguageModel(),
        ab.sum_of(functools.partial(two_terms, draw), lm=ab.tokens(shift=False), size=ab.samples(weight=0.1)),
        sentences(),
    ),
    "a loss that is a module": lambda draw: (Encoder(), ab.mean_over_samples(ScaledLoss(draw)), vectors()),
    "a model in float64": lambda draw: (
        Encoder().double(),
        ab.mean_over_samples(functools.partial(scaled, draw)),
        {name: one.double() if one.is_floating_point() else one for name, one in vectors().items()},
    ),
}


@sees(
    "check: numbers of Python and numpy are drawn anew in each micro-batch",
    "src/anybatch/diagnostics/gradient_runs.py",
    "            seed_generators(self.seed)\n",
    "            pass\n",
)
@pytest.mark.parametrize("kind", SCALARS)
@pytest.mark.parametrize("name", ALIGNED)
@pytest.mark.slow
def test_one_number_of_python_or_numpy_per_forward_is_repeated(name: str, kind: str) -> None:
    """A forward that draws one number draws the same one in every micro-batch, so a right loss is exact."""
    report = ab.check(*ALIGNED[name](SCALARS[kind]))
    assert report.equal, str(report)
    assert [(finding.code, finding.breaks_equality) for finding in report.findings] == [("randomness", False)]


@pytest.mark.parametrize("kind", SCALARS)
@pytest.mark.slow
def test_a_wrong_declaration_with_one_random_number_is_not_equal(kind: str) -> None:
    """A repeated number hides nothing: a sum declared as a mean is not equal, and its cause is a declaration."""
    report = ab.check(Encoder(), ab.mean_over_samples(functools.partial(summed, SCALARS[kind])), vectors())
    assert report.verdict == "not equal"
    assert codes(report) == ["loss_declaration"]


@pytest.mark.parametrize("kind", SCALARS)
@pytest.mark.slow
def test_numbers_of_the_encoder_are_repeated(kind: str) -> None:
    """An encoder that draws one number draws the same one in every micro-batch and in both passes of a joint loss."""
    report = ab.check(Encoder(), ab.joint(functools.partial(both_scaled, SCALARS[kind]), spread), vectors())
    assert report.equal, str(report)


def noisy_in_a_loop(model: nn.Module, batch: Batch) -> Tensor:
    """Draw one number for each sample, in a loop."""
    factors = torch.tensor([[of_python()] for _ in batch["x"]], dtype=batch["x"].dtype)
    return F.cross_entropy(model(batch["x"] * factors), batch["label"])


def noisy_by_row(model: nn.Module, batch: Batch) -> Tensor:
    """Draw numbers for all samples in one call."""
    factors = torch.from_numpy(np.random.rand(*batch["x"].shape)).to(batch["x"].dtype)
    return F.cross_entropy(model(batch["x"] * factors), batch["label"])


@pytest.mark.parametrize("function", [noisy_in_a_loop, noisy_by_row])
@pytest.mark.slow
def test_numbers_drawn_sample_after_sample_are_continued(function: Callable[..., Tensor]) -> None:
    """Numbers drawn once for each sample, in order, are the same in one batch and in several, so cuts are exact."""
    report = ab.check(Encoder(), ab.mean_over_samples(function), vectors())
    assert report.equal, str(report)


def noisy_twice(model: nn.Module, batch: Batch) -> Tensor:
    """Draw twice for each sample, so that the second numbers follow the first ones of all samples."""
    return noisy_by_row(model, batch) + 0.5 * noisy_by_row(model, batch)


def masked_by_bits(model: nn.Module, batch: Batch) -> Tensor:
    """Draw a bit for each sample, of which numpy packs 32 into one number."""
    kept = torch.from_numpy(np.random.randint(0, 2, len(batch["x"]), dtype=bool))[:, None]
    return F.cross_entropy(model(batch["x"] * kept), batch["label"])


def mixed_by_numpy(model: nn.Module, batch: Batch) -> Tensor:
    """Mix samples in an order that numpy draws."""
    order = torch.from_numpy(np.random.permutation(len(batch["x"])))
    return F.cross_entropy(model(0.7 * batch["x"] + 0.3 * batch["x"][order]), batch["label"])


@sees(
    "check: numbers that differ by sample make cuts unequal",
    "src/anybatch/diagnostics/gradient_runs.py",
    "        return self.draws.differ_by_sample or self._depends_on_order(tolerance)\n",
    "        return False\n",
)
@pytest.mark.parametrize("function", [noisy_twice, masked_by_bits, mixed_by_numpy])
@pytest.mark.slow
def test_numbers_drawn_by_sample_leave_it_undecided(function: Callable[..., Tensor]) -> None:
    """Numbers of Python or numpy that belong to samples and cannot be repeated for them leave no verdict."""
    report = ab.check(Encoder(), ab.mean_over_samples(function), vectors())
    assert (report.verdict, report.equal) == ("undecided", False)
    assert codes(report) == ["draws_by_sample"]
    assert report.reason == next(finding.says for finding in report.findings if finding.prevents_verdict)


@pytest.mark.slow
def test_a_private_generator_leaves_it_undecided() -> None:
    """A generator that no seed reaches makes two runs on the same samples differ, so the check is undecided."""
    private = np.random.default_rng(0)
    report = ab.check(
        Encoder(), ab.mean_over_samples(functools.partial(scaled, lambda: 0.5 + float(private.random()))), vectors()
    )
    assert report.verdict == "undecided"
    assert codes(report) == ["unrepeatable"]


def test_state_outside_of_modules_leaves_it_undecided() -> None:
    """State in a global list makes two runs differ, so the check is undecided."""
    calls: list[int] = []

    def counting(model: nn.Module, batch: Batch) -> Tensor:
        calls.append(1)
        return (1 + 0.1 * len(calls)) * separate(model, batch)

    report = ab.check(Encoder(), ab.mean_over_samples(counting), vectors())
    assert (report.verdict, codes(report)) == ("undecided", ["unrepeatable"])


@pytest.mark.slow
def test_batch_norm_with_one_random_number_is_batch_norm() -> None:
    """A random number from numpy does not hide the cause of a difference."""

    def noisy(model: nn.Module, batch: Batch) -> Tensor:
        return of_numpy() * classify(model, batch)

    report = ab.check(Network(nn.BatchNorm2d), ab.mean_over_samples(noisy), images())
    assert (report.verdict, codes(report)) == ("not equal", ["batch_norm"])


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


class Reversible(torch.autograd.Function):
    """Runs a block again in its backward and adds to the parameters' gradients there, like Reformer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            out: Tensor = block(x)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.block(x), gradients[0])
        return x.grad, None


class WithReversible(nn.Module):
    """Has one block that computes its own gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(Reversible.apply(self.first(x), self.block))  # type: ignore[no-untyped-call]  # torch's
        return out


@pytest.mark.slow
def test_gradients_added_within_a_backward_are_compared() -> None:
    """The un-split gradient includes gradients that a backward adds to parameters directly."""
    report = ab.check(WithReversible(), ab.mean_over_samples(separate), vectors())
    assert report.verdict == "exact", str(report)
    wrong = ab.check(
        WithReversible(),
        ab.mean_over_samples(lambda model, batch: F.cross_entropy(model(batch["x"]), batch["label"], reduction="sum")),
        vectors(),
    )
    assert wrong.verdict == "not equal"


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
    "mean": lambda: ab.mean_over(of_zeros, zeros_counted),
    "sum": lambda: ab.sum_over_samples(sums_of_zeros),
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


def test_without_a_gradient_there_is_nothing_to_compare() -> None:
    """A loss with zero gradient agrees with every declaration, so the check is undecided."""
    report = ab.check(Encoder(), ab.mean_over_samples(lambda m, b: 0.0 * separate(m, b)), vectors())
    assert (report.verdict, codes(report)) == ("undecided", ["no_gradient"])


@pytest.mark.slow
def test_pairs_are_called_groups() -> None:
    """Pairs of neighbours are exact in micro-batches of even sizes, and the finding has that size."""

    def preferred(model: nn.Module, batch: Batch) -> Tensor:
        score = model(batch["x"])[:, 0]
        return -F.logsigmoid(score[0::2] - score[1::2]).mean()

    for model in (Encoder(), Encoder(lambda: nn.Dropout(0.2))):
        report = ab.check(model, ab.mean_over_samples(preferred), vectors())
        found = next(finding for finding in report.findings if finding.breaks_equality)
        assert (report.verdict, found.code, found.where) == ("not equal", "groups", "2")
    assert ab.check(Encoder(), ab.mean_over_samples(preferred), vectors(), micro_batch_sizes=[2, 4]).equal


RECIPE = """
import random
import torch
import anybatch as ab


def loss(model, batch):
    factors = torch.tensor([[random.random()] for _ in batch], dtype=batch.dtype)
    others = torch.tensor([[random.random()] for _ in batch], dtype=batch.dtype)
    return (model(batch * factors) * others).square().mean()


def job():
    return ab.Job(
        model=lambda: torch.nn.Linear(1, 1),
        optimizer=torch.optim.SGD,
        loss=ab.mean_over_samples(loss),
        dataset=lambda: torch.arange(64.0)[:, None] / 64,
        defaults=ab.RunConfig(effective_batch_size=16, learning_rate=0.1, epochs=10),
    )
"""


def test_the_program_has_a_status_for_undecided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`anybatch check` has its own exit status for an undecided check, and prints the verdict."""
    from anybatch.cli.main import main  # noqa: PLC0415 (not needed by the other tests)
    from anybatch.cli.status import Status  # noqa: PLC0415 (not needed by the other tests)

    file = tmp_path / "drawing.py"
    file.write_text(RECIPE, encoding="utf-8")
    status = main(["check", str(file), "--samples", "6"])
    assert status == Status.UNDECIDED
    assert "verdict: undecided" in capsys.readouterr().out
