"""What "auto" is: a size that fits, the smallest of the fastest, on all ranks alike; and nothing is left behind.

Time is told by clocks that move when a model says so.
"""

import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import anybatch as ab
from anybatch.core.batch import LaterUnits, Positions
from anybatch.core.records import DiagnosisRecord, MicroBatchRecord, Record, StartRecord
from anybatch.core.size_choice import KnownSize, even_size
from anybatch.engine.accumulation.planned_batch import RankShare
from anybatch.engine.micro_batch_size.budget_trials import WORTH_TIMING
from anybatch.engine.micro_batch_size.search import Auto, Search
from anybatch.engine.micro_batch_size.trial_run import TrialResult
from anybatch.errors import BatchSizeError, CannotPlanError, CompositionError
from anybatch.norms import Ghost
from anybatch.parallel.fsdp import FSDP
from tests.engine.cases import Batch, InMemory, classify, vectors
from tests.faults import sees
from tests.ranks_fixture import Ranks

# The losses here draw from every generator, to see that trials leave them alone.
pytestmark = pytest.mark.filterwarnings("ignore:the model or the loss function draws")

NUM_SAMPLES = 29


class Recorder:
    """Keeps all records."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def observe(self, record: Record, /) -> None:
        """Keep it."""
        self.records.append(record)


class Clock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


Seconds = Callable[[int], float]


def straight(size: int) -> float:
    """Return the seconds of a micro-batch where larger is always faster."""
    return 0.02 + 0.01 * size


def best_at_eight(size: int) -> float:
    """Return the seconds of a micro-batch on a device whose cache holds 8 samples."""
    return 0.02 + 0.01 * size + 0.01 * max(0, size - 8)


class Model(nn.Module):
    """Takes as long as it is told, and memory for as many samples; draws from everywhere, and changes its buffers."""

    def __init__(self, seconds: Seconds = best_at_eight, *, fits: int = 10**9, at_least: int = 1) -> None:
        super().__init__()
        torch.manual_seed(16)
        self.clock = Clock()
        self.seconds = seconds
        self.limit = fits
        self.at_least = at_least
        self.log = array("q")  # which trials do not put back
        self.calls = 0
        self.bulk = nn.Parameter(torch.randn(WORTH_TIMING // NUM_SAMPLES + 1))
        self.register_buffer("seen", torch.zeros(5))
        self.dropout = nn.Dropout(0.5)
        self.out = nn.Linear(5, 4)
        self.double()

    @property
    def sizes(self) -> list[int]:
        """Sizes of all forwards, those of trials too."""
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
    """Return an engine whose "auto" goes by the model's clock; the optimizer has a state already."""
    if auto is None:
        assert isinstance(model, Model)
        auto = Auto(clock=model.clock)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    options = {"norms": "keep", "check_loss": False, **options}
    return ab.Engine(model, optimizer, ab.mean_over_samples(classify), micro_batch_size=auto, **options)


def settled(model: Model, **options: Any) -> tuple[int | None, str]:
    """Return the size that a step of 29 samples has settled on, and the decision in words."""
    with engine_of(model, **options) as engine:
        report = engine.step(InMemory(vectors(NUM_SAMPLES)))
        return report.plan.cut.micro_batch_size, engine.decisions["micro_batch_size"]


# What is chosen


@sees(
    "the largest size that fits is taken",
    "src/anybatch/engine/micro_batch_size/search.py",
    "size = smallest_of_the_fastest(steps)",
    "size = max(steps)",
    also=["tests/engine/test_micro_batch_size.py::test_the_slowest_rank_counts"],
)
def test_the_fastest_of_a_few() -> None:
    """Whole steps are compared, the ragged last micro-batch included, and what was tried is said."""
    size, words = settled(Model())

    by_hand = {tried: sum(best_at_eight(part) for part in parts) for tried, parts in CUTS.items()}
    assert size == min(by_hand, key=lambda tried: by_hand[tried]) == 8
    assert words == "8, the fastest of 8, 15 and 29 (78, 63 and 56 samples/s)"
    assert [round(NUM_SAMPLES / by_hand[tried]) for tried in (8, 15, 29)] == [78, 63, 56]


CUTS = {8: (8, 8, 8, 5), 15: (15, 14), 29: (29,)}


