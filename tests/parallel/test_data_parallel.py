"""Replicas in one process give the gradient of one device, for any model arguments and outputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import anybatch as ab
from anybatch.errors import AnyBatchWarning, CompositionError, UserError
from anybatch.parallel.data_parallel import CutCall, DataParallel, cut_call
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
    "a replica's gradient is left out",
    "src/anybatch/parallel/data_parallel.py",
    "tensor.clone() for name, tensor in self._module.named_parameters()",
    "tensor.detach().clone() for name, tensor in self._module.named_parameters()",
    cases=("7-ragged", "all-masked tokens"),
)
@pytest.mark.parametrize(
    ("split", "name"), [*(("7", name) for name in CASES), *(("all", name) for name in list(CASES)[2::3])]
)
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
    """On two GPUs the gradient is exact too, and an unused parameter has none."""
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
    assert found.pop("prototypes") is expected.pop("prototypes") is None
    assert relative_error({name: None if g is None else g.cpu() for name, g in found.items()}, expected) <= 1e-12


# Arguments of the model


class Takes(nn.Module):
    """A model that takes the arguments of a test case."""

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
    "made in the loss": (lambda x, t: x * t[:, None], lambda model, b: model(b["x"], b["y"].double().cos())),
    "a number as a tensor": (lambda x, scale: x * scale, lambda model, b: model(b["x"], torch.tensor(2.0).double())),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    """Nested, keyword and shared arguments of any kind reach each replica correctly."""
    compute, call = ARGUMENTS[name]
    model = Takes(compute)

    assert error_of(model, lambda m, b: F.cross_entropy(call(m, b), b["y"]), check_loss=False) <= 1e-12
    assert max(model.rows[1:]) < 8  # after the plain run, no replica has all samples of a micro-batch


def test_a_mask_with_as_many_rows_as_samples_is_not_cut() -> None:
    """A (T, T) mask made in the loss stays uncut with micro-batches of T samples, and a warning reports it."""
    model = Takes(lambda x, mask: x @ mask)

    def loss(m: Any, b: Batch) -> torch.Tensor:
        return F.cross_entropy(m(b["x"], MASK.clone()), b["y"])

    with pytest.warns(AnyBatchWarning, match=r"not from the micro-batch, and its axis of 5 may or may not be"):
        assert error_of(model, loss, size=WIDTH) <= 1e-12


class Prompted(nn.Module):
    """A loss that computes the model's argument from its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones(1, WIDTH, dtype=torch.float64))

    def forward(self, model: Any, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"] + self.shift, self.scale), batch["y"])


def test_gradients_flow_through_arguments() -> None:
    """Parameters of the loss that reach the model as arguments, cut or uncut, get the right gradients."""
    model, loss = Takes(lambda x, scale: x.sin() * scale), Prompted()
    both = nn.ModuleDict({"model": model, "loss": loss})
    expected = plain_gradients(both, loss(model, batch_of()))
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)

    with ab.Engine(
        model, optimizer, ab.mean_over_samples(loss), micro_batch_size=7, strategy=DataParallel(), world=World()
    ) as engine:
        found = engine.gradients(InMemory(batch_of()))
        pairs = zip(found.values(), expected.values(), strict=True)
        assert all(relative_error({"": one}, {"": other}) <= 1e-12 for one, other in pairs)


# Outputs of the model


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


def use_prototypes(model: Any, batch: Batch) -> torch.Tensor:
    """Return a loss of logits and prototypes."""
    logits, prototypes = model(batch["x"])
    loss: torch.Tensor = F.cross_entropy(logits, batch["y"]) + prototypes.square().sum()
    return loss


