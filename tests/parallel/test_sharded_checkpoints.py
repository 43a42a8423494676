"""Ranks save their own shards, or rank 0 in the background, and any number of ranks can resume."""

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
from anybatch.checkpoints.files import Disk
from anybatch.errors import AnyBatchWarning, CheckpointError, RankFailedError, UserError
from anybatch.testing import relative_error, run_ranks
from tests.engine.cases import InMemory, vectors
from tests.faults import sees
from tests.parallel.sharded_models import loss_of, tower
from tests.parallel.sharded_models import whole as whole_of
from tests.raising import raises
from tests.ranks_fixture import Ranks

TOLERANCE = 1e-12
BEFORE, AFTER = 2, 2
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fsdp", {}),
    ("fsdp", {"sharded": False, "wait": False}),
    ("zero1", {"sharded": True}),
    ("zero1", {}),
)
STRATEGIES = ("zero1", "fsdp", "all_reduce")
State = dict[str, torch.Tensor]


def engine_over(strategy: str) -> tuple[torch.nn.Module, ab.Engine]:
    """Return a model with tied weights and its engine, which clips, averages and schedules."""
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
    """Run on every rank: train or load, save and continue; return the later losses and the final weights."""
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
    """Run on every rank: save and continue with each combination of strategy and options."""
    return [
        saved_and_gone_on(f"{folder}/{number}", strategy, None, **way) for number, (strategy, way) in enumerate(WAYS)
    ]


def from_everywhere(folder: str) -> list[tuple[list[float], State]]:
    """Run on every rank: resume each checkpoint under another strategy, and save shards again."""
    found = []
    for number, path in enumerate(sorted(Path(folder).iterdir())):
        strategy = STRATEGIES[number % len(STRATEGIES)]
        found.append(saved_and_gone_on(f"{folder}-again/{path.name}", strategy, str(path), sharded=True))
    return found


def errors_of(found: tuple[list[float], State], expected: tuple[list[float], State]) -> list[float]:
    """Return the errors of losses and weights."""
    losses = [abs(one / other - 1) for one, other in zip(found[0], expected[0], strict=True)]
    return [*losses, relative_error(found[1], expected[1])]


def one_device(start: str | None = None) -> tuple[list[float], State]:
    """Return the losses and weights of one device, from the start or from a checkpoint."""
    model, engine = engine_over("single")
    with engine:
        if start is None:
            steps(engine, BEFORE)
        else:
            engine.load(start)
        return steps(engine, AFTER), {name: value.detach().clone() for name, value in model.named_parameters()}


@sees(
    "a part is read at the first rank's position",
    "src/anybatch/engine/checkpoint_state.py",
    "layout.with_local(value.read(offset, layout.local(like).shape)",
    "layout.with_local(value.read((0,) * like.dim(), layout.local(like).shape)",
)
@sees(
    "only rank 0 gets a sharded optimizer state",
    "src/anybatch/parallel/zero1.py",
    "                states.setdefault(number, form)\n",
    "                pass\n",
)
@sees(
    "rank 0 saves only its part of the optimizer state",
    "src/anybatch/parallel/zero1.py",
    "                if self._world.rank == 0:\n",
    "                if False:\n",
)
@pytest.mark.slow
def test_checkpoints_resume_on_any_number_of_ranks(three_ranks: Ranks, two_ranks: Ranks, tmp_path: Path) -> None:
    """Checkpoints of three ranks, sharded or not, in the background or not, resume on two ranks and one device.

    For each strategy and changes between them, losses and weights equal an uninterrupted run on one device.
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


@pytest.mark.slow
def test_ranks_become_fewer_or_more(two_ranks: Ranks, three_ranks: Ranks, tmp_path: Path) -> None:
    """Sharded checkpoints of 4 ranks resume on 3 and 1, and these on 2 and 3, also if ranks hold no row of a tensor.

    Losses and weights equal an uninterrupted run on one device.
    """
    expected, four, one = one_device(), str(tmp_path / "four"), str(tmp_path / "one")
    for outcome in run_ranks(4, saved_and_gone_on, four, "fsdp", None):
        assert outcome.error is None, outcome.error
        assert max(errors_of(outcome.value, expected)) <= TOLERANCE
    saved_and_gone_on(one, "single", None)
    found = [
        *three_ranks.run(saved_and_gone_on, f"{four}-again", "fsdp", four),
        *two_ranks.run(saved_and_gone_on, f"{four}-again-again", "fsdp", f"{four}-again"),
        one_device(four),
        *three_ranks.run(saved_and_gone_on, f"{one}-again", "fsdp", one),
    ]
    assert max(error for each in found for error in errors_of(each, expected)) <= TOLERANCE


def failing_in_the_background(folder: str) -> tuple[list[str], list[str], int]:
    """Run on every rank: the disk fills up; return warnings, the next save's error, and the newest step."""
    _, engine = engine_over("all_reduce")
    raised = []
    with engine, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", AnyBatchWarning)
        steps(engine, 1)
        engine.save(folder, sharded=True)
        steps(engine, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Disk, "sync", _no_room)
            with raises(UserError, "background_in_parts"):
                engine.save(folder, sharded=True, wait=False)
            engine.save(folder, wait=False)
            for thread in threading.enumerate():
                if thread.name == "anybatch checkpoint":
                    thread.join()
        steps(engine, 1)
        try:
            engine.save(folder, sharded=True)
        except (CheckpointError, RankFailedError) as error:
            raised.append(f"{type(error).__name__}: {error}")
        steps(engine, 1)
        engine.save(folder, sharded=True)
    return [str(one.message) for one in seen], raised, load_latest(folder).state["num_steps"]


def _no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
def test_an_error_in_the_background_is_raised_on_all_ranks_together(two_ranks: Ranks, tmp_path: Path) -> None:
    """If a background save fails, rank 0 warns; all ranks raise in the next save and can continue.

    The failure leaves no stray message for the next step or for the next engine on these ranks.
    """
    ((warned,), (first,), newest), (no_warning, (second,), _) = two_ranks.run(failing_in_the_background, str(tmp_path))

    assert no_warning == []
    assert "step-00000002 could not be saved" in warned
    assert "training continues" in warned
    assert first.startswith("DiskFullError: "), first
    assert second.startswith("RankFailedError: "), second
    assert all("step-00000002 could not be saved" in text for text in (first, second))
    assert newest == 4
    assert two_ranks.run(saved_and_gone_on, str(tmp_path / "afresh"), "all_reduce", None)