def test_the_smallest_where_it_makes_no_difference() -> None:
    """Of sizes that are within 3% of the fastest the smallest is taken: it leaves the most memory free."""
    size, words = settled(Model(lambda size: 0.0001 + 0.01 * size))

    assert size == 2
    assert words == "2, the smallest within 3% of the fastest of 2, 8, 15 and 29 (99, 100, 100 and 100 samples/s)"


def test_the_whole_share_where_larger_is_faster() -> None:
    """Where each micro-batch costs a lot by itself, there is one."""
    size, words = settled(Model(lambda _: 1.0))

    assert size == NUM_SAMPLES
    assert words == "29, the fastest of 2, 4, 8, 16 and 29 (2, 4, 7, 14 and 29 samples/s)"


class Fake:
    """Runs nothing, in the time that it is told."""

    def __init__(self, seconds: Seconds, num_samples: int, limit: int) -> None:
        self.clock = Clock()
        self.seconds = seconds
        self.num_samples = num_samples
        self.limit = limit
        self.ran: list[list[int]] = []

    def run(self, size: int, most: int) -> TrialResult:
        """Take the time of the first micro-batches."""
        parts = [min(size, self.num_samples - start) for start in range(0, self.num_samples, size)][:most]
        self.ran.append(parts)
        if max(parts) > self.limit:
            return TrialResult("out_of_memory")
        seconds = tuple(self.seconds(part) for part in parts)
        self.clock.now += sum(seconds)
        return TrialResult("ran", seconds)


def search_of(fake: Fake, **options: Any) -> Search:
    """Return a search over what a fake runs."""
    auto, planned = options.pop("auto", Auto(clock=fake.clock)), options.pop("planned", None)
    search = Search(
        fake,  # type: ignore[arg-type]  # it does what a rehearsal does
        ab.World(),
        share=fake.num_samples,
        num_in_batch=fake.num_samples,
        auto=auto,
        **options,
    )
    search.plan(planned)
    return search


