"""Chooses the most informative samples of an effective batch, and lists their possible counts."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from anybatch.core.batch import picked
from anybatch.core.loss import Loss, tokens, unit_counts
from anybatch.core.tree import Batch, copied, read_samples, tensors_of

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
            each = tokens(lambda row: row, shift=shift).count
            assert each is not None
            counts[f"labels={name}, shift={shift}"] = [float(each(row)) for row in labels.split(1)]
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
                each = tokens(lambda row: row, shift=shift, ignore_index=value).count
                assert each is not None
                counts = [float(each(row)) for row in labels.split(1)]
                found[f"labels={name}, ignore_index={value}, shift={shift}"] = counts
    return found


def _targets(batch: Batch) -> dict[str, torch.Tensor]:
    """Return possible masked targets: several integers per sample, some of them -100, or named like targets."""
    return {
        name: value
        for name, value in _integers(batch)
        if value.dim() > 1 and (bool((value == _IGNORED).any()) or (value.dim() == 2 and _names_targets(name)))  # noqa: PLR2004
    }


def _masks(batch: Batch) -> dict[str, torch.Tensor]:
    """Return possible masks by name: tensors of zeros and ones, with several per sample."""
    named = batch.items() if isinstance(batch, Mapping) else ()
    return {
        repr(name): value
        for name, value in named
        if isinstance(value, torch.Tensor) and value.dim() > 1 and bool(((value == 0) | (value == 1)).all())
    }


def _names_targets(name: str) -> bool:
    return any(word in name.lower() for word in ("label", "target"))


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
