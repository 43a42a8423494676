"""A kit for any trainer: cases as data, the exact gradient of each, and a table of verdicts.

```python
from anybatch.testing import conformance

class MyTrainer:
    name = "my trainer"
    def steps(self, task):      # go through task.samples() once, in order, without changing parameters
        ...
        yield conformance.Step(gradients={...}, sample_ids=(...))

table = conformance.run(MyTrainer())
print(table)
assert table.passed
```
"""

from anybatch.testing.conformance.adapters import EngineAdapter, HandWrittenLoop
from anybatch.testing.conformance.cases import CASES
from anybatch.testing.conformance.run import Row, Table, run
from anybatch.testing.conformance.task import Adapter, Case, LossTerms, Step, Task, Term

__all__ = [
    "CASES",
    "Adapter",
    "Case",
    "EngineAdapter",
    "HandWrittenLoop",
    "LossTerms",
    "Row",
    "Step",
    "Table",
    "Task",
    "Term",
    "run",
]
