"""A kit for any trainer: cases as data, the exact gradient of each, and a table of verdicts.

```python
from anybatch.testing import conformance

class MyTrainer:
    name = "my trainer"
    def steps(self, split):      # train on split.samples() once, in order, without changing parameters
        ...
        yield conformance.TrainerStep(gradients={...}, sample_ids=(...))

table = conformance.run(MyTrainer())
print(table)
assert table.passed
```
"""

from anybatch.testing.conformance.cases import CASES, Adapter, Case, LossTerm, LossTerms, SplitCase, TrainerStep
from anybatch.testing.conformance.table import EngineAdapter, HandWrittenLoop, Row, Table, run

__all__ = [
    "CASES",
    "Adapter",
    "Case",
    "EngineAdapter",
    "HandWrittenLoop",
    "LossTerm",
    "LossTerms",
    "Row",
    "SplitCase",
    "Table",
    "TrainerStep",
    "run",
]
