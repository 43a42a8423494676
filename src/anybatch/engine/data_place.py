"""Where an engine stands in its data, told to the batches that go on from there."""

from typing import Any

from anybatch.core.batch import Position
from anybatch.data.effective_batch import DatasetBatch


def go_on(batch: Any, position: Position, after: object | None) -> str:  # noqa: ANN401 (any nested batch)
    """Tell the iteration of a batch where an engine stands; return a warning where it is too late, else nothing.

    Args:
        batch: what is stepped next; only batches of `ab.batches` without a `start` listen.
        position: where the engine stands in its data.
        after: what was stepped before, as `data_of` has it; None for nothing since the engine was made or loaded.

    Raises:
        DataError: the position lies beyond the data.
    """
    if not isinstance(batch, DatasetBatch) or batch.go_on_from(position, after):
        return ""
    return (
        f"the batches repeat epoch {batch.epoch}, and the engine stands at {position}: later ones have been taken from "
        "their iterator already (a list of batches, or something that reads ahead), so they cannot go on from there. "
        "Iterate ab.batches itself, or make it with start=engine.position."
    )


def data_of(batch: Any) -> object:  # noqa: ANN401 (any nested batch)
    """Return the data set of a batch, or its type if it is of no data set that is known."""
    return batch.dataset if isinstance(batch, DatasetBatch) else type(batch)
