"""A run that is stopped and resumed, on any number of ranks, gives the result of an uninterrupted one."""

import dataclasses
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import anybatch as ab
from anybatch.checkpoints import list_checkpoints
from anybatch.core.records import Record
from anybatch.core.run_config import RunConfig
from anybatch.core.schedules import BatchRamp
from anybatch.errors import BatchSizeError, DataError, MissingCheckpointError, UserError
from anybatch.parallel.world import World
from anybatch.recipes.run_folder import RunFolder
from anybatch.recipes.session import train
from anybatch.testing import relative_error
from tests.cli import small
from tests.cli.small import BATCH_SIZE, NUM_SAMPLES, NUM_STEPS, STEPS_PER_EPOCH, header, logged, parameters, run
from tests.raising import raises
from tests.ranks_fixture import Ranks

ONE = World()


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether two models are bitwise equal."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run on one rank, one sample at a time."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    run(folder)
    return folder


@pytest.mark.parametrize("num_steps", [STEPS_PER_EPOCH, 10])
@pytest.mark.slow
def test_stopped_and_resumed_is_the_same_run(straight: Path, tmp_path: Path, num_steps: int) -> None:
    """A run stopped anywhere, also at an epoch's end, and resumed has the same samples per step and the same result."""
    stopped = run(tmp_path / "run", stop_after=num_steps)
    resumed = run(tmp_path / "run", RunConfig(), resume=True)

    assert (stopped.stopped, stopped.num_steps) == (True, num_steps)
    assert (resumed.stopped, resumed.num_steps, resumed.num_session_steps) == (False, NUM_STEPS, NUM_STEPS - num_steps)
    assert same_bits(parameters(straight), parameters(tmp_path / "run"))
    assert small.samples_of_steps(straight) == small.samples_of_steps(tmp_path / "run")
    assert resumed.metrics["error"] == logged(straight, "evaluate")[-1]["metrics"]["error"]


@pytest.mark.slow
def test_a_resume_keeps_the_ramp(tmp_path: Path) -> None:
    """A ramped run that is stopped within or between stages and resumed without options has bitwise the same steps."""
    ramp = RunConfig(effective_batch_size=BatchRamp((4, 20), (8, 40), (16, None)), micro_batch_size=4, epochs=2)
    train(small.job(), tmp_path / "through", ramp, world=ONE, stop=lambda: False)
    sizes = [line["num_samples"] for line in logged(tmp_path / "through", "step")]
    assert sizes == [4, 4, 4, 4, 4, 8, 8, 8, 6, 8, 8, 16, 16, 2]
    assert [line["step"] for line in logged(tmp_path / "through", "evaluate")] == [9, 14]
    assert header(tmp_path / "through")["stretches"][0]["settings"]["effective_batch_size"] == "4,8@20,16@60"
    for num_steps in (5, 10):
        folder = tmp_path / str(num_steps)
        train(small.job(), folder, ramp, world=ONE, stop=small.StopAfter(num_steps))
        ended = train(small.job(), folder, resume=True, world=ONE, stop=lambda: False)
        assert ended.num_steps == len(sizes)
        assert [line["num_samples"] for line in logged(folder, "step")] == sizes
        assert same_bits(parameters(tmp_path / "through"), parameters(folder))


@pytest.mark.parametrize("failing_step", [1, STEPS_PER_EPOCH + 3])
@pytest.mark.slow
def test_failed_and_resumed_is_the_same_run(straight: Path, tmp_path: Path, failing_step: int) -> None:
    """A run that fails in a step, with or without a checkpoint, and is resumed ends bitwise the same."""
    epoch, step = divmod(failing_step, STEPS_PER_EPOCH)
    with pytest.raises(small.FaultError):
        run(tmp_path / "run", failing_call=epoch * NUM_SAMPLES + step * BATCH_SIZE + 5)
    run(tmp_path / "run", RunConfig(), resume=True)

    assert same_bits(parameters(straight), parameters(tmp_path / "run"))
    assert [line["first_step"] for line in logged(tmp_path / "run", "start")] == [0, epoch * STEPS_PER_EPOCH]
    assert small.samples_of_steps(straight) == small.samples_of_steps(tmp_path / "run")


