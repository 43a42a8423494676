"""Collate functions for samples of different lengths: padded to the longest of a micro-batch, or packed.

The loader calls them for each micro-batch separately, after the cut.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor

from anybatch.core.geometry import ceil_div, checked_int, refuse_unless
from anybatch.core.token_budget import SampleLengths, Shape, shape_for
from anybatch.data.random_state import preserved_random_state
from anybatch.errors import DataError

Collate = Callable[[list[Any]], Any]
IGNORED: Final = -100
"""Target value that is ignored, by default in torch's `cross_entropy` and in `mean_over_tokens`."""
_PADDING: Final[Mapping[str, int]] = {"labels": IGNORED, "label_ids": IGNORED}
_MASK: Final = "attention_mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """A collate function that pads to the longest sample of a micro-batch, along the first axis of each field.

    Samples are mappings (tokenised rows of Hugging Face, say), tuples, or single tensors; fields are lists of numbers,
    arrays or tensors. Fields with the length of the sample are padded, and single numbers become a vector. The plain
    loop, for one field: `torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)`.

    Attributes:
        padding: padding value by field name; by default -100 for `labels` and 0 for others. Pass the tokeniser's:
            `{"input_ids": tokenizer.pad_token_id}`.
        side: side of the padding.
        multiple_of: lengths are rounded up to a multiple of this, for kernels that need it or for fewer shapes.
        longest: maximum length; longer samples are truncated. None: no truncation.
        mask: name of a field to add to mappings that lack it, 1 for tokens and 0 for padding; None for none.
        shift: whether a model or loss predicts `labels` from the token before, so that a sample's first label is masked
            if padding precedes it.
        shapes: the only shapes of a micro-batch, in rows and tokens, so that compiled code sees no others. Missing rows
            are added, each one token of padding with masked targets: for losses over tokens.
    """

    padding: Mapping[str, float] = field(default_factory=dict, hash=False)
    side: Literal["right", "left"] = "right"
    multiple_of: int = 1
    longest: int | None = None
    mask: str | None = _MASK
    shift: bool = True
    shapes: tuple[Shape, ...] = ()

    def __post_init__(self) -> None:
        """Check each value.

        Raises:
            DataError: a value cannot be used.
        """
        if self.side not in ("right", "left"):
            message = f"side={self.side!r} must be 'right' or 'left'."
            raise DataError(message)
        checked_int("multiple_of", self.multiple_of, error=DataError)
        if self.longest is not None:
            checked_int("longest", self.longest, error=DataError)
        for rows, tokens in self.shapes:
            checked_int("rows of a shape", rows, error=DataError)
            checked_int("tokens of a shape", tokens, error=DataError)
        if self.shapes and self.multiple_of > 1:
            message = f"multiple_of={self.multiple_of} and shapes both set the padded length. Pass one of them."
            raise DataError(message)

    def __call__(self, samples: list[Any]) -> Any:  # noqa: ANN401 (structured as the samples are)
        """Collate.

        Raises:
            DataError: samples differ in their fields, or a sample's fields differ in length.
        """
        rows, names = _rows(samples, self.longest)
        lengths = [_length(row, names, number) for number, row in enumerate(rows)]
        longest = ceil_div(max(lengths), self.multiple_of) * self.multiple_of
        if self.shapes:
            num_rows, longest = shape_for(self.shapes, len(rows), max(lengths))
            rows, lengths = _filled_up(rows, lengths, num_rows, self._fills(names))
        fills, fields = self._fills(names), {}
        for name in names:
            column = [row[name] for row in rows]
            if self.shift and self.side == "left" and name in _PADDING:
                column = _without_first(column)
            fields[name] = torch.stack(column) if not column[0].ndim else self._padded(column, longest, fills[name])
        if isinstance(samples[0], Mapping):
            if self.mask is not None and self.mask not in fields:
                ones = [torch.ones(length, dtype=torch.int64) for length in lengths]
                fields[self.mask] = self._padded(ones, longest, 0)
            return fields
        return _like(samples[0], fields)

    def _fills(self, names: Sequence[Any]) -> dict[Any, float]:
        return {name: self.padding.get(str(name), _PADDING.get(str(name), 0)) for name in names}

    def _padded(self, column: Sequence[Tensor], longest: int, fill: float) -> Tensor:
        first = column[0]
        whole = first.new_full((len(column), longest, *first.shape[1:]), fill)
        for number, row in enumerate(column):
            start = longest - len(row) if self.side == "left" else 0
            whole[number, start : start + len(row)] = row
        return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A collate function that concatenates the samples of a micro-batch in one row, without padding.

    For models that keep samples apart: models of transformers do so if `position_ids` restart and there is no attention
    mask, and custom models can use `cu_seqlens`.

    Attributes:
        longest: maximum length; longer samples are truncated. None: no truncation.
        shift: whether a model or loss predicts `labels` from the token before, so that a sample's first label, which
            would be predicted from another sample's last token, is masked.
        boundaries: whether to add `cu_seqlens`, the start of each sample and the end of the last, and `max_seqlen`, for
            packed-attention kernels.
    """

    longest: int | None = None
    shift: bool = True
    boundaries: bool = False

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        """Collate mappings.

        Raises:
            DataError: samples are not mappings, differ in their fields, or a sample's fields differ in length.
        """
        if not isinstance(samples[0], Mapping):
            message = f"Packed takes samples with named fields, and this one is a {type(samples[0]).__name__}."
            raise DataError(message)
        rows, names = _rows(samples, self.longest)
        lengths = torch.tensor([_length(row, names, number) for number, row in enumerate(rows)])
        packed: dict[str, Any] = {}
        for name in names:
            if name == _MASK:  # packed rows have no padding
                continue
            column = [row[name] for row in rows]
            if not column[0].ndim:
                message = (
                    f"field {name!r} is one number for each sample, and packed samples share one row. Leave it out."
                )
                raise DataError(message)
            if self.shift and name in _PADDING:
                column = _without_first(column)
            packed[name] = torch.cat(column)[None]
        packed["position_ids"] = torch.cat([torch.arange(length) for length in lengths.tolist()])[None]
        if self.boundaries:
            packed["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
            packed["max_seqlen"] = int(lengths.max())
        return packed


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedOrPacked:
    """A collate function that pads or packs, using the faster: both are timed on the first batch of a token budget.

    The gradient is the same. The choice is stored in `engine.decisions["layout"]` and in checkpoints, so that a resumed
    run repeats it. Micro-batches are padded if the engine detects that the model mixes packed samples, without a
    budget, and if decisions by clock are disabled.

    Attributes:
        padded: the padding variant; without `shapes`, which packed rows do not have.
        packed: the packing variant; with the same `longest` and `shift`.
    """

    padded: Padded = field(default_factory=Padded)
    packed: Packed = field(default_factory=Packed)

    def __post_init__(self) -> None:
        """Check that both treat samples alike.

        Raises:
            DataError: they do not.
        """
        if self.padded.shapes:
            message = (
                f"shapes={self.padded.shapes} are for compiled code, and packed rows are of any length. Use Padded."
            )
            raise DataError(message)
        for name in ("longest", "shift"):
            one, other = getattr(self.padded, name), getattr(self.packed, name)
            if one != other:
                message = (
                    f"padded has {name}={one} and packed {name}={other}. Give both the same, or losses would differ."
                )
                raise DataError(message)

    def __call__(self, samples: list[Any]) -> Any:  # noqa: ANN401 (structured as the samples are)
        """Collate as padded, the default."""
        return self.padded(samples)


def _rows(samples: Sequence[Any], longest: int | None) -> tuple[list[dict[Any, Tensor]], list[Any]]:
    """Return the fields of each sample as tensors, and their names, or indices, in order."""
    rows = []
    for sample in samples:
        if isinstance(sample, Mapping):
            named: Mapping[Any, Any] = sample
        else:
            named = dict(enumerate(sample)) if isinstance(sample, tuple) else {None: sample}
        rows.append({name: _shortened(torch.as_tensor(value), longest) for name, value in named.items()})
    names = list(rows[0])
    for number, row in enumerate(rows):
        if list(row) != names:
            message = f"sample 0 of a micro-batch has the fields {names}, and sample {number} {list(row)}."
            raise DataError(message)
    return rows, names


def _filled_up(
    rows: list[dict[Any, Tensor]], lengths: list[int], num_rows: int, fills: Mapping[Any, float]
) -> tuple[list[dict[Any, Tensor]], list[int]]:
    """Add rows of one token of padding: a row without tokens would attend to nothing, and give NaN."""
    missing = num_rows - len(rows)
    empty = {
        name: value[:1].new_full((1, *value.shape[1:]), fills[name]) if value.ndim else value
        for name, value in rows[0].items()
    }
    return [*rows, *[empty] * missing], [*lengths, *[1] * missing]


def _without_first(column: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat([row.new_tensor([IGNORED]), row[1:]]) if len(row) else row for row in column]


def _shortened(value: Tensor, longest: int | None) -> Tensor:
    return value[:longest] if value.ndim and longest is not None else value


def _length(row: Mapping[Any, Tensor], names: Sequence[Any], number: int) -> int:
    lengths = {name: len(row[name]) for name in names if row[name].ndim}
    if len(set(lengths.values())) != 1:
        message = (
            f"sample {number} of a micro-batch has fields of different lengths, {lengths}, and samples are padded or "
            "packed by one length. Write your own collate function for it."
        )
        raise DataError(message)
    return next(iter(lengths.values()))


def _like(sample: Any, fields: Mapping[Any, Any]) -> Any:  # noqa: ANN401 (a tuple, or a single tensor)
    if not isinstance(sample, tuple):
        return fields[None]
    values = list(fields.values())
    return type(sample)(*values) if hasattr(sample, "_fields") else tuple(values)


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
