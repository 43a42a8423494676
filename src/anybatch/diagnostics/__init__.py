"""Questions about a training run, answered by running it: is it exact, and what makes it differ where it is not?"""

from anybatch.diagnostics.check import check
from anybatch.diagnostics.loops.check import check_loop
from anybatch.diagnostics.loops.report import LoopReport
from anybatch.diagnostics.memory_report import MemoryReport, record_memory
from anybatch.diagnostics.report import CheckReport, Finding, SplitResult
from anybatch.diagnostics.tune import tune
from anybatch.diagnostics.tuning import TuneReport

__all__ = [
    "CheckReport",
    "Finding",
    "LoopReport",
    "MemoryReport",
    "SplitResult",
    "TuneReport",
    "check",
    "check_loop",
    "record_memory",
    "tune",
]
