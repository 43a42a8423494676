"""Replicas in one process give the gradient of one device, for any model arguments and outputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import anybatch as ab
from anybatch.errors import AnyBatchWarning, CompositionError, UserError
from anybatch.parallel.data_parallel import DataParallel
from anybatch.parallel.world import World
from anybatch.testing import relative_error
from tests.engine.cases import CASES, SPLITS, Batch, InMemory, arrive, engine_for, plain_gradients
from tests.faults import sees

Loss = Callable[[Any, Batch], torch.Tensor]
WIDTH, NUM_CLASSES, NUM_SAMPLES = 5, 4, 23


def batch_of(num_samples: int = NUM_SAMPLES) -> Batch:
    """Return vectors and labels."""
    generator = torch.Generator().manual_seed(3)
    return {
        "x": torch.randn(num_samples, WIDTH, generator=generator, dtype=torch.float64),
        "y": torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator),
    }


def gradients(
    model: nn.Module, loss: Loss, size: int = 8, replicas: int = 3, num_samples: int = NUM_SAMPLES, **options: Any
) -> Mapping[str, Any]:
    """Return the gradient of the engine."""
    strategy = DataParallel(replicas=replicas)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with ab.Engine(
        model, sgd, ab.mean_over_samples(loss), micro_batch_size=size, strategy=strategy, world=World(), **options
    ) as engine:
        return engine.gradients(InMemory(batch_of(num_samples)))


def error_of(model: nn.Module, loss: Loss, **options: Any) -> float:
    """Return the gradient's error against one backward over all samples in plain PyTorch."""
    expected = plain_gradients(model, loss(model, batch_of()))
    expected = {name: None if g is None else g.clone() for name, g in expected.items()}
    model.zero_grad()
    return relative_error(gradients(model, loss, **options), expected)


class Parts(nn.Module):
    """Records the number of samples of its calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(WIDTH, NUM_CLASSES).double()
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        out: torch.Tensor = self.linear(x)
        return out


def simple(model: Any, batch: Batch) -> torch.Tensor:
    """Return the loss of a model that takes vectors."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


@sees(
    "a replica's gradient is skipped",
    "src/anybatch/parallel/data_parallel.py",
    "outputs.append(functional_call(self._module, buffers, *arguments))",
    "outputs.append(functional_call(self._module, buffers, *arguments).detach())",
    cases=("7-ragged", "all-masked tokens"),
)
@pytest.mark.parametrize(("split", "name"), [*(("7", name) for name in CASES), ("all", "masked tokens")])
@pytest.mark.slow
def test_every_case_is_exact(name: str, split: str) -> None:
    """With 3 replicas the gradient equals the full batch's for every loss, also in a ragged micro-batch.

    Models whose output is not a row per sample, for example a loss, are refused.
    """
    case = CASES[name]
    model = case.model()
    expected = plain_gradients(model, case.reference(model, case.batch()))
    with engine_for(case, SPLITS[split], DataParallel(replicas=3), World()) as engine:
        found = engine.gradients(arrive(case.batch(), SPLITS[split], World()))
    assert relative_error(found, expected) <= 1e-12


def test_replicas_run_the_parts() -> None:
    """Each replica runs a part of a micro-batch, of which two differ in size; there are never more than samples."""
    model = Parts()
    assert error_of(model, simple, check_loss=False) <= 1e-12
    assert model.seen == [23, 3, 3, 2, 3, 3, 2, 3, 2, 2]
    model = Parts()
    assert error_of(model, simple, size=4, replicas=9, check_loss=False) <= 1e-12
    assert set(model.seen[1:]) == {1, 2}


@pytest.mark.gpu(2)
def test_two_gpus() -> None:
    """On two GPUs the gradient is exact too."""
    model = Returns(lambda _, out: out)
    expected = dict(plain_gradients(model, simple(model, batch_of())))
    model.zero_grad()
    model.cuda()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    world = World(device=torch.device("cuda:0"))
    with ab.Engine(
        model, sgd, ab.mean_over_samples(simple), micro_batch_size=8, strategy="data_parallel", world=world
    ) as engine:
        found = engine.gradients(InMemory(batch_of()))
    del found["prototypes"], expected["prototypes"]  # unused: zeros on CUDA
    assert relative_error({name: None if g is None else g.cpu() for name, g in found.items()}, expected) <= 1e-12


