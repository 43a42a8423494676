"""Ranks save what each of them holds, also while they train on, and any number of ranks goes on from there."""

import errno
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import anybatch as ab
from anybatch.checkpoints import list_checkpoints, load, load_latest
from anybatch.checkpoints.disk import LocalDisk
from anybatch.errors import CheckpointError, RankFailedError
from anybatch.testing import relative_error, run_ranks
from tests.engine.cases import InMemory, vectors
from tests.faults import sees
from tests.parallel.sharded_models import loss_of, tower
from tests.parallel.sharded_models import whole as whole_of
from tests.ranks_fixture import Ranks

TOLERANCE = 1e-12
BEFORE, AFTER = 2, 2
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fsdp", {}),
    ("fsdp", {"wait": False}),
    ("fsdp", {"sharded": False, "wait": False}),
    ("zero1", {"sharded": True}),
    ("all_reduce", {"sharded": True, "wait": False}),
)
STRATEGIES = ("zero1", "fsdp", "all_reduce")
State = dict[str, torch.Tensor]


def engine_over(strategy: str) -> tuple[torch.nn.Module, ab.Engine]:
    """Return a model with tied weights and what trains it: clipped, averaged and scheduled."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    model = tower("tied")
    engine = ab.Engine(
        model,
        lambda named: torch.optim.AdamW(named, lr=0.01),
        ab.mean_over_samples(loss_of),
        micro_batch_size=3,
        strategy=strategy,
        clip=0.05,
        average_decay=0.5,
        scheduler=lambda made: torch.optim.lr_scheduler.ExponentialLR(made, 0.9),
    )
    return model, engine


def steps(engine: ab.Engine, number: int) -> list[float]:
    """Return the losses of some steps."""
    return [engine.step(InMemory(vectors(11))).loss for _ in range(number)]


def saved_and_gone_on(folder: str, strategy: str, start: str | None, **options: Any) -> tuple[list[float], State]:
    """Run on every rank: train or load, save, go on; return the losses behind the save, and the weights."""
    model, engine = engine_over(strategy)
    with engine:
        if start is None:
            steps(engine, BEFORE)
        else:
            engine.load(start)
        engine.save(folder, **options)
        losses = steps(engine, AFTER)
        ends = {name: tensor.detach().clone() for name, tensor in whole_of(dict(model.named_parameters())).items()}
    return losses, ends


def everything(folder: str) -> list[tuple[list[float], State]]:
    """Run on every rank: every strategy saves in some way, and goes on."""
    return [
        saved_and_gone_on(f"{folder}/{number}", strategy, None, **way) for number, (strategy, way) in enumerate(WAYS)
    ]


def from_everywhere(folder: str) -> list[tuple[list[float], State]]:
    """Run on every rank: go on from each of some checkpoints under another strategy, and save in parts again."""
    found = []
    for number, path in enumerate(sorted(Path(folder).iterdir())):
        strategy = STRATEGIES[number % len(STRATEGIES)]
        found.append(saved_and_gone_on(f"{folder}-again/{path.name}", strategy, str(path), sharded=True))
    return found


def errors_of(found: tuple[list[float], State], expected: tuple[list[float], State]) -> list[float]:
    """Return how far losses and weights are from the expected ones."""
    losses = [abs(one / other - 1) for one, other in zip(found[0], expected[0], strict=True)]
    return [*losses, relative_error(found[1], expected[1])]


def one_device(start: str | None = None) -> tuple[list[float], State]:
    """Return the losses and weights of one device, from the beginning or from a checkpoint."""
    model, engine = engine_over("single")
    with engine:
        if start is None:
            steps(engine, BEFORE)
        else:
            engine.load(start)
        return steps(engine, AFTER), {name: value.detach().clone() for name, value in model.named_parameters()}


@sees(
    "a part is read from the place of the first rank's",
    "src/anybatch/engine/checkpoint_state.py",
    "layout.with_local(value.read(offset, layout.local(like).shape)",
    "layout.with_local(value.read((0,) * like.dim(), layout.local(like).shape)",
)
@sees(
    "rank 0 alone has an optimizer's state that is shared out",
    "src/anybatch/parallel/sharded_update.py",
    "                own.setdefault(number, form)\n",
    "                pass\n",
)
@pytest.mark.slow
def test_parts_go_on_on_any_number_of_ranks(three_ranks: Ranks, two_ranks: Ranks, tmp_path: Path) -> None:
    """What three ranks save, in parts or whole, waiting or not, two ranks and one device go on with, and the reverse.

    Under each strategy and from each into another: losses and weights are those of one device that went through.
    """
    expected = one_device()
    for rank in three_ranks.run(everything, str(tmp_path / "three")):
        assert max(error for found in rank for error in errors_of(found, expected)) <= TOLERANCE
    files = sorted((tmp_path / "three" / "0" / "step-00000002").iterdir())
    assert [file.name for file in files][2:] == [f"tensors-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert max(file.stat().st_size for file in files[2:]) < 1.5 * min(file.stat().st_size for file in files[2:])
    for rank in two_ranks.run(from_everywhere, str(tmp_path / "three")):
        assert max(error for found in rank for error in errors_of(found, expected)) <= TOLERANCE
    for folder in (*(tmp_path / "three").iterdir(), *(tmp_path / "three-again").iterdir()):
        assert max(errors_of(one_device(str(folder)), expected)) <= TOLERANCE
        assert len(load(list_checkpoints(folder)[-1])["model"]) == len(tower("tied").state_dict())


def of_four_ranks(folder: str) -> tuple[list[float], State]:
    """Run on every rank: save sharded parameters."""
    return saved_and_gone_on(folder, "fsdp", None)


def of_two_ranks(folder: str) -> tuple[list[float], State]:
    """Run on every rank: go on sharded."""
    return saved_and_gone_on(f"{folder}-again", "fsdp", folder)


@pytest.mark.slow
def test_four_ranks_become_two(two_ranks: Ranks, tmp_path: Path) -> None:
    """What four sharded ranks save, some of which hold no row of small tensors, two sharded ranks go on with."""
    expected, folder = one_device(), str(tmp_path / "four")
    for outcome in run_ranks(4, of_four_ranks, folder):
        assert outcome.error is None, outcome.error
        assert max(errors_of(outcome.value, expected)) <= TOLERANCE
    for found in two_ranks.run(of_two_ranks, folder):
        assert max(errors_of(found, expected)) <= TOLERANCE


def failing_in_the_background(folder: str) -> list[str]:
    """Run on every rank: a thread of rank 1 has no room; return what each rank is told, and by which call."""
    said = []
    _, engine = engine_over("all_reduce")
    with engine:
        steps(engine, 1)
        engine.save(folder, sharded=True)
        steps(engine, 1)
        with pytest.MonkeyPatch.context() as patch:
            if engine.world.rank == 1:
                patch.setattr(LocalDisk, "sync", _no_room)
            engine.save(folder, sharded=True, wait=False)
            for thread in threading.enumerate():
                # That of rank 0 waits for what rank 1 has no room to leave.
                if thread.name == "anybatch checkpoint" and engine.world.rank == 1:
                    thread.join()
        try:
            steps(engine, 1)
        except (CheckpointError, RankFailedError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def _no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@sees(
    "an error of a thread is kept to itself",
    "src/anybatch/engine/parts.py",
    "self.announce(self.saver.completed())",
    "pass",
)
@pytest.mark.slow
def test_an_error_in_the_background_is_raised_by_the_next_call(two_ranks: Ranks, tmp_path: Path) -> None:
    """Where a thread has no room, the next call raises with the path, on all ranks; the former checkpoint is there."""
    first, second = two_ranks.run(failing_in_the_background, str(tmp_path))

    assert first[0].startswith("RankFailedError: "), first
    assert second[0].startswith("DiskFullError: "), second
    assert all("step-00000002 could not be saved" in text for text in (*first, *second))
    loaded = load_latest(tmp_path)
    assert not loaded.skipped
    assert loaded.state["num_steps"] == 1
