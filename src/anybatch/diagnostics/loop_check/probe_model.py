"""The probe model and data that a loop is run on: the weight of each sample can be read from its gradients.

The model has one parameter, a table with one row per sample, and its output for sample i is

    output_i = constant_i + gain * (table_i - stop_gradient(table_i))

The bracket is zero, so outputs never depend on what an optimizer did to the table, and the loss of a sample has the
same gradient in every step. The gradient of row i is gain * (the weight of sample i) * d loss_i / d output_i: rows do
not mix, so each sample's weight in a gradient can be read from it, whatever the loss is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, Protocol, get_args

import torch
from jaxtyping import Float64, Shaped
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

TargetKind = Literal["classes", "tokens", "values"]
TARGET_KINDS: tuple[TargetKind, ...] = get_args(TargetKind)
NUM_ROWS = 32
_NUM_OUTPUTS, _NUM_POSITIONS, _IGNORED = 5, 6, -100
_TARGET_NAMES = frozenset({"label", "labels", "target", "targets", "y"})


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
    outputs: Float64[Tensor, "sample position output"]

    def ids(self, inputs: Tensor) -> Tensor:
        """Return which samples these inputs are."""
        if self.kind == "tokens":
            return inputs[:, 0].long() // _NUM_POSITIONS
        return inputs.flatten(1).argmax(1)


def make_data(kind: TargetKind) -> ProbeData:
    """Return the samples of a kind, the same ones each time."""
    generator = torch.Generator().manual_seed(5)
    num_positions = _NUM_POSITIONS if kind == "tokens" else 1
    outputs = torch.randn(NUM_ROWS, num_positions, _NUM_OUTPUTS, generator=generator, dtype=torch.float64)
    if kind == "values":
        targets = torch.rand(NUM_ROWS, _NUM_OUTPUTS, generator=generator, dtype=torch.float64)
    else:
        targets = torch.randint(_NUM_OUTPUTS, (NUM_ROWS, num_positions), generator=generator)
    if kind == "tokens":
        # At least two, so that one target is left where a loss shifts the labels.
        lengths = torch.randint(2, num_positions + 1, (NUM_ROWS, 1), generator=generator)
        # Every word occurs once in the data, so the first one says which sample it is.
        words = torch.arange(NUM_ROWS * num_positions).view(NUM_ROWS, num_positions)
        return ProbeData(kind, words, targets.masked_fill(torch.arange(num_positions) >= lengths, _IGNORED), outputs)
    # One-hot, so that a sample is recognised by its largest input.
    return ProbeData(kind, torch.eye(NUM_ROWS, dtype=torch.float64), targets.squeeze(1), outputs)


class ForwardObserver(Protocol):
    """Gets each forward of the probe model."""

    def forward(self, ids: Sequence[int], outputs: Tensor) -> None:
        """Record a forward of these samples."""
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
        if labels is None:
            return outputs
        return SimpleNamespace(loss=own_loss(self._data.kind, outputs, labels), logits=outputs)


def own_loss(kind: TargetKind, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of a model that brings its own: the mean over all targets that count."""
    if kind == "values":
        return F.mse_loss(outputs, targets)
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=_IGNORED)


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
        # The inputs are entry 0 and the targets entry 1.
        return values[key in _TARGET_NAMES]

    def to(self, *args: Any, **kwargs: Any) -> "PairOrDict":  # noqa: ANN401 (those of Tensor.to)
        """Return the batch on another device."""
        return PairOrDict({name: value.to(*args, **kwargs) for name, value in self.items()})


def make_loader(data: ProbeData, ids: Sequence[int], micro_batch_size: int) -> DataLoader[Any]:
    """Return a loader that goes through these samples in order; its last micro-batch has what is left."""
    name = "input_ids" if data.kind == "tokens" else "inputs"

    def collate(pairs: Sequence[tuple[Tensor, Tensor]]) -> Mapping[str, Tensor]:
        inputs, targets = zip(*pairs, strict=True)
        return PairOrDict({name: torch.stack(inputs), "labels": torch.stack(targets)})

    return DataLoader(RowSet(data, ids), batch_size=micro_batch_size, collate_fn=collate)
