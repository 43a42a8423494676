"""One iteration over effective batches: it begins at a start of its own, or where the engine that steps it stands."""

import itertools

from anybatch.core.batch import Position
from anybatch.data.effective_batch import DatasetBatch, DatasetBatches, OpenSource, StepSamples
from anybatch.data.options import BatchOptions, RunRange
from anybatch.errors import DataError


class Iteration:
    """One iteration over a source. One without a `start` begins where it is told before its first step.

    Its first batch is not read before it is looked into, so that a stream is opened once an epoch, and in the right
    one. Told never, it begins at the beginning.

    Args:
        source: what is read.
        request: what was asked.
    """

    def __init__(self, source: OpenSource, request: BatchOptions) -> None:
        self.source = source
        self._request = request
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
            self.is_over = True
            self.source.close()

    def _batch(self, known: StepSamples | None) -> DatasetBatch:
        request = self._request
        return DatasetBatch(
            seed=request.seed,
            sizes=request.sizes,
            number=self._newest,
            iteration=self,
            samples=known,
        )

    def samples_of(self, number: int) -> StepSamples:
        """Return what is in the newest batch, which has not been looked into yet."""
        assert number == self._newest, (number, self._newest)
        try:
            return next(self._steps)
        finally:
            if self.is_over:
                self.source.close()  # the batch has outlived its loop, and its workers have no one to end them

    def moved(self, batch: DatasetBatch, position: Position, *, is_resumed: bool) -> StepSamples | None:
        """Return what is in a batch now that the engine's place is known; None where it is too late to move.

        Raises:
            DataError: the position lies beyond the data, or finished batches have been skipped by hand as well.
        """
        if not self._can_move:
            return batch.samples
        start = batch.start if batch.number else Position()  # the first batch need not be read to know
        # A new run, or finished batches were skipped by hand.
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
        if found is None:  # no step was left in that epoch
            self._steps = self.source.steps(self._request.span_from(Position(span.start.epoch + 1)))
            found = next(self._steps)
        return found

    def _span_from(self, position: Position, *, is_resumed: bool) -> RunRange:
        """Return where this iteration begins for an engine that stands at a position, and where it ends."""
        if is_resumed:
            return self._request.span_from(position, resumed=True)
        # A number of steps need not end where an epoch does, so the next ones continue there. A loop over epochs that
        # was left in the middle of one is over: nobody counts on the rest.
        if self._request.steps is None and position.sample_offset:
            position = Position(position.epoch + 1)
        return self._request.span_from(position)


def _num_to_skip(number: int, start: Position, position: Position) -> int:
    """Return how many batches to leave out after a position, where the user has left out the first ones.

    Args:
        number: how many were left out.
        start: where they end, counted from the beginning.
        position: where the resumed run stands.

    Raises:
        DataError: it cannot be known whether they are the ones that were finished before the run was resumed.
    """
    if position.sample_offset and start == Position(0, position.sample_offset):
        return 0  # the finished batches of this epoch
    if not position.sample_offset and start.epoch == 0:
        return number  # the first batches of every epoch
    message = (
        f"{number} batches were skipped after engine.load, up to {start}, and the run is at {position}: ab.batches "
        "skips finished batches itself. Iterate it from its beginning, or choose a place with ab.batches(start=...)."
    )
    raise DataError(message)
