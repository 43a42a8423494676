"""Records are immutable values, the same on every rank."""

import dataclasses
import re
from typing import get_args

import pytest
import torch

from anybatch.core.records import EndRecord, Observer, Observers, Record, StepRecord

KINDS = get_args(Record)


class Seen:
    """An observer that keeps the records it receives."""

    def __init__(self, log: list[tuple[str, Record]], name: str) -> None:
        """Store the shared log and this observer's name."""
        self.log, self.name = log, name

    def observe(self, record: Record, /) -> None:
        """Store the record under this observer's name."""
        self.log.append((self.name, record))


class Refusing:
    """An observer that raises."""

    def observe(self, record: Record, /) -> None:
        """Raise."""
        message = f"cannot take {record.kind}"
        raise OSError(message)


def end(rank: int = 0) -> EndRecord:
    """Return the record of a completed run."""
    return EndRecord(rank=rank, status="completed", num_steps=3, message=None, digest=None)


def test_the_kinds_are_those_of_the_schema() -> None:
    """There are twelve kinds, each named like its class."""
    names = [re.sub(r"(?<!^)([A-Z])", r"_\1", kind.__name__.removesuffix("Record")).lower() for kind in KINDS]
    assert [kind.kind for kind in KINDS] == names
    assert names == [
        "start",
        "micro_batch",
        "reduction",
        "phase",
        "step",
        "gradient_noise",
        "memory",
        "diagnosis",
        "evaluate",
        "checkpoint",
        "out_of_memory",
        "end",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_records_are_frozen_slotted_and_keyword_only(kind: type[Record]) -> None:
    """No record can be changed, extended or built from positional values; each has its rank and no time."""
    fields = dataclasses.fields(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[union-attr]
    assert "__dict__" not in dir(kind)
    assert all(field.kw_only for field in fields)
    assert all(field.default is field.default_factory is dataclasses.MISSING for field in fields)
    names = [field.name for field in fields]
    assert names[0] == "rank"
    assert not any(name.endswith("_seconds") for name in names)


def test_a_record_cannot_be_changed() -> None:
    """Assigning to a record raises."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        end().num_steps = 4  # type: ignore[misc]


def test_a_record_may_hold_a_number_that_is_still_on_its_device() -> None:
    """Creating and passing on a record reads no tensor, even one on the meta device."""
    unreadable = torch.ones((), device="meta")
    seen: list[tuple[str, Record]] = []
    step = StepRecord(
        rank=0,
        step=0,
        epoch=0,
        sample_offset=8,
        num_samples=8,
        num_micro_batches=2,
        loss=unreadable,
        losses={"loss": unreadable},
        counts={"loss": 8.0},
        gradient_norm=unreadable,
        clipped=None,
        learning_rates=(0.1,),
        skipped=False,
    )
    Observers(Seen(seen, "a")).observe(step)
    assert [record is step for _, record in seen] == [True]


def test_observers_are_told_in_order() -> None:
    """Every observer sees every record, in the given order, before the next record."""
    log: list[tuple[str, Record]] = []
    both: Observer = Observers(Seen(log, "first"), Seen(log, "second"))
    both.observe(end(0))
    both.observe(end(1))
    assert log == [("first", end(0)), ("second", end(0)), ("first", end(1)), ("second", end(1))]


def test_no_observers_take_everything() -> None:
    """`Observers` without an observer does nothing."""
    Observers().observe(end())


def test_what_an_observer_raises_reaches_the_engine() -> None:
    """An observer's exception propagates, and later observers get nothing."""
    log: list[tuple[str, Record]] = []
    with pytest.raises(OSError, match="cannot take end"):
        Observers(Seen(log, "before"), Refusing(), Seen(log, "after")).observe(end())
    assert [name for name, _ in log] == ["before"]
