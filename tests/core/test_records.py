"""Records are immutable values, the same on every rank."""

import dataclasses
from typing import get_args

import pytest
import torch

from anybatch.core.records import Observers, Record, StepRecord

KINDS = get_args(Record)


class Seen:
    """An observer that keeps the records it receives."""

    def __init__(self, log: list[tuple[str, Record]], name: str) -> None:
        """Store the shared log and this observer's name."""
        self.log, self.name = log, name

    def observe(self, record: Record, /) -> None:
        """Store the record under this observer's name."""
        self.log.append((self.name, record))


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
