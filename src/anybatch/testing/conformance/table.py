"""Run a trainer on all cases, and report for each split whether the gradients are correct, or the known fault."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from anybatch.core.loss import Loss, counted, sum_of
from anybatch.core.loss_kinds import Term as EngineTerm
from anybatch.core.tensors import Gradients, relative_error
from anybatch.core.units import columns
from anybatch.engine.engine import Engine
from anybatch.testing.conformance.cases import (
    CASES,
    Adapter,
    Case,
    LossTerms,
    Samples,
    SplitCase,
    TrainerStep,
    gradients_of,
    num_samples,
    parts,
)

LoopFault = Literal["constant divisor", "mean of means", "dropped tail", "duplicated samples"]


class EngineAdapter:
    """`anybatch.Engine`, through its public interface."""

    name = "anybatch"

    def __init__(self, strategy: str = "auto") -> None:
        self._strategy = strategy

    def steps(self, split: SplitCase) -> Iterator[TrainerStep]:
        """Yield the engine's gradient of each effective batch."""
        model, first = split.model(), 0
        with Engine(
            model,
            # Only gradients are computed; this optimizer would change no parameter.
            lambda named: torch.optim.SGD(named, lr=0.0),
            declaration(split.loss),
            micro_batch_size=split.micro_batch_size,
            strategy=self._strategy,
        ) as engine:
            for batch in parts(split.samples(), split.effective_batch_size):
                last = first + num_samples(batch)
                gradients = {
                    # The engine reuses its gradients in the next step.
                    name: None if gradient is None else gradient.clone()
                    for name, gradient in engine.gradients(batch).items()
                }
                yield TrainerStep(gradients, tuple(range(first, last)))
                first = last


def declaration(loss: LossTerms) -> Loss:
    """Return the loss with its declaration for the engine."""
    terms: dict[str, EngineTerm] = {term.name: counted(term.count, weight=term.weight) for term in loss.terms}
    return sum_of(loss.function, **terms)


@dataclass(frozen=True, slots=True)
class HandWrittenLoop:
    """Gradient accumulation as usually written by hand.

    Without a fault, it correctly divides every micro-batch's sums by the counts of the effective batch. With a fault:

    - "mean of means" divides each micro-batch's mean loss by the number of micro-batches in the effective batch;
    - "constant divisor" divides the mean loss by the number of micro-batches in a full effective batch;
    - "dropped tail" skips the step of an effective batch that is not full;
    - "duplicated samples" fills up the last effective batch with the first samples, and is correct otherwise.
    """

    fault: LoopFault | None = None

    @property
    def name(self) -> str:
        """The name in tables, with the fault."""
        return f"hand-written loop: {self.fault or 'right'}"

    def steps(self, split: SplitCase) -> Iterator[TrainerStep]:
        """Yield the gradient of each effective batch."""
        samples, size = split.samples(), split.effective_batch_size
        ids = torch.arange(num_samples(samples))
        for window in ids.split(size):
            if self.fault == "dropped tail" and len(window) < size:
                return
            padding = size - len(window) if self.fault == "duplicated samples" else 0
            filled = torch.cat([window, ids.repeat(-(-padding // len(ids)))[:padding]]) if padding else window
            batch = {name: value[filled] for name, value in samples.items()}
            losses = self._losses(split, batch)
            yield TrainerStep(gradients_of(split.model(), *losses), tuple(filled.tolist()))

    def _losses(self, split: SplitCase, batch: Samples) -> list[Callable[[nn.Module], Tensor]]:
        """Return the loss of each micro-batch, ready for its backward."""
        micro_batches = parts(batch, split.micro_batch_size)
        if self.fault == "constant divisor":
            divisor = -(-split.effective_batch_size // split.micro_batch_size)
        else:
            divisor = len(micro_batches)
        if self.fault in ("constant divisor", "mean of means"):
            return [partial(_plain_mean, split.loss, part, divisor) for part in micro_batches]
        return [partial(_share, split.loss, part, batch) for part in micro_batches]


def _plain_mean(loss: LossTerms, part: Samples, divisor: int, model: nn.Module) -> Tensor:
    """Return a micro-batch's mean loss, divided by a number of micro-batches."""
    means = loss.function(model, part)
    return torch.stack([term.weight * means[term.name] for term in loss.terms]).sum() / divisor


def _share(loss: LossTerms, part: Samples, batch: Samples, model: nn.Module) -> Tensor:
    """Return a micro-batch's loss sums divided by the effective batch's counts; omit terms without items here."""
    means = loss.function(model, part)
    counts = [(term, term.count(part), term.count(batch)) for term in loss.terms]
    shares = [term.weight * means[term.name] * here / all_ for term, here, all_ in counts if here]
    # Without items, return a zero that has a graph, so that the backward still runs.
    return torch.stack(shares).sum() if shares else next(iter(means.values())).nan_to_num(0.0) * 0.0


_DETECTED_FAULTS: tuple[LoopFault, ...] = ("mean of means", "constant divisor", "duplicated samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case with one split.

    `error` is the largest relative error of a step's gradient; infinite if steps are missing or the trainer raised.
    `reason` is the reason for a failure, in a sentence; empty on success.
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
        head = f"{self.adapter}: {len(self.rows) - len(self.failures)} of {len(self.rows)} splits are exact"
        return "\n".join([head, *columns(cells, num_left=4)])


def run(adapter: Adapter, cases: Sequence[Case] = CASES, *, tolerance: float = 1e-12) -> Table:
    """Run a trainer on all cases.

    Each step's gradient and, if the trainer reports them, its samples are compared with the plain unsplit computation.

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
    # Not strict, because different numbers of steps get a separate verdict below.
    errors = [relative_error(step.gradients, gradient) for step, gradient in zip(steps, expected, strict=False)]
    if len(steps) != len(expected):
        partial_tail = num_samples(split.samples()) % split.effective_batch_size
        why = "dropped tail: " if partial_tail and len(steps) == len(expected) - 1 else ""
        return _verdict(split, float("inf"), f"{why}{len(steps)} steps, expected {len(expected)}")
    about_samples = _about_samples(split, steps)
    wrong = [number for number, error in enumerate(errors) if not error <= tolerance]  # NaN is wrong too
    if not wrong:
        return _verdict(split, max(errors), about_samples)
    # A faulty hand-written loop with the same gradients identifies the fault.
    faults = [fault for fault in _DETECTED_FAULTS if _is_fault(split, fault, steps, tolerance)]
    why = about_samples or " or ".join(faults) or "another gradient"
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
