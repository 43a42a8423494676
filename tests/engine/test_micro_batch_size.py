"""The "auto" micro-batch size: it fits, is the smallest of the fastest, equal on all ranks, and leaves no trace.

Clocks advance only when a model advances them.
"""

import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import anybatch as ab
from anybatch.engine.micro_batch_size.search import WORTH_TIMING, Auto, Search, TrialResult
from anybatch.errors import BatchSizeError, CompositionError
from anybatch.parallel.fsdp import FSDP
from tests.engine.cases import Batch, InMemory, classify, vectors
from tests.ranks_fixture import Ranks

# The models draw from every generator and change a buffer, to verify that trials do not affect them.
pytestmark = pytest.mark.filterwarnings(
    "ignore:the model or the loss function draws", "ignore:the forward updates state"
)

NUM_SAMPLES = 29


class Clock:
    """A clock that advances only when it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


Seconds = Callable[[int], float]


def straight(size: int) -> float:
    """Return the time of a micro-batch on a device where larger is always faster."""
    return 0.02 + 0.01 * size


def best_at_eight(size: int) -> float:
    """Return the time of a micro-batch on a device whose cache holds 8 samples."""
    return 0.02 + 0.01 * size + 0.01 * max(0, size - 8)


class Model(nn.Module):
    """Takes a given time and memory per sample, draws from all generators, and changes its buffers."""

    def __init__(self, seconds: Seconds = best_at_eight, *, fits: int = 10**9, at_least: int = 1) -> None:
        super().__init__()
        torch.manual_seed(16)
        self.clock = Clock()
        self.seconds = seconds
        self.limit = fits
        self.at_least = at_least
        self.log = array("q")  # trials do not restore it
        self.calls = 0
        self.bulk = nn.Parameter(torch.randn(WORTH_TIMING // NUM_SAMPLES + 1))
        self.register_buffer("seen", torch.zeros(5))
        self.dropout = nn.Dropout(0.5)
        self.out = nn.Linear(5, 4)
        self.double()

    @property
    def sizes(self) -> list[int]:
        """The sizes of all forwards, including trials."""
        return list(self.log)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append(len(x))
        self.calls += 1
        self.clock.now += self.seconds(len(x))
        self.get_buffer("seen").add_(x.sum(0))
        noise = random.random() + float(np.random.rand())
        hidden = self.dropout(x) + 1e-3 * noise
        if len(x) > self.limit:
            message = "no memory for that many samples"
            raise torch.OutOfMemoryError(message)
        if len(x) < self.at_least:
            message = f"the model cannot run on {len(x)} samples"
            raise ValueError(message)
        logits: torch.Tensor = self.out(hidden) + 1e-3 * self.bulk.mean()
        return logits


def engine_of(model: nn.Module, auto: "Auto | int | None" = None, **options: Any) -> ab.Engine:
    """Return an engine with "auto" on the model's clock; the optimizer already has state."""
    if auto is None:
        assert isinstance(model, Model)
        auto = Auto(clock=model.clock)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    options = {"norms": "keep", "check_loss": False, **options}
    return ab.Engine(model, optimizer, ab.mean_over_samples(classify), micro_batch_size=auto, **options)


def settled(model: Model, **options: Any) -> tuple[int | None, str]:
    """Return the size chosen for a step of 29 samples, and the text of the decision."""
    with engine_of(model, **options) as engine:
        report = engine.step(InMemory(vectors(NUM_SAMPLES)))
        return report.plan.split.micro_batch_size, engine.decisions["micro_batch_size"]


# The chosen size


@pytest.mark.parametrize(
    ("seconds", "chosen", "words"),
    [
        (best_at_eight, 8, "8, the fastest of 8, 15 and 29 (80, 63 and 56 samples/s)"),
        # Among sizes within 3% of the fastest, the smallest needs the least memory.
        (
            lambda size: 0.0001 + 0.01 * size,
            8,
            "8, the smallest within 3% of the fastest of 8, 15 and 29 (100, 100 and 100 samples/s)",
        ),
        (lambda _: 1.0, NUM_SAMPLES, "29, the fastest of 2, 4, 8, 16 and 29 (2, 4, 8, 14 and 29 samples/s)"),
    ],
    ids=["a cache", "no difference", "a fixed cost"],
)
def test_the_fastest_size_is_chosen(seconds: Seconds, chosen: int, words: str) -> None:
    """Full steps are compared, and the decision lists the tried sizes."""
    assert settled(Model(seconds)) == (chosen, words)


