"""The report of a recorded step has its exact memory, and recording changes nothing."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import anybatch as ab
from anybatch.diagnostics import record_memory
from anybatch.diagnostics.memory_report import UNSEEN, MemoryRecording, MemoryReport
from anybatch.errors import UserError
from anybatch.memory.device_memory import MemoryInUse
from anybatch.memory.trace import MemoryTimeline
from tests.engine.cases import InMemory
from tests.planner.profiled import most_allocated
from tests.raising import raises
from tests.ranks_fixture import Ranks

MIB = 2**20
WIDTH, NUM_PLACES, NUM_SAMPLES = 64, 32, 24


class Residual(nn.Module):
    """A stack of residual blocks, with and without recomputation."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3)
        )
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x))
        return x


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean squared error."""
    return F.mse_loss(model(batch["x"]), batch["y"])


def data() -> InMemory:
    """Return an effective batch."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, NUM_PLACES, WIDTH, generator=generator)
    return InMemory({"x": x, "y": x.roll(1, 1)})


def make_engine(*, recomputes: bool = False, dtype: torch.dtype = torch.float32, **choices: Any) -> ab.Engine:
    """Return an engine after its first step."""
    torch.manual_seed(0)
    choices = {"micro_batch_size": 8, "clip": 1.0, **choices}
    model = Residual(recomputes=recomputes).to(dtype)

    def typed(net: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss(net, {name: value.to(dtype) for name, value in batch.items()})

    engine = ab.Engine(model, lambda named: torch.optim.AdamW(named, lr=1e-3), ab.mean_over_samples(typed), **choices)
    engine.step(data())
    return engine


def recorded(engine: ab.Engine, batch: Any, **choices: Any) -> MemoryReport:
    """Return the report of one step."""
    with record_memory(engine, **choices) as recording:
        engine.step(batch)
    return recording.report


def rise(course: MemoryTimeline, *, inputs: bool) -> int:
    """Return how far a timeline rises above its start, with or without inputs that already existed."""
    totals = course.totals
    if not inputs:
        totals = totals - course.held_bytes[:, course.categories.index("inputs")]
    return int(totals.max() - totals[0])


@pytest.mark.slow
@pytest.mark.parametrize(("recomputes", "micro_batch_size"), [(False, 8), (True, 1), (True, 24)])
def test_the_peak_matches_the_allocator(recomputes: bool, micro_batch_size: int) -> None:
    """The memory that a step adds matches torch's own allocator, to the byte.

    The allocator also counts the states of random generators, which no operation returns. The engine keeps one (the
    previous may be freed), and a recomputed block keeps one until its backward.
    """
    state_bytes = torch.get_rng_state().nbytes
    batch = data()
    engine = make_engine(recomputes=recomputes, micro_batch_size=micro_batch_size)
    found = rise(recorded(engine, batch).timeline, inputs=False)
    states = [number * state_bytes for number in range(5 if recomputes else 2)]
    expected = most_allocated(lambda: engine.step(batch))

    assert expected > 100 * state_bytes
    assert expected - found in states


def test_recording_changes_nothing() -> None:
    """Recording steps leaves the trained parameters bitwise the same, with dropout."""
    plain, watched = (make_dropping_engine() for _ in range(2))
    for engine, records in ((plain, False), (watched, True)):
        for _ in range(3):
            if records:
                recorded(engine, data())
            else:
                engine.step(data())

    for one, other in zip(parameters(plain), parameters(watched), strict=True):
        assert torch.equal(one, other)


def make_dropping_engine() -> ab.Engine:
    """Return an engine over a model with dropout."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    return ab.Engine(model, torch.optim.AdamW(model.parameters()), ab.mean_over_samples(loss), micro_batch_size=7)


def parameters(engine: ab.Engine) -> Iterator[torch.Tensor]:
    """Return an engine's parameters."""
    assert isinstance(engine.model, nn.Module)
    return iter(list(engine.model.parameters()))


def test_categories_match_the_engine() -> None:
    """After the last backward, weights, gradients, optimizer state and inputs have exactly their sizes."""
    engine = make_engine()
    num_bytes = sum(one.nbytes for one in parameters(engine))
    num_steps = len(list(parameters(engine)))
    course = recorded(engine, data()).timeline
    update = next(place for place, name in course.marks if name == "update")
    found = course.at(update - 1)

    assert found["weights"] == found["gradients"] == num_bytes
    assert found["optimizer"] == 2 * num_bytes + 4 * num_steps
    assert found["inputs"] == 2 * NUM_SAMPLES * NUM_PLACES * WIDTH * 4
    assert found["activations"] < 512  # the losses for the report
    assert course.at(0)["gradients"] == 0


def test_free_memory_is_reported() -> None:
    """The report names the place of the peak; with a limit it ends with the rest, or a warning about the headroom."""
    engine = make_engine()
    plain = recorded(engine, data())
    peak, course, moment = plain.peak_bytes, plain.timeline, plain.timeline.peak_moment
    kept, used = (recorded(engine, data(), limit_bytes=int(share * peak)) for share in (1.5, 1.1))

    assert f"in {course.mark_before(moment)}, {course.phases[moment]}, by {course.operations[moment]}" in str(plain)
    assert sum(plain.at_peak.values()) == peak == course.peak_bytes
    assert "33% left: headroom of 15% kept" in str(kept).splitlines()[-1]
    assert str(used).splitlines()[-1].startswith("warning: peak ")
    assert "9% left: headroom of 15% used up" in str(used)
    assert "headroom of 5% kept" in str(recorded(engine, data(), limit_bytes=int(1.1 * peak), headroom=0.05))


def test_low_precision_gradients_exist_from_the_start() -> None:
    """The float32 buffers that accumulate bf16 gradients count as gradients before the first backward too."""
    engine = make_engine(dtype=torch.bfloat16)
    course = recorded(engine, data()).timeline
    num_weights = sum(one.numel() for one in parameters(engine))

    assert course.at(0)["weights"] == 2 * num_weights
    assert course.at(0)["gradients"] == 4 * num_weights
    assert course.at(0)["optimizer"] >= 12 * num_weights


def test_a_loss_across_samples_is_marked_in_both_passes() -> None:
    """With a joint loss each micro-batch is marked in its encoding pass and in its gradient pass."""

    def spread(_: object, outputs: torch.Tensor) -> torch.Tensor:
        return (outputs @ outputs.T).square().mean()

    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 8)
    engine = ab.Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        ab.joint(lambda net, batch: net(batch["x"][:, 0]), spread),
        micro_batch_size=12,
    )
    engine.step(data())
    course = recorded(engine, data()).timeline

    assert [name for _, name in course.marks] == [*("micro-batch 1", "micro-batch 2") * 2, "update"]