OUTPUTS: Mapping[str, tuple[Callable[[Any, torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "a tuple": (lambda _, out: (out, None, 3), lambda output: output[0]),
    "nested": (lambda _, out: {"a": [out, (out * 2, "word")]}, lambda output: output["a"][1][0] - output["a"][0]),
    "a model output": (lambda _, out: Output(logits=out, ids=out.argmax(1)), lambda output: output.logits),
    "a buffer of no sample": (lambda _, out: (out, MASK), lambda output: output[0] * output[1].sum()),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs(name: str) -> None:
    """Outputs of any structure are joined in sample order."""
    make, pick = OUTPUTS[name]
    assert error_of(Returns(make), lambda m, b: F.cross_entropy(pick(m(b["x"])), b["y"])) <= 1e-12


REFUSED: Mapping[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "a loss": (lambda _, out: (out, out.mean()), r"output\[1\]: it is a scalar"),
    "parameters": (lambda model, out: (out, model.prototypes * 1), r"\[1\]: it is of shape \(4, 2\)"),
    "a value": (lambda _, out: (out, float(out.detach().sum())), "on one replica and another value elsewhere"),
    "a count": (lambda _, out: (out, out.argmax(1).sum()), "have returned different values"),
    "a list as long as the part": (lambda _, out: [out, *out], "different structures"),
    "two views": (lambda _, out: (torch.cat([out, out * 2]),), r"\[0\]: it has 2 rows for each sample"),
    "other widths": (lambda _, out: (out, out[:, : len(out)]), "different shapes"),
    "packed": (
        lambda _, out: (out, pack_padded_sequence(out[:, :, None], [4] * len(out), batch_first=True)),
        "rows for each sample",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_outputs_that_cannot_be_joined_are_refused(name: str) -> None:
    """Outputs with one value per replica, or with different shapes, are refused with the reason and the fix."""
    make, reason = REFUSED[name]
    with pytest.raises(CompositionError, match=reason) as caught:
        gradients(Returns(make), lambda m, b: F.cross_entropy(m(b["x"])[0], b["y"]))
    assert "strategy='all_reduce'" in str(caught.value)


def test_an_output_with_as_many_rows_as_a_part_is_not_taken_for_samples() -> None:
    """Four prototypes are not mistaken for the samples of a replica, because the first cut is uneven."""
    model = Returns(lambda model, out: (out, model.prototypes * 1))
    with pytest.raises(CompositionError, match=r"\[1\]: it is of shape \(4, 2\)"):
        gradients(model, use_prototypes, replicas=2, num_samples=16)


# Use of the model in the loss function


class Encodes(Parts):
    """A model with a method that calls the model, and one that does not."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self(x)
        return out.tanh()

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out.tanh()


def test_methods_of_the_model() -> None:
    """A method that calls the model runs in replicas; others run on the first alone, with a warning. Both are exact."""
    assert error_of(Encodes(), lambda m, b: F.cross_entropy(m.encode(b["x"]), b["y"])) <= 1e-12
    with pytest.warns(AnyBatchWarning, match="calls methods or parts of the model"):
        assert error_of(Encodes(), lambda m, b: F.cross_entropy(m.embed(b["x"]), b["y"])) <= 1e-12


def test_the_loss_gets_what_it_knows() -> None:
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


def test_named_models() -> None:
    """With several named models each one has replicas."""
    models = {"first": Takes(lambda x: x), "second": Takes(lambda x: x.exp())}

    def loss(named: Any, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(named["first"](batch["x"]) * named["second"](batch["x"]), batch["y"])

    both = nn.ModuleDict(models)
    expected = plain_gradients(both, loss(models, batch_of()))
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    with ab.Engine(
        models, optimizer, ab.mean_over_samples(loss), micro_batch_size=7, strategy=DataParallel(), world=World()
    ) as engine:
        assert relative_error(engine.gradients(InMemory(batch_of())), expected) <= 1e-12


def test_a_gradient_of_a_gradient() -> None:
    """A gradient penalty is exact: it differentiates through the replicas."""

    def loss(model: Any, batch: Batch) -> torch.Tensor:
        x = batch["x"].clone().requires_grad_()
        slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        return slope.square().mean() + simple(model, batch)

    assert error_of(Takes(lambda x: x.sin()), loss, check_loss=False) <= 1e-12


def test_a_graph_that_is_kept() -> None:
    """A loss that differentiates its terms with retain_graph=True gets the right gradient."""

    def loss(model: Any, batch: Batch) -> torch.Tensor:
        out = model(batch["x"].sin())
        mean = F.cross_entropy(out, batch["y"])
        torch.autograd.grad(mean, out, retain_graph=True)
        torch.autograd.grad(mean, model.linear.weight, retain_graph=True)
        return mean

    assert error_of(Parts(), loss) <= 1e-12


# Errors, random numbers


class Fails(Parts):
    """Fails on one sample."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x[:, 0] == batch_of()["x"][5, 0]).any():
            message = "a bad sample"
            raise ArithmeticError(message)
        return super().forward(x)


def test_an_error_in_a_replica() -> None:
    """An exception in a replica is raised unchanged; later steps work."""
    model = Fails()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    good = {name: torch.cat([value[:4], value[8:20]]) for name, value in batch_of().items()}
    with ab.Engine(
        model, sgd, ab.mean_over_samples(simple), micro_batch_size=8, strategy=DataParallel(), world=World()
    ) as engine:
        engine.step(InMemory(good))
        with pytest.raises(ArithmeticError, match="a bad sample"):
            engine.step(InMemory({name: value[:8] for name, value in batch_of().items()}))
        engine.step(InMemory(good))


class RunsOut(Parts):
    """Raises out-of-memory errors above a number of samples."""

    limit = NUM_SAMPLES

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.limit:
            message = "out of memory"
            raise torch.OutOfMemoryError(message)
        return super().forward(x)


@pytest.mark.slow
def test_a_replica_that_runs_out_of_memory() -> None:
    """The step is retried with smaller micro-batches, and its update equals a single device's."""
    model, plain = RunsOut(), Parts()
    data = batch_of(16)
    for _ in range(2):
        for name, gradient in plain_gradients(plain, simple(plain, data)).items():
            assert gradient is not None
            plain.get_parameter(name).data -= 0.1 * gradient
    with (
        ab.Engine(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            ab.mean_over_samples(simple),
            micro_batch_size=8,
            strategy=DataParallel(),
            world=World(),
        ) as engine,
    ):
        engine.step(InMemory(data))
        model.limit = 3
        assert engine.step(InMemory(data)).too_large == (8,)
    assert relative_error(dict(model.named_parameters()), dict(plain.named_parameters())) <= 1e-12


def test_parts_of_a_call() -> None:
    """Arguments with the samples as their first axis are cut, others are not, and outputs are joined."""
    data = batch_of(7)
    call = cut_call(((data["x"], MASK), {"y": data["y"]}), 2, 7, frozenset())
    assert isinstance(call, CutCall)
    parts = [call.part(number) for number in range(len(call.ranges))]

    assert [len(args[0]) for args, _ in parts] == [4, 3]
    assert all(args[1] is MASK for args, _ in parts)
    joined = call.join([(args[0], kwargs["y"]) for args, kwargs in parts])
    assert torch.equal(joined[0], data["x"])
    assert torch.equal(joined[1], data["y"])


class Drops(Parts):
    """Applies dropout in a checkpointed block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.inside, x, use_reentrant=False)
        return out

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(F.dropout(x.sin(), 0.5, self.training))
        return out


def test_replicas_that_draw() -> None:
    """Random numbers are drawn reproducibly, also in a block that runs again in the backward."""
    model = Drops()
    once, again = gradients(model, simple, check_loss=False), gradients(model, simple, check_loss=False)

    assert relative_error(once, again) == 0.0


# Modules of all kinds


class Escapes(Parts):
    """Calls a method bound in the constructor, which uses the original parameters in every replica."""

    def __init__(self) -> None:
        super().__init__()
        self.bound = self.scores

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.bound(x) + self.linear(x.sin())
        return out


class Recurrent(nn.Module):
    """A recurrent layer, which also keeps its weights in a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.LSTM(WIDTH, NUM_CLASSES, batch_first=True).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x[:, None])[0][:, 0]
        return out


class Lists(nn.Module):
    """Parameters in lists and dicts, one of them under two names; the forward iterates over all of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        weights = [nn.Parameter(torch.randn(WIDTH, NUM_CLASSES, dtype=torch.float64)) for _ in range(2)]
        self.some = nn.ParameterList(weights)
        self.others = nn.ParameterDict({"a": weights[0], "b": torch.randn(1, NUM_CLASSES, dtype=torch.float64)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        out: torch.Tensor = x @ self.some[0] + x.sin() @ self.some[1] * self.others["b"] + penalty * x[:, :1]
        return out


MODULES: Mapping[str, Callable[[], nn.Module]] = {
    "a bound method": Escapes,
    "recurrent": Recurrent,
    "lists of parameters": Lists,
    "a parametrization": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, NUM_CLASSES).double()),
    "one module twice": lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH).double()] * 2, nn.Linear(WIDTH, 4).double()),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    """Modules that store parameters in special ways have exact gradients."""
    torch.manual_seed(1)
    assert error_of(MODULES[name](), simple) <= 1e-12


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
        expected(batch_of(8)["x"][:5])  # 8 samples are cut into 5 and 3
        assert "come from the first replica alone" in said
    torch.testing.assert_close(layer.running_mean, expected.running_mean, rtol=1e-12, atol=0)


def test_evaluation_and_training_go_on_after_it() -> None:
    """Evaluation also runs in replicas, and closing the engine restores the model."""
    model = Parts()
    before = set(vars(model))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [batch_of(8), batch_of(7)]
    with ab.Engine(model, sgd, ab.mean_over_samples(simple), strategy="data_parallel", world=World()) as engine:
        engine.step(InMemory(batch_of()))
        assert "2, one after another on the CPU: for comparison" in engine.decisions["replicas"]
        found = engine.evaluate(batches)
    with torch.no_grad():
        expected = sum(simple(model, batch) * len(batch["x"]) for batch in batches) / 15
    assert found["loss"] == pytest.approx(float(expected), rel=1e-12)
    assert set(vars(model)) == before
    simple(model, batch_of()).backward()


@pytest.mark.parametrize("replicas", [0, 1.5, True])
def test_replicas_are_a_whole_number(replicas: Any) -> None:
    """A number of replicas that is not a positive whole number is refused."""
    with pytest.raises(UserError, match="replicas="):
        DataParallel(replicas=replicas)


@pytest.mark.parametrize(
    ("device", "replicas", "reason"), [("meta", None, "is on 'meta'"), ("cuda:0", 99, "replicas=99 must be at most")]
)
def test_devices_that_are_not_there_are_refused(device: str, replicas: int | None, reason: str) -> None:
    """Unsupported devices, and more replicas than devices, are refused."""
    model = Parts()
    with pytest.raises(UserError, match=reason):
        DataParallel(replicas=replicas).prepare(model, model, World(device=torch.device(device)), None)


def test_policies_about_buffers_are_refused() -> None:
    """Buffer policies are refused, because one replica's samples update a buffer."""
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, NUM_CLASSES))
    model.register_buffer("queue", torch.zeros(3))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CompositionError, match="splits each micro-batch over replicas"):
        ab.Engine(
            model,
            sgd,
            ab.mean_over_samples(simple),
            strategy="data_parallel",
            buffers={"queue": "mean"},
            norms="freeze",
            world=World(),
        )