def test_resumed_on_other_ranks(straight: Path, tmp_path: Path, two_ranks: Ranks, three_ranks: Ranks) -> None:
    """A run of two ranks resumed on two, one and three has the same samples, and parameters up to rounding.

    The second rank requests the stop. On two ranks the result is bitwise the uninterrupted run's.
    """
    through = tmp_path / "through"
    two_ranks.run(run, through)
    (outcome, other) = two_ranks.run(run_and_stop_second, tmp_path / "two")
    for name in ("one", "three"):
        shutil.copytree(tmp_path / "two", tmp_path / name)
    two_ranks.run(resume, tmp_path / "two")
    three_ranks.run(resume, tmp_path / "three")
    resume(tmp_path / "one")

    assert (outcome.stopped, outcome.num_steps) == (other.stopped, other.num_steps) == (True, 10)
    assert same_bits(parameters(through), parameters(tmp_path / "two"))
    for name in ("one", "two", "three"):
        assert small.samples_of_steps(tmp_path / name) == small.samples_of_steps(straight), name
        assert relative_error(parameters(tmp_path / name), parameters(straight)) <= 1e-12, name
    (_, start) = logged(tmp_path / "three", "start")
    assert (start["first_step"], start["world_size"]) == (10, 3)
    assert any("world_size 2 -> 3" in line["message"] for line in logged(tmp_path / "three", "diagnosis"))


def run_and_stop_second(folder: Path) -> object:
    """Run on every rank; the second one requests a stop."""
    return run(folder, stop_after=10, stopping_rank=1)


def resume(folder: Path) -> object:
    """Resume, on every rank."""
    return run(folder, RunConfig(), resume=True)


@pytest.mark.slow
def test_damaged_checkpoint_is_skipped(straight: Path, tmp_path: Path) -> None:
    """If the newest checkpoint is truncated, the run resumes from the one before, reports it and ends bitwise equal."""
    run(tmp_path / "run", stop_after=10)
    newest = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    tensors = newest / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    run(tmp_path / "run", RunConfig(), resume=True)

    (fell_back,) = [line for line in logged(tmp_path / "run", "checkpoint") if line["event"] == "fell_back"]
    assert fell_back["path"] == str(newest)
    assert logged(tmp_path / "run", "start")[-1]["first_step"] == STEPS_PER_EPOCH
    assert same_bits(parameters(straight), parameters(tmp_path / "run"))


def learning_rates(folder: Path) -> list[float]:
    """Return the learning rate of each step, from the log."""
    rates = {line["step"]: line["learning_rates"][0] for line in logged(folder, "step")}
    return [rates[step] for step in sorted(rates)]


@pytest.mark.parametrize("scheduled", [True, False])
@pytest.mark.slow
def test_changes_are_followed(tmp_path: Path, scheduled: bool) -> None:
    """Resumed with a larger batch, a run has the learning rates of a run with equal steps and that batch.

    It reports the change, and keeps the batch in a second resume without options.
    """
    job = small.job() if scheduled else without_scheduler(small.job())
    larger = RunConfig(effective_batch_size=2 * BATCH_SIZE, learning_rate=0.02)
    train(job, tmp_path / "run", world=ONE, stop=small.StopAfter(STEPS_PER_EPOCH))
    train(job, tmp_path / "run", larger, resume=True, world=ONE, stop=small.StopAfter(2))
    outcome = train(job, tmp_path / "run", resume=True, world=ONE, stop=lambda: False)

    num_steps = STEPS_PER_EPOCH + 2 * 4
    fresh = RunConfig(effective_batch_size=2 * BATCH_SIZE, learning_rate=0.02, steps=num_steps)
    train(job, tmp_path / "fresh", fresh, world=ONE, stop=lambda: False)
    assert outcome.num_steps == num_steps
    assert learning_rates(tmp_path / "run")[STEPS_PER_EPOCH:] == learning_rates(tmp_path / "fresh")[STEPS_PER_EPOCH:]
    messages = [line["message"] for line in logged(tmp_path / "run", "diagnosis")]
    (followed,) = [message for message in messages if message.startswith("from step")]
    assert "effective_batch_size 8 -> 16, learning_rate 0.01 -> 0.02" in followed


