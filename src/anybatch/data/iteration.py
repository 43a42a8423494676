"""One iteration over effective batches, from its own start or from the position of the engine that steps it."""

import itertools

from anybatch.core.batch import Position
from anybatch.data.effective_batch import DatasetBatch, DatasetBatches, OpenSource, StepSamples
from anybatch.data.options import BatchOptions, RunRange
from anybatch.errors import DataError


class Iteration:
    """One iteration over a source. Without a `start` it begins at the engine's position, set before its first step.

    Its first batch is not read before it is needed, so that a stream is opened once an epoch, and in the right epoch.
    If no engine sets a position, it begins at the beginning.
    """

    def __init__(self, source: OpenSource, request: BatchOptions) -> None:
        self.source = source
        self._request = request
        self._sizes = request.sizes
        self._steps = source.steps(request.span)
        self._can_move = request.start is None
        self._newest = -1
        self.is_over = False
        self.dataset = source.dataset
        self.key = (source.num_samples, request.seed)

    def batches(self) -> DatasetBatches:
        """Yield the effective batches; workers stop when this generator does."""
        try:
            while True:
                known: StepSamples | None = None
                # Without a start the first batch exists, or reading it raises: yield it without reading.
                if not (self._can_move and self._newest < 0):
                    known = next(self._steps, None)
                    if known is None:
                        return
                self._newest += 1
                batch = DatasetBatch(
                    seed=self._request.seed, sizes=self._sizes, number=self._newest, iteration=self, samples=known
                )
                yield batch
                if known is None and not batch.is_known:
                    _ = batch.start  # determines the batch: the next read is after it
        finally:
            self.is_over = True
            self.source.close()

    def samples_of(self, number: int) -> StepSamples:
        """Return the samples of the newest batch, which has not been read yet."""
        assert number == self._newest, (number, self._newest)
        try:
            return next(self._steps)
        finally:
            if self.is_over:
                self.source.close()  # the batch is used after its loop, which can no longer stop its workers

    def moved(self, batch: DatasetBatch, position: Position, *, is_resumed: bool) -> StepSamples | None:
        """Return the samples of a batch for a known engine position; None if it is too late to move."""
        if not self._can_move:
            return batch.samples
        start = batch.start if batch.number else Position()  # known without reading the first batch
        # A new run, or the caller has skipped finished batches.
        stays = is_resumed and position in (Position(), start)
        span, num_skipped = self._span_from(position, is_resumed=is_resumed), batch.number
        if num_skipped and is_resumed and not stays:
            num_skipped = _num_to_skip(batch.number, start, position)
        self._can_move = False
        if stays:
            return batch.samples
        if batch.number != self._newest:
            return None
        self._steps = self.source.steps(span)
        found = next(itertools.islice(self._steps, num_skipped, None), None)
        if found is None:  # that epoch has no step left
            self._steps = self.source.steps(self._request.span_from(Position(span.start.epoch + 1)))
            found = next(self._steps)
        return found

    def _span_from(self, position: Position, *, is_resumed: bool) -> RunRange:
        """Return the range of this iteration for an engine at a position."""
        if is_resumed:
            return self._request.span_from(position, resumed=True)
        # A run of `steps` may end within an epoch, and the next run continues there. A loop over epochs that stopped
        # early does not: the rest of its epoch is skipped.
        if self._request.steps is None and position.sample_offset:
            position = Position(position.epoch + 1)
        return self._request.span_from(position)


def _num_to_skip(number: int, start: Position, position: Position) -> int:
    """Return the number of batches to skip after a position, if the caller has skipped the first `number` batches.

    `start` is the end of the skipped batches, counted from the beginning; `position` is the resumed run's position.
    Raises a `DataError` if the skipped batches are not clearly the ones finished before the resume.
    """
    if position.sample_offset and start == Position(0, position.sample_offset):
        return 0  # the finished batches of this epoch
    if not position.sample_offset and start.epoch == 0:
        return number  # the first batches of every epoch
    message = (
        f"{number} batches were skipped after engine.load, up to {start}, and the run is at {position}: ab.batches "
        "skips finished batches itself. Iterate it from its beginning, or set its start with ab.batches(start=...)."
    )
    raise DataError(message)
