"""Run a trainer on all cases, and report for each split whether it is correct, or which known fault it has."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from anybatch.core.comparison import Gradients, relative_error
from anybatch.testing.conformance.adapters import HandWrittenLoop, LoopFault
from anybatch.testing.conformance.cases import CASES
from anybatch.testing.conformance.protocol import Adapter, Case, SplitCase, TrainerStep, num_samples

_NAMED: tuple[LoopFault, ...] = ("mean of means", "constant divisor", "duplicated samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case with one split.

    Attributes:
        case: name of the case.
        micro_batch_size: the split.
        error: largest relative error of a step's gradient; infinite where steps are missing, or the trainer raised.
        reason: the reason of a failure, in a sentence; empty on success.
    """

    case: str
    micro_batch_size: int
    error: float
    reason: str

    @property
    def passed(self) -> bool:
        """Whether the split is correct."""
        return not self.reason


@dataclass(frozen=True, slots=True)
class Table:
    """The verdicts on a trainer, one row per case and split."""

    adapter: str
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        """Whether all splits are correct."""
        return all(row.passed for row in self.rows)

    @property
    def failures(self) -> tuple[Row, ...]:
        """The failed rows."""
        return tuple(row for row in self.rows if not row.passed)

    def __str__(self) -> str:
        """Return the verdicts as lines."""
        cells = [("case", "micro-batch", "error", "verdict")]
        cells += [(row.case, str(row.micro_batch_size), f"{row.error:.1e}", row.reason or "exact") for row in self.rows]
        widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
        return "\n".join([f"{self.adapter}: {len(self.rows) - len(self.failures)} of {len(self.rows)} hold", *lines])


def run(adapter: Adapter, cases: Sequence[Case] = CASES, *, tolerance: float = 1e-12) -> Table:
    """Run a trainer on all cases.

    Each step's gradient and, if the trainer reports them, its samples are compared with the plain un-split computation.

    Args:
        adapter: the trainer.
        cases: the cases to run.
        tolerance: largest relative error, in float64, that counts as equal.
    """
    rows = []
    for case in cases:
        expected = case.expected()
        rows += [_row(adapter, SplitCase(case, size), expected, tolerance) for size in case.micro_batch_sizes]
    return Table(adapter.name, tuple(rows))


def _row(adapter: Adapter, split: SplitCase, expected: Sequence[Gradients], tolerance: float) -> Row:
    try:
        steps = list(adapter.steps(split))
    except Exception as error:  # noqa: BLE001 (any error is a verdict)
        return _verdict(split, float("inf"), f"raised {type(error).__name__}: {error}")
    # Not strict: different numbers of steps are a separate verdict, below.
    errors = [relative_error(step.gradients, gradient) for step, gradient in zip(steps, expected, strict=False)]
    if len(steps) != len(expected):
        partial_tail = num_samples(split.samples()) % split.effective_batch_size
        why = "dropped tail: " if partial_tail and len(steps) == len(expected) - 1 else ""
        return _verdict(split, float("inf"), f"{why}{len(steps)} steps, expected {len(expected)}")
    about_samples = _about_samples(split, steps)
    wrong = [number for number, error in enumerate(errors) if not error <= tolerance]  # NaN is wrong too
    if not wrong:
        return _verdict(split, max(errors), about_samples)
    # The known faulty loops run as references: the one with equal gradients names the fault.
    named = [fault for fault in _NAMED if _is_fault(split, fault, steps, tolerance)]
    why = about_samples or " or ".join(named) or "another gradient"
    return _verdict(split, max(errors, key=_nan_first), f"{why} (step {wrong[0] + 1} of {len(steps)})")


def _verdict(split: SplitCase, error: float, reason: str) -> Row:
    return Row(case=split.case.name, micro_batch_size=split.micro_batch_size, error=error, reason=reason)


def _about_samples(split: SplitCase, steps: Sequence[TrainerStep]) -> str:
    """Return the fault in the samples that a trainer reports; empty without a fault, or without a report."""
    if any(step.sample_ids is None for step in steps):
        return ""
    times = Counter(sample for step in steps for sample in step.sample_ids or ())
    every = range(num_samples(split.samples()))
    twice, never = [s for s in times if times[s] > 1], [s for s in every if not times[s]]
    if twice:
        return f"duplicated samples: {sorted(twice)}"
    return f"missing samples: {never}" if never else ""


def _is_fault(split: SplitCase, fault: LoopFault, steps: Sequence[TrainerStep], tolerance: float) -> bool:
    """Return whether the gradients match the hand-written loop with this fault."""
    others = list(HandWrittenLoop(fault).steps(split))
    return len(others) == len(steps) and all(
        relative_error(step.gradients, other.gradients) <= tolerance for step, other in zip(steps, others, strict=True)
    )


def _nan_first(error: float) -> float:
    return float("inf") if error != error else error  # noqa: PLR0124 (only NaN differs from itself)