@sees(
    "a planned bound cuts a group",
    "src/anybatch/engine/micro_batch_size/search.py",
    "planned = max(1, planned // self._group) * self._group",
    "planned = max(self._group, planned)",
)
@example(share=135, limit=118, fixed=0.1, cache=300, planned=118, group=4)
@given(
    share=st.integers(1, 300),
    limit=st.integers(1, 300),
    fixed=st.floats(0.0, 0.1),
    cache=st.integers(1, 300),
    planned=st.none() | st.integers(1, 300),
    group=st.sampled_from([1, 1, 4]),
)
def test_never_above_what_fits(
    *, share: int, limit: int, fixed: float, cache: int, planned: int | None, group: int
) -> None:
    """The size fits, by test and by plan, is one that was tried, and no more than 25 steps' worth were run.

    It is a multiple of the group, unless it is the whole share.
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


@given(limit=st.integers(1, 300), share=st.integers(1, 300))
def test_doubling_finds_what_fits(limit: int, share: int) -> None:
    """Without a clock it is the largest power of two that fits, or the share, in equal parts."""
    fake = Fake(lambda _: 0.0, share, limit)

    size = search_of(fake).largest("cuda:0").size

    bound = share if share <= limit else max(2**power for power in range(9) if 2**power <= limit)
    assert size == even_size(share, bound)
    tried = [max(parts) for parts in fake.ran]
    assert tried[0] == min(2, share)  # BatchNorm refuses a single sample
    assert max(tried) <= share
    assert len(tried) == len(set(tried))


def test_an_optimizer_without_state_will_want_memory_too() -> None:
    """Before the first update half of what fits is taken, unless nothing has run out of memory."""
    assert search_of(Fake(straight, 29, 5), optimizer_is_new=True).largest("cuda:0").size == 2
    assert search_of(Fake(straight, 29, 5)).largest("cuda:0").size == 4
    assert search_of(Fake(straight, 29, 29), optimizer_is_new=True).largest("cuda:0").size == 29
    fastest = search_of(Fake(straight, 29, 16), optimizer_is_new=True).fastest()
    assert fastest.size is not None
    assert fastest.size <= 8
    assert fastest.words.endswith("; 29 does not fit")


def test_not_even_one() -> None:
    """If a single sample does not fit there is nothing to find."""
    for way in (Search.fastest, lambda search: search.largest("cuda:0")):
        with pytest.raises(BatchSizeError, match="not even 1 sample"):
            way(search_of(Fake(straight, 8, 0)))


def test_not_even_one_group() -> None:
    """What is smaller than a group is not tried, since no step could be cut so: the error names the group."""
    fake = Fake(straight, 29, 3)

    with pytest.raises(BatchSizeError, match="not even one group of 4 samples fits") as caught:
        search_of(fake, group=4).fastest()

    assert caught.value.micro_batch_size == 4
    assert {max(parts) for parts in fake.ran} == {4}


def test_one_group_is_not_halved() -> None:
    """An optimizer without state takes half of what fits, but no less than one group, even with no time to compare."""
    fake = Fake(straight, 29, 5)

    found = search_of(fake, group=4, optimizer_is_new=True, auto=Auto(clock=fake.clock, most_seconds=0.0)).fastest()

    assert found.size == 4


def test_only_one() -> None:
    """If a single sample fits, and two do not, it is one at a time."""
    found = search_of(Fake(straight, 8, 1)).fastest()

    assert found.size == 1
    assert found.words == "1, the only size tried (33 samples/s); 2 does not fit"


@pytest.mark.parametrize("most_seconds", [0.0, 1.0, 10.0, 60.0])
def test_time_is_bounded(most_seconds: float) -> None:
    """A slow model is tried for as long as there is time, and with what was seen until then the choice is made.

    More is spent only while a doubled size is more than a tenth faster.
    """
    fake = Fake(lambda size: 0.2 + 0.1 * size, 256, 256)
    begun = fake.clock.now

    found = search_of(fake, auto=Auto(clock=fake.clock, most_seconds=most_seconds)).fastest()

    # 5.0, 6.7, 8.0, 8.9 and 9.4 samples per second at 2, 4, 8, 16 and 32; two micro-batches were run of each.
    to_32 = 2 * sum(0.2 + 0.1 * size for size in (2, 4, 8, 16, 32))
    assert fake.clock.now - begun <= max(most_seconds, to_32 + 1e-6)
    assert found.size is not None
    assert found.size >= 16
    if most_seconds < 60.0:
        assert "; larger ones were not tried in the " in found.words


class NoRoom:
    """Says that memory is short once micro-batches are as large as this."""

    available_bytes = 1000

    def __init__(self, fake: Fake, size: int) -> None:
        self._fake = fake
        self._size = size

    def may_double(self) -> bool:
        """Return whether the last size was smaller."""
        return max(self._fake.ran[-1]) < self._size


@sees(
    "sizes are doubled into memory that is not there",
    "src/anybatch/engine/micro_batch_size/search.py",
    "if not trial.may_double:",
    "if False:",
)
def test_no_doubling_into_memory_that_is_not_there() -> None:
    """Where running out of memory would end the process, what cannot be sure to fit is not tried."""
    fake = Fake(straight, 64, 64)

    found = search_of(fake, room=NoRoom(fake, 8)).fastest()

    assert max(max(parts) for parts in fake.ran) == 8
    assert found.size == 8
    assert "not enough memory left to be sure" in found.words


@sees(
    "a planned bound is not kept to",
    "src/anybatch/engine/micro_batch_size/search.py",
    "self._upper = self._share if planned is None else min(self._share, planned)",
    "self._upper = self._share",
    also=["tests/engine/test_micro_batch_size.py::test_never_above_what_fits"],
)
def test_a_plan_is_a_bound() -> None:
    """What is planned to fit is asked for with the rank's share on the host, and nothing larger is tried."""
    model, asked = Model(straight), []

    def largest(batch: Batch, num_samples: int) -> int:
        asked.append((len(batch["x"]), num_samples))
        return 12

    size, words = settled(model, auto=Auto(clock=model.clock, largest=largest))

    assert asked == [(NUM_SAMPLES, NUM_SAMPLES)]
    assert max(model.sizes) <= 12
    assert size == 10  # 29 in three parts
    assert words.endswith("; 12 fits, as planned")


