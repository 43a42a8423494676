"""The conformance kit passes the engine, and fails hand-written loops exactly for their known faults."""

from collections.abc import Iterator

import pytest

from anybatch.testing import conformance
from anybatch.testing.conformance import CASES, EngineAdapter, HandWrittenLoop, SplitCase, TrainerStep
from anybatch.testing.conformance.table import LoopFault

# (case, micro-batch sizes) at which the loop with this fault is wrong, by arithmetic
WRONG: dict[LoopFault, dict[str, set[int]]] = {
    "mean of means": {
        "ragged micro-batches": {5, 4},
        "class weights": {4, 1},
        "masked tokens": {4, 1},
        "micro-batches without targets": {3, 1},
        "two terms": {3},
        "fewer samples than one micro-batch": {2},
    },
    "constant divisor": {
        "ragged micro-batches": {5, 4},
        "partial last batch": {4, 2},
        "class weights": {4, 1},
        "masked tokens": {4, 1},
        "micro-batches without targets": {3, 1},
        "two terms": {3},
        "fewer samples than one micro-batch": {4, 2},
    },
    "dropped tail": {
        "partial last batch": {12, 4, 2},
        "fewer samples than one micro-batch": {12, 4, 2},
    },
    # Three samples, each four times, have the mean of three: only their ids show the fault.
    "duplicated samples": {
        "partial last batch": {12, 4, 2},
        "fewer samples than one micro-batch": {12, 4, 2},
    },
}


class Silent:
    """A trainer that does not report its samples."""

    def __init__(self, fault: LoopFault) -> None:
        self._loop = HandWrittenLoop(fault)
        self.name = "silent"

    def steps(self, split: SplitCase) -> Iterator[TrainerStep]:
        """Yield gradients only."""
        for step in self._loop.steps(split):
            yield TrainerStep(step.gradients)


class Broken:
    """A trainer that raises."""

    name = "broken"

    def steps(self, split: SplitCase) -> Iterator[TrainerStep]:
        """Raise."""
        raise RuntimeError(split.micro_batch_size)


@pytest.mark.slow
def test_the_engine_conforms() -> None:
    """The engine's gradient matches the unsplit batch in every case and split."""
    table = conformance.run(EngineAdapter())
    assert table.passed, str(table)
    assert len(table.rows) == sum(len(case.micro_batch_sizes) for case in CASES)


def test_a_right_loop_conforms() -> None:
    """A careful loop in plain torch passes the kit."""
    table = conformance.run(HandWrittenLoop())
    assert table.passed, str(table)


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.slow
def test_known_faults_are_detected(fault: LoopFault) -> None:
    """Each known fault fails exactly where it is wrong, by name, and by far more than rounding."""
    table = conformance.run(HandWrittenLoop(fault))
    failed: dict[str, set[int]] = {}
    for row in table.failures:
        failed.setdefault(row.case, set()).add(row.micro_batch_size)

    assert failed == WRONG[fault], str(table)
    for row in table.failures:
        assert row.reason == "duplicated samples: [0, 1, 2]" or not row.error < 1e-3  # NaN is an error too
        assert fault in row.reason


@pytest.mark.slow
def test_faults_are_named_by_their_gradients() -> None:
    """A fault is also found by the gradients alone, where they differ."""
    case = next(case for case in CASES if case.name == "partial last batch")
    for fault in ("constant divisor", "duplicated samples"):
        rows = {row.micro_batch_size: row for row in conformance.run(Silent(fault), [case]).rows}
        assert fault in rows[4].reason


def test_a_trainer_that_raises_fails() -> None:
    """If a trainer raises, that is its result, and the other cases still run."""
    table = conformance.run(Broken())
    assert not table.passed
    assert {row.reason for row in table.rows} >= {"raised RuntimeError: 12", "raised RuntimeError: 4"}
