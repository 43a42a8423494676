"""Measured memory of a step: over time, by purpose, and how much of the device remains free."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from anybatch.core.records import MicroBatchRecord, PhaseRecord, Record, StepRecord
from anybatch.core.tree import tensors_of
from anybatch.core.units import HEADROOM, Reserve, describe_reserve, in_bytes
from anybatch.diagnostics.memory_pictures import draw_memory, memory_bars
from anybatch.engine.engine import Engine
from anybatch.errors import UserError
from anybatch.memory.device_memory import Counted, MemoryInUse, begin_peak, counting_text, limit_of, memory_in_use
from anybatch.memory.ledger import MemoryLedger
from anybatch.memory.trace import MemoryTimeline, timeline

UNSEEN = "not in tensors"
"""Allocated memory that no recorded tensor explains: workspaces of kernels, and rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorReport:
    """Counters of torch's CUDA allocator during the recording."""

    peak_bytes: int  # including workspaces of kernels
    allocated_bytes: int  # at the peak of tensors
    reserved_bytes: int  # at the peak of tensors
    num_retries: int  # how often the cache was emptied to allocate again

    @property
    def fragmentation(self) -> float:
        """Share of reserved memory that was not allocated at the peak: `1 - allocated / reserved`."""
        return 1.0 - self.allocated_bytes / self.reserved_bytes if self.reserved_bytes else 0.0

    def __str__(self) -> str:
        """Return the counters in a line."""
        retries = f"{self.num_retries:,} retr{'y' if self.num_retries == 1 else 'ies'}"
        reserved = f"{in_bytes(self.reserved_bytes)} reserved at the peak"
        return f"allocator: {reserved}, {self.fragmentation:.1%} of it not allocated; {retries}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryReport:
    """The memory of the recorded steps. `print(report)` shows the peak by purpose."""

    timeline: MemoryTimeline = field(metadata={"json": False})  # with marks where micro-batches begin
    device: str  # type and number of the device
    num_steps: int  # optimizer steps that were recorded
    num_samples: int  # samples of the last step, over all ranks
    num_micro_batches: int  # micro-batches of the last step on this rank
    limit_bytes: int | None  # memory of the device; None if unknown
    headroom: float  # fraction of the limit to keep free
    allocator: AllocatorReport | None  # counters of torch's allocator; None on a CPU
    decided: str | None = None  # the micro-batch size that the engine chose, and why; None if the user gave it

    @property
    def peak_bytes(self) -> int:
        """Peak memory: of the allocator if there is one, else of tensors."""
        seen = self.timeline.peak_bytes
        return seen if self.allocator is None else max(seen, self.allocator.peak_bytes)

    @property
    def counted(self) -> Counted:
        """What `peak_bytes` counts."""
        return "in tensors" if self.allocator is None else "allocated"

    @property
    def at_peak(self) -> Mapping[str, int]:
        """Memory at the peak by purpose, in bytes."""
        # The allocator also counts workspaces of kernels, which are not tensors.
        unseen = self.peak_bytes - self.timeline.peak_bytes
        return {**self.timeline.at(self.timeline.peak_moment), **({UNSEEN: unseen} if unseen else {})}

    @property
    def reserve(self) -> Reserve | None:
        """The part of the limit that the peak leaves free; None without a limit."""
        return None if self.limit_bytes is None else Reserve(self.peak_bytes, self.limit_bytes, self.headroom)

    def draw(self, path: str | Path) -> None:
        """Draw memory over time.

        Args:
            path: the file, which ends in .png, .svg or .pdf.

        Raises:
            UserError: matplotlib is not installed, or the path does not end in .png, .svg or .pdf.
            OSError: the file cannot be written.
        """
        left = "" if self.reserve is None else f"; {describe_reserve(self.reserve)}"
        draw_memory(
            self.timeline,
            Path(path),
            title=self._peak_text,
            subtitle=f"{self._steps_text}{left}",
            limit_bytes=self.limit_bytes,
            headroom=self.headroom,
        )

    def __str__(self) -> str:
        """Return the peak, bars of its parts, and the memory that remains free."""
        operation = self.timeline.operations[self.timeline.peak_moment]
        lines = [self._steps_text, self._peak_text + f", by {operation}" * bool(operation)]
        lines += [memory_bars(self.at_peak, self.limit_bytes), counting_text(self.counted)]
        lines += [] if self.allocator is None else [str(self.allocator)]
        lines += [] if self.decided is None else [f"decided: micro-batch size: {self.decided}"]
        reserve = self.reserve
        if reserve is not None:
            lines.append(f"{'' if reserve.kept else 'warning: '}{describe_reserve(reserve)}")
        return "\n".join(lines)

    @property
    def _steps_text(self) -> str:
        steps = "one step" if self.num_steps == 1 else f"{self.num_steps:,} steps"
        split = f"{self.num_micro_batches:,} micro-batch{'es' * (self.num_micro_batches != 1)} on this rank"
        return f"{steps} of {self.num_samples:,} samples, {split}, {self.device}"

    @property
    def _peak_text(self) -> str:
        moment = self.timeline.peak_moment
        names = [self.timeline.mark_before(moment), self.timeline.phases[moment]]
        where = ", ".join(dict.fromkeys(name for name in names if name))
        return f"peak {in_bytes(self.peak_bytes)} {self.counted}, in {where}"


