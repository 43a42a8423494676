"""The report on a loop: a verdict, findings and a table of its optimizer steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from anybatch.diagnostics.loop_check.findings import LoopFinding, fraction

_MAX_PRINTED_STEPS, _MAX_PRINTED_FILES = 8, 5


class LoopVerdict(StrEnum):
    """How the gradients of a loop compare with those of un-split batches."""

    EXACT = "exact"
    CONSTANT_FACTOR = "equal up to a constant factor"
    UNDECIDED = "cannot be judged"
    NOT_EQUAL = "not equal"


_VERDICTS = {
    frozenset[str](): LoopVerdict.EXACT,
    frozenset({"constant_factor"}): LoopVerdict.CONSTANT_FACTOR,
    frozenset({"draws_random_numbers"}): LoopVerdict.UNDECIDED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The micro-batches and weights of one optimizer step.

    Attributes:
        step: its number, from 1.
        micro_batches: samples of each forward since the step before, rank by rank.
        found: sample -> its weight in the gradient that the optimizer used; samples without weight are left out.
        expected: sample -> its weight in the gradient of the un-split batch. Samples whose loss has no gradient (a
            masked target, say) are in neither.
    """

    step: int
    micro_batches: tuple[tuple[int, ...], ...]
    found: Mapping[int, float]
    expected: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopReport:
    """The report on a training loop.

    Attributes:
        loop: its name.
        findings: most important first; none if all is well.
        windows: its optimizer steps, over two epochs.
        accumulation_steps: given to the loop; if it has no parameter for them, the number that it used.
        num_ranks: ranks it ran on.
        remarks: aspects that could not be judged, and why.
        written: files that it wrote, in the temporary copy of the working folder.
        not_copied: files and folders that the temporary copy left out, because they are large.
    """

    loop: str
    findings: tuple[LoopFinding, ...]
    windows: tuple[Window, ...]
    accumulation_steps: int
    num_ranks: int
    remarks: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    not_copied: tuple[str, ...] = ()

    @property
    def verdict(self) -> LoopVerdict:
        """The verdict on its gradients."""
        wrong = frozenset(finding.code for finding in self.findings if finding.in_gradient)
        return _VERDICTS.get(wrong, LoopVerdict.NOT_EQUAL)

    @property
    def codes(self) -> frozenset[str]:
        """The codes of the findings."""
        return frozenset(finding.code for finding in self.findings)

    def __str__(self) -> str:
        """Return verdict, findings and table, as `anybatch check --loop` prints them."""
        ranks = f" on {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        number = len(self.findings)
        count = f"{number or 'no'} finding{'s' * (number != 1)}"
        head = f"{self.loop}: {self.verdict} (accumulation steps {self.accumulation_steps}{ranks}); {count}"
        remarks = list(self.remarks)
        if self.written:
            remarks.append(f"Written to a temporary copy of the folder, now deleted: {shortened(self.written)}.")
        if self.not_copied:
            remarks.append(f"Left out of that copy, because they are large: {shortened(self.not_copied)}.")
        return "\n\n".join([head, *map(str, self.findings), *remarks, self.table()])

    def table(self) -> str:
        """Return the steps as a table: samples, their weights, and the expected weights."""
        rows = [("step", "samples", "weight", "expected")]
        for window in self.windows[:_MAX_PRINTED_STEPS]:
            rows += [("" if index else str(window.step), *row) for index, row in enumerate(_rows(window))]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        if len(self.windows) > _MAX_PRINTED_STEPS:
            lines.append(f"... and {len(self.windows) - _MAX_PRINTED_STEPS} more steps")
        return "\n".join(lines)


def _rows(window: Window) -> list[tuple[str, str, str]]:
    """Return (samples, weight, expected weight) for each group of samples with the same weights."""
    groups: dict[tuple[str, str], list[int]] = {}
    for sample in sorted(window.found.keys() | window.expected.keys()):
        weights = fraction(window.found.get(sample, 0.0)), fraction(window.expected.get(sample, 0.0))
        groups.setdefault(weights, []).append(sample)
    return [(ranges(samples), *weights) for weights, samples in groups.items()]


def ranges(numbers: Sequence[int]) -> str:
    """Return whole numbers as ranges: 0-3, 8."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def shortened(names: Sequence[str]) -> str:
    """Return the first names of a list."""
    return ", ".join(names[:_MAX_PRINTED_FILES]) + (", ..." if len(names) > _MAX_PRINTED_FILES else "")
