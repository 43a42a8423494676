"""The length of each sample before it is loaded: given by the user, read from a column, or computed once and cached."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from anybatch.core.token_budget import SampleLengths
from anybatch.core.whole_numbers import checked_int, refuse_unless
from anybatch.data.collate import Packed, Padded, PaddedOrPacked
from anybatch.data.fetch import Collate
from anybatch.data.random_state import preserved_random_state
from anybatch.errors import DataError

Lengths = Sequence[int] | str | Callable[[Any], int]
"""Lengths of all samples by id, the name of a column or field that contains them or has that length, or a function."""


class KnownLengths:
    """The lengths of a data set's samples, and the layout of its collate function; `dataset` is None for a stream.

    Raises:
        DataError: the number of lengths is not the number of samples, or one is not a whole number.
    """

    def __init__(self, lengths: Lengths, collate: Collate, dataset: Any | None) -> None:  # noqa: ANN401 (torch has no type for it)
        self._either = isinstance(collate, PaddedOrPacked)
        if isinstance(collate, PaddedOrPacked):
            collate = collate.padded
        self._packed = isinstance(collate, Packed)
        self._multiple_of, self._shapes = (
            (collate.multiple_of, collate.shapes) if isinstance(collate, Padded) else (1, ())
        )
        self._longest = collate.longest if isinstance(collate, (Padded, Packed)) else None
        self._dataset = dataset
        self._all: list[int] | None = None
        self._known: dict[int, int] = {}
        self._of_sample = _function_of(lengths)
        is_valid = isinstance(lengths, str) or callable(lengths) or hasattr(lengths, "__len__")
        refuse_unless(is_valid, "lengths", lengths, "a list, the name of a field, or a function of a sample", DataError)
        told = _of_all(lengths, dataset)
        if told is not None and dataset is not None:
            if len(told) != len(dataset):
                message = (
                    f"lengths has {len(told):,} entries, and the data set {len(dataset):,} samples. Give one each."
                )
                raise DataError(message)
            self._all = list(map(_checked, told))

    def of(self, sample_ids: Sequence[int], samples: Sequence[Any] | None = None) -> SampleLengths:
        """Return the lengths of some samples by id; loads unknown ones once, unless `samples` of a stream are given."""
        if samples is not None:
            tokens = [_checked(self._of_sample(sample)) for sample in samples]
        elif self._all is not None:
            tokens = [self._all[one] for one in sample_ids]
        else:
            missing = [one for one in sample_ids if one not in self._known]
            if missing:
                self._load(missing)
            tokens = [self._known[one] for one in sample_ids]
        if self._longest is not None:
            tokens = [min(length, self._longest) for length in tokens]
        return SampleLengths(
            tokens=tokens,
            packed=self._packed,
            either=self._either,
            multiple_of=self._multiple_of,
            shapes=self._shapes,
        )

    def _load(self, sample_ids: Iterable[int]) -> None:
        assert self._dataset is not None
        with preserved_random_state():
            for one in sample_ids:
                self._known[one] = _checked(self._of_sample(self._dataset[one]))


def _function_of(lengths: Lengths) -> Callable[[Any], int]:
    if isinstance(lengths, str):
        return partial(_length_of_field, lengths)
    if callable(lengths):
        return lengths

    def refuse(sample: object) -> int:
        del sample
        message = (
            "lengths is a list, but samples of a stream have no index. Give a function of a sample, such as "
            "lengths=lambda sample: len(sample['input_ids']), or the name of the field."
        )
        raise DataError(message)

    return refuse


def _length_of_field(name: str, sample: Any) -> int:  # noqa: ANN401 (a sample may be anything)
    try:
        return _length_of(sample[name])
    except (KeyError, IndexError, TypeError) as error:
        has = (
            f"the fields {sorted(map(str, sample))}" if isinstance(sample, Mapping) else f"type {type(sample).__name__}"
        )
        message = f"lengths={name!r} is not a field of a sample, which has {has}. Pass one of them, or a function."
        raise DataError(message) from error


def _of_all(lengths: Lengths, dataset: Any | None) -> Sequence[int] | None:  # noqa: ANN401
    """Return the lengths of all samples if that needs no loading of samples; otherwise None."""
    if isinstance(lengths, str):
        # Reading a column of numbers from a table is cheap, and a column of lists is read only once.
        if lengths in getattr(dataset, "column_names", ()) and dataset is not None:
            return [_length_of(value) for value in dataset[lengths]]
        return None
    if callable(lengths):
        return None
    return lengths.tolist() if hasattr(lengths, "tolist") else lengths


def _length_of(value: Any) -> int:  # noqa: ANN401 (a number, or anything with a length)
    shape = getattr(value, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else int(value)
    return len(value) if isinstance(value, (Sequence, Mapping)) else value


def _checked(length: Any) -> int:  # noqa: ANN401 (the result of a user function)
    if type(length) is int and length >= 0:  # the usual case
        return length
    plain = length.item() if hasattr(length, "item") else length
    return checked_int("a sample's length", plain, least=0, error=DataError, cure="Count whole tokens, pixels, frames.")
