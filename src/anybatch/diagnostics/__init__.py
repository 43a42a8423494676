"""Questions about a training run, answered by running it: is it exact, and what makes it differ where it is not?"""

from anybatch.diagnostics.check import check
from anybatch.diagnostics.report import CheckReport, Finding, SplitResult

__all__ = ["CheckReport", "Finding", "SplitResult", "check"]
