"""Around a step: schedulers, constant losses, complex and captured parameters, metrics, sources of NaN."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ChainedScheduler, StepLR

import anybatch as ab
from anybatch.errors import AnyBatchWarning, LossError, ParameterError
from anybatch.testing import relative_error
from tests.engine.cases import (
    Batch,
    InMemory,
    classify,
    language_model,
    perceptron,
    sentences,
    sgd_engine,
    vectors,
)
from tests.ranks_fixture import Ranks

TOLERANCE = 1e-12


def sgd(named: Any) -> torch.optim.Optimizer:
    """Return SGD with weight decay."""
    return torch.optim.SGD(named, lr=0.1, weight_decay=0.1)


def warned(run: Callable[[], object]) -> list[str]:
    """Return the warnings that anybatch raises during a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AnyBatchWarning)
        run()
    return [str(one.message) for one in caught if issubclass(one.category, AnyBatchWarning)]


def rates(optimizer: torch.optim.Optimizer, *, chained: bool) -> Any:
    """Return a schedule that halves the learning rate every step."""
    halving = StepLR(optimizer, 1, gamma=0.5)
    return ChainedScheduler([halving], optimizer) if chained else halving


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("steps_itself", [False, True])
def test_a_scheduler_that_is_stepped_twice_warns(chained: bool, steps_itself: bool) -> None:
    """A loop that also calls `step()` on the engine's scheduler gets one warning; other loops get none."""

    def train() -> None:
        model = perceptron()
        optimizer = sgd(model.parameters())
        scheduler = rates(optimizer, chained=chained)
        loss = ab.mean_over_samples(classify)
        with ab.Engine(model, optimizer, loss, micro_batch_size=4, scheduler=scheduler) as engine:
            for _ in range(4):
                engine.step(InMemory(vectors(7)))
                if steps_itself:
                    scheduler.step()

    found = warned(train)
    assert len(found) == steps_itself
    assert not steps_itself or "Remove scheduler.step()" in found[0]


def detections(model: nn.Module, batch: Batch) -> ab.LossSum:
    """Return the sum over samples that have a box, or a constant zero without any."""
    found = batch["y"] > 0
    if not found.any():
        return ab.LossSum(torch.zeros(()), 0)
    losses = F.cross_entropy(model(batch["x"][found]), batch["y"][found], reduction="none")
    return ab.LossSum(losses.sum(), int(found.sum()))


def boxes() -> Batch:
    """Return a batch in which the first micro-batch of each of two ranks has no box."""
    batch = vectors(12)
    batch["y"] = torch.where(torch.arange(12) % 6 < 2, torch.zeros_like(batch["y"]), batch["y"].clamp(min=1))
    return batch


def error_with_constants(strategy: str, *, is_declared: bool) -> float | str:
    """Run on every rank: return the error of the weights after two steps, or the error message."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    model, plain = perceptron(), perceptron()
    loss = ab.mean_over(detections, count=lambda batch: (batch["y"] > 0).sum()) if is_declared else detections
    world = ab.World() if strategy == "single" else ab.World.from_environment()
    optimizer = sgd(plain.parameters())
    try:
        with ab.Engine(
            model, sgd, loss, micro_batch_size=2, strategy=strategy, check_loss=False, world=world
        ) as engine:
            for _ in range(2):
                engine.step(InMemory(boxes()))
                found: Any = detections(plain, boxes())
                optimizer.zero_grad()
                (found.total / found.count).backward()
                optimizer.step()
    except LossError as error:
        return str(error)
    trained = {name: one.detach() for name, one in model.named_parameters()}
    return relative_error(trained, {name: one.detach() for name, one in plain.named_parameters()})


@pytest.mark.parametrize("is_declared", [False, True])
def test_a_constant_zero_adds_nothing(is_declared: bool) -> None:
    """A micro-batch whose loss is a constant zero adds nothing to the gradient, as in the unsplit batch."""
    error = error_with_constants("single", is_declared=is_declared)
    assert isinstance(error, float)
    assert error <= TOLERANCE


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_a_loss_that_is_always_constant_is_refused(value: float) -> None:
    """A loss that never depends on the model raises an error, even if it is zero."""
    model = perceptron()
    loss = ab.mean_over_samples(lambda _model, _batch: torch.tensor(value))
    with (
        ab.Engine(model, sgd, loss, micro_batch_size=4, check_loss=False) as engine,
        pytest.raises(LossError),
    ):
        engine.step(InMemory(vectors(7)))


TEMPERATURE = nn.Parameter(torch.ones((), dtype=torch.float64))


def with_global(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a loss that uses a parameter from the module's globals."""
    return classify(model, batch) * TEMPERATURE


