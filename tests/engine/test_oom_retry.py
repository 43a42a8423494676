"""A run that runs out of memory ends bitwise like a run planned with the smaller cut."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import anybatch as ab
from anybatch.core.records import DiagnosisRecord, OutOfMemoryRecord, Record
from anybatch.engine.decisions import Decisions
from anybatch.engine.micro_batch_size.oom_retry import FIRST_WAIT, SizeBackoff
from anybatch.engine.micro_batch_size.sizes import RunSizes
from anybatch.errors import AnyBatchError, CannotRedoError, DoesNotFitError, HalfUpdatedError
from anybatch.testing import memory_budget, out_of_memory_at, run_ranks
from tests.engine.cases import InMemory
from tests.engine.out_of_memory_cases import (
    LARGE,
    Fault,
    Listening,
    Run,
    engine_of,
    same,
    samples,
    sweep,
    train,
)
from tests.faults import sees
from tests.ranks_fixture import Ranks


def expect(run: Run, sizes: Mapping[str, int | str]) -> Run:
    """Return the same run, planned with other sizes."""
    return Run(
        strategy=run.strategy,
        loss=run.loss,
        num_samples=run.num_samples,
        sizes=sizes,
        options=run.options,
        brought=run.brought,
    )


HALF, QUARTER = {"micro_batch_size": LARGE // 2}, {"micro_batch_size": LARGE // 4}
SWEEPS: Mapping[str, tuple[Run, int]] = {
    "all_reduce": (Run(strategy="all_reduce"), 7),
    "all_reduce, each allocation": (Run(strategy="all_reduce"), 1),
    "across samples": (Run(strategy="all_reduce", loss="joint"), 11),
    "count comes late": (Run(strategy="all_reduce, after", loss="late"), 10),
    "the caller's numbers": (Run(strategy="all_reduce", options={"rng": None}), 10),
    "groups": (Run(strategy="all_reduce", options={"norms": "ghost"}), 11),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.published] * name.endswith("each allocation")) for name in SWEEPS]
)
def test_wherever_one_of_two_ranks_fails(name: str, two_ranks: Ranks) -> None:
    """Out of memory at any allocation of forward, backward or reduction: both ranks end as planned.

    The failing rank reports its phase, the other that a peer failed; each sample counts exactly once.
    """
    run, every = SWEEPS[name]
    planned = two_ranks.run(train, expect(run, HALF))
    for found in zip(*two_ranks.run(sweep, run, 1, every), strict=True):
        (at, other), (_, failing) = found
        assert same(other.weights, planned[0].weights), at
        assert same(failing.weights, planned[1].weights), at
        assert other.plans[1:] == failing.plans[1:] == planned[0].plans[1:]
        assert other.too_large == failing.too_large == (LARGE,)
        assert other.events == ((None, LARGE, LARGE // 2),)
        assert failing.events[0][0] in {"forward_backward", "reduce"}
        ids = [first + k for end in (other, failing) for first, number in end.units for k in range(number)]
        assert sorted(ids) == list(range(1000, 1000 + 2 * LARGE))
        assert f"because {LARGE} ran out of memory in step 1" in failing.decision == other.decision


ONE_RANK: Mapping[str, tuple[Run, Mapping[str, int | str], int]] = {
    "numbers by sample": (Run(options={"rng": "per_sample"}), HALF, 14),
    "accumulation steps": (Run(sizes={"accumulation_steps": 2}), {"accumulation_steps": 4}, 13),
    "whole shares": (Run(sizes={"micro_batch_size": "auto"}), HALF, 9),
    "one's own batches": (Run(brought=True), HALF, 9),
    "exact normalisation": (Run(options={"norms": "exact"}), HALF, 11),
    "master weights": (Run(options={"precision": "bf16"}), HALF, 9),
    "a buffer once per step": (Run(options={"buffers": {"*seen": "mean"}}), HALF, 9),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the forward updates state")
@pytest.mark.parametrize("name", ONE_RANK)
def test_wherever_a_single_rank_fails(name: str) -> None:
    """The same holds on one rank, for other sizes, batches, policies and random numbers."""
    run, sizes, every = ONE_RANK[name]
    planned = train(expect(run, sizes))
    found = sweep(run, 0, every)
    assert len(found) > 1
    for at, end in found:
        assert same(end.weights, planned.weights), at
        assert end.plans[1:] == planned.plans[1:]


def test_twice_in_one_step(two_ranks: Ranks) -> None:
    """A step that fails twice is retried a second time, and ends as planned with a quarter of the size."""
    run = Run(strategy="all_reduce")
    planned = two_ranks.run(train, expect(run, QUARTER))
    for (at, _), (_, failing) in zip(*two_ranks.run(sweep, run, 1, 9, 2, 2), strict=True):
        assert failing.too_large == (LARGE, LARGE // 2), at
        assert same(failing.weights, planned[1].weights), at


@pytest.mark.slow
def test_the_failed_try_lets_go_of_its_memory() -> None:
    """When the next try begins, all tensors of the failed one are freed, without garbage collection."""
    held: list[tuple[str, int]] = []
    for loss in ("plain", "joint"):
        listening = Holding()
        model, engine = engine_of(Run(loss=loss), ab.World(), listening)
        with engine:
            engine.step(InMemory(samples(0, 2)))
            batch = InMemory(samples(1, LARGE))
            with memory_budget(10**9, model, engine.optimizer, *batch.batch.values()) as budget:
                listening.budget = budget
                listening.before = budget.held_bytes
                with out_of_memory_at(30):
                    engine.step(batch)
        held.append((loss, listening.left_bytes))
    small = 2000  # for kept buffers and the counts of the planned cut
    assert all(0 <= left < small for _, left in held), held


class Holding(Listening):
    """Measures live memory when an out-of-memory event is reported."""

    def __init__(self) -> None:
        super().__init__()
        self.budget: Any = None
        self.before = 0
        self.left_bytes = -1

    def observe(self, record: Record) -> None:
        """Compare live memory with the level before the step."""
        if isinstance(record, OutOfMemoryRecord):
            self.left_bytes = max(0, self.budget.held_bytes - self.before)


def one_rank_engine(**options: Any) -> tuple[nn.Module, ab.Engine]:
    """Return a model and its engine on one rank."""
    return engine_of(Run(sizes={}, options=options), ab.World(), Listening())


@pytest.mark.slow
def test_one_sample_that_does_not_fit_ends_the_run() -> None:
    """If one sample does not fit, the error lists live memory and smaller options; nothing has changed."""
    model, engine = one_rank_engine(micro_batch_size=2)
    with engine:
        engine.step(InMemory(samples(0, 2)))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        batch = InMemory(samples(1, 4))
        with memory_budget(0, model) as budget:
            budget.num_bytes = budget.held_bytes + 600
            with pytest.raises(DoesNotFitError) as caught:
                engine.step(batch)
        for words in (
            "weights ",
            "gradients ",
            "optimizer state ",
            "precision='bf16'",
            "Tried to allocate",
            "of step 1 ",
        ):
            assert words in str(caught.value)
        assert same(before, model.state_dict())
        assert engine.num_steps == 1
        assert engine.step(batch).step == 1


def starve(strategy: str) -> str:
    """Run on every rank: the last one has no memory for a single sample; return the error."""
    world = ab.World.from_environment(device="cpu")
    model, engine = engine_of(Run(strategy=strategy, sizes={"micro_batch_size": 2}), world, Listening())
    engine.step(InMemory(samples(0, 4)))
    batch = InMemory(samples(1, 4))
    budget_bytes = 0 if world.rank == world.size - 1 else 10**9
    try:
        with memory_budget(budget_bytes, model) as budget:
            budget.num_bytes += budget.held_bytes
            engine.step(batch)
    except ab.errors.AnyBatchError as error:
        engine.close(error)
        return f"{type(error).__name__}: {error}"
    return ""


def test_one_rank_that_cannot_fit_ends_all(two_ranks: Ranks) -> None:
    """If one rank cannot fit a sample, the other raises the reason, and none hangs."""
    other, failing = two_ranks.run(starve, "all_reduce")
    assert failing.startswith("DoesNotFitError: out of memory in phase 'forward_backward' of step 1")
    assert other.startswith("RankFailedError: rank 1 failed: DoesNotFitError: out of memory")


def ddp_point(at: int) -> tuple[tuple[int, ...], bool]:
    """Run on every rank: return the sizes that failed under DDP, and whether the weights are as planned.

    A negative number counts from the end of the step.
    """
    world = ab.World.from_environment(device="cpu")
    run = Run(strategy="ddp", num_samples=2 * LARGE)
    planned = train(expect(run, HALF))
    at = at if at > 0 else train(run).num_allocations + at
    end = train(run, Fault(at=tuple(at if rank == world.size - 1 else 0 for rank in range(world.size))))
    return end.too_large, same(end.weights, planned.weights)


def test_ddp_begins_anew_outside_of_its_reduction(two_ranks: Ranks) -> None:
    """DDP also recovers, up to the last micro-batch's backward."""
    for at in (1, 33):
        assert two_ranks.run(ddp_point, at) == [((LARGE,), True)] * 2


