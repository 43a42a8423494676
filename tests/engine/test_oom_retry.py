"""A run that runs out of memory ends bitwise like a run planned with the smaller cut."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core.records import DiagnosisRecord, OutOfMemoryRecord, Record
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

pytestmark = pytest.mark.filterwarnings("ignore:the forward updates state")


def expect(run: Run, sizes: Mapping[str, int | str]) -> Run:
    """Return the same run, planned with other sizes."""
    return replace(run, sizes=sizes)


HALF, QUARTER = {"micro_batch_size": LARGE // 2}, {"micro_batch_size": LARGE // 4}
SWEEPS: Mapping[str, tuple[Run, int]] = {
    "all_reduce": (Run(strategy="all_reduce"), 7),
    "across samples": (Run(strategy="all_reduce", loss="joint"), 11),
    "count from the forward": (Run(strategy="all_reduce, after", loss="late"), 10),
    "groups": (Run(strategy="all_reduce", options={"norms": "ghost"}), 11),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_one_of_two_ranks_fails_anywhere(name: str, two_ranks: Ranks) -> None:
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
    "hand-made batches": (Run(brought=True), HALF, 9),
    "exact normalisation": (Run(options={"norms": "exact"}), HALF, 11),
    "a buffer once per step": (Run(options={"buffers": {"*seen": "mean"}}), HALF, 9),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_RANK)
def test_a_single_rank_fails_anywhere(name: str) -> None:
    """The same holds on one rank, for other sizes, batches, policies and random numbers."""
    run, sizes, every = ONE_RANK[name]
    planned = train(expect(run, sizes))
    found = sweep(run, 0, every)
    assert len(found) > 1
    for at, end in found:
        assert same(end.weights, planned.weights), at
        assert end.plans[1:] == planned.plans[1:]


def test_two_failures_in_one_step(two_ranks: Ranks) -> None:
    """A step that fails twice is retried a second time, and ends as planned with a quarter of the size."""
    run = Run(strategy="all_reduce")
    planned = two_ranks.run(train, expect(run, QUARTER))
    for (at, _), (_, failing) in zip(*two_ranks.run(sweep, run, 1, 9, 2, 2), strict=True):
        assert failing.too_large == (LARGE, LARGE // 2), at
        assert same(failing.weights, planned[1].weights), at


@pytest.mark.slow
def test_a_failed_try_frees_its_memory() -> None:
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
        for words in ("weights ", "gradients ", "optimizer state ", "precision='bf16'", "Tried to allocate", "step 1 "):
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


def test_ddp_retries_outside_of_its_reduction(two_ranks: Ranks) -> None:
    """DDP also recovers, up to the last micro-batch's backward."""
    for at in (1, 33):
        assert two_ranks.run(ddp_point, at) == [((LARGE,), True)] * 2


@pytest.mark.slow
def test_ddp_cannot_retry_in_its_reduction() -> None:
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
def test_norms_over_ranks_cannot_retry() -> None:
    """With collectives inside forwards, ranks cannot retry: the error explains why and gives the alternative."""
    other, failing = run_ranks(2, sync_point, timeout_seconds=60)
    assert "CannotRedoError: out of memory in step 1" in (failing.error or "")
    assert "AssertionError" not in (failing.error or "")
    assert "norms='keep' or Ghost(group_size) they do not" in (failing.error or "")
    assert "RankFailedError" in (other.error or "")


@sees(
    "an update that failed half-way reports that nothing changed",
    "src/anybatch/engine/updater.py",
    '            raise HalfUpdatedError(message, step=step, phase="update") from error',
    '            raise DoesNotFitError(message, step=step, phase="update") from error',
)
def test_a_failed_update_is_never_retried() -> None:
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


class TooLarge(torch.utils.data.Dataset[Any]):
    """Samples of which one does not fit into memory."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return 8

    def __getitem__(self, index: int) -> Any:
        """Load a sample, or run out of memory."""
        if index == 5:
            message = "planted"
            raise torch.OutOfMemoryError(message)
        return {"x": torch.ones(4), "labels": torch.ones(3, dtype=torch.long)}


def test_memory_may_run_out_while_samples_are_counted() -> None:
    """Loading samples to count their targets may need too much memory: the error names the phase."""
    model = nn.Linear(4, 5)
    loss = ab.mean_over_tokens(
        lambda net, batch: nn.functional.cross_entropy(net(batch["x"]).unsqueeze(2).expand(-1, -1, 3), batch["labels"]),
        labels="labels",
        shift=False,
    )
    with ab.Engine(model, torch.optim.SGD(model.parameters(), 0.1), loss, micro_batch_size=4) as engine:
        (batch,) = ab.batches(TooLarge(), effective_batch_size=8, epochs=1)
        with pytest.raises(DoesNotFitError) as caught:
            engine.step(batch)
    assert caught.value.phase == "load"
