"""The report on a loop: a verdict, findings with both values, and a table of its optimizer steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

MAX_PRINTED_STEPS = 8


class LoopVerdict(StrEnum):
    """How the gradients of a loop stand to those of un-split batches."""

    EXACT = "exact"
    CONSTANT_FACTOR = "equal up to a constant factor"
    NOT_EQUAL = "not equal"
    UNDECIDED = "cannot be judged"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFinding:
    """One thing about a loop that is not as its author thinks.

    Attributes:
        code: its name, for programs.
        what: what the loop does, in a sentence.
        found: the value that shows it.
        expected: the value of a right loop.
        where: lines of the loop's file, as far as they are known.
        change: what to change.
        in_gradient: whether gradients are wrong because of it; else it costs time, or misleads.
        is_undecided: whether it keeps gradients from being judged, right or wrong.
    """

    code: str
    what: str
    found: str
    expected: str
    where: str
    change: str
    in_gradient: bool = True
    is_undecided: bool = False

    def __str__(self) -> str:
        """Return it as a paragraph."""
        values = f"found {self.found}; expected {self.expected}"
        return "\n  ".join((f"{self.code} ({self.where})", self.what, values, self.change))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The micro-batches and weights of one optimizer step.

    Attributes:
        step: its number, from 1.
        micro_batches: samples of each forward since the step before, rank by rank.
        found: sample -> its weight in the gradient that the optimizer met; samples without weight are left out.
        expected: sample -> its weight in the gradient of the un-split batch of these micro-batches.
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
        verdict: on its gradients.
        findings: most important first; none if all is well.
        windows: its optimizer steps, over two epochs.
        accumulation_steps: those given to it, or, where it has no parameter for them, those it used.
        num_ranks: ranks it ran on.
        remarks: aspects that could not be judged, and why.
        written: files that it wrote, in the folder of its own that is gone.
    """

    loop: str
    verdict: LoopVerdict
    findings: tuple[LoopFinding, ...]
    windows: tuple[Window, ...]
    accumulation_steps: int
    num_ranks: int
    remarks: tuple[str, ...] = ()
    written: tuple[str, ...] = ()

    @property
    def codes(self) -> frozenset[str]:
        """The names of the findings."""
        return frozenset(finding.code for finding in self.findings)

    def __str__(self) -> str:
        """Return verdict, findings and table, as `anybatch check --loop` prints them."""
        ranks = f" on {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        head = f"{self.loop}: {self.verdict} (accumulation steps {self.accumulation_steps}{ranks})"
        number = len(self.findings)
        count = f"{number or 'no'} finding{'s' * (number != 1)}"
        remarks = list(self.remarks)
        if self.written:
            named = ", ".join(self.written[:5]) + (", ..." if len(self.written) > 5 else "")  # noqa: PLR2004
            remarks.append(f"It wrote {named} to a folder of its own, which is gone; nothing of yours was touched.")
        paragraphs = [f"{head}; {count}", *map(str, self.findings), *remarks, self.table()]
        return "\n\n".join(paragraphs)

    def table(self) -> str:
        """Return the steps as a table: which samples, with which weights, and which there should be."""
        rows = [("step", "samples", "weight", "expected")]
        for window in self.windows[:MAX_PRINTED_STEPS]:
            rows += [
                (str(window.step) if first else "", *row)
                for first, row in zip(_first_only(), _rows(window), strict=False)
            ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        if len(self.windows) > MAX_PRINTED_STEPS:
            lines.append(f"... and {len(self.windows) - MAX_PRINTED_STEPS} more steps")
        return "\n".join(lines)


def fraction(weight: float) -> str:
    """Return a weight as people write it: 1/12 where it is that, else four digits."""
    near = Fraction(weight).limit_denominator(400)
    if near.numerator != 0 and abs(float(near) - weight) <= 1e-6 * abs(weight):
        return str(near)
    return f"{weight:.4g}"


def ranges(numbers: Sequence[int]) -> str:
    """Return whole numbers the short way: 0-3, 8."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _first_only() -> Sequence[bool]:
    return [True, *[False] * 1000]


def _rows(window: Window) -> list[tuple[str, str, str]]:
    """Return (samples, weight, expected) for every group of samples that have both in common."""
    groups: dict[tuple[str, str], list[int]] = {}
    for sample in sorted(window.found.keys() | window.expected.keys()):
        pair = fraction(window.found.get(sample, 0.0)), fraction(window.expected.get(sample, 0.0))
        groups.setdefault(pair, []).append(sample)
    return [(ranges(samples), *pair) for pair, samples in groups.items()]
