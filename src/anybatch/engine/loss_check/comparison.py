"""The check's comparison: the gradient of a few samples in one piece, and the sum over uneven pieces of them."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from anybatch.core.batch import picked
from anybatch.core.loss import Loss, tokens, unit_counts
from anybatch.core.loss_kinds import SAMPLES
from anybatch.core.tree import Batch, copied, read_samples, tensors_of
from anybatch.engine.loss_check.held import HeldDraws
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
FEW_SAMPLES = 4
"""With at most this many samples the first split decides, since others detect less."""
_IGNORED = -100
_MOST_PADDINGS = 3
_WEIGHT_OF_COUNTS = 3.0


@dataclass(frozen=True, slots=True)
class SampleSource:
    """Samples to choose from."""

    places: Sequence[int]
    pick: Callable[[Sequence[Sequence[int]]], Iterator[Batch]]
    num_candidates: int
    real_units: Sequence[Sequence[int]] = ()
    reads_again: bool = False

    def repeatable(self) -> "SampleSource":
        """Return the source, or samples in memory if a data set returns other values at each read."""
        if not self.reads_again:
            return self
        first = self.places[:2]
        one, other = (list(tensors_of(batch)) for batch in self.pick([first, first]))
        if len(one) == len(other) and all(map(torch.equal, one, other)):
            return self
        batch, number = read_samples(next(self.pick([_spread(self.places, self.num_candidates)])))
        return SampleSource(range(number), functools.partial(picked, batch), number)


def choose(loss: Loss, source: SampleSource, max_samples: int) -> tuple[list[int], list[int]]:
    """Return the places of samples that differ as much as possible, and the same places sorted by similarity.

    Features of a sample are its counts and, for each tensor, the mean, the numbers of -100s and zeros, and the size.
    Farthest-point selection starts with the two lowest counts, and adds the sample that is farthest from all chosen
    ones. The second order follows the first principal component, so that its pieces differ most from each other.
    """
    places = _spread(source.places, source.num_candidates)
    rows = [_described(loss, batch) for batch in source.pick([[place] for place in places])]
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
    found = [places[number] for number in chosen]
    return found, [found[number] for number in order]


def splits(
    chosen: Sequence[int], alike: Sequence[int], source: SampleSource
) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """Yield places and the sizes of their pieces: with single samples, then even sizes, pairs, and real micro-batches.

    Many small pieces show more threshold effects, such as a margin, the hardest samples, or a capacity.
    """
    number, varied = len(chosen), list(chosen)
    yield varied, _sizes(number, 1, 1, 1, 2)
    if number >= FEW_SAMPLES:
        yield varied, _sizes(number, 2, 2)
        yield list(alike), _sizes(number, 2, 4)
    in_order = list(source.places[: number // 2 * 2])
    for group in (2, 4):
        if len(in_order) > group:
            yield in_order, (group, len(in_order) - group)
    if len(source.real_units) > 1:
        units = source.real_units[:2]
        yield list(itertools.chain.from_iterable(units)), tuple(map(len, units))


def _sizes(number: int, *first: int) -> tuple[int, ...]:
    """Return the first of these sizes that fit, then the remainder."""
    sizes = list(first)
    while sum(sizes) >= number:
        sizes.pop()
    return (*sizes, number - sum(sizes))


def _spread(places: Sequence[int], most: int) -> list[int]:
    """Return at most `most` places, evenly spaced."""
    if len(places) <= most:
        return list(places)
    return [places[round(number * (len(places) - 1) / (most - 1))] for number in range(most)]


def _described(loss: Loss, sample: Batch) -> list[float]:
    row = [float(count) for count in unit_counts(loss, copied(sample), 1)]
    for tensor in tensors_of(sample):
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_complex() or not tensor.numel():
            row += [0.0] * 4
            continue
        ignored, zeros = int((tensor == _IGNORED).sum()), int((tensor == 0).sum())
        row += [float(tensor.double().mean()), float(ignored), float(zeros), float(tensor.numel())]
    return row


def candidates(batch: Batch, num_samples: int) -> dict[str, list[float]]:
    """Return possible counts of the samples by declaration: ones, the targets in their labels, or a mask."""
    counts = {"samples": [1.0] * num_samples}
    for name, labels in _targets(batch).items():
        for shift in (True, False):
            counts[f"labels={name}, shift={shift}"] = _token_counts(labels, shift=shift)
    for name, mask in _masks(batch).items():
        counts[f"count=lambda batch: batch[{name}].sum()"] = [float(row.sum()) for row in mask.split(1)]
    return counts


def paddings(batch: Batch, num_samples: int) -> dict[str, list[float]]:
    """Return possible counts of the samples by declaration, if a value other than -100 marks ignored targets."""
    found = {}
    for name, labels in _integers(batch):
        if labels.dim() < 2 or labels.shape[0] != num_samples:  # noqa: PLR2004
            continue
        values, times = labels.unique(return_counts=True)
        # The most frequent values, and typical values of padding: 0, -1 and the largest.
        likely = {0, -1, int(values.max()), *values[times.argsort(descending=True)[:_MOST_PADDINGS]].tolist()}
        for value in sorted(likely - {_IGNORED}):
            for shift in (True, False):
                counts = _token_counts(labels, shift=shift, ignored=value)
                found[f"labels={name}, ignore_index={value}, shift={shift}"] = counts
    return found


def _token_counts(labels: torch.Tensor, *, shift: bool, ignored: int = _IGNORED) -> list[float]:
    count = tokens(lambda row: row, shift=shift, ignore_index=ignored).count
    assert count is not None
    return [float(count(row)) for row in labels.split(1)]


def _targets(batch: Batch) -> dict[str, torch.Tensor]:
    """Return possible masked targets: several integers per sample, some of them -100, or named like targets."""
    found = {}
    for name, value in _integers(batch):
        is_named = value.dim() == 2 and any(word in name.lower() for word in ("label", "target"))  # noqa: PLR2004
        if value.dim() > 1 and (is_named or bool((value == _IGNORED).any())):
            found[name] = value
    return found


def _masks(batch: Batch) -> dict[str, torch.Tensor]:
    """Return possible masks by name: tensors of zeros and ones, with several per sample."""
    named = batch.items() if isinstance(batch, Mapping) else ()
    return {
        repr(name): value
        for name, value in named
        if isinstance(value, torch.Tensor) and value.dim() > 1 and bool(((value == 0) | (value == 1)).all())
    }


def _integers(batch: Batch) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the integer tensors at the top level of a batch, with their name in a declaration."""
    if isinstance(batch, Mapping):
        named = {repr(key): value for key, value in batch.items()}
    elif dataclasses.is_dataclass(batch):
        named = {repr(field.name): getattr(batch, field.name) for field in dataclasses.fields(batch)}
    elif isinstance(batch, (tuple, list)):
        named = {f"lambda batch: batch[{place}]": value for place, value in enumerate(batch)}
    else:
        named = {}
    for name, value in named.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.dtype in (torch.int64, torch.int32):
            yield name, value


TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""Smaller differences are rounding; larger ones are compared again in a wider type."""
_WIDE_TOLERANCES = {torch.float64: 1e-5, torch.float32: 3e-4}
"""Not smaller, since some models compute parts in float32 with parameters of any type."""
_DEFINITE = 30.0
"""Without a wider type, a difference above this multiple of the tolerance is not rounding."""
_COUNT_TOLERANCE = 1e-5
_MOST_LETTERS = 100

Agree = Callable[[float], float]
_Orders = tuple[list[int], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of the check."""

    kind: Literal["holds", "broken", "undecided"]
    reason: str = ""
    is_harmless: bool = False  # undecided for a reason that does not suggest a fault
    fits_others: bool = False  # other declarations would hold too, since all these samples have equal counts
    error: float = 0.0  # relative difference of the parameter that differs most
    tolerance: float = 0.0
    parameter: str = ""
    pieces: tuple[Piece, ...] = ()  # the samples in one piece, then in several
    # For a count that is not additive: the term, the count of all samples, the sum of the pieces' counts.
    counts: tuple[str, float, float] | None = None
    is_scalar: bool = False  # the loss function returned one number
    # The error of a broken declaration.
    message: str = ""
    cause: str | None = None
    term: str | None = None

    @property
    def is_certain(self) -> bool:
        """Whether it is broken for a reason other than a difference of gradients."""
        return self.kind == "broken" and (self.counts is not None or bool(self.reason))

    @property
    def full(self) -> Piece:
        """The samples in one piece."""
        return self.pieces[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each piece."""
        return tuple(piece.num_samples for piece in self.pieces[1:])


def judge(
    runs: LossRuns, source: SampleSource, *, max_samples: int = MAX_SAMPLES, agree: Agree = lambda number: number
) -> Verdict:
    """Return whether pieces of some samples, weighted as declared, add up to the gradient of all of them."""
    if len(source.places) < 2:  # noqa: PLR2004 (one sample has no pieces)
        return Verdict(kind="undecided", reason="there is only one sample", is_harmless=True)
    source = source.repeatable()
    chosen = _chosen(runs, source, max_samples)
    verdict = _tried(runs, source, chosen, agree)
    if verdict.is_harmless and len(source.places) > len(chosen[0]):
        # A hinge loss has a gradient of zero for most samples.
        verdict = _tried(runs, source, _chosen(runs, source, 4 * max_samples), agree)
    if verdict.kind != "holds" and not verdict.is_harmless and agree(float(runs.draws.num_draws)):
        # Samples may be along another axis than the first, or draw in a loop.
        varied, runs.draws = runs.draws, HeldDraws(constant=True)
        constant = _tried(runs, source, chosen, agree)
        if constant.kind != "undecided" or verdict.kind == "undecided":
            return constant
        runs.draws = varied
    return verdict


def _chosen(runs: LossRuns, source: SampleSource, max_samples: int) -> _Orders:
    try:
        chosen = choose(runs.parts.loss, source, max_samples)
        next(source.pick([chosen[0][::-1]]))
    except Exception:  # noqa: BLE001 (a user's batch class may support slices but not reordering)
        first = list(source.places[:max_samples])
        return first, first
    return chosen


def _tried(runs: LossRuns, source: SampleSource, orders: _Orders, agree: Agree) -> Verdict:
    """Try splits until one decides: equal gradients with single samples, or different ones without single samples."""
    even: list[Verdict] = []
    single: Verdict | None = None
    failure = Verdict(kind="undecided", reason="no split could be run")
    for places, sizes in splits(*orders, source):
        if len(even) > 1:
            break
        verdict, is_final = _attempted(runs, source, places, sizes, agree)
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
    runs: LossRuns, source: SampleSource, places: Sequence[int], sizes: Sequence[int], agree: Agree
) -> tuple[Verdict, bool]:
    """Compare one split; also return whether the verdict is final, because other splits would show no more."""
    try:
        verdict = _compared(runs, source, places, sizes, agree)
    except torch.OutOfMemoryError:
        return Verdict(kind="undecided", reason="it ran out of memory"), True
    except NothingToCompareError as error:
        return Verdict(kind="undecided", reason=str(error), is_harmless=True), True
    except UndecidedError as error:
        return Verdict(kind="undecided", reason=str(error)), False
    except Exception as error:  # noqa: BLE001 (the step itself raises errors of the batch)
        line = next(iter(str(error).splitlines()), "")[:_MOST_LETTERS]
        return Verdict(kind="undecided", reason=f"{type(error).__name__}: {line}"), False
    return verdict, verdict.kind == "undecided" or verdict.is_certain


def _compared(
    runs: LossRuns, source: SampleSource, places: Sequence[int], sizes: Sequence[int], agree: Agree
) -> Verdict:
    """Compare one split with the samples in one piece."""
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    cut = [list(places), *(list(places[start : start + size]) for start, size in zip(starts, sizes, strict=True))]
    pieces = tuple(map(Piece, source.pick(cut), map(len, cut)))
    try:
        if (verdict := _counted(runs, pieces)) is not None:
            return verdict
        full = runs.gradient(pieces[:1], is_full=True)
    except LossError as failure:  # the step raises it too, unless it does not wait for a count on a device
        return Verdict(kind="broken", reason=str(failure), pieces=pieces)
    except NotFiniteError as failure:
        raise NothingToCompareError(str(failure)) from failure
    error, place = difference(full, runs.gradient(pieces[1:]))
    found = Verdict(
        kind="holds",
        fits_others=_counts_alike(runs, pieces),
        error=agree(error),
        tolerance=TOLERANCES.get(runs.narrowest, max(TOLERANCES.values())),
        parameter=runs.names[place],
        pieces=pieces,
    )
    if found.error <= found.tolerance:
        return found
    if reason := _why_unrepeatable(runs, found, full, agree):
        return dataclasses.replace(found, kind="undecided", reason=reason)
    return _rounding_or_not(runs, found)


def _rounding_or_not(runs: LossRuns, found: Verdict) -> Verdict:
    """Repeat the comparison in float64, to distinguish rounding from a real difference."""
    error, place, dtype = found.error, 0, runs.narrowest
    try:
        if dtype is not torch.float64:
            with runs.widened() as dtype:
                full = runs.gradient(found.pieces[:1], is_full=True)
                error, place = difference(full, runs.gradient(found.pieces[1:]))
                found = dataclasses.replace(found, parameter=runs.names[place])
    except NotFiniteError:
        raise
    except Exception:  # noqa: BLE001 (not every model runs in float64)
        if found.error > found.tolerance * _DEFINITE:
            return dataclasses.replace(found, kind="broken")
        reason = f"pieces differ by {found.error:.1e}, which is close to rounding, and the model cannot run in float64"
        return dataclasses.replace(found, kind="undecided", reason=reason)
    tolerance = _WIDE_TOLERANCES[dtype]
    if error <= tolerance:
        return dataclasses.replace(found, reason="the difference is rounding")
    return dataclasses.replace(found, kind="broken", error=error, tolerance=tolerance)


def _counted(runs: LossRuns, pieces: Sequence[Piece]) -> Verdict | None:
    """Return a broken verdict if a count is not additive (`len` of a dict, or `clamp(min=1)`), otherwise None."""
    whole, *parts = map(runs.counts, pieces)
    for name, count, column in zip(runs.parts.loss.names, whole, zip(*parts, strict=True), strict=True):
        if abs(sum(column) - count) > _COUNT_TOLERANCE * max(count, sum(column)):
            return Verdict(kind="broken", pieces=tuple(pieces), counts=(name, count, sum(column)))
    return None


def _counts_alike(runs: LossRuns, pieces: Sequence[Piece]) -> bool:
    """Return whether all samples have equal counts in a term that does not count samples, so that other items fit."""
    loss = runs.parts.loss
    if loss.kind.brings_count or loss.kind.encode is not None:
        return False
    of_samples = [[count / piece.num_samples for count in runs.counts(piece)] for piece in pieces]
    terms = list(loss.kind.terms.values())
    return any(
        term.items.name != SAMPLES.name and len(set(column)) == 1
        for term, column in zip(terms, zip(*of_samples, strict=True), strict=True)
    )


def _why_unrepeatable(runs: LossRuns, found: Verdict, full: Gradients, agree: Agree) -> str:
    """Return why two runs of the same samples differ, as a clause; empty if they agree."""
    if runs.draws.unknown:
        return f"torch draws random numbers that cannot be fixed ({', '.join(sorted(runs.draws.unknown))})"
    repeated = agree(difference(full, runs.gradient(found.pieces[:1]))[0])
    if repeated > found.tolerance:
        return (
            f"two runs of the same samples differ by {repeated:.1e}: the loss or the model updates and reads Python "
            "numbers"
        )
    if runs.has_aligned_draws:
        return ""
    runs.seed = 1
    try:
        reseeded = agree(difference(full, runs.gradient(found.pieces[:1]))[0])
    finally:
        runs.seed = 0
    if reseeded > found.tolerance:
        return "the loss or the model draws random numbers from Python or numpy, which cannot be fixed"
    return ""
