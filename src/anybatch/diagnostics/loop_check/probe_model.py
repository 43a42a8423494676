"""The probe model and data that a loop is run on: the weight of each sample can be read from its gradients.

The model has one parameter, a table with one row per sample, and its output for sample i is

    output_i = constant_i + gain * (table_i - stop_gradient(table_i))

The bracket is zero, so outputs never depend on what an optimizer did to the table, and the loss of a sample has the
same gradient in every step. The gradient of row i is gain * (the weight of sample i) * d loss_i / d output_i: rows do
not mix, so each sample's weight in a gradient can be read from it, whatever the loss is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, get_args

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

TargetKind = Literal["classes", "tokens", "values"]
TARGET_KINDS: tuple[TargetKind, ...] = get_args(TargetKind)
NUM_ROWS = 32
_NUM_OUTPUTS, _NUM_POSITIONS, _IGNORED = 5, 6, -100
_TARGET_NAMES = frozenset({"label", "labels", "target", "targets", "y", "lm_labels", "tgt"})
_NOT_GIVEN = frozenset({"edge_index", "edge_attr", "edge_weight", "batch", "pos", "weight", "mask", "lengths"})
_SIZE_NAMES = frozenset({"batch_size", "num_graphs", "nsentences"})
"""What batches of graphs and sentences have beside inputs and targets, and how many samples they say that they are."""


@dataclass(frozen=True, slots=True)
class ProbeData:
    """Samples that say who they are, the outputs that the model has for them, and targets.

    Attributes:
        kind: "classes" (one class per sample), "values" (as many numbers as outputs) or "tokens" (a class per position,
            of which a different number is masked in each sample).
        inputs: arguments of the model; each sample is recognised by its values.
        targets: what the loss compares with.
        outputs: one row per sample, with a position and an output axis.
    """

    kind: TargetKind
    inputs: Shaped[Tensor, "sample ..."]
    targets: Shaped[Tensor, "sample ..."]
    outputs: Float[Tensor, "sample position output"]

    def ids(self, inputs: Tensor) -> Tensor:
        """Return which samples these inputs are."""
        if self.kind == "tokens":
            return inputs[:, 0].long() // _NUM_POSITIONS
        return inputs.flatten(1).argmax(1)


def make_data(kind: TargetKind, *, is_padded: bool = True, dtype: torch.dtype = torch.float64) -> ProbeData:
    """Return the samples of a kind, the same ones each time.

    Args:
        kind: see `ProbeData`.
        is_padded: tokens are masked; else all are there, as in blocks of a stream.
        dtype: of inputs, outputs and targets that are numbers.
    """
    generator = torch.Generator().manual_seed(5)
    num_positions = _NUM_POSITIONS if kind == "tokens" else 1
    outputs = torch.randn(NUM_ROWS, num_positions, _NUM_OUTPUTS, generator=generator, dtype=torch.float64).to(dtype)
    if kind == "values":
        targets = torch.rand(NUM_ROWS, _NUM_OUTPUTS, generator=generator, dtype=torch.float64).to(dtype)
    else:
        targets = torch.randint(_NUM_OUTPUTS, (NUM_ROWS, num_positions), generator=generator)
    if kind == "tokens":
        # At least two, so that one target is left where a loss shifts the labels.
        lengths = torch.randint(2, num_positions + 1, (NUM_ROWS, 1), generator=generator)
        # Every word occurs once in the data, so the first one says which sample it is.
        words = torch.arange(NUM_ROWS * num_positions).view(NUM_ROWS, num_positions)
        # The first position has no target, so that labels are as many where a loop counts them shifted.
        positions = torch.arange(num_positions)
        masked = targets.masked_fill((positions >= lengths) | (positions == 0), _IGNORED)
        return ProbeData(kind, words, masked if is_padded else targets, outputs)
    # One-hot, so that a sample is recognised by its largest input, also under noise or mixed with another one.
    return ProbeData(kind, 100.0 * torch.eye(NUM_ROWS, dtype=dtype), targets.squeeze(1), outputs)


class ForwardObserver(Protocol):
    """Gets each forward of the probe model, and each pass over its loader."""

    def forward(self, ids: Sequence[int], outputs: Tensor) -> None:
        """Record a forward of these samples."""
        ...

    def begin_pass(self) -> int:
        """Record that a pass over the loader begins, and return its number."""
        ...

    def end_pass(self, number: int) -> None:
        """Record that a pass has come to its end."""
        ...


class RowModel(nn.Module):
    """The model described above. Called in any way, it looks for the inputs; called with labels, it returns a loss too.

    Args:
        data: the samples it knows.
        gain: size of its gradients, as a power of two: small enough for no clipping to act, or large enough for any.
        observer: gets every forward that a backward can follow.
    """

    def __init__(self, data: ProbeData, gain: float, observer: ForwardObserver) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros_like(data.outputs))
        self._data, self._gain, self._observer = data, gain, observer

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (called as the user's loop calls its model)
        """Return one row of outputs per sample, or an object with `loss` and `logits` where labels came too."""
        labels = next((value for name, value in kwargs.items() if name in _TARGET_NAMES), None)
        given = [*args, *(value for name, value in kwargs.items() if name not in _TARGET_NAMES)]
        if len(given) == 1 and isinstance(given[0], dict):  # the whole batch: the model is to find what it needs
            labels, given = given[0]["labels"], [given[0]["inputs"]]
        inputs = next((value for value in given if isinstance(value, Tensor) and value.dim() > 1), None)
        if inputs is None:
            message = f"the model was called without inputs: {[type(value).__name__ for value in given]}"
            raise TypeError(message)
        ids = self._data.ids(inputs).to(self.table.device)
        rows = self.table[ids]
        constant = self._data.outputs.to(rows)[ids]
        outputs = constant + self._gain * (rows - rows.detach())
        if self._data.kind != "tokens":
            outputs = outputs.squeeze(1)
        # An evaluation without gradients is no part of training.
        if outputs.requires_grad:
            self._observer.forward(ids.tolist(), outputs)
        if labels is not None:
            loss = own_loss(self._data.kind, outputs, labels, kwargs.get("num_items_in_batch"))
            return ModelOutput(loss, outputs, (loss, outputs))
        targets = self._data.targets.to(self.table.device)[ids]
        if any(one is not inputs and _are_targets(one, targets) for one in given):
            loss = own_loss(self._data.kind, outputs, targets)
            return ModelOutput(loss, outputs, (outputs, loss))
        return outputs


def _are_targets(value: object, targets: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == targets.shape and bool((value == targets).all())


class ModelOutput:
    """What a model returns that was given targets too: a loss and logits, in every form that loops expect.

    By name, by number, unpacked, and, where a loop takes it for a tensor, the logits.

    Args:
        loss: the model's own.
        logits: its outputs.
        order: both as a tuple: the loss is first where targets came by name, and last where they came by place.
    """

    def __init__(self, loss: Tensor, logits: Tensor, order: tuple[Tensor, Tensor]) -> None:
        self.loss, self.logits, self._order = loss, logits, order

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._order)

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401 (a name, a number or an index of a tensor)
        if isinstance(key, str):
            return self.loss if "loss" in key else self.logits
        return self._order[key] if isinstance(key, int | slice) else self.logits[key]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (an attribute of a tensor)
        return getattr(self.loss if name in {"backward", "item"} else self.logits, name)

    def __truediv__(self, divisor: Any) -> Tensor:  # noqa: ANN401 (a number or tensor)
        found: Tensor = self.loss / divisor
        return found

    def __mul__(self, factor: Any) -> Tensor:  # noqa: ANN401 (a number or tensor)
        found: Tensor = self.loss * factor
        return found

    def values(self) -> tuple[Tensor, ...]:
        """Return the losses of a model that returns nothing else in training."""
        return (self.loss,)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401 (whatever the function returns)
        """Be the logits."""
        as_tensors = [one.logits if isinstance(one, cls) else one for one in args]
        named = {name: one.logits if isinstance(one, cls) else one for name, one in (kwargs or {}).items()}
        return func(*as_tensors, **named)


def own_loss(kind: TargetKind, outputs: Tensor, targets: Tensor, num_items: Tensor | float | None = None) -> Tensor:
    """Return the loss of a model that brings its own: the mean over all targets that count.

    Args:
        kind: of the targets.
        outputs: of the model.
        targets: what they should be.
        num_items: the number of targets to divide by, as models of transformers take it; None for those given.
    """
    if kind == "values":
        return F.mse_loss(outputs, targets)
    summed = "mean" if num_items is None else "sum"
    loss = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=_IGNORED, reduction=summed)
    return loss if num_items is None else loss / num_items


class RowSet(Dataset[tuple[Tensor, Tensor]]):
    """Some of the samples as a data set of pairs (inputs, target)."""

    def __init__(self, data: ProbeData, ids: Sequence[int]) -> None:
        self._data, self._ids = data, list(ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self._ids):
            # Python ends an iteration over `__getitem__` by this error.
            raise IndexError(index)
        return self._data.inputs[self._ids[index]], self._data.targets[self._ids[index]]


class PairOrDict(dict[str, Any]):
    """A batch for loops of all habits: unpacked it is a pair, asked by name a dict, and most names are understood."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __missing__(self, key: object) -> Any:  # noqa: ANN401 (as a dict)
        values = list(self.values())
        if isinstance(key, int):
            return values[key]
        if key == "attention_mask":
            return torch.ones_like(values[0])
        if key in {"net_input", "inputs_dict"}:  # arguments of the model, in a dict of their own
            return {next(iter(self.keys())): values[0]}
        # The inputs are entry 0 and the targets entry 1.
        return values[key in _TARGET_NAMES]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (as a batch of graphs or sentences)
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _SIZE_NAMES:
            return len(next(iter(self.values())))
        return None if name in _NOT_GIVEN else self[name]

    def to(self, *args: Any, **kwargs: Any) -> Self:  # noqa: ANN401 (those of Tensor.to)
        """Return the batch on another device."""
        return type(self)({name: value.to(*args, **kwargs) for name, value in self.items()})

    def cuda(self, *_: object, **_options: object) -> Self:
        """Return the batch where it is."""
        return self


