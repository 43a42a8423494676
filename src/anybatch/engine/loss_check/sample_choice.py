"""Which samples of a micro-batch can tell one declaration of a loss from another."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch

from anybatch.core.loss import Loss, tokens, unit_counts
from anybatch.core.loss_kinds import SAMPLES
from anybatch.core.tree import Batch, map_tensors, slice_samples, tensors_of

_NUMBERS = (7, 5, 6, 8, 4, 3, 2)
"""How many samples are looked at: few, since they cost a forward; a number that no other axis has, if possible."""
_MOST_WINDOWS = 4
_IGNORED = -100
_MOST_PADDINGS = 3


def choose_samples(loss: Loss, batch: Batch, num_samples: int) -> tuple[Batch, int, dict[str, str]]:
    """Return a few samples, how many, and by term why they can not tell its declaration from others, if they cannot."""
    elsewhere = {size for tensor in tensors_of(batch) for size in tensor.shape[1:]}
    # False sorts before True, and sorting is stable: numbers that are no other length first, by preference.
    possible = sorted((one for one in _NUMBERS if one <= num_samples), key=lambda number: number in elsewhere)
    windows = ((start, n) for n in possible for start in range(0, num_samples - n + 1, n)[:_MOST_WINDOWS])
    found: tuple[Batch, int, dict[str, str]] | None = None
    for start, number in windows:
        chosen = slice_samples(batch, start, start + number)
        doubtful = doubts(loss, chosen, number)
        if found is None or not any(doubtful.values()):
            found = chosen, number, doubtful
        if not any(doubtful.values()):
            break
    assert found is not None, "there are two samples at least"
    return found


def sample_counts(loss: Loss, batch: Batch, num_samples: int) -> dict[str, list[float]]:
    """Return what each sample counts for each term."""
    # One sample at a time, since a count function returns one number for all that it is given.
    rows = [unit_counts(loss, slice_samples(batch, number, number + 1), 1) for number in range(num_samples)]
    return {name: [row[place] for row in rows] for place, name in enumerate(loss.names)}


def candidates(batch: Batch, num_samples: int) -> dict[str, list[float]]:
    """Return what samples may count as, by how that is declared: ones, the targets in their labels, or a mask."""
    found = {"samples": [1.0] * num_samples}
    for name, labels in _targets(batch).items():
        for shift in (True, False):
            each = tokens(lambda row: row, shift=shift).count
            assert each is not None
            found[f"labels={name}, shift={shift}"] = [float(each(row)) for row in labels.split(1)]
    for name, mask in _masks(batch).items():
        found[f"count=lambda batch: batch[{name}].sum()"] = [float(row.sum()) for row in mask.split(1)]
    return found


def paddings(batch: Batch, num_samples: int) -> dict[str, list[float]]:
    """Return what samples count as if a value other than -100 marked what is no target, by how that is declared."""
    found = {}
    for name, labels in _integers(batch):
        if labels.dim() < 2 or labels.shape[0] != num_samples:  # noqa: PLR2004
            continue
        values, times = labels.unique(return_counts=True)
        # The most frequent ones, and those at the ends, where padding is mostly put.
        likely = {0, -1, int(values.max()), *values[times.argsort(descending=True)[:_MOST_PADDINGS]].tolist()}
        for value in sorted(likely - {_IGNORED}):
            for shift in (True, False):
                each = tokens(lambda row: row, shift=shift, ignore_index=value).count
                assert each is not None
                counts = [float(each(row)) for row in labels.split(1)]
                found[f"labels={name}, ignore_index={value}, shift={shift}"] = counts
    return found


def doubts(loss: Loss, batch: Batch, num_samples: int) -> dict[str, str]:
    """Return, by term, why these samples cannot tell what its value is a mean over; empty where they can."""
    counts = sample_counts(loss, batch, num_samples)
    labelled = (counted for name, counted in candidates(batch, num_samples).items() if name.startswith("labels="))
    targets = list(labelled)
    classes = [one for _, one in _integers(batch) if one.dim() == 1]
    found = {}
    for name, own in counts.items():
        items = loss.kind.terms[name].items
        found[name] = ""
        if sum(map(bool, own)) < 2:  # noqa: PLR2004 (one sample cannot be cut)
            found[name] = "fewer than two of its samples count anything"
        elif items is not SAMPLES and len(set(own)) == 1:
            found[name] = f"all of its samples count the same, {own[0]:g}"
        elif items is SAMPLES and any(len(set(counted)) == 1 for counted in targets):
            found[name] = "all of its samples have equally many targets"
        elif items is SAMPLES and classes and all(bool((one == one[0]).all()) for one in classes):
            found[name] = "all of its samples have the same label"
    return found


def joined(batches: Sequence[Batch]) -> Batch | None:
    """Return micro-batches as one, or None where they cannot be joined (padded to different lengths, say)."""
    columns = list(zip(*(list(tensors_of(batch)) for batch in batches), strict=True))
    if any(len({tensor.shape[1:] for tensor in column}) > 1 for column in columns):
        return None
    whole = iter([torch.cat(column) if column[0].dim() else column[0] for column in columns])
    return map_tensors(batches[0], lambda _: next(whole))


def _targets(batch: Batch) -> dict[str, torch.Tensor]:
    """Return what may be masked targets: integers with several per sample, some of them masked, or so named."""
    return {
        name: one
        for name, one in _integers(batch)
        if one.dim() > 1 and (bool((one == _IGNORED).any()) or (one.dim() == 2 and _is_named_so(name)))  # noqa: PLR2004
    }


def _masks(batch: Batch) -> dict[str, torch.Tensor]:
    """Return what marks some of several entries per sample: tensors of zeros and ones, under their names."""
    named = batch.items() if isinstance(batch, Mapping) else ()
    return {
        repr(name): one
        for name, one in named
        if isinstance(one, torch.Tensor) and one.dim() > 1 and bool(((one == 0) | (one == 1)).all())
    }


def _is_named_so(name: str) -> bool:
    return any(word in name.lower() for word in ("label", "target"))


def _integers(batch: Batch) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the integer tensors at the top of a batch, under the name that a declaration would call them by."""
    if isinstance(batch, Mapping):
        named = {repr(key): value for key, value in batch.items()}
    elif dataclasses.is_dataclass(batch):
        named = {repr(one.name): getattr(batch, one.name) for one in dataclasses.fields(batch)}
    elif isinstance(batch, (tuple, list)):
        named = {f"lambda batch: batch[{place}]": value for place, value in enumerate(batch)}
    else:
        named = {}
    for name, value in named.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.dtype in (torch.int64, torch.int32):
            yield name, value
