"""One iteration over effective batches: it begins at a start of its own, or where the engine that steps it stands."""

from collections.abc import Iterator
from typing import Protocol

from anybatch.core.batch import Position
from anybatch.data.effective_batch import DatasetBatch, DatasetBatches, StepSamples
from anybatch.data.options import BatchOptions, RunRange


class OpenSource(Protocol):
    """A source that is being read, with its workers."""

    @property
    def dataset(self) -> object:
        """What is read, as the user gave it."""

    def steps(self, span: RunRange) -> Iterator[StepSamples]:
        """Yield the samples of each step of a span. The last call counts: workers look ahead in its span."""

    def close(self) -> None:
        """Shut the workers down."""


class Iteration:
    """One iteration over a source. One without a `start` begins where it is told before its first step.

    Its first batch is not read before it is looked into, so that a stream is opened once an epoch, and in the right
    one. Told never, it begins at the beginning.

    Args:
        source: what is read.
        request: what was asked.
    """

    def __init__(self, source: OpenSource, request: BatchOptions) -> None:
        self._source = source
        self._request = request
        self._steps = source.steps(request.span)
        self._can_move = request.start is None
        self._newest = -1
        self._is_over = False

    @property
    def dataset(self) -> object:
        """The data set."""
        return self._source.dataset

    def batches(self) -> DatasetBatches:
        """Yield the effective batches; workers stop when this generator does."""
        try:
            while True:
                known: StepSamples | None = None
                # A run without a start has a first batch, or reading it raises: it need not be read to be yielded.
                if not (self._can_move and self._newest < 0):
                    known = next(self._steps, None)
                    if known is None:
                        return
                self._newest += 1
                batch = self._batch(known)
                yield batch
                if not batch.is_known:
                    _ = batch.start  # what is read next comes after it
        finally:
            self._is_over = True
            self._source.close()

    def _batch(self, known: StepSamples | None) -> DatasetBatch:
        request = self._request
        return DatasetBatch(
            seed=request.seed,
            sizes=request.sizes,
            number=self._newest,
            places=self,
            samples=known,
        )

    def samples_of(self, number: int) -> StepSamples:
        """Return what is in the newest batch, which has not been looked into yet."""
        assert number == self._newest, (number, self._newest)
        try:
            return next(self._steps)
        finally:
            if self._is_over:
                self._source.close()  # the batch has outlived its loop, and its workers have no one to end them

    def moved(self, batch: DatasetBatch, position: Position, after: object | None) -> StepSamples | None:
        """Return what is in a batch now that the engine's place is known; None where it is too late to move.

        Raises:
            DataError: the position lies beyond the data.
        """
        if not self._can_move:
            return batch.samples
        self._can_move = False
        span = self._span_from(position, after)
        if span.start.epoch == 0 and (batch.number or span.start == Position()):
            return batch.samples
        if batch.number != self._newest:
            return None
        if batch.number:
            # The user has left out the first batches: those of that epoch are left out.
            span = span.behind(batch.start, batch.number)
        self._steps = self._source.steps(span)
        found = next(self._steps, None)
        if found is None:  # no step was left in that epoch
            self._steps = self._source.steps(self._request.span_from(Position(span.start.epoch + 1)))
            found = next(self._steps)
        return found

    def _span_from(self, position: Position, after: object | None) -> RunRange:
        """Return where this iteration begins for an engine that stands at a position, and where it ends."""
        if after is None:
            return self._request.span_from(position, resumed=True)
        # A number of steps need not end where an epoch does, so the next ones go on from there.
        if self._request.steps is not None and after is self.dataset:
            return self._request.span_from(position)
        # A loop that was left in the middle of an epoch, or a position in other data: nobody counts on the rest.
        return self._request.span_from(position if not position.sample_offset else Position(position.epoch + 1))
