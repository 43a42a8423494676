"""The check's comparison: the gradient of a few samples in one piece, and the sum of smaller pieces' gradients."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from anybatch.core.batch import select_each
from anybatch.core.loss import Loss, unit_counts
from anybatch.core.tree import Batch, copied, mark_and_count, tensors_of
from anybatch.engine.loss_check.fixed_draws import FixedDraws
from anybatch.engine.loss_check.runs import (
    Gradients,
    LossRuns,
    NotFiniteError,
    NothingToCompareError,
    Piece,
    UndecidedError,
    difference,
)
from anybatch.errors import LossError

MAX_SAMPLES = 8
Orders = tuple[list[int], list[int]]
FEW_SAMPLES = 4
"""With fewer samples, only the split with single samples decides, since other splits detect fewer faults."""
_IGNORED = -100
_WEIGHT_OF_COUNTS = 3.0


@dataclass(frozen=True, slots=True)
class SampleSource:
    """Samples from which the check chooses a few.

    `pick` returns a batch for each list of positions; if `reads_again`, it reads the samples from the data set in each
    call. `real_units` are the positions of this rank's micro-batches.
    """

    positions: Sequence[int]
    pick: Callable[[Sequence[Sequence[int]]], Iterator[Batch]]
    num_candidates: int
    real_units: Sequence[Sequence[int]] = ()
    reads_again: bool = False

    def repeatable(self) -> "SampleSource":
        """Return the source, or samples in memory if the data set returns other values in each read."""
        if not self.reads_again:
            return self
        first = self.positions[:2]
        values, again = (list(tensors_of(batch)) for batch in self.pick([first, first]))
        if len(values) == len(again) and all(map(torch.equal, values, again)):
            return self
        batch, number = mark_and_count(next(self.pick([_spread(self.positions, self.num_candidates)])))
        return SampleSource(range(number), functools.partial(select_each, batch), number)


def choose(loss: Loss, source: SampleSource, max_samples: int) -> Orders:
    """Return the positions of samples for the check, and the same positions sorted by similarity."""
    try:
        orders = _different(loss, source, max_samples)
        next(source.pick([orders[0][::-1]]))
    except Exception:  # noqa: BLE001 (the user's class of batches may support slices, but no reordering)
        first = list(source.positions[:max_samples])
        return first, first
    return orders


def _different(loss: Loss, source: SampleSource, max_samples: int) -> Orders:
    """Return the positions of samples that differ as much as possible, and the same positions sorted by similarity.

    The features of a sample are its counts (items in each loss term) and, for each tensor, the mean, the numbers of
    -100s and zeros, and the size. The selection starts with the samples of the lowest counts, and then always adds the
    sample farthest from all selected samples. The order by similarity follows the first principal component.
    """
    positions = _spread(source.positions, source.num_candidates)
    rows = [_features(loss, batch) for batch in source.pick([[position] for position in positions])]
    width = max(map(len, rows))
    table = torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=torch.float64).nan_to_num()
    table = (table - table.mean(0)) / table.std(0, unbiased=False).clamp(min=1e-12)
    table[:, : len(loss.names)] *= _WEIGHT_OF_COUNTS
    num_first = 2 if max_samples > FEW_SAMPLES else 1
    chosen = sorted(range(len(rows)), key=lambda number: (rows[number][0], number))[:num_first]
    distances = torch.stack([(table - table[number]).norm(dim=1) for number in chosen]).amin(0)
    while len(chosen) < min(max_samples, len(rows)):
        distances[chosen] = -1.0
        chosen.append(int(distances.argmax()))
        distances = torch.minimum(distances, (table - table[chosen[-1]]).norm(dim=1))
    centred = table[chosen] - table[chosen].mean(0)
    order = (centred @ torch.linalg.svd(centred, full_matrices=False).Vh[0]).argsort(stable=True).tolist()
    selected = [positions[number] for number in chosen]
    return selected, [selected[number] for number in order]


def splits(
    chosen: Sequence[int], by_similarity: Sequence[int], source: SampleSource
) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """Yield positions and sizes of pieces: first single samples, then even sizes, pairs, and the step's micro-batches.

    Small pieces reveal more effects of thresholds, such as a margin, the hardest samples, or a capacity.
    """
    number, varied = len(chosen), list(chosen)
    yield varied, _sizes(number, 1, 1, 1, 2)
    if number >= FEW_SAMPLES:
        yield varied, _sizes(number, 2, 2)
        yield list(by_similarity), _sizes(number, 2, 4)
    in_order = list(source.positions[: number // 2 * 2])
    for group in (2, 4):
        if len(in_order) > group:
            yield in_order, (group, len(in_order) - group)
    if len(source.real_units) > 1:
        units = source.real_units[:2]
        yield list(itertools.chain.from_iterable(units)), tuple(map(len, units))


def _sizes(number: int, *first: int) -> tuple[int, ...]:
    """Return as many of these sizes as fit, from the first on, and the remaining number."""
    sizes = list(first)
    while sum(sizes) >= number:
        sizes.pop()
    return (*sizes, number - sum(sizes))


def _spread(positions: Sequence[int], max_number: int) -> list[int]:
    """Return at most `max_number` positions, evenly spaced."""
    if len(positions) <= max_number:
        return list(positions)
    return [positions[round(number * (len(positions) - 1) / (max_number - 1))] for number in range(max_number)]


def _features(loss: Loss, sample: Batch) -> list[float]:
    row = [float(count) for count in unit_counts(loss, copied(sample), 1)]
    for tensor in tensors_of(sample):
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_complex() or not tensor.numel():
            row += [0.0] * 4
            continue
        ignored, zeros = int((tensor == _IGNORED).sum()), int((tensor == 0).sum())
        row += [float(tensor.double().mean()), float(ignored), float(zeros), float(tensor.numel())]
    return row


TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""Smaller relative differences are rounding; after a larger difference, the comparison is repeated in float64."""
_WIDE_TOLERANCES = {torch.float64: 1e-5, torch.float32: 3e-4}
"""Tolerances in float64 and float32; not smaller, since some models compute parts in float32 with any parameters."""
_DEFINITE = 30.0
"""If the model cannot run in float64, a difference above this multiple of the tolerance is not rounding."""
_COUNT_TOLERANCE = 1e-5
_MAX_LETTERS = 100