@pytest.mark.slow
def test_strategy_and_average_are_settings_of_a_run(tmp_path: Path) -> None:
    """Strategy and average are in the run's header and kept on resume; an older header without them can be read."""
    choices = RunConfig(average_decay=0.5, strategy="single")
    run(tmp_path, choices, stop_after=2)
    run(tmp_path, resume=True, stop_after=2)
    assert [line["strategy"] for line in logged(tmp_path, "start")] == ["single", "single"]
    settings = header(tmp_path)["stretches"][0]["settings"]
    assert (settings["strategy"], settings["average_decay"]) == ("single", 0.5)

    run(tmp_path / "old", stop_after=1)
    older = header(tmp_path / "old")
    for name in ("strategy", "average_decay"):
        del older["stretches"][0]["settings"][name]
    RunFolder(tmp_path / "old").header.write_text(json.dumps(older))
    assert run(tmp_path / "old", resume=True).num_steps == NUM_STEPS


def without_scheduler(job: ab.Job) -> ab.Job:
    """Return the job with a constant learning rate."""
    fields = {name: getattr(job, name) for name in job.__slots__ if name != "scheduler"}
    return ab.Job(**fields)


def test_change_is_not_lost_with_its_checkpoints(tmp_path: Path) -> None:
    """A change whose checkpoints are all lost is made again from the checkpoint before it."""
    train(small.job(), tmp_path, world=ONE, stop=small.StopAfter(STEPS_PER_EPOCH))
    change = RunConfig(learning_rate=0.5)
    train(small.job(), tmp_path, change, resume=True, world=ONE, stop=small.StopAfter(3))
    shutil.rmtree(list_checkpoints(tmp_path / "checkpoints")[-1])
    train(small.job(), tmp_path, resume=True, world=ONE, stop=lambda: False)

    assert logged(tmp_path, "start")[-1]["first_step"] == STEPS_PER_EPOCH
    assert [each["first_step"] for each in header(tmp_path)["stretches"]] == [0, STEPS_PER_EPOCH]
    assert learning_rates(tmp_path)[STEPS_PER_EPOCH] > 0.2


