"""The report of `check`, as a value and as text."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from anybatch.core.units import columns

SplitVerdict = Literal["exact", "equal up to rounding", "undecided", "not equal"]
EXACT = 1e-12
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Relative errors that rounding may cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitResult:
    """The gradient of one split of the batch, compared with the unsplit batch.

    Attributes:
        verdict: "exact" is an error of at most 1e-12; "equal up to rounding" is within the tolerance of the narrowest
            number type seen inside the model; "undecided": the gradients cannot be compared, see the findings.
    """

    sizes: tuple[int, ...]  # samples of each micro-batch, in order
    error: float  # relative error over all parameters together; infinite if a micro-batch failed
    errors: Mapping[str, float]  # relative gradient error by parameter name
    verdict: SplitVerdict
    failure: str | None = None  # the error message of the micro-batch that failed

    @property
    def worst(self) -> str | None:
        """Name of the parameter that differs most."""
        return max(self.errors, key=lambda name: self.errors[name], default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinding:
    """A reason why a split changes the gradient, or an effect that was excluded from the comparison.

    Attributes:
        code: identifier for programs. Gradients differ: "loss_declaration", "batch_norm", "couples_samples",
            "joint_loss", "state", "cannot_run" or "unexplained". The verdict is "undecided": "draws_by_sample",
            "unrepeatable" or "no_gradient". Information only: "randomness". Of a trainer, also "not_divided",
            "wrong_total", "mean_of_means" and "uneven_weights"; "refused": `ab.exact` refuses it.
    """

    code: str
    where: str = ""  # the affected module, loss term or parameter
    observation: str  # the effect, with measured values
    change: str  # the fix; empty if none is needed

    @property
    def prevents_verdict(self) -> bool:
        """Whether the finding prevents a comparison of gradients, so that the verdict is "undecided"."""
        return self.code in {"draws_by_sample", "unrepeatable", "no_gradient"}

    @property
    def breaks_equality(self) -> bool:
        """Whether the finding makes the gradients differ."""
        return self.code not in {"randomness", "refused"} and not self.prevents_verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The unsplit batch compared with several splits, and the causes of differences; `print(report)` shows all."""

    num_samples: int  # samples in the batch
    precision: str  # number type that the check ran in, and why if it is not float64
    tolerance: float  # relative error that rounding alone may cause in this number type
    splits: tuple[SplitResult, ...]  # one result for each split of the batch, with the user's model and loss
    findings: tuple[CheckFinding, ...]  # why splits differ; or excluded effects, with `breaks_equality=False`
    exact: "CheckReport | None" = None  # of a trainer, the report on its steps after `ab.exact`

    @property
    def verdict(self) -> SplitVerdict:
        """The worst verdict of all splits."""
        order: tuple[SplitVerdict, ...] = ("exact", "equal up to rounding", "undecided", "not equal")
        return max((split.verdict for split in self.splits), key=order.index)

    @property
    def equal(self) -> bool:
        """Whether every split gives the gradient of the unsplit batch; False if undecided."""
        return self.verdict not in ("undecided", "not equal")

    @property
    def reason(self) -> str | None:
        """Why the verdict is "undecided"; None for any other verdict."""
        return next((finding.observation for finding in self.findings if finding.prevents_verdict), None)

    def __str__(self) -> str:
        """Return the table of splits and the findings."""
        lines = [f"{self.num_samples} samples, {self.precision}", "", *_table(self.splits)]
        if self.exact is not None:
            lines += ["", "after ab.exact(trainer)", "", *_table(self.exact.splits)]
        findings = (*self.findings, *(self.exact.findings if self.exact is not None else ()))
        for number, finding in enumerate(findings, 1):
            lines += ["", f"{number}. {finding.observation}"]
            if finding.change:
                lines.append(f"   Change: {finding.change}")
        return "\n".join([*lines, "", f"verdict: {self.verdict}"])


def _table(splits: Sequence[SplitResult]) -> list[str]:
    rows, notes = [["  micro-batches", "gradient error"]], ["  verdict"]
    for split in splits:
        differs = split.verdict in ("undecided", "not equal") and split.error != 0
        worst = f", most in {split.worst!r}" if differs and split.worst is not None else ""
        rows.append([f"  {describe_sizes(split.sizes)}", "cannot run" if split.failure else f"{split.error:.1e}"])
        notes.append(f"  {split.verdict}{worst}")
    return [line + note for line, note in zip(columns(rows), notes, strict=True)]


def describe_sizes(sizes: Sequence[int]) -> str:
    """Return the sizes of micro-batches as a short text: `2 x 5 + 2` is two of 5 samples and one of 2."""
    runs = [(size, len(list(run))) for size, run in itertools.groupby(sizes)]
    return " + ".join(f"{number} x {size}" if number > 1 else str(size) for size, number in runs)


def verdict_of(error: float, tolerance: float) -> SplitVerdict:
    """Return the verdict on a relative error; rounding alone may cause errors up to `tolerance`."""
    if math.isnan(error):
        return "not equal"
    if error <= EXACT:
        return "exact"
    return "equal up to rounding" if error <= tolerance else "not equal"