@sees(
    "auto: why there is no plan is not told",
    "src/anybatch/engine/micro_batch_size/sizes.py",
    'reason = next((found for found in plans if isinstance(found, str)), "")',
    'reason = ""',
)
def test_no_plan() -> None:
    """A planner that cannot tell leaves it to doubling, and its reason is told; one that has none says nothing."""
    model = Model(straight)

    def cannot(batch: Batch, num_samples: int) -> int:
        del batch, num_samples
        message = "cannot plan, will probe: a kernel of its own"
        raise CannotPlanError(message)

    _, words = settled(model, auto=Auto(clock=model.clock, largest=cannot))
    assert max(model.sizes) == NUM_SAMPLES
    assert "sizes were doubled, for a plan could not be made (cannot plan, will probe: a kernel of its own)" in words

    model = Model(straight)
    _, words = settled(model, auto=Auto(clock=model.clock, largest=lambda _batch, _num_samples: None))
    assert max(model.sizes) == NUM_SAMPLES
    assert "plan" not in words


@sees(
    "auto: a plan that did not hold is believed",
    "src/anybatch/engine/micro_batch_size/search.py",
    "if size != seed or 2 * below >= size:",
    "if True:",
)
@given(planned=st.integers(2, 300), share=st.integers(2, 300), limit=st.integers(2, 300))
def test_a_plan_leaves_sizes_out(planned: int, share: int, limit: int) -> None:
    """A plan that holds is tried at once, in the place of every power of two below; one that does not is no loss."""
    fake = Fake(lambda _: 0.0, share, limit)

    size = search_of(fake, planned=planned).largest("cuda:0").size

    upper, tried = min(planned, share), [max(parts) for parts in fake.ran]
    bound = upper if upper <= limit else max(2**power for power in range(9) if 2**power <= min(limit, upper))
    assert size == even_size(share, bound)
    assert max(tried) <= upper
    if upper <= limit:
        assert len(tried) <= 2
    assert len(tried) == len(set(tried))


@sees(
    "auto: a plan is only a bound, and every power of two is tried",
    "src/anybatch/engine/micro_batch_size/search.py",
    "below, seed = 0, self._seed(timed=timed)",
    "below, seed = 0, 0",
    also=["tests/engine/test_micro_batch_size.py::test_a_plan_leaves_sizes_out"],
)
def test_a_plan_is_where_timing_begins() -> None:
    """With a plan sizes are timed from a quarter of it on, unless that is so slow that there is no time for it."""
    fake = Fake(straight, 256, 10**9)
    search_of(fake, planned=128).fastest()
    assert [max(parts) for parts in fake.ran][:4] == [2, 32, 64, 128]

    fake = Fake(lambda size: 0.1 * size, 256, 10**9)
    search_of(fake, planned=128).fastest()
    assert [max(parts) for parts in fake.ran][:3] == [2, 4, 8]


# Nothing is left behind


class After(NamedTuple):
    """A run's state, all of it."""

    tensors: list[torch.Tensor]
    draws: list[float]


def after_steps(model: Model, engine: ab.Engine) -> After:
    """Make three steps, and return everything that they can have changed."""
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


@sees(
    "trying sizes does not put buffers and random numbers back",
    "src/anybatch/engine/micro_batch_size/budget_trials.py",
    "with without_side_effects(self.modules, device, functions=functions, as_compiled=True) as generators:",
    "with contextmanager(lambda: (one for one in (None,)))() as generators:",
    also=[
        "tests/engine/test_micro_batch_size.py::test_running_out_of_memory_leaves_nothing_behind",
        "tests/engine/test_micro_batch_size.py::test_an_interrupt_leaves_nothing_behind",
    ],
)
@pytest.mark.parametrize("rng", ["micro_batch", "per_sample", None])
def test_as_if_the_size_had_been_given(rng: Any) -> None:
    """Parameters, buffers, optimizer state and all random numbers end bit for bit as with that size."""
    tried, given_size = Model(), Model()
    found = after_steps(tried, engine_of(tried, rng=rng))
    wanted = after_steps(given_size, engine_of(given_size, 8, rng=rng))

    assert max(tried.sizes) == NUM_SAMPLES  # it was tried
    assert tried.sizes[-4:] == given_size.sizes[-4:] == [8, 8, 8, 5]
    assert all(torch.equal(*pair) for pair in zip(found.tensors, wanted.tensors, strict=True))
    assert found.draws == wanted.draws


