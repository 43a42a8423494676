"""Questions about a training run, answered by running it: is it exact, and if not, why?"""

from anybatch.diagnostics.check import check
from anybatch.diagnostics.check_report import CheckFinding, CheckReport, SplitResult
from anybatch.diagnostics.compare import ComparisonReport, compare
from anybatch.diagnostics.loop_check.check_loop import check_loop
from anybatch.diagnostics.loop_check.report import LoopReport
from anybatch.diagnostics.memory_report import MemoryReport, record_memory
from anybatch.diagnostics.tune import TuneReport, tune

__all__ = [
    "CheckFinding",
    "CheckReport",
    "ComparisonReport",
    "LoopReport",
    "MemoryReport",
    "SplitResult",
    "TuneReport",
    "check",
    "check_loop",
    "compare",
    "record_memory",
    "tune",
]