def test_without_a_step_there_is_no_report() -> None:
    """Without a finished block with a step, reading the report raises."""
    engine = make_engine()
    with record_memory(engine) as recording, raises(UserError, "no_report_yet"):
        _ = recording.report
    with raises(UserError, "no_report_yet"):
        _ = recording.report


def test_a_failed_step_removes_the_observer() -> None:
    """An error inside the block propagates, and the observer is removed."""
    engine = make_engine()
    with pytest.raises(TypeError), record_memory(engine):
        engine.step(InMemory({"x": torch.zeros(4, NUM_PLACES, WIDTH), "y": None}))  # type: ignore[dict-item]
    engine.step(data())

    assert not engine._parts.notifier.observers  # noqa: SLF001 (no public equivalent)


class Allocator:
    """A fake CUDA allocator with the ledger's memory and a workspace, in segments of 1 MiB."""

    def __init__(self) -> None:
        self.recording: MemoryRecording | None = None
        self.num_read = 0

    def __call__(self) -> MemoryInUse:
        self.num_read += 1
        held = 0 if self.recording is None else self.recording.ledger.held_bytes
        peak = 0 if self.recording is None else self.recording.ledger.peak_bytes + MIB
        return MemoryInUse(
            held, peak, reserved_bytes=-(-held // MIB) * MIB + MIB, limit_bytes=None, num_retries=min(self.num_read, 3)
        )


def test_an_allocator_is_read_at_the_peak() -> None:
    """Reserved and allocated memory are read at the tensor peak; workspaces are the rest."""
    engine, allocator = make_engine(), Allocator()
    with record_memory(engine, allocator=allocator) as recording:
        allocator.recording = recording
        engine.step(data())
    report = recording.report
    seen = report.timeline.peak_bytes

    assert report.allocator is not None
    assert report.allocator.allocated_bytes == seen
    assert report.allocator.reserved_bytes == -(-seen // MIB) * MIB + MIB
    assert report.allocator.fragmentation == 1 - seen / report.allocator.reserved_bytes
    assert report.allocator.num_retries == 2
    assert report.peak_bytes == seen + MIB
    assert report.at_peak[UNSEEN] == MIB
    assert "2 retries" in str(report)


def first_moment() -> tuple[int, int]:
    """Run on a rank: return the gradient bytes at the start of a step, and the parameter bytes."""
    world = ab.World.from_environment(device="cpu")
    engine = make_engine(world=world, strategy="all_reduce")
    with engine:
        course = recorded(engine, data()).timeline
    return course.at(0)["gradients"], sum(one.nbytes for one in parameters(engine))


def test_reduction_buckets_are_gradients(two_ranks: Ranks) -> None:
    """With all_reduce, gradients exist once, in their buckets, from the start of the step."""
    for found, expected in two_ranks.run(first_moment):
        assert found == expected


@pytest.mark.gpu
def test_a_recorded_step_on_an_accelerator() -> None:
    """On CUDA host tensors are left out, and the peak is at most the allocator's."""
    engine = make_engine()
    report = recorded(engine, data())

    assert report.device.startswith("cuda")
    assert report.allocator is not None
    assert report.timeline.peak_bytes <= report.allocator.peak_bytes
    assert report.allocator.reserved_bytes >= report.allocator.allocated_bytes
    assert 0 <= report.allocator.fragmentation < 1
    assert report.limit_bytes is not None
