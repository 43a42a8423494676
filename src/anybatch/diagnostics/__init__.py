"""Answers about what a user already has: is it exact? Each takes the user's own code and returns a report."""

from anybatch.diagnostics.loops.check import check_loop
from anybatch.diagnostics.loops.report import Finding, LoopReport, Verdict, Window

__all__ = ["Finding", "LoopReport", "Verdict", "Window", "check_loop"]