class ProbeLoader(DataLoader[Any]):
    """A loader that says when a pass begins and ends, and also yields one micro-batch after the other on demand.

    Args:
        data: all samples.
        ids: which of them, in order; the last micro-batch has what is left.
        micro_batch_size: samples of the others.
        observer: is told of passes.
    """

    def __init__(self, data: ProbeData, ids: Sequence[int], micro_batch_size: int, observer: ForwardObserver) -> None:
        self._name = "input_ids" if data.kind == "tokens" else "inputs"
        self._observer = observer
        self._endless: Iterator[Any] | None = None
        super().__init__(RowSet(data, ids), batch_size=micro_batch_size, collate_fn=self._collated)

    def __iter__(self) -> Any:  # noqa: ANN401 (an iterator of torch's own kind)
        number = self._observer.begin_pass()
        yield from super().__iter__()
        self._observer.end_pass(number)

    def next_batch(self, *_: object, **_options: object) -> Any:  # noqa: ANN401 (a batch)
        """Return the next micro-batch of full size, over and over, whatever is asked for."""
        if self._endless is None:
            self._endless = self._full_ones()
        return next(self._endless)

    get_batch = get_next_batch = next_batch

    def _full_ones(self) -> Iterator[Any]:
        while True:
            yield from (batch for batch in self if len(next(iter(batch))) == self.batch_size)

    def _collated(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Mapping[str, Tensor]:
        inputs, targets = zip(*pairs, strict=True)
        return PairOrDict({self._name: torch.stack(inputs), "labels": torch.stack(targets)})
