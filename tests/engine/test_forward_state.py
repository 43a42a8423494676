"""Buffers updated in the forward: detected, reported once, and on request updated once per effective batch."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.engine.forward_state import BufferUpdate
from anybatch.errors import AnyBatchWarning, CompositionError, UserError
from anybatch.testing import relative_error
from tests.engine.cases import STRATEGIES, Batch, InMemory, vectors
from tests.raising import raises
from tests.ranks_fixture import Ranks


class Centred(nn.Module):
    """Subtracts a running mean of its outputs, as DINO's teacher does."""

    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 4)
        self.register_buffer("center", torch.full((4,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(x)
        centred = output - self.center
        with torch.no_grad():
            self.center.mul_(0.9).add_(output.mean(0), alpha=0.1)
        return centred


class Reassigned(Centred):
    """The same, but with a new tensor each time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(x)
        centred = output - self.center
        self.center = 0.9 * self.center + 0.1 * output.detach().mean(0)
        return centred


class Queued(nn.Module):
    """Compares outputs with the newest 60, as MoCo does."""

    queue: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 4)
        self.register_buffer("queue", torch.linspace(-1, 1, 240).reshape(60, 4))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = F.normalize(self.inner(x), dim=1)
        likeness = output @ self.queue.T
        self.queue = torch.cat([output.detach(), self.queue])[:60]
        self.calls += 1
        return torch.cat([output, likeness], 1)


def enqueue(before: torch.Tensor, after: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Return the queue with the rows of all micro-batches, each of which prepended its rows."""
    return torch.cat([*(one[:size] for one, size in zip(after, sizes, strict=True)), before])[: len(before)]


class Normed(nn.Module):
    """Divides a weight by an estimate of its largest singular value, refined in each forward."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.inner = wrap(nn.Linear(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(x)
        return output


def squares(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a mean over samples."""
    loss: torch.Tensor = model(batch["x"]).square().sum(1).mean()
    return loss


MODELS: Mapping[str, tuple[Callable[[], nn.Module], dict[str, BufferUpdate]]] = {
    "a centre": (Centred, {"center": "mean"}),
    "a centre that is replaced": (Reassigned, {"center": "mean"}),
    "a queue": (Queued, {"queue": enqueue, "calls": "first"}),
    "a spectral norm": (lambda: Normed(nn.utils.parametrizations.spectral_norm), {"*._u": "first", "*._v": "first"}),
}


def built(name: str) -> nn.Module:
    """Return a model in float64, the same each time."""
    torch.manual_seed(1)
    return MODELS[name][0]().double()


def plain(name: str) -> list[dict[str, torch.Tensor]]:
    """Return the states after each of three unsplit steps."""
    model, found = built(name), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        squares(model, vectors(23)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(copy.deepcopy(model.state_dict()))
    return found


def errors_of_runs(name: str) -> dict[tuple[str, int], float]:
    """Run on every rank: return errors with pooled buffers: one strategy with every size, the others with one."""
    world, found, expected = ab.World.from_environment(), {}, plain(name)
    first, *others = STRATEGIES if world.size == 1 else list(STRATEGIES)[1:]
    for strategy in (first, *others):
        for size in (3, 7) if strategy == first else (7,):
            model = built(name)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            worst = 0.0
            with ab.Engine(
                model,
                optimizer,
                ab.mean_over_samples(squares),
                micro_batch_size=size,
                strategy=STRATEGIES[strategy](),
                buffers=MODELS[name][1],
                check_loss=False,
                world=world,
            ) as engine:
                for states in expected:
                    engine.step(InMemory(vectors(23)))
                    worst = max(worst, relative_error(dict(model.state_dict()), states))
            found[strategy, size] = worst
    return found


@pytest.mark.parametrize("name", MODELS)
def test_three_steps_equal_the_unsplit_batch(name: str, ranks: Ranks) -> None:
    """With a suitable `buffers=`, parameters and buffers on every rank equal the unsplit run after each step."""
    for found in ranks.run(errors_of_runs, name):
        assert max(found.values()) <= 1e-12, found


def counted_centres(strategy: str, num_masked: int) -> dict[str, float]:
    """Run on every rank: return the errors of centres against those over micro-batches that count anything.

    The first `num_masked` of 12 samples, in micro-batches of 2, are masked.
    """
    batch, found = vectors(12), {}
    batch["y"][:num_masked] = -100
    for how in ("first", "mean", "function"):
        world = ab.World() if strategy == "single" else ab.World.from_environment()
        model: Any = built("a centre that is replaced")
        outputs = model.inner(batch["x"]).detach()
        counted = outputs[num_masked : num_masked + 2] if how == "first" else outputs[num_masked:]
        expected = 0.9 * model.center + 0.1 * counted.mean(0)
        loss = ab.mean_over(
            lambda net, part: nn.functional.cross_entropy(net(part["x"]), part["y"]),
            count=lambda part: (part["y"] != -100).sum(),
        )
        function: Any = lambda _, values, numbers: sum(map(torch.mul, values, numbers)) / sum(numbers)  # noqa: E731
        with ab.Engine(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            loss,
            micro_batch_size=2,
            strategy=strategy,
            buffers={"center": function if how == "function" else how},  # type: ignore[dict-item]
            check_loss=False,
            world=world,
        ) as engine:
            engine.step(InMemory(batch))
        found[how] = float((model.center - expected).abs().max())
    return found


@pytest.mark.parametrize("num_masked", [2, 8])
def test_buffers_where_micro_batches_count_nothing(num_masked: int, two_ranks: Ranks) -> None:
    """The updates "first" and "mean" skip micro-batches that count nothing, even if a rank has no others."""
    for found in [counted_centres("single", num_masked), *two_ranks.run(counted_centres, "all_reduce", num_masked)]:
        assert max(found.values()) <= 1e-12, found


def said(model: nn.Module, *, size: int = 3, **options: Any) -> list[str]:
    """Return the warnings about state from a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = ab.mean_over_samples(squares)
        with ab.Engine(model, optimizer, loss, micro_batch_size=size, check_loss=False, **options) as engine:
            for _ in range(4):
                engine.step(InMemory({"x": vectors(9)["x"].float()}))
    return [
        str(one.message) for one in caught if issubclass(one.category, AnyBatchWarning) and "state" in str(one.message)
    ]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (Centred, "'center'"),
        (Reassigned, "'center'"),
        (Queued, "'queue'"),
        (MODELS["a spectral norm"][0], "'inner.parametrizations.weight.0._u'"),
    ],
    ids=["in place", "replaced", "queue", "spectral norm"],
)
def test_changed_buffers_cause_one_warning(make: Callable[[], nn.Module], named: str) -> None:
    """A buffer that the forward changes causes one warning, which names it and the fix, if the batch is cut."""
    (message,) = said(make())
    assert named in message
    assert "'mean'" in message
    assert said(make(), size=9) == []  # not cut


class Counting(nn.Module):
    """Keeps a counter, a growing and a converted cache, its last output, and BatchNorm's statistics."""

    calls: torch.Tensor
    positions: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("positions", torch.zeros(1))
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64))
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.scale = self.scale.to(x.dtype).clone()
        if len(self.positions) < len(x):
            self.positions = torch.arange(len(x), dtype=x.dtype)
        output: torch.Tensor = self.norm(self.inner(x) + 0 * self.positions[: len(x), None]) * self.scale
        self.last = output.detach()
        return output


def test_counters_and_caches_cause_no_warning() -> None:
    """Integer buffers, the last output, caches that grow or are converted, and running statistics are ignored."""
    assert said(Counting(), norms="keep") == []


def test_a_choice_silences_the_warning() -> None:
    """A choice in `buffers=`, even "keep", silences the warning for that buffer but not for others."""
    assert said(Centred(), buffers={"center": "keep"}) == []
    assert said(Centred(), buffers={"cent*": "mean"}) == []
    both = nn.Sequential(Centred(), nn.Linear(4, 5), Centred())
    (message,) = said(both, buffers={"0.center": "mean"})
    assert "'2.center'" in message
    assert "'0.center'" not in message


@pytest.mark.parametrize(
    ("buffers", "code"),
    [
        ({"queue": "mean"}, "no_such_buffer"),
        ({"inner.calls": "mean"}, "mean_of_integers"),
        ({"inner.queue": "sum"}, "unknown_update"),
        ({"norm.running_mean": "mean"}, "no_such_buffer"),
    ],
    ids=["no such name", "integers", "no such update", "BatchNorm"],
)
def test_bad_choices_are_refused(buffers: dict[str, Any], code: str) -> None:
    """An invalid choice in `buffers=` raises an error that names the problem."""
    model = nn.ModuleDict({"inner": Queued(), "norm": nn.BatchNorm1d(4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with raises(UserError, code):
        ab.Engine(model, optimizer, ab.mean_over_samples(squares), buffers=buffers)


def test_losses_across_samples_and_exact_norms_are_refused() -> None:
    """`ab.joint` and norms="exact" refuse buffer updates, because they run parts of a micro-batch more than once."""
    optimizer = torch.optim.SGD(Centred().parameters(), lr=0.05)
    joint = ab.joint(lambda model, batch: model(batch["x"]), lambda _, outputs: outputs.square().mean())
    with raises(CompositionError, "forwards_run_twice"):
        ab.Engine(Centred(), optimizer, joint, buffers={"center": "mean"})
    model = nn.Sequential(Centred(), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with raises(CompositionError, "forwards_run_twice"):
        ab.Engine(
            model,
            optimizer,
            ab.mean_over_samples(squares),
            buffers={"*center": "mean"},
            norms="exact",
            micro_batch_size=4,
        )