@sees(
    "trying sizes leaves gradients",
    "src/anybatch/engine/micro_batch_size/budget_trials.py",
    """
            finally:
                self.clear()
""",
    """
            finally:
                pass
""",
)
def test_trials_leave_no_gradient() -> None:
    """When the size is told, the gradients of trial runs are gone, and their memory is free for the first step."""
    model = Model()
    present: list[bool] = []

    class Looks:
        """Looks for gradients when the size is told."""

        def observe(self, record: Record, /) -> None:
            """Note whether there are any."""
            if isinstance(record, DiagnosisRecord) and record.code == "micro_batch_size":
                present.append(any(parameter.grad is not None for parameter in model.parameters()))

    with engine_of(model, observer=Looks()) as engine:
        engine.step(InMemory(vectors(NUM_SAMPLES)))
    assert present == [False]


def test_running_out_of_memory_leaves_nothing_behind() -> None:
    """Half-finished forwards that ran out of memory, or failed, leave as little behind."""
    tried, given_size = Model(straight, fits=11, at_least=3), Model(straight)
    found = after_steps(tried, engine_of(tried))
    size = max(tried.sizes[-3:])
    assert size == 8
    wanted = after_steps(given_size, engine_of(given_size, size))

    assert {2, 16} <= set(tried.sizes)
    assert all(torch.equal(*pair) for pair in zip(found.tensors, wanted.tensors, strict=True))
    assert found.draws == wanted.draws


def test_an_interrupt_leaves_nothing_behind() -> None:
    """Ctrl-C while sizes are tried: buffers, random numbers and gradients are as they were."""
    model = Model()

    def interrupted(size: int) -> float:
        if size == NUM_SAMPLES:
            raise KeyboardInterrupt
        return best_at_eight(size)

    model.seconds = interrupted
    with engine_of(model) as engine:
        before = [*(tensor.clone() for tensor in model.state_dict().values()), torch.get_rng_state()]
        with pytest.raises(KeyboardInterrupt):
            engine.step(InMemory(vectors(NUM_SAMPLES)))
        after = [*model.state_dict().values(), torch.get_rng_state()]
        gradients = [parameter.grad for parameter in model.parameters()]

    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert not any(gradient is not None and bool(gradient.any()) for gradient in gradients)


def test_an_observer_sees_the_decision_and_no_trial() -> None:
    """The records of micro-batches are those of the step; the decision is a diagnosis, and stands in the header."""
    model, recorder = Model(), Recorder()
    with engine_of(model, observer=recorder) as engine:
        engine.step(InMemory(vectors(NUM_SAMPLES)))
        words = engine.decisions["micro_batch_size"]

    ends = [r.num_samples for r in recorder.records if isinstance(r, MicroBatchRecord) and r.event == "end"]
    diagnoses = [r for r in recorder.records if isinstance(r, DiagnosisRecord)]
    (said,) = (r for r in diagnoses if r.code != "draws_are_not_keyed")
    (start,) = (r for r in recorder.records if isinstance(r, StartRecord))
    assert ends == [8, 8, 8, 5]
    assert (said.code, said.message) == ("micro_batch_size", f"micro_batch_size: {words}")
    assert start.decisions["micro_batch_size"] == words
    assert start.micro_batch_size == 8


# Where speed does not decide