class Takes(nn.Module):
    """A model that computes its features from the arguments of a test case."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(WIDTH, NUM_CLASSES).double()
        self.compute = compute
        self.rows: list[int] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = self.compute(*args, **kwargs)
        self.rows.append(len(x))
        return self.linear(x)


@dataclass
class Pair:
    """Arguments in a dataclass."""

    x: torch.Tensor
    scale: float


MASK = torch.linspace(0.5, 1.5, WIDTH * WIDTH, dtype=torch.float64).view(WIDTH, WIDTH)
ARGUMENTS: Mapping[str, tuple[Callable[..., Any], Callable[[Any, Batch], Any]]] = {
    "by keyword": (lambda *, x, scale: x * scale, lambda model, b: model(x=b["x"], scale=2.0)),
    "nested": (
        lambda pair, more: pair.x * pair.scale + more["z"][0],
        lambda m, b: m(Pair(b["x"], 2.0), {"z": (b["x"], None)}),
    ),
    "no tensors": (
        lambda x, words, n: x * torch.tensor([[len(word)] for word in words]) * n,
        lambda model, b: model(b["x"], ["a" * (1 + int(y)) for y in b["y"]], 3),
    ),
    "shared by all samples": (lambda x, mask: x @ mask, lambda model, b: model(b["x"], MASK)),
    "a number as a tensor": (lambda x, scale: x * scale, lambda model, b: model(b["x"], torch.tensor(2.0).double())),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    """Nested, keyword and shared arguments of any kind reach each replica correctly."""
    compute, call = ARGUMENTS[name]
    model = Takes(compute)

    assert error_of(model, lambda m, b: F.cross_entropy(call(m, b), b["y"]), check_loss=False) <= 1e-12
    assert max(model.rows[1:]) < 8  # after the plain run, no replica has all samples of a micro-batch


class Output(dict[str, Any]):
    """An output with attribute access to its entries, as in transformers."""

    @property
    def logits(self) -> torch.Tensor:
        found: torch.Tensor = self["logits"]
        return found


class Returns(Parts):
    """A model that returns a function of its logits."""

    def __init__(self, make: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.make = make
        self.prototypes = nn.Parameter(torch.ones(4, 2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self, super().forward(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Call the model."""
        out: torch.Tensor = self(x)
        return out.tanh()

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        """Call a part of the model."""
        out: torch.Tensor = self.linear(x)
        return out.tanh()


class Escapes(Parts):
    """Calls a method bound in the constructor, which uses the original parameters in every replica."""

    def __init__(self) -> None:
        super().__init__()
        self.bound = super().forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.bound(x) + self.linear(x.sin())
        return out


def returning(make: Callable[[Any, torch.Tensor], Any], pick: Callable[[Any], torch.Tensor]) -> tuple[nn.Module, Loss]:
    """Return a model that returns a function of its logits, and a loss of a part of that."""
    return Returns(make), lambda m, b: F.cross_entropy(pick(m(b["x"])), b["y"])


MODELS: Mapping[str, Callable[[], tuple[nn.Module, Loss]]] = {
    "a tuple": lambda: returning(lambda _, out: (out, None, 3), lambda output: output[0]),
    "nested outputs": lambda: returning(
        lambda _, out: {"a": [out, (out * 2, "word")]}, lambda output: output["a"][1][0] - output["a"][0]
    ),
    "a model output": lambda: returning(lambda _, out: Output(logits=out, ids=out.argmax(1)), lambda out: out.logits),
    "a buffer of no sample": lambda: returning(lambda _, out: (out, MASK), lambda output: output[0] * output[1].sum()),
    "a method": lambda: (Returns(lambda _, out: out), lambda m, b: F.cross_entropy(m.encode(b["x"]), b["y"])),
    "a bound method": lambda: (Escapes(), simple),
    "a parametrization": lambda: (parametrizations.weight_norm(nn.Linear(WIDTH, NUM_CLASSES).double()), simple),
    "one module twice": lambda: (
        nn.Sequential(*[nn.Linear(WIDTH, WIDTH).double()] * 2, nn.Linear(WIDTH, 4).double()),
        simple,
    ),
}
"""Models and losses by their output, method or kind of module."""


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    """Outputs of any structure are joined in sample order, and parameters in special places have exact gradients."""
    torch.manual_seed(1)
    assert error_of(*MODELS[name]()) <= 1e-12


IDLE: Mapping[str, tuple[nn.Module, Loss, int]] = {
    # A (T, T) mask made in the loss, with micro-batches of T samples
    "an ambiguous mask": (
        Takes(lambda x, mask: x @ mask),
        lambda m, b: F.cross_entropy(m(b["x"], MASK.clone()), b["y"]),
        WIDTH,
    ),
    "a method that does not call the model": (
        Returns(lambda _, out: out),
        lambda m, b: F.cross_entropy(m.embed(b["x"]), b["y"]),
        8,
    ),
}