class Fake:
    """Simulates trial runs with a given time per micro-batch."""

    def __init__(self, seconds: Seconds, num_samples: int, limit: int) -> None:
        self.clock = Clock()
        self.seconds = seconds
        self.num_samples = self.num_in_batch = num_samples
        self.limit = limit
        self.ran: list[list[int]] = []

    def run(self, size: int, most: int) -> TrialResult:
        """Simulate the first micro-batches."""
        parts = [min(size, self.num_samples - start) for start in range(0, self.num_samples, size)][:most]
        self.ran.append(parts)
        if max(parts) > self.limit:
            return TrialResult("out_of_memory")
        seconds = tuple(self.seconds(part) for part in parts)
        self.clock.now += sum(seconds)
        return TrialResult("ran", seconds)


def search_of(fake: Fake, **options: Any) -> Search:
    """Return a search over simulated runs."""
    options = {"auto": Auto(clock=fake.clock), **options}
    # The simulation has the methods that the search uses.
    return Search(fake, ab.World(), share=fake.num_samples, **options)  # type: ignore[arg-type]


@example(share=135, limit=118, fixed=0.1, cache=300, planned=118, group=4)
@given(
    share=st.integers(1, 300),
    limit=st.integers(1, 300),
    fixed=st.floats(0.0, 0.1),
    cache=st.integers(1, 300),
    planned=st.none() | st.integers(1, 300),
    group=st.sampled_from([1, 1, 4]),
)
def test_the_chosen_size_fits(
    *, share: int, limit: int, fixed: float, cache: int, planned: int | None, group: int
) -> None:
    """The chosen size was tried, fits by trial and by plan, and trials cost at most 25 steps.

    It is a multiple of the group size or the full share.
    """
    limit, planned = max(limit, group), None if planned is None else max(planned, group)
    fake = Fake(lambda size: fixed + 0.01 * size + 0.02 * max(0, size - cache), share, limit)

    found = search_of(fake, planned=planned, group=group)
    size = found.fastest().size

    assert size is not None
    tried = [max(parts) for parts in fake.ran]
    assert size in tried
    assert size <= min(limit, share)
    assert size % group == 0 or size == share
    if planned is not None:
        assert max(tried) <= max(planned, min(share, 2))
    assert sum(map(sum, fake.ran)) <= 25 * share + 25


def test_memory_is_left_for_the_optimizers_state() -> None:
    """Before the first update, half of the largest fitting size is chosen, unless every size fits."""
    assert search_of(Fake(straight, 29, 5), optimizer_is_new=True).largest("cuda:0").size == 2
    assert search_of(Fake(straight, 29, 5)).largest("cuda:0").size == 4
    assert search_of(Fake(straight, 29, 29), optimizer_is_new=True).largest("cuda:0").size == 29
    fastest = search_of(Fake(straight, 29, 16), optimizer_is_new=True).fastest()
    assert fastest.size is not None
    assert fastest.size <= 8
    assert fastest.description.endswith("; 29 does not fit")


def test_no_size_fits() -> None:
    """If a single sample does not fit, the search raises an error."""
    for way in (Search.fastest, lambda search: search.largest("cuda:0")):
        with pytest.raises(BatchSizeError) as caught:
            way(search_of(Fake(straight, 8, 0)))
        assert caught.value.micro_batch_size == 1


@pytest.mark.parametrize("max_seconds", [1.0, 60.0])
def test_time_is_bounded(max_seconds: float) -> None:
    """Trials of a slow model stop after the time limit, and the choice uses the measurements so far.

    They only exceed the limit while doubling the size gains more than 10%.
    """
    fake = Fake(lambda size: 0.2 + 0.1 * size, 256, 256)
    begun = fake.clock.now

    found = search_of(fake, auto=Auto(clock=fake.clock, max_seconds=max_seconds)).fastest()

    # 5.0, 6.7, 8.0, 8.9 and 9.4 samples/s at sizes 2, 4, 8, 16 and 32, with two micro-batches each.
    to_32 = 2 * sum(0.2 + 0.1 * size for size in (2, 4, 8, 16, 32))
    assert fake.clock.now - begun <= max(max_seconds, to_32 + 1e-6)
    assert found.size is not None
    assert found.size >= 16
    if max_seconds < 60.0:
        assert "; larger sizes were not tried for lack of time " in found.description


