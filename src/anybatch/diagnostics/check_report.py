"""The report of `check`, as a value and as text."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

SplitVerdict = Literal["exact", "equal up to rounding", "undecided", "not equal"]
EXACT = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitResult:
    """One way of cutting the batch, against the un-split batch.

    Attributes:
        sizes: samples of each micro-batch, in order.
        errors: relative gradient error by parameter name.
        error: the same over all parameters together; infinite if the micro-batches could not be run.
        failure: why they could not be run.
        verdict: "exact" is an error of at most 1e-12; "equal up to rounding" is within the tolerance of the narrowest
            number type seen inside the model; "undecided": the gradients cannot be compared, see the findings.
    """

    sizes: tuple[int, ...]
    error: float
    errors: Mapping[str, float]
    verdict: SplitVerdict
    failure: str | None = None

    @property
    def worst(self) -> str | None:
        """Name of the parameter that differs most."""
        return max(self.errors, key=lambda name: self.errors[name], default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinding:
    """A reason why a cut changes the gradient, or an effect that was excluded from the comparison.

    Attributes:
        code: for programs: "loss_declaration", "batch_norm", "couples_samples", "joint_loss", "groups", "state",
            "cannot_run" or "unexplained"; with the verdict "undecided": "draws_by_sample", "unrepeatable" or
            "no_gradient"; "randomness" is a note.
        where: the affected module, loss term or parameter.
        says: the observation, with figures.
        change: the fix; empty if none is needed.
        breaks_equality: whether it makes the gradients differ.
        prevents_verdict: whether it prevents a comparison of gradients, so that the verdict is "undecided".
    """

    code: str
    where: str
    says: str
    change: str
    breaks_equality: bool = True
    prevents_verdict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The un-split batch against several cuts, and the reasons where they differ. `print(report)` shows all of it.

    Attributes:
        num_samples: samples in the batch.
        precision: number type that the check ran in, and why if it is not float64.
        tolerance: relative error that rounding alone may cause there.
        splits: one result for each cut, with everything in place as the user has it, except what findings with
            `breaks_equality=False` say was set aside.
        findings: reasons.
    """

    num_samples: int
    precision: str
    tolerance: float
    splits: tuple[SplitResult, ...]
    findings: tuple[CheckFinding, ...]

    @property
    def verdict(self) -> SplitVerdict:
        """The worst of all cuts."""
        order: tuple[SplitVerdict, ...] = ("exact", "equal up to rounding", "undecided", "not equal")
        return max((split.verdict for split in self.splits), key=order.index)

    @property
    def equal(self) -> bool:
        """Whether every cut gives the gradient of the un-split batch; False where that is undecided."""
        return self.verdict not in ("undecided", "not equal")

    @property
    def reason(self) -> str | None:
        """Why the verdict is "undecided"; None if it is not."""
        return next((finding.says for finding in self.findings if finding.prevents_verdict), None)

    def __str__(self) -> str:
        """Return the table of cuts and the findings."""
        lines = [f"{self.num_samples} samples, {self.precision}", ""]
        shown = [in_words(split.sizes) for split in self.splits]
        width = max(len("micro-batches"), *map(len, shown))
        lines.append(f"  {'micro-batches':<{width}}  gradient error  verdict")
        for sizes, split in zip(shown, self.splits, strict=True):
            error = "cannot run" if split.failure else f"{split.error:.1e}"
            differs = split.verdict in ("undecided", "not equal") and split.error != 0
            worst = f", most in {split.worst!r}" if differs and split.worst is not None else ""
            lines.append(f"  {sizes:<{width}}  {error:>14}  {split.verdict}{worst}")
        for number, finding in enumerate(self.findings, 1):
            lines += ["", f"{number}. {finding.says}"]
            if finding.change:
                lines.append(f"   Change: {finding.change}")
        return "\n".join([*lines, "", f"verdict: {self.verdict}"])


def in_words(sizes: Sequence[int]) -> str:
    """Return sizes of micro-batches in short: `2 x 5 + 2`."""
    runs = [(size, len(list(run))) for size, run in itertools.groupby(sizes)]
    return " + ".join(f"{number} x {size}" if number > 1 else str(size) for size, number in runs)


def verdict_of(error: float, tolerance: float) -> SplitVerdict:
    """Return the verdict on a relative error where rounding alone may cause `tolerance`."""
    if math.isnan(error):
        return "not equal"
    if error <= EXACT:
        return "exact"
    return "equal up to rounding" if error <= tolerance else "not equal"
