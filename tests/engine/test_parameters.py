"""Which parameters get a gradient, from which engine, and which stay unchanged."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.core.loss import Loss
from anybatch.engine.user_code import referenced_by
from anybatch.testing import relative_error
from tests.engine.cases import STRATEGIES, Batch, Gradients, InMemory, perceptron, plain_gradients, vectors
from tests.faults import sees
from tests.ranks_fixture import Ranks, selected

TOLERANCE = 1e-12
MICRO_BATCH_SIZES = (1, 3)
CLIP = 0.02


class Built(NamedTuple):
    """The engine's arguments, and a module with all trainable parameters."""

    model: Any
    loss: "Loss | Callable[[Any, Any], Any]"
    whole: nn.Module


@dataclass(frozen=True, slots=True)
class ParameterCase:
    """A special arrangement of parameters, and the full-batch loss of (module, batch) in plain PyTorch."""

    build: Callable[[], Built]
    reference: Callable[[Any, Batch], torch.Tensor]


class Heads(nn.Module):
    """A trunk with one head per task, used only for tasks in the batch, and a head that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 1) for _ in range(3))

    def forward(self, batch: Batch) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(batch["x"]))
        task = (batch["y"] < 2).long()  # in the batch below, task 0 in the second part and 1 in the first
        parts = [self.heads[number](hidden[task == number]) for number in (0, 1) if (task == number).any()]
        return torch.cat(parts).squeeze(1)


class TiedAutoencoder(nn.Module):
    """Encodes and decodes with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(5, 5)
        self.decode = nn.Linear(5, 5)
        self.decode.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        decoded: torch.Tensor = self.decode(torch.tanh(self.encode(x)))
        return decoded


@dataclass
class Output:
    """Structured output of a model."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


class Structured(nn.Module):
    """Returns a dataclass that contains a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = perceptron()

    def forward(self, x: torch.Tensor) -> Output:
        logits = self.inside(x)
        return Output(logits, (logits * 2, x))

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a tuple from a method other than `forward`."""
        output = self(x)
        return output.hidden[0], output.logits


class Margin(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]) * self.temperature, batch["y"])


def tasks() -> Batch:
    """Return samples sorted by task, so that some micro-batches, and the second of two ranks, see a single task."""
    batch = vectors(29)
    order = batch["y"].argsort()
    return {name: value[order] for name, value in batch.items()}


def images(batch: Batch) -> torch.Tensor:
    """Return vectors as images of 2 channels, 5 x 5."""
    x = batch["x"]
    return torch.stack([x.unsqueeze(1) * x.unsqueeze(2), x.unsqueeze(1) + x.unsqueeze(2)], 1)


def each_squared(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return one loss per sample."""
    outputs: torch.Tensor = model(batch)
    return outputs.square()


