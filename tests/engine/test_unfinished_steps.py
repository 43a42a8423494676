"""Every way of leaving an unfinished step restores the same state, under every strategy."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

import anybatch as ab
from anybatch.errors import UpdateFailedError
from tests.engine.cases import InMemory
from tests.engine.unfinished_steps import (
    WAYS,
    Outcome,
    Trial,
    UserInterrupt,
    differing,
    leave,
    samples,
)
from tests.faults import sees
from tests.ranks_fixture import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:the forward updates state")
IN_ONE_PROCESS = ("single", "data_parallel")
"""Plans that every rank refuses alike, and hooks that run after ranks have agreed on the update."""
ON_RANKS = ("refused batch", "NaN loss", "NaN gradient", "loss", "Ctrl-C", "stop request")
"""Failures that leave no sum of the step pending, so that ranks may continue."""
SHARED = ("all_reduce", "ddp", "zero1", "fsdp", "data_parallel")


def spread(values: Sequence[str], ways: Iterable[str], every: int) -> list[tuple[str, str]]:
    """Return pairs that give each way one in `every` of the values, evenly spread over the values."""
    return [
        (value, way)
        for row, way in enumerate(ways)
        for column, value in enumerate(values)
        if (row + column) % every == 0
    ]


def is_restored(outcomes: list[Outcome]) -> bool:
    """Return whether a step raised on every rank, changed nothing and left no trace in the next step."""
    return all(error is not None and changed == later == [] for error, changed, later in outcomes)


@sees(
    "an unfinished step keeps its buffers",
    "src/anybatch/engine/updater.py",
    """
        self.state.restore()
        self.state.release()
""",
    """
        self.state.release()
""",
)
@sees(
    "a failed step leaves its gradients",
    "src/anybatch/engine/updater.py",
    """
        self._clear_gradients()
        self.scaler.forget_gradients()
""",
    """
        self.scaler.forget_gradients()
""",
    cases=["single-NaN loss", "single-NaN gradient"],
)
@sees(
    "a non-finite gradient is not checked",
    "src/anybatch/engine/updater.py",
    "sum(contributions.tolist()) + (0.0 if norm is None else norm.item())",
    "sum(contributions.tolist())",
    cases=["single-NaN gradient"],
    also=["tests/engine/test_refusals.py::test_refused_on_one_rank[a gradient of NaN]"],
)
@sees(
    "an update uses a non-finite loss",
    "src/anybatch/engine/updater.py",
    """
                raise self._error(step, (contributions.sum(), norm), late=False)
""",
    """
                pass
""",
    cases=["zero1-NaN loss"],
)
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "way"), [*(("single", way) for way in WAYS), *spread(SHARED, ON_RANKS, 3)])
def test_every_rank_fails(strategy: str, way: str, two_ranks: Ranks) -> None:
    """The state is unchanged on every rank, and the next step equals one of an engine that has not failed."""
    is_alone = strategy in IN_ONE_PROCESS
    outcomes = [leave(strategy, way)] if is_alone else two_ranks.run(leave, strategy, way)

    assert is_restored(outcomes), outcomes


@sees(
    "a failed step restores the buffers of the previous step",
    "src/anybatch/engine/updater.py",
    """
                    self.state.release()
                else:
""",
    """
                else:
""",
    cases=["evaluation"],
)
@pytest.mark.parametrize("call", ["evaluation", "saving", "loading"])
def test_between_steps(call: str, tmp_path: Path) -> None:
    """A failed call between steps does not restore the state from before the last step."""
    trial = Trial("single", ab.World(), rng=None)
    trial.engine.step(InMemory(samples(0)))
    before = trial.state()
    (tmp_path / "file").touch()
    calls: dict[str, Callable[[], object]] = {
        "evaluation": lambda: trial.engine.evaluate([InMemory(samples(0))], lambda *_: 1 // 0),
        "saving": lambda: trial.engine.save(tmp_path / "file"),
        "loading": lambda: trial.engine.load(tmp_path / "nowhere"),
    }
    with pytest.raises((ZeroDivisionError, ab.errors.CheckpointError)):
        calls[call]()

    assert differing(before, trial.state()) == []


@sees(
    "an update that is not counted is ignored",
    "src/anybatch/engine/updater.py",
    "self.interrupted_by = _INTERRUPTED",
    "pass",
)
def test_interrupted_before_the_step_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After Ctrl-C between update and step count, steps are refused until a checkpoint is loaded."""

    def interrupt(**_: object) -> None:
        raise UserInterrupt

    trial = Trial("single", ab.World())
    trial.engine.step(InMemory(samples(0)))
    trial.engine.save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("anybatch.engine.engine.StepReport", interrupt)
        assert isinstance(trial.fail(""), UserInterrupt)
    with pytest.raises(UpdateFailedError):
        trial.engine.step(InMemory(samples(1)))
    trial.engine.load(tmp_path)
    trial.engine.step(InMemory(samples(1)))