Agree = Callable[[float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of the check."""

    kind: Literal["holds", "broken", "undecided"]
    reason: str = ""
    is_harmless: bool = False  # undecided for a reason that does not suggest a fault
    error: float = 0.0  # relative difference of the parameter that differs most
    tolerance: float = 0.0
    parameter: str = ""
    pieces: tuple[Piece, ...] = ()  # first all samples in one piece, then the smaller pieces
    # For a count that is not additive: the term, the count of all samples, the sum of the pieces' counts.
    counts: tuple[str, float, float] | None = None
    is_scalar: bool = False  # the loss function returned one number
    # The error of a broken declaration.
    message: str = ""
    cause: str | None = None
    term: str | None = None

    @property
    def is_certain(self) -> bool:
        """Whether the declaration is broken for a reason other than different gradients."""
        return self.kind == "broken" and (self.counts is not None or bool(self.reason))

    @property
    def full(self) -> Piece:
        """All samples in one piece."""
        return self.pieces[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of samples of each smaller piece."""
        return tuple(piece.num_samples for piece in self.pieces[1:])


def judge(
    runs: LossRuns, source: SampleSource, *, max_samples: int = MAX_SAMPLES, agree: Agree = lambda number: number
) -> Verdict:
    """Return whether the gradients of pieces, weighted as declared, add up to the gradient of all samples together."""
    if len(source.positions) < 2:  # noqa: PLR2004 (one sample has no pieces)
        return Verdict(kind="undecided", reason="there is only one sample", is_harmless=True)
    source = source.repeatable()
    chosen = choose(runs.parts.loss, source, max_samples)
    verdict = _tried(runs, source, chosen, agree)
    if verdict.is_harmless and len(source.positions) > len(chosen[0]):
        # Try more samples: a hinge loss, for example, has a gradient of zero for most samples.
        verdict = _tried(runs, source, choose(runs.parts.loss, source, 4 * max_samples), agree)
    if verdict.kind != "holds" and not verdict.is_harmless and agree(float(runs.draws.num_draws)):
        # Try constant draws, since samples may not be along the first axis, or a loop over samples may draw.
        varied, runs.draws = runs.draws, FixedDraws(constant=True)
        constant = _tried(runs, source, chosen, agree)
        if constant.kind != "undecided" or verdict.kind == "undecided":
            return constant
        runs.draws = varied
    return verdict


def _tried(runs: LossRuns, source: SampleSource, orders: Orders, agree: Agree) -> Verdict:
    """Try splits until one decides: one with single samples if gradients agree, another one if they differ."""
    even: list[Verdict] = []
    single: Verdict | None = None
    failure = Verdict(kind="undecided", reason="no split could be run")
    for positions, sizes in splits(*orders, source):
        if len(even) > 1:
            break
        verdict, is_final = _attempted(runs, source, positions, sizes, agree)
        has_single = 1 in sizes
        if is_final or verdict.kind == ("holds" if has_single else "broken"):
            return verdict
        if verdict.kind == "undecided":
            failure = verdict
        elif not has_single:
            even.append(verdict)
        elif len(orders[0]) < FEW_SAMPLES:
            return verdict
        else:
            single = verdict
    if single is None or not even:
        return even[0] if even else single or failure
    reason = (
        f"pieces of one sample differ by {single.error:.1e} from all {single.full.num_samples} samples, but pieces of "
        "even sizes agree (samples in pairs or groups, or a threshold?)"
    )
    return dataclasses.replace(single, kind="undecided", reason=reason)


def _attempted(
    runs: LossRuns, source: SampleSource, positions: Sequence[int], sizes: Sequence[int], agree: Agree
) -> tuple[Verdict, bool]:
    """Compare one split; also return whether the verdict is final, so that other splits need not be tried."""
    try:
        verdict = _compared(runs, source, positions, sizes, agree)
    except torch.OutOfMemoryError:
        return Verdict(kind="undecided", reason="it ran out of memory"), True
    except NothingToCompareError as error:
        return Verdict(kind="undecided", reason=str(error), is_harmless=True), True
    except UndecidedError as error:
        return Verdict(kind="undecided", reason=str(error)), False
    except Exception as error:  # noqa: BLE001 (the step itself raises errors of the batch)
        line = next(iter(str(error).splitlines()), "")[:_MAX_LETTERS]
        return Verdict(kind="undecided", reason=f"{type(error).__name__}: {line}"), False
    return verdict, verdict.kind == "undecided" or verdict.is_certain


def _compared(
    runs: LossRuns, source: SampleSource, positions: Sequence[int], sizes: Sequence[int], agree: Agree
) -> Verdict:
    """Compare the sum of the pieces' gradients with the gradient of all samples in one piece."""
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    rows = [list(positions), *(list(positions[start : start + n]) for start, n in zip(starts, sizes, strict=True))]
    pieces = tuple(map(Piece, source.pick(rows), map(len, rows)))
    try:
        if (broken := _broken_count(runs, pieces)) is not None:
            return broken
        full = runs.gradient(pieces[:1], is_full=True)
    except LossError as failure:  # the step raises it too, unless it would have to read a count from a device
        return Verdict(kind="broken", reason=str(failure), pieces=pieces)
    except NotFiniteError as failure:
        raise NothingToCompareError(str(failure)) from failure
    error, index = difference(full, runs.gradient(pieces[1:]))
    verdict = Verdict(
        kind="holds",
        error=agree(error),
        tolerance=TOLERANCES.get(runs.narrowest, max(TOLERANCES.values())),
        parameter=runs.names[index],
        pieces=pieces,
    )
    if verdict.error <= verdict.tolerance:
        return verdict
    if reason := _why_unrepeatable(runs, verdict, full, agree):
        return dataclasses.replace(verdict, kind="undecided", reason=reason)
    return _rounding_or_not(runs, verdict)


def _rounding_or_not(runs: LossRuns, verdict: Verdict) -> Verdict:
    """Repeat the comparison in float64, to distinguish rounding from a real difference."""
    error, dtype = verdict.error, runs.narrowest
    try:
        if dtype is not torch.float64:
            with runs.widened() as dtype:
                full = runs.gradient(verdict.pieces[:1], is_full=True)
                error, index = difference(full, runs.gradient(verdict.pieces[1:]))
                verdict = dataclasses.replace(verdict, parameter=runs.names[index])
    except NotFiniteError:
        raise
    except Exception:  # noqa: BLE001 (not every model runs in float64)
        if verdict.error > verdict.tolerance * _DEFINITE:
            return dataclasses.replace(verdict, kind="broken")
        reason = (
            f"pieces differ by {verdict.error:.1e}, which is close to rounding, and the model cannot run in float64"
        )
        return dataclasses.replace(verdict, kind="undecided", reason=reason)
    tolerance = _WIDE_TOLERANCES[dtype]
    if error <= tolerance:
        return dataclasses.replace(verdict, reason="the difference is rounding")
    return dataclasses.replace(verdict, kind="broken", error=error, tolerance=tolerance)


def _broken_count(runs: LossRuns, pieces: Sequence[Piece]) -> Verdict | None:
    """Return a broken verdict if a count is not additive (`len` of a dict, or `clamp(min=1)`), otherwise None."""
    whole, *parts = map(runs.counts, pieces)
    for name, count, column in zip(runs.parts.loss.names, whole, zip(*parts, strict=True), strict=True):
        if abs(sum(column) - count) > _COUNT_TOLERANCE * max(count, sum(column)):
            return Verdict(kind="broken", pieces=tuple(pieces), counts=(name, count, sum(column)))
    return None


def _why_unrepeatable(runs: LossRuns, verdict: Verdict, full: Gradients, agree: Agree) -> str:
    """Return why two runs of the same samples differ, as a clause; empty if their gradients are equal."""
    if runs.draws.unknown:
        return f"torch draws random numbers that cannot be fixed ({', '.join(sorted(runs.draws.unknown))})"
    repeated = agree(difference(full, runs.gradient(verdict.pieces[:1]))[0])
    if repeated > verdict.tolerance:
        return (
            f"two runs of the same samples differ by {repeated:.1e}: the loss or the model updates and reads Python "
            "numbers"
        )
    if runs.has_aligned_draws:
        return ""
    runs.seed = 1
    try:
        reseeded = agree(difference(full, runs.gradient(verdict.pieces[:1]))[0])
    finally:
        runs.seed = 0
    if reseeded > verdict.tolerance:
        return "the loss or the model draws random numbers from Python or numpy, which cannot be fixed"
    return ""