class NoRoom:
    """Reports that memory is short once micro-batches reach a given size."""

    available_bytes = 1000

    def __init__(self, fake: Fake, size: int) -> None:
        self._fake = fake
        self._size = size

    def may_double(self) -> bool:
        """Return whether the last size was smaller."""
        return max(self._fake.ran[-1]) < self._size


def test_sizes_that_may_not_fit_are_not_tried() -> None:
    """If running out of memory would kill the process, sizes that may not fit are not tried."""
    fake = Fake(straight, 64, 64)

    found = search_of(fake, room=NoRoom(fake, 8)).fastest()

    assert max(max(parts) for parts in fake.ran) == 8
    assert found.size == 8
    assert "the free memory may not suffice" in found.description


def test_a_plan_limits_the_search() -> None:
    """The plan sees the rank's share on the host, and no larger size is tried."""
    model, asked = Model(straight), []

    def largest(batch: Batch, num_samples: int) -> int:
        asked.append((len(batch["x"]), num_samples))
        return 12

    size, words = settled(model, auto=Auto(clock=model.clock, largest=largest))

    assert asked == [(NUM_SAMPLES, NUM_SAMPLES)]
    assert max(model.sizes) <= 12
    assert size == 10  # 29 in three parts
    assert words.endswith("; 12 fits, as planned")


# No leftovers


class After(NamedTuple):
    """All state that a step can change."""

    tensors: list[torch.Tensor]
    draws: list[float]


def after_steps(model: Model, engine: ab.Engine) -> After:
    """Make three steps; return all state that they can change."""
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    with engine:
        for seed in range(3):
            engine.step(InMemory(vectors(NUM_SAMPLES), seed=seed))
        moments = [state["momentum_buffer"].clone() for state in engine.optimizer.state.values()]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert not any(bool(gradient.any()) for gradient in gradients)
    draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    return After([*model.state_dict().values(), *moments], draws)


@pytest.mark.parametrize("rng", ["micro_batch", "per_sample", None])
def test_a_search_leaves_no_trace(rng: Any) -> None:
    """Parameters, buffers, optimizer state and random numbers end bitwise as if the size had been given."""
    tried, given_size = Model(), Model()
    found = after_steps(tried, engine_of(tried, rng=rng))
    wanted = after_steps(given_size, engine_of(given_size, 8, rng=rng))

    assert max(tried.sizes) == NUM_SAMPLES  # the full share was tried
    assert tried.sizes[-4:] == given_size.sizes[-4:] == [8, 8, 8, 5]
    assert all(torch.equal(*pair) for pair in zip(found.tensors, wanted.tensors, strict=True))
    assert found.draws == wanted.draws


def test_failed_trials_leave_no_trace() -> None:
    """Trial forwards that ran out of memory or failed leave no trace."""
    tried, given_size = Model(straight, fits=11, at_least=3), Model(straight)
    found = after_steps(tried, engine_of(tried))
    size = max(tried.sizes[-3:])
    assert size == 8
    wanted = after_steps(given_size, engine_of(given_size, size))

    assert {2, 16} <= set(tried.sizes)
    assert all(torch.equal(*pair) for pair in zip(found.tensors, wanted.tensors, strict=True))
    assert found.draws == wanted.draws


# Cases without timing


