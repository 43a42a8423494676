"""Shows a run to a person: a progress bar on a terminal, plain lines elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from anybatch.core.records import (
    CheckpointRecord,
    DiagnosisRecord,
    EndRecord,
    EvaluateRecord,
    Flag,
    MemoryRecord,
    MicroBatchRecord,
    OutOfMemoryRecord,
    PhaseRecord,
    Record,
    ReductionRecord,
    Scalar,
    StartRecord,
    StepRecord,
)
from anybatch.core.units import duration, in_bytes, per_second, shortened, three_digits
from anybatch.events.messages import lines_of_start, message_of, skipped_line
from anybatch.events.observer import ClosingObserver, read_number
from anybatch.events.screen import CELL_WIDTH, Screen, ScreenCell, ScreenContents, screen_for
from anybatch.events.throughput import Throughput

_LABEL_WIDTH = CELL_WIDTH - len(" -1.23e-100")


class Console(ClosingObserver):
    """An observer that shows a run to a person.

    On a terminal it keeps a progress bar and the newest numbers at the bottom, and prints events above them:
    evaluations, checkpoints, diagnoses, skipped steps, out of memory. Elsewhere (a pipe, a file, CI) it prints plain
    lines: the first and the last step, one every few seconds between them, and events.

    Only rank 0 is shown. Numbers are read from their device only when they are shown, at most four times a second, so
    the loop does not wait for the device in each step. It has no thread: the display changes when a record arrives. A
    closed terminal does not end the run.

    Use it in a `with`, or let the run end (`Engine.close`), to restore the terminal.

    Args:
        total_steps: steps of the whole run, including those before a resume; None if unknown.
        stream: output; None: standard error, which keeps standard output for results.
        screen: how to draw; None: by the stream, a terminal's or the plain one.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        total_steps: int | None,
        *,
        stream: TextIO | None = None,
        screen: Screen | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._screen = screen_for(sys.stderr if stream is None else stream) if screen is None else screen
        self._clock = clock
        self._lock = threading.Lock()  # backward hooks send records from other threads
        self._pace = Throughput()
        self._num_steps = 0
        self._step: StepRecord | None = None
        self._micro_batch: MicroBatchRecord | None = None
        self._memory: MemoryRecord | None = None
        self._flags: list[tuple[int, Flag]] = []
        self._shown_seconds: float | None = None
        self._shown_steps: int | None = None

    def observe(self, record: Record, /) -> None:
        """Process a record, and update the display if it is due."""
        # Every rank has the same loss, so one is enough; reductions and phases are for the log.
        if record.rank != 0 or isinstance(record, ReductionRecord | PhaseRecord):
            return
        with self._lock:
            self._take(record, self._clock())

    def close(self) -> None:
        """Restore the terminal. Closing twice is allowed."""
        with self._lock:
            self._screen.close()

    def _take(self, record: Record, now: float) -> None:
        match record:
            case StepRecord():
                self._take_step(record, now)
            case MicroBatchRecord():
                self._micro_batch = record
                self._show_if_due(now, self._screen.seconds_per_micro_batch)
            case MemoryRecord():
                self._memory = record
            case StartRecord():
                self._start(record, now)
            case EndRecord():
                self._end(record, now)
            case EvaluateRecord() | CheckpointRecord():
                self._pace.aside(now)
                self._say(record)
            # The size search reports it, and the decisions at the start repeat it; show it once.
            case DiagnosisRecord(code="micro_batch_size"):
                return  # the next start record has it among its decisions
            case DiagnosisRecord() | OutOfMemoryRecord():
                self._say(record)
            case _:  # an unknown kind
                return

    def _start(self, record: StartRecord, now: float) -> None:
        """Begin a session: print the split and the decisions, and draw the bar at its first step."""
        for line in lines_of_start(record):
            self._screen.say(line, "plain")
        self._pace, self._num_steps = Throughput(), record.first_step
        self._step = self._micro_batch = self._memory = self._shown_steps = None
        self._pace.begin(now)
        if self._screen.has_bar:
            self._show(now)
        self._shown_seconds = now

    def _take_step(self, record: StepRecord, now: float) -> None:
        self._pace.step(now, record.num_samples)
        is_first = self._step is None
        self._step, self._micro_batch, self._num_steps = record, None, record.step + 1
        # On an accelerator the flag is a tensor that may not be computed yet; it is read when numbers are shown.
        if record.skipped is not False:
            self._flags.append((record.step + 1, record.skipped))
        if is_first or self._num_steps == self._total_steps:
            self._show(now)
        else:
            self._show_if_due(now, self._screen.seconds_per_step)

    def _end(self, record: EndRecord, now: float) -> None:
        # The last step is often not due when the run ends, but users look for it.
        if self._shown_steps != self._num_steps and self._step is not None:
            self._show(now)
        self._screen.close()
        self._say(record, seconds=self._pace.seconds_since_begin(now))

    def _say(self, record: Record, *, seconds: float | None = None) -> None:
        line, level = message_of(record, self._total_steps, seconds=seconds)
        self._screen.say(line, level)

    def _show_if_due(self, now: float, seconds: float) -> None:
        if self._shown_seconds is None or now - self._shown_seconds >= seconds:
            self._show(now)

    def _show(self, now: float) -> None:
        """Read the pending numbers, and show them."""
        flags, self._flags = self._flags, []
        skipped = [number for number, flag in flags if read_number(flag)]
        if skipped:
            self._screen.say(skipped_line(skipped, self._total_steps), "warning")
        self._screen.show(self._moment(now))
        # The clock is read again: otherwise a slow device would make every record due immediately.
        self._shown_seconds, self._shown_steps = self._clock(), self._num_steps  # reading may have waited

    def _moment(self, now: float) -> ScreenContents:
        total = self._total_steps
        left = None if total is None else self._pace.seconds_left(now, max(0, total - self._num_steps))
        num_done, num_micro_batches = self._micro_batches()
        within = self._micro_batch is not None
        return ScreenContents(
            num_steps=self._num_steps,
            total_steps=total,
            share_of_step=num_done / num_micro_batches if within else 0.0,
            is_within_step=within,
            time_left=None if left is None else duration(left),
            cells=self._cells(now),
            underway=ScreenCell("micro-batch", f"{num_done:,} of {num_micro_batches:,}", 10)
            if num_micro_batches > 1
            else None,
        )

    def _micro_batches(self) -> tuple[int, int]:
        """Return how many micro-batches of this (or the last) step are done, and their total."""
        if self._micro_batch is not None:
            return self._micro_batch.position + (self._micro_batch.event == "end"), self._micro_batch.num_micro_batches
        return (0, 0) if self._step is None else (self._step.num_micro_batches, self._step.num_micro_batches)

    def _cells(self, now: float) -> list[ScreenCell]:
        cells = [] if self._step is None else _cells_of_step(self._step)
        cells.append(ScreenCell("samples/s", per_second(self._pace.samples_per_second)))
        if self._memory is not None:
            limit = self._memory.limit_bytes
            cells.append(ScreenCell("memory", in_bytes(self._memory.peak_bytes, limit), 8 if limit is None else 16))
        if self._step is not None:
            cells.append(ScreenCell("epoch", f"{self._step.epoch + (self._step.sample_offset > 0):,}", 3))
        cells.append(ScreenCell("time", duration(self._pace.seconds_since_begin(now)), 11))
        return cells


def _cells_of_step(record: StepRecord) -> list[ScreenCell]:
    """Return the numbers of a step, waiting for its device."""
    cells = [ScreenCell("loss", three_digits(read_number(record.loss)))]
    if len(record.losses) > 1:
        terms: Mapping[str, Scalar] = record.losses
        cells += [
            ScreenCell(shortened(name, _LABEL_WIDTH), three_digits(read_number(value))) for name, value in terms.items()
        ]
    if record.gradient_norm is not None:
        cells.append(ScreenCell("gradient norm", three_digits(read_number(record.gradient_norm))))
    # Parameter groups usually share a rate; otherwise a range is shown, because a list would not fit.
    rates = [read_number(rate) for rate in record.learning_rates]
    if len(set(rates)) == 1:
        cells.append(ScreenCell("learning rate", three_digits(rates[0])))
    elif rates:
        known = [rate for rate in rates if rate is not None]
        cells.append(ScreenCell("highest rate", three_digits(max(known, default=None))))
        cells.append(ScreenCell("lowest rate", three_digits(min(known, default=None))))
    return cells