def reconstruct(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean squared error of an autoencoder."""
    return F.mse_loss(model(batch["x"]), batch["x"])


def classify_structured(model: Structured, batch: Batch) -> torch.Tensor:
    """Return the cross-entropy of logits in a tuple."""
    doubled, logits = model.encode(batch["x"])
    return F.cross_entropy(logits, batch["y"]) + doubled.square().mean()


def classify_images(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the cross-entropy of a convolutional model."""
    return F.cross_entropy(model(images(batch)).mean((2, 3)), batch["y"])


def classify_in_two(models: Mapping[str, nn.Module] | nn.ModuleDict, batch: Batch) -> torch.Tensor:
    """Return the cross-entropy of two modules in sequence."""
    return F.cross_entropy(models["head"](torch.tanh(models["body"](batch["x"]))), batch["y"])


def simple(make: Callable[[], nn.Module], loss: Callable[[Any, Batch], torch.Tensor]) -> Callable[[], Built]:
    """Return a function that builds a module with a mean loss over samples."""

    def build() -> Built:
        torch.default_generator.manual_seed(4)
        model = make().double()
        return Built(model, ab.mean_over_samples(loss), model)

    return build


def frozen() -> nn.Module:
    """Return a perceptron with a frozen first layer."""
    model = perceptron()
    model.get_submodule("0").requires_grad_(requires_grad=False)
    return model


def channels_last() -> nn.Module:
    """Return convolutions with channels-last weights, and therefore channels-last gradients."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 2))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch 2.13 has no annotation
    return model


def two_modules() -> Built:
    """Return a dict of modules."""
    torch.default_generator.manual_seed(5)
    models = {"body": nn.Linear(5, 6).double(), "head": nn.Linear(6, 4).double()}
    return Built(models, ab.mean_over_samples(classify_in_two), nn.ModuleDict(models))


def loss_with_parameters() -> Built:
    """Return a model and a loss module."""
    model, loss = perceptron(), Margin()
    return Built(model, ab.mean_over_samples(loss), nn.ModuleDict({"model": model, "loss": loss}))


PARAMETER_CASES: Mapping[str, ParameterCase] = {
    "frozen": ParameterCase(
        simple(frozen, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"])),
        lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
    ),
    "tied": ParameterCase(simple(TiedAutoencoder, reconstruct), reconstruct),
    "unused here and there": ParameterCase(
        simple(Heads, each_squared), lambda model, batch: each_squared(model, batch).mean()
    ),
    "structured outputs": ParameterCase(simple(Structured, classify_structured), classify_structured),
    "channels last": ParameterCase(simple(channels_last, classify_images), classify_images),
    "dict of modules": ParameterCase(two_modules, classify_in_two),
    "loss with parameters": ParameterCase(
        loss_with_parameters, lambda whole, batch: whole["loss"](whole["model"], batch)
    ),
}


def case_errors(case: ParameterCase, strategy: str) -> dict[str, float]:
    """Run on every rank: return the errors of gradients, and of parameters after two updates."""
    world = ab.World.from_environment()
    batch = tasks()
    plain = case.build().whole
    expected = plain_gradients(plain, case.reference(plain, batch))
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    optimizer = sgd(plain)
    for _ in range(2):
        optimizer.zero_grad()
        case.reference(plain, batch).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.step()
    errors = {}
    for size in MICRO_BATCH_SIZES:
        built = case.build()
        options: dict[str, Any] = {"micro_batch_size": size, "strategy": STRATEGIES[strategy](), "world": world}
        options |= {"check_loss": False, "clip": CLIP}
        with ab.Engine(built.model, sgd(built.whole), built.loss, **options) as engine:
            errors[f"gradients, {size}"] = relative_error(engine.gradients(InMemory(batch)), expected)
            errors[f"unchanged, {size}"] = relative_error(built.whole.state_dict(), before)
            for _ in range(2):
                engine.step(InMemory(batch))
            errors[f"updates, {size}"] = relative_error(built.whole.state_dict(), plain.state_dict())
    return errors


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that moves parameters even if their gradient is zero."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def all_case_errors(cases: Sequence[str]) -> dict[tuple[str, str], dict[str, float]]:
    """Run on every rank: return the errors of cases under all strategies."""
    size = ab.World.from_environment().size
    names = ["single", "all_reduce"] if size == 1 else [name for name in STRATEGIES if name != "single"]
    return {(case, name): case_errors(PARAMETER_CASES[case], name) for case in cases for name in names}


@pytest.fixture(scope="module")
def errors(ranks: Ranks, request: pytest.FixtureRequest) -> list[dict[tuple[str, str], dict[str, float]]]:
    """Return the errors of all cases on every rank."""
    return ranks.run(all_case_errors, selected(request, "case"))


@sees(
    "a parameter used only by another rank is not updated",
    "src/anybatch/parallel/all_reduce.py",
    "return buffers.gradients(used), report_sums",
    "return buffers.gradients(buffers.used), report_sums",
    cases=["2-ranks-unused here and there"],
    also=["tests/engine/test_parameters.py::test_unused_parameters_are_unchanged[all_reduce]"],
)
@pytest.mark.parametrize("case", PARAMETER_CASES)
def test_every_parameter_gets_the_plain_gradient(
    case: str, errors: list[dict[tuple[str, str], dict[str, float]]]
) -> None:
    """Gradients (also None) and two clipped updates with momentum and weight decay equal the plain loop's."""
    found = {
        (strategy, what): error
        for rank in errors
        for (name, strategy), row in rank.items()
        for what, error in row.items()
        if name == case
    }

    assert len(found) >= 3 * 2 * len(MICRO_BATCH_SIZES)
    assert {what: error for what, error in found.items() if not error <= TOLERANCE} == {}


def unused_and_used(strategy: str) -> tuple[list[bool], list[bool]]:
    """Run on every rank: return whether AdamW left each parameter unchanged, and whether its gradient is None."""
    built = PARAMETER_CASES["unused here and there"].build()
    before = [parameter.detach().clone() for parameter in built.whole.parameters()]
    optimizer = torch.optim.AdamW(built.whole.parameters(), lr=0.1, weight_decay=0.5)
    world = ab.World.from_environment()
    with ab.Engine(
        built.model, optimizer, built.loss, micro_batch_size=3, strategy=STRATEGIES[strategy](), world=world
    ) as engine:
        gradients = engine.gradients(InMemory(tasks()))
        engine.step(InMemory(tasks()))
    after = built.whole.parameters()
    unchanged = [torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    return unchanged, [gradient is None for gradient in gradients.values()]


@sees(
    "an unused parameter gets a gradient of zero",
    "src/anybatch/parallel/gradient_buckets.py",
    "[view if is_used else None for view, is_used in zip(self._views, used, strict=True)]",
    "list(self._views)",
    cases=["all_reduce"],
)
@pytest.mark.parametrize("strategy", ["all_reduce", "all_reduce, after", "ddp"])
def test_unused_parameters_are_unchanged(strategy: str, two_ranks: Ranks) -> None:
    """A parameter used by no rank has no gradient and no weight decay; one used by any rank moves on all."""
    for unchanged, without_gradient in two_ranks.run(unused_and_used, strategy):
        assert unchanged == without_gradient == [False] * 6 + [True] * 2


def stride_pairs(strategy: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Run on every rank: return the strides of each parameter and its gradient."""
    built = PARAMETER_CASES["channels last"].build()
    world = ab.World.from_environment()
    with ab.Engine(built.model, sgd(built.whole), built.loss, strategy=STRATEGIES[strategy](), world=world) as engine:
        gradients = engine.gradients(InMemory(tasks()))
    pairs = zip(built.whole.parameters(), gradients.values(), strict=True)
    return [(parameter.stride(), gradient.stride()) for parameter, gradient in pairs if gradient is not None]


@sees(
    "gradients have different strides than their parameters",
    "src/anybatch/parallel/gradient_buckets.py",
    'torch.empty_like(part, device="meta").stride()',
    'torch.empty(part.shape, device="meta").stride()',
    cases=["all_reduce"],
)
@pytest.mark.parametrize("strategy", ["all_reduce", "ddp"])
def test_gradients_have_their_parameters_strides(strategy: str, two_ranks: Ranks) -> None:
    """Gradients of channels-last weights are channels-last, so that optimizers access memory in one order."""
    pairs = two_ranks.run(stride_pairs, strategy)[0]
    assert len(pairs) == 4
    assert all(own == other for own, other in pairs)
    assert pairs[0][0] != torch.empty(4, 2, 3, 3).stride()


class Bag(nn.Module):
    """A sparse embedding followed by a linear layer."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.default_generator.manual_seed(6)
        self.table = nn.Embedding(50, 4, sparse=sparse, dtype=torch.float64)
        self.out = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.table(words).mean(1))
        return logits


@sees(
    "a sparse gradient is not accumulated",
    "src/anybatch/parallel/single.py",
    """
                parameter.grad = parameter.grad.coalesce()
""",
    """
                pass
""",
    cases=["clipped-count first"],
)
@pytest.mark.parametrize("late", [False, True], ids=["count first", "count last"])
@pytest.mark.parametrize("clip", [None, 0.01], ids=["unclipped", "clipped"])
def test_sparse_gradients_on_one_rank(clip: float | None, late: bool) -> None:
    """A sparse embedding's sparse gradient has the dense values, also accumulated, divided and clipped."""
    generator = torch.Generator().manual_seed(0)
    batch = {
        "words": torch.randint(0, 20, (11, 6), generator=generator),
        "y": torch.randint(0, 3, (11,), generator=generator),
    }

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["words"]), batch["y"], reduction="none")

    def run(*, sparse: bool) -> tuple[Gradients, Mapping[str, torch.Tensor]]:
        model = Bag(sparse=sparse)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        declared = loss if late else ab.mean_over_samples(loss)
        with ab.Engine(model, optimizer, declared, micro_batch_size=3, clip=clip, world=ab.World()) as engine:
            gradients = engine.gradients(batch)
            engine.step(batch)
        return gradients, model.state_dict()

    plain = Bag(sparse=False)
    expected = plain_gradients(plain, loss(plain, batch).mean())
    for sparse in (False, True):
        gradients, after = run(sparse=sparse)
        assert gradients["table.weight"] is not None
        assert gradients["table.weight"].is_sparse == sparse
        dense = {name: g.to_dense() if g is not None and g.is_sparse else g for name, g in gradients.items()}
        assert relative_error(dense, expected) <= TOLERANCE
        assert relative_error(after, run(sparse=False)[1]) <= TOLERANCE


temperature = nn.Parameter(torch.ones(()))
"""A global with the name of an attribute that a loss function reads."""


def names_attribute(model: Any, _batch: Batch) -> Any:
    """Read an attribute whose name is also a global's."""
    return model.temperature


def with_empty_cell() -> Callable[..., Any]:
    """Return a function with a parameter in its closure, and a cell that is still empty."""
    weight = nn.Parameter(torch.ones(()))

    def loss(model: Any, batch: Any) -> Any:
        return later(model(batch) * weight)

    found = referenced_by(loss)
    assert isinstance(found["weight"], nn.Parameter)

    def later(values: torch.Tensor) -> torch.Tensor:
        return values.sum()

    return loss


def test_captured_parameters_are_found() -> None:
    """Names of attributes are not globals, and an empty cell of a closure hides no other variable."""
    assert "temperature" not in referenced_by(names_attribute)
    assert isinstance(referenced_by(with_empty_cell())["weight"], nn.Parameter)