class Holder:
    """An object with a parameter and with the loss as a method."""

    def __init__(self) -> None:
        self.scales = TEMPERATURE

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss."""
        return classify(model, batch) * self.scales


def with_argument(scale: torch.Tensor, model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a loss that gets a parameter as a bound argument."""
    return classify(model, batch) * scale


@pytest.mark.parametrize(
    "make",
    [
        lambda: lambda model, batch: classify(model, batch) * TEMPERATURE,
        lambda: with_global,
        lambda: Holder().loss,
        lambda: functools.partial(with_argument, TEMPERATURE),
    ],
    ids=["closure", "global", "object", "partial"],
)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_parameter_that_only_the_loss_has_warns(make: Callable[[], Any], is_frozen: bool) -> None:
    """A trainable parameter that only the loss function holds causes a warning; a frozen one does not."""
    TEMPERATURE.requires_grad_(not is_frozen)
    model = perceptron()
    found = warned(lambda: ab.Engine(model, sgd, ab.mean_over_samples(make()), micro_batch_size=4).close())
    assert len(found) == (not is_frozen)
    assert is_frozen or "are not trained" in found[0]


def refused_capture() -> tuple[str, bool]:
    """Run on every rank: return the error for a captured parameter, and whether the model kept that parameter."""
    model = perceptron()
    weight = model.get_parameter("0.weight")
    loss = ab.mean_over_samples(lambda net, batch: classify(net, batch) + weight.square().sum())
    with pytest.raises(ParameterError) as caught:
        ab.Engine(model, sgd, loss, strategy="fsdp", world=ab.World.from_environment())
    return str(caught.value), model.get_parameter("0.weight") is weight


def test_a_captured_parameter_is_refused_under_fsdp(two_ranks: Ranks) -> None:
    """Under fsdp, a loss that has captured a model parameter raises an error before the model changes."""
    for message, is_kept in two_ranks.run(refused_capture):
        assert "'0.weight'" in message
        assert is_kept


def each_word(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return one loss per word."""
    logits = model(batch["words"])
    return F.cross_entropy(logits.flatten(0, 1), batch["words"].flatten(), reduction="none")


@pytest.mark.parametrize("size", [3, None])
def test_an_undeclared_loss_per_word_is_evaluated_as_it_is_trained(size: int | None) -> None:
    """Evaluating an undeclared loss per word returns its mean over words; a metric is named after its function."""
    model, batch = language_model(), sentences(7)
    with ab.Engine(model, sgd, each_word, micro_batch_size=size or "auto") as engine:
        expected = float(each_word(model, batch).detach().mean())
        assert engine.evaluate([InMemory(batch)]) == pytest.approx({"loss": expected}, rel=1e-12)
        assert engine.evaluate([InMemory(batch)], each_word) == pytest.approx({"each_word": expected}, rel=1e-12)
        partial = functools.partial(each_word)
        assert engine.evaluate([InMemory(batch)], partial) == pytest.approx({"each_word": expected}, rel=1e-12)
        assert set(engine.evaluate([InMemory(batch)], lambda net, part: each_word(net, part) * 2)) == {"metric"}


class Waves(nn.Module):
    """A model with complex and real weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex128))
        self.real = nn.Linear(5, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number per sample."""
        squares: torch.Tensor = self.real(x).squeeze(1).square()
        return squares + (x * self.phase).sum(1).abs().square()


def test_complex_parameters_with_a_late_count() -> None:
    """Gradients of complex and real parameters are divided correctly by a count known only after the forward."""
    model, plain = Waves(), Waves()
    with ab.Engine(model, sgd, lambda net, batch: net(batch["x"]), micro_batch_size=2, check_loss=False) as engine:
        engine.step(InMemory(vectors(7)))
    optimizer = sgd(plain.parameters())
    plain(vectors(7)["x"]).mean().backward()
    optimizer.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert float((one - other).detach().abs().max()) <= TOLERANCE


def test_an_error_in_the_loss_names_step_rank_and_samples() -> None:
    """An error in the loss function keeps its type and gets notes with the step, rank and samples."""
    calls = []

    def loss(model: nn.Module, part: Batch) -> torch.Tensor:
        calls.append(part)
        if len(calls) == 6:
            raise KeyError("label")  # noqa: EM101 (as a dict raises it)
        return classify(model, part)

    with sgd_engine(perceptron(), loss, check_loss=False, micro_batch_size=3) as engine:
        engine.step(InMemory(vectors(10)))
        with pytest.raises(KeyError) as caught:
            engine.step(InMemory(vectors(10)))
    notes = " ".join(caught.value.__notes__)
    assert "samples 3 to 5 of the effective batch (micro-batch 1, counted from 0)" in notes
    assert "in step 1 (counted from 0), on rank 0 of 1" in notes
