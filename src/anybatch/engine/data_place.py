"""Where an engine stands in each data set that it trains on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from anybatch.checkpoints.structure import read_stored
from anybatch.core.batch import Position
from anybatch.data.effective_batch import BatchSource, DatasetBatch
from anybatch.data.order import digest_of_ids
from anybatch.errors import DataError

Remark = tuple[str, str]
_OWN: Final = "batches of the user's own"
_SAMPLES = "samples of a stream"


@dataclass(slots=True, eq=False)
class DataPlace:
    """Where an engine stands in one data set.

    Attributes:
        key: number of samples and seed of the data set; empty for batches of the user's own; None: not known.
        position: the place.
        digest: checksum of the ids of the epoch's samples up to there; None: not known.
        order: ids of the epoch in a sampler's order, from a checkpoint; None: it is drawn.
        source: the newest iteration over it; None since a checkpoint was loaded.
        is_resumed: whether the data go on at exactly this place, and have not yet done so.
        is_stepped: whether a step was made on it in this process.
    """

    key: tuple[int | None, int] | tuple[()] | None
    position: Position = field(default_factory=Position)
    digest: int | None = None
    order: torch.Tensor | None = None
    source: BatchSource | str | None = None
    is_resumed: bool = True
    is_stepped: bool = False

    def begin(self, batch: Any) -> Remark | None:  # noqa: ANN401 (any nested batch)
        """Let the iteration of a batch go on from here; return a warning where it cannot, or where data differ.

        Raises:
            DataError: the position lies beyond the data, finished batches were skipped by hand as well, or the data
                come in another order than before the run was resumed.
        """
        if not isinstance(batch, DatasetBatch):
            return None
        if self.is_resumed and self.order is not None:
            batch.iteration.use_order(self.position.epoch, self.order)
        if not batch.go_on_from(self.position, is_resumed=self.is_resumed):
            message = (
                f"the batches repeat epoch {batch.epoch}, and the engine stands at {self.position}: later ones have "
                "been taken from their iterator already (a list of batches, or something that reads ahead), so they "
                "cannot go on from there. Iterate ab.batches itself, or make it with start=engine.position."
            )
            return "data_repeats", message
        remark = self._compared(batch) if self.is_resumed else None
        self.key = batch.iteration.key
        return remark

    def advance(self, batch: Any, end: Position) -> None:  # noqa: ANN401 (any nested batch)
        """Move on behind a step.

        Args:
            batch: what was stepped.
            end: where its data end.
        """
        if isinstance(batch, DatasetBatch):
            start, source = batch.start, batch.iteration
            first = source.subset_digest
            if first is None or end.epoch > start.epoch:
                self.digest = first
            elif start.sample_offset == 0:
                self.digest = digest_of_ids(batch.sample_ids, first)
            elif self.digest is not None:
                # Behind batches that were left out it is not known any more.
                self.digest = digest_of_ids(batch.sample_ids, self.digest) if start == self.position else None
        self.position = end
        self.is_resumed, self.is_stepped = False, True

    def state_dict(self) -> dict[str, Any]:
        """Return the place as plain values."""
        order, source = self.order, self.source
        if self.is_stepped and source is not None and not isinstance(source, str):
            order = source.sampled_order(self.position.epoch) if self.position.sample_offset else None
        return {"key": self.key, "position": _stored(self.position), "digest": self.digest, "order": order}

    def _compared(self, batch: DatasetBatch) -> Remark | None:
        """Compare the data of a resumed run with those before, where they go on.

        Raises:
            DataError: other samples were finished in this epoch.
        """
        source, position = batch.iteration, self.position
        if self.key is None or batch.start != position:  # an earlier version's checkpoint, or a start of the user's
            return None
        found = None if self.digest is None else source.digest_before(position)
        if found is None:
            if self.key == source.key or not position.sample_offset:
                return None
        elif found == self.digest:
            return None
        message = (
            f"the run stands at {position} of {_named(self.key)}, and its data are {_named(source.key)} now, which "
            "come in another order or are another subset. Use the same data set, split, sampler, shuffle and seed as "
            "before (a sampler or split that draws from a generator of its own differs in every process); or begin "
            "where you choose, with ab.batches(start=...)."
        )
        if position.sample_offset:
            self.source = None
            raise DataError(message)
        return "data_set_differs", message


class DataPlaces:
    """Where an engine stands in its data sets. A position belongs to a data set.

    In a checkpoint a data set is known by its number of samples and its seed. Within a process, one that is made anew
    for every epoch is the same as before, and one that is iterated while another one of that size is, is not.
    """

    def __init__(self) -> None:
        self._newest = DataPlace(None)
        self._places = [self._newest]

    @property
    def position(self) -> Position:
        """Where the data set stands that was stepped last."""
        return self._newest.position

    def set(self, position: Position) -> None:
        """Forget all, and let the next data set go on from a position."""
        self._newest = DataPlace(None, position)
        self._places = [self._newest]

    def of(self, batch: Any) -> DataPlace:  # noqa: ANN401 (any nested batch)
        """Return the place in the data set of a batch.

        Raises:
            DataError: it cannot be known which data set of a checkpoint this is.
        """
        source = batch.iteration if isinstance(batch, DatasetBatch) else _OWN
        if self._newest.source is source:  # nearly always
            return self._newest
        place = next((place for place in self._places if place.source is source), None) or self._found(source)
        place.source = source
        return place

    def advance(self, place: DataPlace, batch: Any, end: Position) -> None:  # noqa: ANN401 (any nested batch)
        """Move on behind a step."""
        place.advance(batch, end)
        self._newest = place

    def state_dict(self) -> dict[str, Any]:
        """Return all places as plain values; of the newest one the position too, as earlier versions wrote it."""
        return {
            "position": _stored(self.position),
            "data_sets": [place.state_dict() for place in self._places],
            "newest_data_set": self._places.index(self._newest),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, perhaps an earlier version's, which has one position."""
        if "data_sets" not in state:
            self.set(Position(**state["position"]))
            return
        self._places = [
            DataPlace(one["key"], Position(**one["position"]), one["digest"], one["order"])
            for one in read_stored(state["data_sets"])
        ]
        self._newest = self._places[state["newest_data_set"]]

    def _found(self, source: BatchSource | str) -> DataPlace:
        """Return the place in a data set whose iteration is new."""
        key = () if isinstance(source, str) else source.key
        used = [place for place in self._places if place.key == key and place.source is not None]
        again = [place for place in used if _is_again(source, place.source)]
        if again:
            return again[0]
        loaded = [place for place in self._places if place.source is None]
        found = [place for place in loaded if place.key in (None, key)] or self._changed(loaded, source)
        if len({place.position for place in found}) > 1:
            places = ", ".join(f"{place.position} of {_named(place.key)}" for place in found)
            message = (
                f"it cannot be known which data set of the checkpoint this is, {_named(key)}: the run stands at "
                f"{places}. Give data sets of one size different seeds; to go on with this run, make each with "
                "ab.batches(start=...)."
            )
            raise DataError(message)
        if found:
            return found[0]
        # Epochs count on where data sets follow each other, so that their samples are augmented anew.
        before = self._newest.source
        is_after = before is not None and not isinstance(before, str) and before.is_over
        start = Position(self.position.epoch + bool(self.position.sample_offset)) if is_after else Position()
        self._places.append(DataPlace(key, start, is_resumed=False))
        return self._places[-1]

    def _changed(self, loaded: Sequence[DataPlace], source: BatchSource | str) -> list[DataPlace]:
        """Return the places that a data set of another size or seed may go on from; what has changed is compared."""
        if isinstance(source, str):
            return []
        others = [place for place in loaded if place.key]
        middle = [place for place in others if place.position.sample_offset]
        return middle or (others if len(self._places) == 1 else [])


def _is_again(source: BatchSource | str, before: BatchSource | str | None) -> bool:
    """Whether a new iteration over a data set of this size is one over the same data set."""
    if isinstance(source, str) or isinstance(before, str) or before is None:
        return source is before
    return source.dataset is before.dataset or before.is_over


def _named(key: tuple[int | None, int] | tuple[()] | None) -> str:
    if not key:
        return "data of an unknown size"
    number, seed = key
    return f"{_SAMPLES if number is None else f'{number:,} samples'} with seed {seed}"


def _stored(position: Position) -> dict[str, int]:
    return {"epoch": position.epoch, "sample_offset": position.sample_offset}
