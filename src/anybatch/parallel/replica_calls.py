"""One call of a model as calls of its replicas: arguments are cut by samples, outputs are joined again.

Shapes show which arguments and outputs carry samples. If an argument is ambiguous, the call is not cut; an output that
cannot be joined exactly is refused.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.core.splitting import even_parts
from anybatch.core.tree import has_rows, map_leaves, merge_trees, slice_samples
from anybatch.errors import CompositionError, DataError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments, and keyword arguments."""
Owned = Collection[tuple[int, int]]
"""Address and first stride of each tensor of a micro-batch, whose first axis is known to be the sample."""
SURE = 3
"""Minimum samples for parts of different sizes, so that outputs show which of their axes follow the samples."""


@dataclass(slots=True)
class OutputForm:
    """Properties of a model's outputs, from the first call of its kind.

    Attributes:
        rows: by path, the rows per sample; 0 for an output that does not follow the samples. Empty before the first
            call.
        draws: whether the model has drawn random numbers; None before the first call.
    """

    rows: dict[str, int] = field(default_factory=dict)
    draws: bool | None = None


@dataclass(frozen=True, slots=True)
class CutCall:
    """A call in parts.

    Attributes:
        ranges: (first sample, exclusive end) of each part, in order.
        is_cut: function (leaf) -> whether it is cut; every part gets the others whole.
        arguments: of the call.
        form: known properties of the outputs.
    """

    ranges: tuple[tuple[int, int], ...]
    is_cut: Callable[[Any], bool]
    arguments: Arguments
    form: OutputForm

    def part(self, number: int, of_tensor: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Arguments:
        """Return the arguments of one part.

        `of_tensor` is a function (a tensor or its slice for this part, the tensor) -> the replica's argument.
        """
        start, stop = self.ranges[number]

        def piece(leaf: Any) -> Any:  # noqa: ANN401 (a tensor, list, array or anything else)
            own = slice_samples(leaf, start, stop) if self.is_cut(leaf) else leaf
            return of_tensor(own, leaf) if isinstance(own, torch.Tensor) else own

        positional, named = self.arguments
        return tuple(map_leaves(value, piece) for value in positional), {
            name: map_leaves(value, piece) for name, value in named.items()
        }

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor among the arguments, each once."""
        return [leaf for leaf in _leaves(self.arguments) if isinstance(leaf, torch.Tensor)]

    def join(self, outputs: Sequence[Any], join_rows: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> Any:  # noqa: ANN401 (the model's)
        """Return the outputs of all parts as the whole call's, or raise a `CompositionError` if that is not exact."""
        if any(isinstance(one, PackedSequence) for one in (outputs[0], *_items(outputs[0]))):
            message = _refused("a PackedSequence", "its rows are in the order of time and not of samples")
            raise CompositionError(message)
        sizes = [stop - start for start, stop in self.ranges]
        try:
            return merge_trees(outputs, lambda path, leaves: self._merged(path, leaves, sizes, join_rows))
        except DataError as error:
            message = _refused("its output", f"replicas return different structures ({error})")
            raise CompositionError(message) from error

    def _merged(
        self,
        path: str,
        leaves: Sequence[Any],
        sizes: Sequence[int],
        join_rows: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    ) -> Any:  # noqa: ANN401 (a tensor or anything else)
        what = f"its output{path}"
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if len(tensors) != len(leaves):
            if all(leaf is leaves[0] or (type(leaf) is type(leaves[0]) and leaf == leaves[0]) for leaf in leaves):
                return leaves[0]
            raise CompositionError(_refused(what, f"it is {leaves[0]!r} on one replica and another thing elsewhere"))
        rows = self.form.rows.setdefault(path, _rows_per_sample(tensors, sizes))
        if rows > 1:
            why = (
                f"it has {rows} rows for each sample, and shapes do not show whether the rows of a sample follow each "
                "other or come in separate blocks, as two views in one tensor do"
            )
            raise CompositionError(_refused(what, why))
        if rows and all(len(one) == rows * size for one, size in zip(tensors, sizes, strict=True)):
            if len({one.shape[1:] for one in tensors}) == 1:
                return join_rows(tensors)
            shapes = " and ".join(str(tuple(one.shape)) for one in tensors)
            raise CompositionError(_refused(what, f"rows have different shapes on replicas: {shapes}"))
        shape = tuple(tensors[0].shape)
        if any(one.requires_grad for one in tensors):
            kind = "a scalar" if not shape else f"of shape {shape}"
            raise CompositionError(_refused(what, f"it is {kind}, and each replica has computed its own"))
        if not all(_same(one, tensors[0]) for one in tensors):
            raise CompositionError(_refused(what, f"replicas have returned different values of shape {shape}"))
        return tensors[0]


class CallCutter:
    """Cuts calls of one model into at most `num_parts`, and remembers the outputs of each kind of call."""

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._forms: dict[tuple[object, ...], OutputForm] = {}

    def cut(self, arguments: Arguments, kind: tuple[object, ...], num_samples: int, owned: Owned) -> CutCall | str:
        """Return a call in parts, or a clause with the reason why it is not cut.

        `kind` distinguishes calls beyond their arguments, such as the mode of the model; `owned` are the micro-batch's
        tensors.
        """
        leaves = _leaves(arguments)
        cut = [has_rows(leaf, num_samples) for leaf in leaves]
        if not any(cut):
            return f"no argument has the micro-batch's {num_samples} samples as its first axis"
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if len(tensors) > 1 and any(num_samples in tensor.shape[1:] for tensor in tensors):
            strange = [one for one in tensors if has_rows(one, num_samples) and address(one) not in owned]
            if strange:
                return (
                    f"an argument of shape {tuple(strange[0].shape)} is not from the micro-batch, and an axis of "
                    f"{num_samples} may be the axis of its {num_samples} samples or not"
                )
        form = self._forms.setdefault((*kind, tuple(arguments[1]), tuple(cut)), OutputForm())
        num_parts = min(self._num_parts, num_samples)
        if form.draws is False:
            sizes = even_parts(num_samples, num_parts)
        elif num_samples < SURE:
            return f"{num_samples} samples are too few to see which outputs follow them"
        else:  # in all calls of a model that draws: a repeated micro-batch has to draw the same numbers
            sizes = _uneven_parts(num_samples, num_parts)
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + size)
        return CutCall(tuple(pairwise(ends)), lambda leaf: has_rows(leaf, num_samples), arguments, form)