@pytest.mark.slow
def test_ddp_says_that_it_cannot_leave_its_reduction() -> None:
    """In the backward that reduces, DDP cannot recover: the error names a strategy that can, and all ranks end."""
    other, failing = run_ranks(2, ddp_point, -15, timeout_seconds=60)
    assert "CannotRedoError" in (failing.error or "")
    assert "strategy='all_reduce' can" in (failing.error or "")
    assert "RankFailedError" in (other.error or "")


def sync_point() -> None:
    """Run on every rank: a fault under a policy with collectives inside forwards; its error has the location."""
    run = Run(strategy="all_reduce", options={"norms": "sync"})
    world = ab.World.from_environment(device="cpu")
    with pytest.raises(AnyBatchError) as caught:
        train(run, Fault(at=tuple(9 if rank else 0 for rank in range(world.size))))
    error = caught.value
    if isinstance(error, CannotRedoError):
        assert (error.rank, error.step) == (world.rank, 1)
        assert (error.phase, error.micro_batch_size) == ("forward_backward", LARGE)
    raise error


@pytest.mark.slow
def test_norms_over_ranks_say_that_they_cannot() -> None:
    """With collectives inside forwards, ranks cannot retry: the error explains why and gives the alternative."""
    other, failing = run_ranks(2, sync_point, timeout_seconds=60)
    assert "CannotRedoError: out of memory in step 1" in (failing.error or "")
    assert "AssertionError" not in (failing.error or "")
    assert "norms='keep' or Ghost(group_size) they do not" in (failing.error or "")
    assert "RankFailedError" in (other.error or "")


