"""What an observer is handed: one frozen record for each thing that happens in a run.

```python
import anybatch as ab
from anybatch.records import Observers, Record, StepRecord


class PrintLoss:  # any object with this method is an `ab.Observer`
    def observe(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            print(record.step, float(record.loss))  # reading a number waits for the device


engine = ab.Engine(model, optimizer, loss, observer=Observers(PrintLoss(), ab.JsonlLog("events.jsonl")))
```

New kinds of record and new fields may come: an observer does nothing on a kind that it does not know.
"""

from anybatch.core.records import (
    CheckpointRecord,
    DiagnosisRecord,
    EndRecord,
    EvaluateRecord,
    Flag,
    GradientNoiseRecord,
    MemoryRecord,
    MicroBatchRecord,
    Observers,
    OutOfMemoryRecord,
    PhaseName,
    PhaseRecord,
    Record,
    ReductionRecord,
    Scalar,
    SpanEvent,
    StartRecord,
    StepRecord,
)

__all__ = [
    "CheckpointRecord",
    "DiagnosisRecord",
    "EndRecord",
    "EvaluateRecord",
    "Flag",
    "GradientNoiseRecord",
    "MemoryRecord",
    "MicroBatchRecord",
    "Observers",
    "OutOfMemoryRecord",
    "PhaseName",
    "PhaseRecord",
    "Record",
    "ReductionRecord",
    "Scalar",
    "SpanEvent",
    "StartRecord",
    "StepRecord",
]