@pytest.mark.parametrize("name", IDLE)
def test_the_first_replica_alone(name: str) -> None:
    """What cannot be cut runs on the first replica, exactly, with a warning."""
    model, loss, size = IDLE[name]
    with pytest.warns(AnyBatchWarning):
        assert error_of(model, loss, size=size) <= 1e-12


REFUSED: Mapping[str, Callable[[Any, torch.Tensor], Any]] = {
    "a loss": lambda _, out: (out, out.mean()),
    "parameters": lambda model, out: (out, model.prototypes * 1),
    "a value": lambda _, out: (out, float(out.detach().sum())),
    "two views": lambda _, out: (torch.cat([out, out * 2]),),
    "other widths": lambda _, out: (out, out[:, : len(out)]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_outputs_that_cannot_be_joined_are_refused(name: str) -> None:
    """Outputs with one value per replica, or with different shapes, are refused."""
    with pytest.raises(CompositionError):
        gradients(Returns(REFUSED[name]), lambda m, b: F.cross_entropy(m(b["x"])[0], b["y"]))


def test_the_loss_gets_a_usual_model() -> None:
    """In the loss the model has its own class, submodules and mode, and keeps attributes that the loss sets."""
    model = Parts()
    found: list[bool] = []

    def loss(m: Any, batch: Batch) -> torch.Tensor:
        found.append(isinstance(m, Parts) and m.linear is model.linear and m.training is model.training)
        m.calls = getattr(m, "calls", 0) + 1
        return simple(m, batch)

    gradients(model, loss, check_loss=False)
    model.eval()
    gradients(model, loss, check_loss=False)
    assert all(found)
    assert model.calls == len(found)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("norms", ["keep", "freeze"])
def test_running_statistics_are_of_the_first_replica(norms: Any) -> None:
    """Buffers are updated once per step from the first replica's samples, with a warning; frozen ones stay."""
    torch.manual_seed(1)
    layer = nn.BatchNorm1d(WIDTH).double()
    model = nn.Sequential(layer, nn.Linear(WIDTH, NUM_CLASSES).double())
    expected = nn.BatchNorm1d(WIDTH).double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with ab.Engine(
        model, sgd, ab.mean_over_samples(simple), norms=norms, strategy=DataParallel(), world=World(), check_loss=False
    ) as engine:
        said = engine.decisions["batch norm"]
        engine.step(InMemory(batch_of(8)))

    if norms == "keep":
        expected(batch_of(8)["x"][:5])  # 8 samples are split into 5 and 3
        assert "come from the first replica alone" in said
    torch.testing.assert_close(layer.running_mean, expected.running_mean, rtol=1e-12, atol=0)


def test_evaluation_and_closing() -> None:
    """Evaluation also runs in replicas, and closing the engine restores the model."""
    model = Parts()
    before = set(vars(model))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [batch_of(8), batch_of(7)]
    with ab.Engine(model, sgd, ab.mean_over_samples(simple), strategy="data_parallel", world=World()) as engine:
        engine.step(InMemory(batch_of()))
        assert "2, run one after another on the CPU, for comparison" in engine.decisions["replicas"]
        found = engine.evaluate(batches)
    with torch.no_grad():
        expected = sum(simple(model, batch) * len(batch["x"]) for batch in batches) / 15
    assert found["loss"] == pytest.approx(float(expected), rel=1e-12)
    assert set(vars(model)) == before
    simple(model, batch_of()).backward()


@pytest.mark.parametrize(("device", "replicas"), [("meta", None), ("cuda:0", 99)])
def test_missing_devices_are_refused(device: str, replicas: int | None) -> None:
    """Unsupported devices, and more replicas than devices, are refused."""
    model = Parts()
    with pytest.raises(UserError):
        DataParallel(replicas=replicas).prepare(model, model, World(device=torch.device(device)), Mock())


def test_policies_about_buffers_are_refused() -> None:
    """Buffer policies are refused, because one replica's samples update a buffer."""
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, NUM_CLASSES))
    model.register_buffer("queue", torch.zeros(3))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CompositionError):
        ab.Engine(
            model,
            sgd,
            ab.mean_over_samples(simple),
            strategy="data_parallel",
            buffers={"queue": "mean"},
            norms="freeze",
            world=World(),
        )