class MemoryRecording:
    """The memory of an engine's steps while it is recorded; see `record_memory`."""

    def __init__(self, engine: Engine, allocator: Callable[[], MemoryInUse | None] | None) -> None:
        self._engine, self._allocator = engine, allocator
        self.ledger = MemoryLedger(on_allocation=self._watch, device_type=engine.world.device.type)
        self.ledger.phase = "setup"
        self.register_resident()
        now = None if allocator is None else allocator()
        self._retries_before = 0 if now is None else now.num_retries
        self._seen_bytes = 0
        self._at_peak: MemoryInUse | None = None
        self._allocated_peak_bytes = 0
        self._loading = 0
        self._last_mark = ""
        self._steps: list[StepRecord] = []
        self._report: MemoryReport | None = None

    @property
    def report(self) -> MemoryReport:
        """The report, available after the block."""
        if self._report is None:
            message = (
                "no memory report yet: call engine.step inside the record_memory block, and read the report after it."
            )
            raise UserError(message, code="no_report_yet")
        return self._report

    def observe(self, record: Record, /) -> None:
        """Set the phase of the step, and register new permanent memory."""
        match record:
            case MicroBatchRecord(event="begin"):
                self._mark(f"micro-batch {record.position + 1}")
            case PhaseRecord():
                self._follow(record)
            case StepRecord():
                self._steps.append(record)
                now = None if self._allocator is None else self._allocator()
                self._allocated_peak_bytes = max(self._allocated_peak_bytes, 0 if now is None else now.peak_bytes)
            case _:
                return

    def _follow(self, record: PhaseRecord) -> None:
        """Set the phase, which lasts until the next phase. `MemoryLedger` itself separates forward and backward."""
        begins = record.event == "begin"
        if record.name == "load":
            # Memory of loading is not counted; `register_inputs` counts the loaded micro-batch.
            self.ledger.phase, self.ledger.paused = "setup" if begins else None, begins
            self._loading = record.position or 0
            return
        if record.name == "forward_backward":
            self.ledger.phase = None if begins else "reduce"
        elif begins:
            self.ledger.phase = record.name
            if record.name == "clip":
                self._mark("update")
        if not begins:
            self.register_resident()

    def register_resident(self) -> None:
        """Register the engine's permanent memory; the end of each phase calls this for memory allocated in it."""
        for category, tensors in self._engine.resident_tensors().items():
            self.ledger.categorize(category, tensors)

    def register_inputs(self, batch: Any) -> None:  # noqa: ANN401 (any nested batch)
        """Register a loaded micro-batch. Memory of the data set and of loading is not counted."""
        self._mark(f"micro-batch {self._loading + 1}")
        self.ledger.phase = "setup"
        self.ledger.categorize("inputs", tensors_of(batch))
        self.ledger.phase = None

    def _mark(self, name: str) -> None:
        """Add a mark unless the previous mark has its name, as in the second pass of an `ab.joint` loss."""
        if name != self._last_mark:
            self.ledger.mark(name)
            self._last_mark = name

    def _watch(self, held_bytes: int, _num_bytes: int, _operation: str) -> None:
        """Read the allocator's counters at each new peak of tensors."""
        if self._allocator is not None and held_bytes > self._seen_bytes:
            self._seen_bytes = held_bytes
            self._at_peak = self._allocator()

    def make_report(self, limit_bytes: int | None, headroom: float) -> None:
        """Create the report on the recorded steps, if there are any."""
        if not self._steps:
            return
        last = self._steps[-1]
        self._report = MemoryReport(
            timeline=timeline(self.ledger.trace()),
            device=str(self._engine.world.device),
            num_steps=len(self._steps),
            num_samples=last.num_samples,
            num_micro_batches=last.num_micro_batches,
            limit_bytes=limit_bytes,
            headroom=headroom,
            allocator=self._allocator_report(),
            decided=self._engine.decisions.get("micro_batch_size"),
        )

    def _allocator_report(self) -> AllocatorReport | None:
        at_peak, now = self._at_peak, None if self._allocator is None else self._allocator()
        if at_peak is None or at_peak.reserved_bytes is None or now is None:
            return None
        return AllocatorReport(
            peak_bytes=self._allocated_peak_bytes,
            allocated_bytes=at_peak.allocated_bytes,
            reserved_bytes=at_peak.reserved_bytes,
            # The allocator counts from the start of the process.
            num_retries=now.num_retries - self._retries_before,
        )


@contextmanager
def record_memory(
    engine: Engine,
    *,
    limit_bytes: int | None = None,
    headroom: float = HEADROOM,
    allocator: Callable[[], MemoryInUse | None] | None = None,
) -> Iterator[MemoryRecording]:
    """Record the memory of the steps in a `with` block, tensor by tensor.

    ```python
    with record_memory(engine) as recording:
        engine.step(batch)
    print(recording.report)
    recording.report.draw("memory.png")
    ```

    A recorded step trains as usual, with bitwise the same result, but is slower. Temporary memory inside kernels is
    visible on CUDA devices only, as `not in tensors`. Do not record the first step of an engine, which checks the loss
    and creates the optimizer's state.

    Args:
        engine: the engine to record. Its observer still receives records.
        limit_bytes: available memory; None: the limit of this process on the device, or no limit on a CPU.
        headroom: fraction of the limit to keep free.
        allocator: function that reads the allocator's counters; None: torch's on CUDA, no allocator on a CPU.
    """
    device = engine.world.device
    begin_peak(device)
    if allocator is None and device.type == "cuda":
        allocator = partial(memory_in_use, device)
    recording = MemoryRecording(engine, allocator)
    try:
        with engine.observed_by(recording, recording.register_inputs), recording.ledger:
            yield recording
        # After an error the last step is incomplete, and a report would be misleading.
        recording.make_report(limit_of(device) if limit_bytes is None else limit_bytes, headroom)
    finally:
        recording.ledger.forget()