@sees(
    "an update that failed half-way is said to have changed nothing",
    "src/anybatch/engine/updater.py",
    '            raise HalfUpdatedError(message, step=step, phase="update") from error',
    '            raise DoesNotFitError(message, step=step, phase="update") from error',
)
def test_an_update_that_fails_is_never_made_again() -> None:
    """If an update fails, the error says that weights may be half updated, and which checkpoint to load."""
    _, engine = one_rank_engine(micro_batch_size=4)
    with engine:
        engine.step(InMemory(samples(0, 2)))
        batch = InMemory(samples(1, 8))
        with out_of_memory_at(3, phase="update"), pytest.raises(HalfUpdatedError):
            engine.step(batch)


@pytest.mark.slow
def test_an_evaluation_that_does_not_fit_gives_the_same_numbers() -> None:
    """A failing micro-batch of an evaluation is split in halves for any loss, and the metric stays the same."""
    for loss in ("plain", "joint", "late"):
        listening = Listening()
        _, engine = engine_of(Run(loss=loss), ab.World(), listening)
        with engine:
            batches = [InMemory(samples(0, 16)), InMemory(samples(1, 7))]
            expected = engine.evaluate(batches)
            with out_of_memory_at(6, times=2) as fault:
                found = engine.evaluate(batches)
        assert len(fault.failed) == 2
        assert found == pytest.approx(expected, rel=1e-13)
        told = [record.message for record in listening.records if isinstance(record, DiagnosisRecord)]
        assert told[0] == "out of memory in an evaluation: micro-batch 8 -> 4 samples on rank 0"


@pytest.mark.slow
def test_a_resumed_run_keeps_the_smaller_size(tmp_path: Path) -> None:
    """A checkpoint contains the reduced size, so a resumed run is bitwise equal; a different size overrides it."""
    model, engine = one_rank_engine(micro_batch_size=8)
    with engine:
        engine.step(InMemory(samples(0, 2)))
        batch = InMemory(samples(1, 8))
        with out_of_memory_at(5):
            engine.step(batch)
        engine.save(tmp_path)
        engine.step(InMemory(samples(2, 8)))
    again_model, again = one_rank_engine(micro_batch_size=8)
    with again:
        again.load(tmp_path)
        report = again.step(InMemory(samples(2, 8)))
    assert str(report.plan) == "8 samples = 1 rank x 2 micro-batches x 4"
    assert same(model.state_dict(), again_model.state_dict())
    assert "as in the checkpoint" in again.decisions["micro_batch_size"]
    _, other = one_rank_engine(micro_batch_size=6)
    with other:
        other.load(tmp_path)
        assert str(other.step(InMemory(samples(2, 6))).plan) == "6 samples = 1 rank x 1 micro-batch x 6"


class Recorded:
    """A notifier that keeps its messages."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def diagnosis(self, code: str, message: str) -> None:
        """Keep a message."""
        del code
        self.told.append(message)


def sizing_of(size: int | None) -> RunSizes:
    """Return sizes on one rank."""
    return RunSizes(ab.World(), effective_batch_size=None, micro_batch_size=size, accumulation_steps=None, deal="fixed")


def backoff_of(sizes: RunSizes, notified: Recorded | None = None) -> SizeBackoff:
    """Return the backoff of a new run."""
    return SizeBackoff(sizes, Decisions(), notified or Recorded())  # type: ignore[arg-type]  # has the one method used


def test_a_named_size_stays_small_and_auto_grows_again() -> None:
    """A given size stays reduced; "auto" retries the former size after some steps, and doubles the wait on failure."""
    for grows in (False, True):
        sizing, notified = sizing_of(16), Recorded()
        sizing.is_auto = grows
        resizing = backoff_of(sizing, notified)
        tried = []
        for step in range(8 * FIRST_WAIT):
            resizing.begin_step(step)
            if sizing.sizes.micro_batch_size == 16:
                tried.append(step)
                if step < 2 * FIRST_WAIT + FIRST_WAIT:
                    plan = sizing.placement.plan(32)
                    assert resizing.shrink(plan, step) == (16, 8)
        if not grows:
            assert tried == [0]
            assert sizing.sizes.micro_batch_size == 8
            continue
        assert tried[:3] == [0, FIRST_WAIT, 3 * FIRST_WAIT]
        assert tried[3:] == list(range(3 * FIRST_WAIT + 1, 8 * FIRST_WAIT))
        assert notified.told[0].startswith(
            "trying the larger size again from step 100 on, after 100 steps with at most 8"
        )
