"""The records that an observer receives, one for each event of a run, and observers that write them.

```python
import anybatch as ab
from anybatch.records import Observers, Record, StepRecord


class PrintLoss:  # any object with this method is an `ab.Observer`
    def observe(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            print(record.step, float(record.loss))  # reading a number waits for the device


engine = ab.Engine(model, optimizer, loss, observer=Observers(PrintLoss(), ab.JsonlLog("events.jsonl")))
```

Later versions may add kinds of records and fields, so an observer should ignore kinds that it does not handle.
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
from anybatch.events.jsonl import JsonlLog
from anybatch.events.metrics_log import CometLog, MlflowLog, TensorBoardLog, TrackioLog, WandbLog
from anybatch.events.plot import plot_losses

__all__ = [
    "CheckpointRecord",
    "CometLog",
    "DiagnosisRecord",
    "EndRecord",
    "EvaluateRecord",
    "Flag",
    "GradientNoiseRecord",
    "JsonlLog",
    "MemoryRecord",
    "MicroBatchRecord",
    "MlflowLog",
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
    "TensorBoardLog",
    "TrackioLog",
    "WandbLog",
    "plot_losses",
]