@pytest.mark.slow
def test_longer_run(tmp_path: Path) -> None:
    """A finished run does nothing, and continues if given more epochs or steps."""
    run(tmp_path)
    again = run(tmp_path, RunConfig(), resume=True)
    longer = run(tmp_path, RunConfig(epochs=4), resume=True)
    by_steps = run(tmp_path, RunConfig(steps=30), resume=True)

    assert (again.num_session_steps, longer.num_session_steps, by_steps.num_session_steps) == (0, STEPS_PER_EPOCH, 2)
    assert again.metrics
    assert not again.stopped
    with raises(UserError, "steps_already_made"):
        run(tmp_path, RunConfig(steps=29), resume=True)
    with pytest.raises(DataError):
        run(tmp_path, RunConfig(epochs=4), resume=True)
    with raises(UserError, "other_seed"):  # it would change the order of the samples
        run(tmp_path, RunConfig(seed=1, steps=40), resume=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_signals_stop_a_run(straight: Path, tmp_path: Path, number: signal.Signals) -> None:
    """On a signal the step finishes, and the run saves and stops; the previous handlers are restored."""
    former = signal.getsignal(number)
    calls = small.Calls()

    def strike() -> None:
        calls.number += 1
        if calls.number == 2 * BATCH_SIZE + 3:
            os.kill(os.getpid(), number)

    outcome = train(small.job(strike), tmp_path / "run", RunConfig(micro_batch_size=1), world=ONE)
    run(tmp_path / "run", RunConfig(), resume=True)

    assert (outcome.stopped, outcome.num_steps) == (True, 3)
    assert signal.getsignal(number) is former
    assert [line["status"] for line in logged(tmp_path / "run", "end")] == ["stopped", "completed"]
    assert same_bits(parameters(straight), parameters(tmp_path / "run"))


def test_second_interrupt_ends_immediately(tmp_path: Path) -> None:
    """A second Ctrl-C in the same step raises KeyboardInterrupt, and the run can be resumed."""
    calls = small.Calls()

    def strike() -> None:
        calls.number += 1
        if calls.number > STEPS_PER_EPOCH + 1:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(small.job(strike), tmp_path, world=ONE)

    assert logged(tmp_path, "step")[-1]["step"] == STEPS_PER_EPOCH
    assert run(tmp_path, RunConfig(), resume=True).num_session_steps == NUM_STEPS - STEPS_PER_EPOCH


def test_used_folder_is_refused(tmp_path: Path) -> None:
    """A folder with other files is not changed, and the message says whether it is a run."""
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.txt").write_text("dear")
    with raises(UserError, "folder_in_use"):
        run(tmp_path / "letters")
    with raises(UserError, "folder_in_use"):
        run(tmp_path / "letters" / "a.txt")
    with raises(MissingCheckpointError, "no_run"):
        run(tmp_path / "letters", resume=True)
    run(tmp_path / "run", stop_after=1)
    with raises(UserError, "folder_in_use"):
        run(tmp_path / "run")
    assert [path.name for path in (tmp_path / "letters").iterdir()] == ["a.txt"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such lock")
def test_a_session_holds_the_lock(tmp_path: Path, one_rank: Ranks) -> None:
    """A session locks its folder from beginning to end."""
    seen: list[str] = []

    def strike() -> None:
        if not seen:
            seen.extend(one_rank.run(lock_elsewhere, tmp_path / "run"))

    train(small.job(strike), tmp_path / "run", RunConfig(steps=1, epochs=None), world=ONE)
    assert f"process {os.getpid()} " in seen[0]
    assert one_rank.run(lock_elsewhere, tmp_path / "run") == [""]


def lock_elsewhere(folder: Path) -> str:
    """Lock a run's folder in another process; return the reason for a refusal."""
    try:
        with RunFolder(folder).locked():
            return ""
    except UserError as error:
        return str(error)


def test_a_run_without_a_step_leaves_no_folder(tmp_path: Path) -> None:
    """A run that fails before its first update leaves no folder, so the corrected command runs unchanged."""
    with pytest.raises(small.FaultError):
        run(tmp_path / "run", failing_call=1)
    with pytest.raises(BatchSizeError):
        run(tmp_path / "run", RunConfig(accumulation_steps=9))
    assert not (tmp_path / "run").exists()


def test_times_of_saves_and_evaluations(tmp_path: Path) -> None:
    """Checkpoints are saved at an interval in seconds, too; a run below an epoch is evaluated at its quarters."""
    seconds = iter(range(10_000))
    options: dict[str, Any] = {"world": ONE, "stop": lambda: False, "clock": lambda: float(next(seconds))}
    train(small.job(), tmp_path / "long", RunConfig(steps=9), checkpoint_seconds=3.5, **options)
    run(tmp_path / "short", RunConfig(steps=6))

    saved = [line["step"] for line in logged(tmp_path / "long", "checkpoint")]
    assert {STEPS_PER_EPOCH, 9} < {*saved}
    assert [line["step"] for line in logged(tmp_path / "long", "evaluate")] == [STEPS_PER_EPOCH, 9]
    assert [line["step"] for line in logged(tmp_path / "short", "evaluate")] == [2, 4, 6]


@pytest.mark.parametrize(
    ("begun", "again", "size"),
    [
        (RunConfig(accumulation_steps=2), RunConfig(accumulation_steps=2), 2),
        (RunConfig(micro_batch_size=4), RunConfig(micro_batch_size=4), 2),
        (RunConfig(micro_batch_size=4), RunConfig(micro_batch_size=3), 3),
    ],
)
@pytest.mark.slow
def test_smaller_micro_batches_are_kept(tmp_path: Path, begun: RunConfig, again: RunConfig, size: int) -> None:
    """A run that had to reduce its micro-batches keeps the smaller size until it is given another."""
    run(tmp_path, begun, stop_after=1)
    place = RunFolder(tmp_path)
    place.write(dataclasses.replace(place.read(), largest_micro_batch_size=2))

    run(tmp_path, again, resume=True, stop_after=1)
    assert logged(tmp_path, "start")[-1]["micro_batch_size"] == size
    assert place.read().largest_micro_batch_size == (2 if again == begun else None)


@pytest.mark.slow
def test_a_late_observer_misses_nothing(tmp_path: Path) -> None:
    """A late observer is created with the folder and the length of the run, and then gets all records of the log."""
    seen: list[Record] = []
    starts: list[tuple[RunFolder, int | None]] = []

    class Watcher:
        def observe(self, record: Record, /) -> None:
            seen.append(record)

    def make(*start: Any) -> Watcher:
        assert not seen
        starts.append(start)
        return Watcher()

    run(tmp_path, stop_after=5)
    train(small.job(), tmp_path, resume=True, world=ONE, observer=make, stop=lambda: False)

    kinds = [line["kind"] for line in small.lines(tmp_path)]
    assert [record.kind for record in seen] == kinds[len(kinds) - len(seen) :]
    assert seen[0].kind == "checkpoint"
    assert starts == [(RunFolder(tmp_path), NUM_STEPS)]