def address(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the start of a tensor's memory and its row stride: equal for slices of its columns."""
    return tensor.untyped_storage().data_ptr(), tensor.stride(0) if tensor.dim() else 0


def _uneven_parts(total: int, num_parts: int) -> tuple[int, ...]:
    """Return part sizes of which two differ, so that only samples can have matching rows in each part.

    `total` is at least 3, and `num_parts` from 2 to `total`.
    """
    sizes = even_parts(total, num_parts)
    if sizes[0] != sizes[-1]:
        return sizes
    if sizes[0] == 1:  # one sample each
        return even_parts(total, num_parts - 1)
    return (sizes[0] + 1, *sizes[1:-1], sizes[-1] - 1)


def _rows_per_sample(tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> int:
    """Return the number of rows per sample, equal for all tensors; 0 if it differs."""
    if any(not tensor.dim() or tensor.layout is not torch.strided or tensor.is_nested for tensor in tensors):
        return 0
    rows = len(tensors[0]) // sizes[0]
    return rows if all(len(one) == rows * size for one, size in zip(tensors, sizes, strict=True)) else 0


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other.to(one.device))


def _leaves(arguments: Arguments) -> list[Any]:
    """Return the leaves of all arguments, each once."""
    found: dict[int, Any] = {}

    def note(leaf: Any) -> Any:  # noqa: ANN401 (a tensor or anything else)
        found[id(leaf)] = leaf
        return leaf

    for value in (*arguments[0], *arguments[1].values()):
        map_leaves(value, note)
    return list(found.values())


def _items(output: Any) -> tuple[Any, ...]:  # noqa: ANN401 (the model's)
    if isinstance(output, Mapping):
        return tuple(output.values())
    return tuple(output) if isinstance(output, (tuple, list)) else ()


def _refused(what: str, why: str) -> str:
    return (
        f"strategy 'data_parallel' cannot join what the replicas of the model have returned: {what}: {why}. Return one "
        "value or row for each sample, as (samples, ...) tensors, and compute losses, means and everything that is one "
        "for the whole batch in the loss function; or use strategy='all_reduce' (torchrun), which cuts nothing that a "
        "model is called with."
    )
