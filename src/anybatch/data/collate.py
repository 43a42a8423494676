"""Collate functions for samples of different lengths: padded to the longest sample of a micro-batch, or packed.

They are called for each micro-batch separately, after the effective batch has been split into micro-batches.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor

from anybatch.core.geometry import ceil_div, checked_int, require
from anybatch.core.token_budget import SampleLengths
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

    Samples are mappings (such as rows of a Hugging Face tokenizer), tuples, or tensors; fields are lists of numbers,
    arrays or tensors. A field with one entry per token is padded; a field with a single number becomes a vector. In
    plain PyTorch, for one field: `torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)`.

    Attributes:
        padding: padding value by field name; by default -100 for `labels` and `label_ids`, and 0 for other fields. Pass
            the tokeniser's: `{"input_ids": tokenizer.pad_token_id}`.
        side: "right" for padding at the end of a sample, "left" for padding at its beginning.
        multiple_of: lengths are rounded up to a multiple of this number, for kernels that need it or for fewer shapes.
        longest: maximum length; longer samples are truncated. None: no truncation.
        mask: name of the mask that is added to mappings without one: 1 for tokens and 0 for padding; None: add no mask.
        shift: whether a model or loss predicts each label from the token before. Then a sample's first label is masked
            if the padding is on the left.
    """

    padding: Mapping[str, float] = field(default_factory=dict, hash=False)
    side: Literal["right", "left"] = "right"
    multiple_of: int = 1
    longest: int | None = None
    mask: str | None = _MASK
    shift: bool = True

    def __post_init__(self) -> None:
        """Check each value.

        Raises:
            DataError: a value is invalid.
        """
        if self.side not in ("right", "left"):
            message = f"side={self.side!r} must be 'right' or 'left'."
            raise DataError(message)
        checked_int("multiple_of", self.multiple_of, error=DataError)
        if self.longest is not None:
            checked_int("longest", self.longest, error=DataError)

    def __call__(self, samples: list[Any]) -> Any:  # noqa: ANN401 (structured as the samples are)
        """Return the samples as one padded batch.

        Raises:
            DataError: samples differ in their fields, or a sample's fields differ in length.
        """
        rows, names = _rows(samples, self.longest)
        lengths = [_length(row, names, number) for number, row in enumerate(rows)]
        longest = ceil_div(max(lengths), self.multiple_of) * self.multiple_of
        fields = {}
        for name in names:
            column = [row[name] for row in rows]
            if self.shift and self.side == "left" and name in _PADDING:
                column = _without_first(column)
            fill = self.padding.get(str(name), _PADDING.get(str(name), 0))
            fields[name] = self._padded(column, longest, fill) if column[0].ndim else torch.stack(column)
        if isinstance(samples[0], Mapping):
            if self.mask is not None and self.mask not in fields:
                ones = [torch.ones(length, dtype=torch.int64) for length in lengths]
                fields[self.mask] = self._padded(ones, longest, 0)
            return fields
        return _like(samples[0], fields)

    def _padded(self, column: Sequence[Tensor], longest: int, fill: float) -> Tensor:
        first = column[0]
        padded = first.new_full((len(column), longest, *first.shape[1:]), fill)
        for number, row in enumerate(column):
            start = longest - len(row) if self.side == "left" else 0
            padded[number, start : start + len(row)] = row
        return padded


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A collate function that concatenates the samples of a micro-batch in one row, without padding.

    The model must not attend from one sample to another: models of transformers do not if `position_ids` restart and
    there is no attention mask, and custom models can use `cu_seqlens`.

    Attributes:
        longest: maximum length; longer samples are truncated. None: no truncation.
        shift: whether a model or loss predicts each label from the token before. Then a sample's first label is masked,
            because it would be predicted from the last token of another sample.
        boundaries: whether to add `cu_seqlens` (the start of each sample and the end of the last) and `max_seqlen`, for
            packed-attention kernels.
    """

    longest: int | None = None
    shift: bool = True
    boundaries: bool = False

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        """Return the samples, which are mappings, as one packed row.

        Raises:
            DataError: samples are not mappings, differ in their fields, or a sample's fields differ in length.
        """
        if not isinstance(samples[0], Mapping):
            message = f"Packed needs samples that are mappings, but one is a {type(samples[0]).__name__}. Use a dict."
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
                    f"field {name!r} has one number per sample, but packed samples share one row. Leave the field out."
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
    """A collate function that pads or packs, whichever is faster on the first batch of an engine with a token budget.

    The gradient is the same. The choice is stored in `engine.decisions["layout"]` and in checkpoints, so that a resumed
    run repeats it. Micro-batches are padded if the engine finds that packed samples affect each other, if there is no
    token budget, or if choices based on timing are disabled.

    Attributes:
        padded: the collate function that pads.
        packed: the collate function that packs, with the same `longest` and `shift`.
    """

    padded: Padded = field(default_factory=Padded)
    packed: Packed = field(default_factory=Packed)

    def __post_init__(self) -> None:
        """Check that both have the same `longest` and `shift`.

        Raises:
            DataError: one of these values differs.
        """
        for name in ("longest", "shift"):
            values = getattr(self.padded, name), getattr(self.packed, name)
            if values[0] != values[1]:
                message = (
                    f"padded has {name}={values[0]}, but packed has {name}={values[1]}. Give both the same value, or "
                    "losses would differ."
                )
                raise DataError(message)

    def __call__(self, samples: list[Any]) -> Any:  # noqa: ANN401 (structured as the samples are)
        """Return the samples as one padded batch; the loader calls `packed` itself if packing is faster."""
        return self.padded(samples)


def _rows(samples: Sequence[Any], longest: int | None) -> tuple[list[dict[Any, Tensor]], list[Any]]:
    """Return the fields of each sample as tensors, and the names (or indices) of the fields, in order."""
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
            message = (
                f"sample 0 of a micro-batch has the fields {names}, but sample {number} has {list(row)}. Return the "
                "same fields for every sample."
            )
            raise DataError(message)
    return rows, names


def _without_first(column: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat([row.new_tensor([IGNORED]), row[1:]]) if len(row) else row for row in column]


def _shortened(value: Tensor, longest: int | None) -> Tensor:
    return value[:longest] if value.ndim and longest is not None else value


def _length(row: Mapping[Any, Tensor], names: Sequence[Any], number: int) -> int:
    lengths = {name: len(row[name]) for name in names if row[name].ndim}
    if len(set(lengths.values())) != 1:
        message = (
            f"sample {number} of a micro-batch has fields of different lengths, {lengths}, but a sample is padded or "
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
"""A list of lengths by sample id; the name of a column or field whose value or `len()` is the length; or a function."""


class KnownLengths:
    """The lengths of a data set's samples, with the layout of its collate function; `dataset` is None for a stream.

    Raises:
        DataError: the number of lengths is not the number of samples, or a length is not a whole number.
    """

    def __init__(self, lengths: Lengths, collate: Collate, dataset: Any | None) -> None:  # noqa: ANN401 (torch has no type for it)
        has_both = isinstance(collate, PaddedOrPacked)
        if isinstance(collate, PaddedOrPacked):
            collate = collate.padded
        # Collators of transformers have the second name.
        multiple_of = collate.multiple_of if isinstance(collate, Padded) else getattr(collate, "pad_to_multiple_of", 1)
        packed = isinstance(collate, Packed)
        self._layout = SampleLengths(tokens=(), packed=packed, has_both_layouts=has_both, multiple_of=multiple_of or 1)
        self._longest = collate.longest if isinstance(collate, (Padded, Packed)) else None
        self._dataset = dataset
        self._lengths = lengths
        self._all: list[int] | None = None
        self._known: dict[int, int] = {}
        if isinstance(lengths, str):
            # Reading a column of numbers from a table is cheap, and a column of lists is read only once.
            if dataset is not None and lengths in getattr(dataset, "column_names", ()):
                self._all = [_checked(_length_of(value)) for value in dataset[lengths]]
        elif not callable(lengths):
            self._all = _listed(lengths, dataset)

    def of(self, sample_ids: Sequence[int], samples: Iterable[Any] | None = None) -> SampleLengths:
        """Return the lengths of the samples with the given ids; `samples` are the loaded samples of a stream.

        A sample of unknown length is loaded once.
        """
        if samples is not None:
            tokens = [self._sample_length(sample) for sample in samples]
        elif self._all is not None:
            tokens = [self._all[sample_id] for sample_id in sample_ids]
        else:
            missing = [sample_id for sample_id in sample_ids if sample_id not in self._known]
            if missing:
                assert self._dataset is not None
                with preserved_random_state():
                    self._known |= {number: self._sample_length(self._dataset[number]) for number in missing}
            tokens = [self._known[sample_id] for sample_id in sample_ids]
        if self._longest is not None:
            tokens = [min(length, self._longest) for length in tokens]
        return replace(self._layout, tokens=tokens)

    def _sample_length(self, sample: Any) -> int:  # noqa: ANN401 (a sample may be anything)
        if callable(self._lengths):
            return _checked(self._lengths(sample))
        try:
            return _checked(_length_of(sample[self._lengths]))
        except (KeyError, IndexError, TypeError) as error:
            has = sorted(map(str, sample)) if isinstance(sample, Mapping) else f"type {type(sample).__name__}"
            message = (
                f"lengths={self._lengths!r} is not a field of a sample, which has {has}. Pass a field or function."
            )
            raise DataError(message) from error


def _listed(lengths: Any, dataset: Any | None) -> list[int]:  # noqa: ANN401 (the user's)
    """Return the user's lengths as a list of whole numbers, one for each sample of a data set."""
    is_valid = hasattr(lengths, "__len__")
    require(is_valid, "lengths", lengths, "a list, the name of a field, or a function of a sample", DataError)
    if dataset is None:
        message = (
            "lengths is a list, but samples of a stream have no index. Pass a function of a sample, such as "
            "lengths=lambda sample: len(sample['input_ids']), or the name of the field."
        )
        raise DataError(message)
    if len(lengths) != len(dataset):
        message = f"lengths has {len(lengths):,} entries, but there are {len(dataset):,} samples. Pass one for each."
        raise DataError(message)
    return list(map(_checked, lengths.tolist() if hasattr(lengths, "tolist") else lengths))


def _length_of(value: Any) -> int:  # noqa: ANN401 (a number, or anything with a length)
    shape = getattr(value, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else int(value)
    return len(value) if isinstance(value, (Sequence, Mapping)) else value


def _checked(length: Any) -> int:  # noqa: ANN401 (the result of a user function)
    if type(length) is int and length >= 0:  # the usual case
        return length
    plain = length.item() if hasattr(length, "item") else length
    return checked_int(
        "a sample's length", plain, minimum=0, error=DataError, hint="Count whole tokens, pixels, frames."
    )
