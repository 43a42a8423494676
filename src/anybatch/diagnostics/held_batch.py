"""A batch that is loaded once, so that steps on it can be timed without loading."""

from collections.abc import Iterator, Sequence

from anybatch.core.batch import EffectiveBatch, Foresight, Position, Positions
from anybatch.core.tree import Batch


class HeldBatch:
    """An effective batch whose micro-batches are kept on the host once they were loaded."""

    def __init__(self, batch: EffectiveBatch) -> None:
        self._batch = batch
        self._loaded: tuple[Sequence[Positions], list[Batch]] | None = None
        self.sample_ids: Sequence[int] = batch.sample_ids
        self.seed: int = batch.seed
        self.end: Position = batch.end

    def feed(self, units: Sequence[Positions], foresight: Foresight | None = None) -> Iterator[Batch]:
        """Yield the micro-batches of a cut, loaded once as long as the cut stays."""
        # Another micro-batch size cuts the batch elsewhere.
        if self._loaded is None or self._loaded[0] != units:
            self._loaded = units, list(self._batch.feed(units, foresight))
        yield from self._loaded[1]
