"""The progress of a run in each of its data sets: the position, and a checksum of the epoch's samples used so far."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from anybatch.checkpoints.structure import read_stored
from anybatch.core.batch import Position
from anybatch.data.effective_batch import DatasetBatch, Iteration
from anybatch.errors import DataError

Remark = tuple[str, str]
"""The code and the text of a warning."""
Key = tuple[int | None, int] | tuple[()] | None
"""Number of samples (None for a stream) and seed of a data set; () for batches of another loader; None if unknown."""
_OTHER_LOADER: Final = "batches that are not from ab.batches"


@dataclass(slots=True, eq=False)
class DataProgress:
    """Progress in one data set.

    `digest` (a checksum of the epoch's samples so far) and `order` (of the epoch's samples) are from a checkpoint.
    `is_resumed`: the position is from a checkpoint or from the user, and no step has been made since.
    `has_begun`: the engine has tried to start the iteration at the position.
    """

    key: Key
    position: Position = field(default_factory=Position)
    digest: int | None = None
    order: torch.Tensor | None = None
    iteration: Iteration | str | None = None
    is_resumed: bool = True
    is_stepped: bool = False
    has_begun: bool = False

    def begin(self, batch: Any) -> Remark | None:  # noqa: ANN401 (any nested batch)
        """Move a batch's iteration to the position; return a warning if that is impossible or the data differ."""
        if not isinstance(batch, DatasetBatch):
            return None
        if self.is_resumed and self.order is not None:
            batch.iteration.source.use_order(self.position.epoch, self.order)
        if not batch.resume_from(self.position, is_resumed=self.is_resumed):
            message = (
                f"the batches repeat epoch {batch.epoch}, but the engine is at {self.position}. Later batches were "
                "already fetched from their iterator (by a list, or by code that reads ahead). Iterate over "
                "ab.batches directly, or create it with start=engine.position."
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
        """If the data differ from the checkpoint's, raise in the middle of an epoch, or return a warning otherwise."""
        iteration, position = batch.iteration, self.position
        if self.key is None or batch.start != position:  # an older checkpoint, or a start that the user chose
            return None
        digest = None if self.digest is None else iteration.source.digest_before(position)
        has_key = self.key == iteration.key or not position.sample_offset
        is_same = has_key if digest is None else digest == self.digest
        if is_same:
            return None
        message = (
            f"the run is at {position} of {_named(self.key)}, but the data set is now {_named(iteration.key)}, in "
            "another order or another subset. Use the same data set, split, sampler, shuffle and seed as before; a "
            "split needs a seeded generator. To begin at a position of your choice, use ab.batches(start=...)."
        )
        if position.sample_offset:
            self.iteration = None
            raise DataError(message, code="other_data")
        return "data_set_differs", message


class RunProgress:
    """Progress in all data sets of a run.

    A checkpoint identifies a data set by its number of samples and seed. Within a process, a new object of the same
    size and seed counts as the same data set, unless an iteration over the old object is still open.
    """

    def __init__(self) -> None:
        self.set(Position())

    @property
    def position(self) -> Position:
        """Position in the data set of the newest step."""
        return self._newest.position

    def set(self, position: Position) -> None:
        """Forget all progress; the next data set continues at this position."""
        self._newest = DataProgress(None, position)
        self._all = [self._newest]

    def of(self, batch: Any, warn: Callable[[str, str], None]) -> DataProgress:  # noqa: ANN401 (any nested batch)
        """Return the progress in the data set of a batch, and move a new iteration to its position if possible."""
        iteration = batch.iteration if isinstance(batch, DatasetBatch) else _OTHER_LOADER
        progress = self._newest
        if progress.iteration is not iteration:
            known = (other for other in self._all if other.iteration is iteration)
            progress = next(known, None) or self._match(iteration)
            if progress.iteration is not iteration:
                progress.iteration, progress.has_begun = iteration, False
        # Only once for each iteration, because an iteration that has started cannot be moved.
        if progress.is_resumed or not progress.has_begun:
            remark = progress.begin(batch)
            progress.has_begun = True
            if remark is not None:
                warn(*remark)
        return progress

    def advance(self, progress: DataProgress, end: Position) -> None:
        """Record the position after a step on a data set."""
        progress.position = end
        progress.is_resumed, progress.is_stepped = False, True
        self._newest = progress

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors, with the newest position as older versions stored it."""
        return {
            "position": _stored(self.position),
            "data_sets": [progress.state_dict() for progress in self._all],
            "newest_data_set": self._all.index(self._newest),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; checkpoints of older versions have a single position."""
        if "data_sets" not in state:
            self.set(Position(**state["position"]))
            return
        self._all = [
            DataProgress(saved["key"], Position(**saved["position"]), saved["digest"], saved["order"])
            for saved in read_stored(state["data_sets"])
        ]
        self._newest = self._all[state["newest_data_set"]]

    def _match(self, iteration: Iteration | str) -> DataProgress:
        """Return the progress in the data set of a new iteration; a new data set starts at its beginning."""
        key: Key = () if isinstance(iteration, str) else iteration.key
        same = [item for item in self._all if item.key == key and _has_same_data(iteration, item.iteration)]
        if same:
            return same[0]
        loaded = [item for item in self._all if item.iteration is None]
        fitting = [item for item in loaded if item.key in (None, key)]
        if not fitting and key:
            # No data set has this size and seed: take a data set whose epoch is unfinished, or the only data set.
            fitting = [item for item in loaded if item.key and (item.position.sample_offset or len(self._all) == 1)]
        if len({item.position for item in fitting}) > 1:
            positions = " and ".join(f"{item.position} of {_named(item.key)}" for item in fitting)
            message = (
                f"the checkpoint has several data sets that may be this one ({_named(key)}): {positions}. Give data "
                "sets of the same size different seeds; to resume this run, use ab.batches(start=...) for each."
            )
            raise DataError(message)
        if fitting:
            return fitting[0]
        # If data sets follow each other, the epoch number continues, so that augmentation does not repeat.
        before = self._newest.iteration
        is_after = before is not None and not isinstance(before, str) and before.is_over
        start = Position(self.position.epoch + bool(self.position.sample_offset)) if is_after else Position()
        self._all.append(DataProgress(key, start, is_resumed=False))
        return self._all[-1]


def _has_same_data(iteration: Iteration | str, before: Iteration | str | None) -> bool:
    """Whether a new iteration, of the same size and seed as an older one, has the same data set."""
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
