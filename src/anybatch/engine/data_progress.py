"""Progress of a run in each of its data sets: positions, and checksums of the samples finished in an epoch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from anybatch.checkpoints.structure import read_stored
from anybatch.core.batch import Position
from anybatch.data.effective_batch import DatasetBatch, Iteration
from anybatch.errors import DataError

Remark = tuple[str, str]
Key = tuple[int | None, int] | tuple[()] | None
"""Number of samples (None for a stream) and seed of a data set; empty for the user's batches; None if not known."""
_OWN: Final = "batches that are not from ab.batches"


@dataclass(slots=True, eq=False)
class DataProgress:
    """Progress in one data set."""

    key: Key
    position: Position = field(default_factory=Position)
    digest: int | None = None
    order: torch.Tensor | None = None
    iteration: Iteration | str | None = None
    is_resumed: bool = True
    is_stepped: bool = False
    has_begun: bool = False

    def begin(self, batch: Any) -> Remark | None:  # noqa: ANN401 (any nested batch)
        """Move the iteration of a batch to this position; return a warning if it is too late, or if data differ."""
        if not isinstance(batch, DatasetBatch):
            return None
        if self.is_resumed and self.order is not None:
            batch.iteration.source.use_order(self.position.epoch, self.order)
        if not batch.resume_from(self.position, is_resumed=self.is_resumed):
            message = (
                f"the batches repeat epoch {batch.epoch}, and the engine is at {self.position}: later ones have been "
                "taken from their iterator already (a list of batches, or something that reads ahead), so they cannot "
                "continue there. Iterate ab.batches itself, or make it with start=engine.position."
            )
            return "data_repeats", message
        remark = self._compared(batch) if self.is_resumed else None
        self.key = batch.iteration.key
        return remark

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors."""
        digest, order, iteration, position = self.digest, self.order, self.iteration, self.position
        if self.is_stepped and iteration is not None and not isinstance(iteration, str):
            digest = iteration.source.digest_before(position)
            order = iteration.source.sampled_order(position.epoch) if position.sample_offset else None
        return {"key": self.key, "position": _stored(position), "digest": digest, "order": order}

    def _compared(self, batch: DatasetBatch) -> Remark | None:
        """Compare the data of a resumed run with the data before; return a warning at the beginning of an epoch."""
        iteration, position = batch.iteration, self.position
        if self.key is None or batch.start != position:  # an older checkpoint, or a start that the user chose
            return None
        found = None if self.digest is None else iteration.source.digest_before(position)
        is_same = found == self.digest if found is not None else self.key == iteration.key or not position.sample_offset
        if is_same:
            return None
        message = (
            f"the run is at {position} of {_named(self.key)}, and the data are {_named(iteration.key)} now, in another "
            "order or another subset. Use the same data set, split, sampler, shuffle and seed as before; a split needs "
            "a seeded generator. To begin at a position of your choice, use ab.batches(start=...)."
        )
        if position.sample_offset:
            self.iteration = None
            raise DataError(message, code="other_data")
        return "data_set_differs", message


class RunProgress:
    """Progress in all data sets of a run.

    A checkpoint identifies a data set by its number of samples and seed. Within a process, a new object of the same
    size and seed is the same data set, unless an iteration over the old one is still open.
    """

    def __init__(self) -> None:
        self.set(Position())

    @property
    def position(self) -> Position:
        """Position in the data set of the newest step."""
        return self._newest.position

    def set(self, position: Position) -> None:
        """Forget all progress, and let the next data set continue at a position."""
        self._newest = DataProgress(None, position)
        self._all = [self._newest]

    def of(self, batch: Any, warn: Callable[[str, str], None]) -> DataProgress:  # noqa: ANN401 (any nested batch)
        """Return the progress in the data set of a batch, whose iteration continues there if possible."""
        iteration = batch.iteration if isinstance(batch, DatasetBatch) else _OWN
        found = self._newest
        if found.iteration is not iteration:
            found = next((one for one in self._all if one.iteration is iteration), None) or self._found(iteration)
            if found.iteration is not iteration:
                found.iteration, found.has_begun = iteration, False
        # Once for each iteration: it cannot move after that.
        if found.is_resumed or not found.has_begun:
            remark = found.begin(batch)
            found.has_begun = True
            if remark is not None:
                warn(*remark)
        return found

    def advance(self, progress: DataProgress, end: Position) -> None:
        """Count a step on a data set."""
        progress.position = end
        progress.is_resumed, progress.is_stepped = False, True
        self._newest = progress

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors, with the newest position as older versions stored it."""
        return {
            "position": _stored(self.position),
            "data_sets": [one.state_dict() for one in self._all],
            "newest_data_set": self._all.index(self._newest),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; one of an older version has a single position."""
        if "data_sets" not in state:
            self.set(Position(**state["position"]))
            return
        self._all = [
            DataProgress(one["key"], Position(**one["position"]), one["digest"], one["order"])
            for one in read_stored(state["data_sets"])
        ]
        self._newest = self._all[state["newest_data_set"]]

    def _found(self, iteration: Iteration | str) -> DataProgress:
        """Return the progress in a data set with a new iteration."""
        key: Key = () if isinstance(iteration, str) else iteration.key
        again = [one for one in self._all if one.key == key and _is_again(iteration, one.iteration)]
        if again:
            return again[0]
        loaded = [one for one in self._all if one.iteration is None]
        fitting = [one for one in loaded if one.key in (None, key)]
        if not fitting and key:
            # Another size or seed: compare with the data set that was left in an epoch, or with the only one.
            fitting = [one for one in loaded if one.key and (one.position.sample_offset or len(self._all) == 1)]
        if len({one.position for one in fitting}) > 1:
            positions = " and ".join(f"{one.position} of {_named(one.key)}" for one in fitting)
            message = (
                f"the checkpoint has several data sets that may be this one ({_named(key)}): {positions}. Give data "
                "sets of one size different seeds; to resume this run, use ab.batches(start=...) for each."
            )
            raise DataError(message)
        if fitting:
            return fitting[0]
        # Epochs count on if data sets follow each other, so that augmentation does not repeat.
        before = self._newest.iteration
        is_after = before is not None and not isinstance(before, str) and before.is_over
        start = Position(self.position.epoch + bool(self.position.sample_offset)) if is_after else Position()
        self._all.append(DataProgress(key, start, is_resumed=False))
        return self._all[-1]


def _is_again(iteration: Iteration | str, before: Iteration | str | None) -> bool:
    """Whether a new iteration over data of the same size and seed iterates the same data set as an older iteration."""
    if isinstance(iteration, str) or isinstance(before, str) or before is None:
        return False
    return iteration.dataset is before.dataset or before.is_over


def _named(key: Key) -> str:
    if not key:
        return "data of unknown size"
    number, seed = key
    return f"{'a stream' if number is None else f'{number:,} samples'} with seed {seed}"


def _stored(position: Position) -> dict[str, int]:
    return {"epoch": position.epoch, "sample_offset": position.sample_offset}