class Normalised(Model):
    """A model with BatchNorm, whose result depends on the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


class Small(Model):
    """A model whose step is too short to time."""

    def __init__(self) -> None:
        super().__init__()
        self.bulk = nn.Parameter(self.bulk.detach()[:-30])


@pytest.mark.parametrize(
    ("make", "deterministic", "reason"),
    [
        (Small, False, "a step is too short to be worth timing"),
        (Normalised, False, "BatchNorm's output for a sample depends on its micro-batch"),
        (Model, True, "torch.use_deterministic_algorithms is on"),
    ],
)
def test_the_whole_share_on_a_cpu(make: Callable[[], Model], deterministic: bool, reason: str) -> None:
    """If timing must not or need not decide, a CPU runs the full share without trials and reports why."""
    torch.use_deterministic_algorithms(deterministic)
    try:
        model = make()
        assert settled(model)[1].startswith(f"the whole rank share, because {reason}")
        assert model.sizes == [NUM_SAMPLES]
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_failing_model_raises_its_own_error() -> None:
    """If all trials fail, the step raises the same error as without trials."""
    model = Model(at_least=100)
    with engine_of(model) as engine:
        with pytest.raises(ValueError, match="cannot run on 29 samples"):
            engine.step(InMemory(vectors(NUM_SAMPLES)))
        said = engine.decisions["micro_batch_size"]

    assert said.startswith("the whole rank share, because trial runs failed (ValueError: ")


# Resume


@pytest.mark.parametrize(("make", "wanted"), [(Model, 8), (Small, None)])
def test_a_resumed_run_keeps_the_size(make: Callable[[], Model], wanted: int | None, tmp_path: Path) -> None:
    """The checkpoint contains the chosen size, which is reused even if timing would now choose another one."""
    first, second = make(), make()
    with engine_of(first) as engine:
        engine.step(InMemory(vectors(NUM_SAMPLES)))
        path = engine.save(tmp_path)
    second.seconds = lambda _: 1.0  # would be fastest in one micro-batch
    with engine_of(second) as engine:
        engine.load(path)
        plan = engine.step(InMemory(vectors(NUM_SAMPLES + 60))).plan
        words = engine.decisions["micro_batch_size"]

    assert plan.split.micro_batch_size == wanted
    assert words == f"{wanted or 'the whole rank share'}, as in the checkpoint"
    assert second.sizes == [unit.num_samples for unit in plan.units]


# Ranks


class OnRank(NamedTuple):
    """The size that one rank chose."""

    size: int | None
    words: str
    gradient: torch.Tensor


def settle_on_ranks(strategy: str, curves: list[str], limits: list[int], num_samples: int) -> OnRank:
    """Run on every rank: choose a size with a different speed and memory per rank."""
    world = ab.World.from_environment()
    seconds = {"straight": straight, "best_at_eight": best_at_eight}[curves[world.rank]]
    model = Model(seconds, fits=limits[world.rank])
    model.bulk = nn.Parameter(torch.zeros(WORTH_TIMING, dtype=torch.float64))
    engine = engine_of(model, Auto(clock=model.clock), strategy=strategy, world=world)
    with engine:
        batch = InMemory(vectors(num_samples))
        report = engine.step(batch)
        gradient = engine.gradients(batch)["out.weight"]
        assert gradient is not None
        return OnRank(report.plan.split.micro_batch_size, engine.decisions["micro_batch_size"], gradient)


@pytest.mark.parametrize(
    ("strategy", "curves", "limits", "size", "words"),
    [
        ("all_reduce", ["straight", "best_at_eight"], [99, 99], 8, "the fastest of 8, 15 and 29 (160, 126 and 112"),
        ("ddp", ["straight", "straight"], [99, 5], 4, "; 8 does not fit"),
    ],
    ids=["the slowest", "the smallest"],
)
def test_all_ranks_use_one_size(  # noqa: PLR0917 (fields of a table)
    strategy: str, curves: list[str], limits: list[int], size: int, words: str, two_ranks: Ranks
) -> None:
    """Both ranks use the size that is fastest on the slowest rank and fits on the smallest; gradients are equal."""
    found: list[OnRank] = two_ranks.run(settle_on_ranks, strategy, curves, limits, 58)

    assert [one.size for one in found] == [size, size]
    assert all(words in one.words for one in found)
    assert torch.equal(found[0].gradient, found[1].gradient)


def refused_search() -> str:
    """Run on every rank: return the error in lockstep on a device that may run out of memory."""
    world = ab.World.from_environment()
    model = Model()
    loss = ab.mean_over_samples(classify)
    engine = ab.Engine(model, lambda named: torch.optim.SGD(named, lr=0.1), loss, strategy=FSDP(), world=world)
    engine._parts.sizes.raises_out_of_memory = True  # noqa: SLF001 (as on an accelerator)
    with pytest.raises(CompositionError) as caught:
        engine.step(InMemory(vectors(58)))
    return str(caught.value)


def test_no_search_under_lockstep(two_ranks: Ranks) -> None:
    """In lockstep, a rank that ran out of memory would leave the others waiting, so the search is refused."""
    for message in two_ranks.run(refused_search):
        assert "'fsdp'" in message
        assert "Set micro_batch_size" in message