class Normalised(Model):
    """With BatchNorm, which makes another model of every cut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


class Small(Model):
    """A step of it is not worth timing."""

    def __init__(self) -> None:
        super().__init__()
        self.bulk = nn.Parameter(self.bulk.detach()[:-30])


UNTIMED: Mapping[str, tuple[Callable[[], Model], dict[str, Any], str]] = {
    "small": (Small, {}, "a step takes too little to be worth timing"),
    "BatchNorm": (Normalised, {}, "what BatchNorm makes of a sample depends on its micro-batch"),
    "BatchNorm, synchronised": (Normalised, {"norms": "sync"}, "what BatchNorm makes of a sample depends on"),
}


@sees(
    "BatchNorm is cut for speed",
    "src/anybatch/norms/policies.py",
    'least_samples=2 if has_layers else 1, largest_fitting=_OF_MICRO_BATCH if has_layers else ""',
    'largest_fitting=""',
)
@pytest.mark.parametrize("name", UNTIMED)
def test_the_whole_share_on_a_cpu(name: str, one_rank: Ranks) -> None:
    """Where a clock must not decide, or need not, a CPU runs the share in one go; nothing is tried; that is said."""
    (found,) = one_rank.run(untimed, name)

    assert found == ([NUM_SAMPLES], None, f"the whole rank share, as {UNTIMED[name][2]}"[: len(found[2])])


def untimed(name: str) -> tuple[list[int], int | None, str]:
    """Run on the rank: return the sizes that were run in a step, the size that was settled, and the decision."""
    make, options, words = UNTIMED[name]
    model = make()
    options = {key: value() if key == "strategy" else value for key, value in options.items()}
    optimizer = lambda named: torch.optim.SGD(named, lr=0.1)  # noqa: E731
    world = ab.World.from_environment()
    loss = ab.mean_over_samples(classify)
    auto = Auto(clock=model.clock)
    with ab.Engine(model, optimizer, loss, micro_batch_size=auto, check_loss=False, world=world, **options) as engine:
        report = engine.step(InMemory(vectors(NUM_SAMPLES)))
        said = engine.decisions["micro_batch_size"]
        return model.sizes, report.plan.cut.micro_batch_size, said[: len("the whole rank share, as ") + len(words)]


def test_deterministic_algorithms() -> None:
    """Who asks torch for deterministic algorithms gets a cut that no clock decides."""
    torch.use_deterministic_algorithms(True)
    try:
        model = Model()
        assert settled(model)[1].startswith("the whole rank share, as torch.use_deterministic_algorithms is on")
        assert model.sizes == [NUM_SAMPLES]
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_loss_across_samples_is_not_timed() -> None:
    """Cutting such a batch costs a second forward of everything, so a CPU does not cut it."""
    model = Model()

    def spread(_: nn.Module, outputs: torch.Tensor) -> torch.Tensor:
        return (outputs - outputs.mean(0)).square().mean()

    loss = ab.joint(lambda net, batch: net(batch["x"]), spread)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ab.Engine(model, optimizer, loss, micro_batch_size=Auto(clock=model.clock), check_loss=False) as engine:
        engine.step(InMemory(vectors(NUM_SAMPLES)))
        words = engine.decisions["micro_batch_size"]

    assert model.sizes == [NUM_SAMPLES]
    assert words == "the whole rank share, as a loss across samples runs forwards twice once it is cut"


def test_ghost_groups_stay_whole() -> None:
    """Where samples are normalised in groups, a micro-batch holds whole ones, and speed decides again."""
    model = Normalised()

    size, words = settled(model, norms=Ghost(group_size=5))

    assert size is not None
    assert size % 5 == 0
    assert "the fastest of" in words
    assert min(model.sizes) >= 4  # the rest of the last group


def test_what_cannot_run_small_is_run_large() -> None:
    """A model that refuses small micro-batches is tried with those that it takes."""
    size, words = settled(Model(straight, at_least=13))

    assert size in (15, 29)
    assert words.startswith(f"{size}, the ")


def test_what_cannot_run_at_all_fails_as_it_would() -> None:
    """If nothing can be tried, the step itself says why, in the error that it would have raised anyway."""
    model = Model(at_least=100)
    with engine_of(model) as engine:
        with pytest.raises(ValueError, match="cannot run on 29 samples"):
            engine.step(InMemory(vectors(NUM_SAMPLES)))
        said = engine.decisions["micro_batch_size"]

    assert said.startswith("the whole rank share, since no part of it could be run by itself (ValueError: ")


class Packed(InMemory):
    """Micro-batches that no one can count or cut: a collate function has packed them."""

    def feed(self, units: Sequence[Positions], later_units: LaterUnits | None = None) -> Iterator[Any]:
        """Yield each in a list of one row."""
        for batch in super().feed(units, later_units):
            yield {"x": batch["x"][None], "y": batch["y"][None]}


def test_what_cannot_be_cut_is_loaded() -> None:
    """Where a collate function makes something else of samples, each size is loaded as a step would load it."""
    model = Model()
    loss = ab.mean_over_samples(lambda net, batch: classify(net, {"x": batch["x"][0], "y": batch["y"][0]}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    auto = Auto(clock=model.clock)
    with ab.Engine(model, optimizer, loss, micro_batch_size=auto, check_loss=False) as engine:
        engine.step(Packed(vectors(NUM_SAMPLES)))
        words = engine.decisions["micro_batch_size"]

    assert words == "8, the fastest of 8, 15 and 29 (78, 63 and 56 samples/s)"
    assert model.sizes[-4:] == [8, 8, 8, 5]


# What is known


class Remembered:
    """Sizes by circumstances, in a dict."""

    def __init__(self, *, can_keep: bool = True) -> None:
        self.kept: list[tuple[Mapping[str, Any], KnownSize]] = []
        self.can_keep = can_keep

    def find(self, circumstances: Mapping[str, Any]) -> KnownSize | None:
        """Return the last one."""
        return next((known for there, known in reversed(self.kept) if there == circumstances), None)

    def keep(self, circumstances: Mapping[str, Any], size: int, samples_per_second: float) -> bool:
        """Keep one more."""
        if self.can_keep:
            self.kept.append((circumstances, KnownSize(size, samples_per_second, "2030-12-31")))
        return self.can_keep


def settled_with(known: Remembered, model: Model, **options: Any) -> tuple[int | None, str]:
    """Return what a step has settled on."""
    return settled(model, auto=Auto(clock=model.clock, known=known), **options)


def test_what_is_known_is_not_measured_again() -> None:
    """Under the same circumstances the size is taken as it was measured, with the date, and nothing is tried."""
    known, first, second = Remembered(), Model(), Model()
    settled_with(known, first)
    size, words = settled_with(known, second)

    assert (size, words) == (8, "8, as measured on 2030-12-31 (78 samples/s)")
    assert second.sizes == [8, 8, 8, 5]
    assert len(known.kept) == 1


def other_layer() -> Model:
    """Return a model with another dropout rate."""
    model = Model()
    model.dropout = nn.Dropout(0.4)
    return model


def frozen() -> Model:
    """Return a model with a parameter that is not trained."""
    model = Model()
    model.out.bias.requires_grad = False
    return model


@pytest.mark.parametrize(
    ("make", "options"),
    [(other_layer, {}), (frozen, {}), (Model, {"precision": "bf16"}), (Model, {"rng": "per_sample"})],
)
def test_other_circumstances_are_measured(make: Callable[[], Model], options: dict[str, Any]) -> None:
    """Another layer, another trainable parameter, another precision, another source of numbers: measured anew."""
    known, second = Remembered(), make()
    settled_with(known, Model())
    settled_with(known, second, **options)

    assert max(second.sizes) == NUM_SAMPLES
    assert len(known.kept) == 2


def test_another_share_is_measured() -> None:
    """So is a batch of another size, or with samples of another shape."""
    known, model = Remembered(), Model()
    settled_with(known, Model())
    with engine_of(model, Auto(clock=model.clock, known=known)) as engine:
        engine.step(InMemory(vectors(NUM_SAMPLES + 1)))
    assert max(model.sizes) == NUM_SAMPLES + 1
    wider = Model()
    with engine_of(wider, Auto(clock=wider.clock, known=known)) as engine:
        engine.step(InMemory({**vectors(NUM_SAMPLES), "more": torch.zeros(NUM_SAMPLES, 3)}))
    assert max(wider.sizes) == NUM_SAMPLES
    assert len(known.kept) == 3


def test_what_cannot_be_kept() -> None:
    """A place that cannot be written is said, and costs nothing else."""
    size, words = settled_with(Remembered(can_keep=False), Model())

    assert size == 8
    assert words.endswith("; it could not be kept for later")


# Resume


@sees(
    "a resumed run times sizes again",
    "src/anybatch/engine/micro_batch_size/sizes.py",
    'if "micro_batch_size" not in decisions:',
    "if True:",
)
@pytest.mark.parametrize(("make", "wanted"), [(Model, 8), (Small, None)])
def test_a_resumed_run_takes_it_again(make: Callable[[], Model], wanted: int | None, tmp_path: Path) -> None:
    """What was chosen is in the checkpoint, and is taken again where a clock would choose something else."""
    first, second = make(), make()
    with engine_of(first) as engine:
        engine.step(InMemory(vectors(NUM_SAMPLES)))
        path = engine.save(tmp_path)
    second.seconds = lambda _: 1.0  # would be fastest in one go
    with engine_of(second) as engine:
        engine.load(path)
        plan = engine.step(InMemory(vectors(NUM_SAMPLES + 60))).plan
        words = engine.decisions["micro_batch_size"]

    assert plan.cut.micro_batch_size == wanted
    assert words == f"{wanted or 'the whole rank share'}, as in the checkpoint"
    assert second.sizes == [unit.num_samples for unit in plan.units]


# Ranks


class OnRank(NamedTuple):
    """What one rank has settled on, and what it has run."""

    size: int | None
    words: str
    sizes: list[int]
    gradient: torch.Tensor


def settle_on_ranks(strategy: str, curves: list[str], limits: list[int], num_samples: int) -> OnRank:
    """Run on every rank: settle on a size where each rank has a speed and a memory of its own.

    Below 0, rank 0 brings that many samples, and the others none.
    """
    world = ab.World.from_environment()
    seconds = {"straight": straight, "best_at_eight": best_at_eight}[curves[world.rank]]
    model = Model(seconds, fits=limits[world.rank])
    model.bulk = nn.Parameter(torch.zeros(WORTH_TIMING, dtype=torch.float64))
    known = Remembered()
    engine = engine_of(model, Auto(clock=model.clock, known=known), strategy=strategy, world=world)
    with engine:
        own = RankShare(vectors(abs(num_samples)) if world.rank == 0 else None)
        batch = InMemory(vectors(num_samples)) if num_samples > 0 else own
        report = engine.step(batch)
        gradient = engine.gradients(batch)["out.weight"]
        assert gradient is not None
        assert bool(known.kept) == (world.rank == 0)  # one rank keeps it for all
        return OnRank(report.plan.cut.micro_batch_size, engine.decisions["micro_batch_size"], model.sizes, gradient)


@pytest.mark.parametrize("strategy", ["all_reduce", "ddp"])
def test_the_slowest_rank_counts(strategy: str, two_ranks: Ranks) -> None:
    """All ranks take the same size: the one that is best where each size takes as long as on its slowest rank."""
    found: list[OnRank] = two_ranks.run(settle_on_ranks, strategy, ["straight", "best_at_eight"], [99, 99], 58)

    assert [one.size for one in found] == [8, 8]
    assert found[0].words == found[1].words == "8, the fastest of 8, 15 and 29 (157, 126 and 112 samples/s)"
    assert torch.equal(found[0].gradient, found[1].gradient)


@sees(
    "a rank settles on a size by itself",
    "src/anybatch/engine/micro_batch_size/search.py",
    "zip(*self._world.gather_numbers(numbers), strict=True)",
    "zip(*[numbers], strict=True)",
)
@pytest.mark.parametrize("strategy", ["all_reduce", "ddp"])
def test_the_smallest_memory_counts(strategy: str, two_ranks: Ranks) -> None:
    """Where one rank has less room than the other, both take a size that fits there, and the gradient is whole."""
    found: list[OnRank] = two_ranks.run(settle_on_ranks, strategy, ["straight", "straight"], [99, 5], 58)

    assert found[0].size == found[1].size == 4
    assert all(one.words.endswith("; 8 does not fit") for one in found)
    assert torch.equal(found[0].gradient, found[1].gradient)


def test_a_rank_without_samples(two_ranks: Ranks) -> None:
    """Where one rank brings all the samples, the other tries nothing, and both take the size that is best there."""
    found: list[OnRank] = two_ranks.run(settle_on_ranks, "all_reduce", ["best_at_eight", "straight"], [99, 99], -29)

    assert [one.size for one in found] == [8, 8]
    assert found[1].sizes == []


def refused_search() -> str:
    """Run on every rank: return what is said under lockstep where memory may run out."""
    world = ab.World.from_environment()
    model = Model()
    loss = ab.mean_over_samples(classify)
    engine = ab.Engine(model, lambda named: torch.optim.SGD(named, lr=0.1), loss, strategy=FSDP(), world=world)
    engine._parts.sizes.may_run_out = True  # noqa: SLF001 (as on an accelerator)
    with pytest.raises(CompositionError) as caught:
        engine.step(InMemory(vectors(58)))
    return str(caught.value)


def test_no_search_under_lockstep(two_ranks: Ranks) -> None:
    """Where ranks run in lockstep, one that ran out of memory would leave the others waiting: refused beforehand."""
    for message in two_ranks.run(refused_search):
        assert "'fsdp'" in message
        assert "Name a micro_batch_size" in message
