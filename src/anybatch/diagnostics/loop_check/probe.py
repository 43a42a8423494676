"""The probe model and its data: the weight of each sample in a gradient can be read from the model's parameter.

The parameter is a table with one row per sample. The output for sample i is

    output_i = constant_i + gain * (table_i - stop_gradient(table_i))

The bracket is zero, so outputs never depend on the optimizer's updates, and the loss of a sample has the same gradient
in every step. The gradient of row i is gain * (weight of sample i) * d loss_i / d output_i. Rows do not mix, so the
weight of each sample can be read from the gradient, for any loss.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from anybatch.diagnostics.loop_check.recorder import Recorder

TargetKind = Literal["classes", "tokens", "values"]
TARGET_KINDS: tuple[TargetKind, ...] = get_args(TargetKind)
NUM_ROWS = 32
_NUM_OUTPUTS, _NUM_POSITIONS, _IGNORED = 5, 6, -100
_TARGET_NAMES = frozenset({"label", "labels", "target", "targets", "y", "lm_labels", "tgt"})
_ABSENT_NAMES = frozenset({"edge_index", "edge_attr", "edge_weight", "batch", "pos", "weight", "mask", "lengths"})
_SIZE_NAMES = frozenset({"batch_size", "num_graphs", "nsentences"})
"""Attributes of batches of graphs and sentences: some that are None here, and some with the number of samples."""


@dataclass(frozen=True, slots=True)
class ProbeData:
    """Samples with inputs that identify them, targets, and the outputs that the model has for them.

    The kind is "classes" (one class per sample), "values" (one number per output) or "tokens" (a class per position,
    of which a different number is masked in each sample).
    """

    kind: TargetKind
    inputs: Shaped[Tensor, "sample ..."]
    targets: Shaped[Tensor, "sample ..."]
    outputs: Float[Tensor, "sample position output"]

    def ids(self, inputs: Tensor) -> Tensor:
        """Return the samples with these inputs."""
        return inputs[:, 0].long() // _NUM_POSITIONS if self.kind == "tokens" else inputs.flatten(1).argmax(1)


def make_data(kind: TargetKind, *, is_padded: bool = True, dtype: torch.dtype = torch.float64) -> ProbeData:
    """Return the samples of a kind, always the same ones; if not padded, no targets are masked."""
    generator = torch.Generator().manual_seed(5)
    num_positions = _NUM_POSITIONS if kind == "tokens" else 1
    outputs = torch.randn(NUM_ROWS, num_positions, _NUM_OUTPUTS, generator=generator, dtype=torch.float64).to(dtype)
    # One-hot, so that a sample can be recognised under noise or when mixed with another one.
    inputs = 100.0 * torch.eye(NUM_ROWS, dtype=dtype)
    if kind == "values":
        targets = torch.rand(NUM_ROWS, _NUM_OUTPUTS, generator=generator, dtype=torch.float64).to(dtype)
        return ProbeData(kind, inputs, targets, outputs)
    targets = torch.randint(_NUM_OUTPUTS, (NUM_ROWS, num_positions), generator=generator)
    if kind == "classes":
        return ProbeData(kind, inputs, targets.squeeze(1), outputs)
    # Every word occurs once in the data, so the first one identifies the sample.
    words = torch.arange(NUM_ROWS * num_positions).view(NUM_ROWS, num_positions)
    # The first position has no target, so that shifting the labels loses none; the second always has one.
    lengths, positions = torch.randint(2, num_positions + 1, (NUM_ROWS, 1), generator=generator), words[0]
    is_masked = (positions >= lengths) | (positions == 0)
    return ProbeData(kind, words, targets.masked_fill(is_masked & is_padded, _IGNORED), outputs)


class RowModel(nn.Module):
    """The model described above. It finds the inputs among its arguments; given labels too, it also returns a loss."""

    def __init__(self, data: ProbeData, gain: float, recorder: Recorder) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros_like(data.outputs))
        self._data, self._gain, self._recorder = data, gain, recorder

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (called as the user's loop calls its model)
        """Return one row of outputs per sample, or a `ModelOutput` if there are labels among the arguments."""
        labels = next((value for name, value in kwargs.items() if name in _TARGET_NAMES), None)
        given = [*args, *(value for name, value in kwargs.items() if name not in _TARGET_NAMES)]
        if len(given) == 1 and isinstance(given[0], dict):  # the whole batch
            labels, given = given[0]["labels"], [given[0]["inputs"]]
        inputs = next((value for value in given if isinstance(value, Tensor) and value.dim() > 1), None)
        if inputs is None:
            message = f"the model was called without inputs: {[type(value).__name__ for value in given]}"
            raise TypeError(message)
        ids = self._data.ids(inputs)
        rows, targets = self.table[ids], self._data.targets[ids]
        outputs = self._data.outputs.to(rows)[ids] + self._gain * (rows - rows.detach())
        outputs = outputs if self._data.kind == "tokens" else outputs.squeeze(1)
        if outputs.requires_grad:  # otherwise it is an evaluation
            self._recorder.forward(ids.tolist(), outputs)
        if labels is not None:
            loss = self._loss(outputs, labels, kwargs.get("num_items_in_batch"))
            return ModelOutput((loss, outputs), loss, outputs)
        tensors = [value for value in given if isinstance(value, Tensor) and value is not inputs]
        if any(value.shape == targets.shape and bool((value == targets).all()) for value in tensors):
            loss = self._loss(outputs, targets, None)
            return ModelOutput((outputs, loss), loss, outputs)  # as models that take targets by position
        return outputs

    def _loss(self, outputs: Tensor, targets: Tensor, num_items: Tensor | float | None) -> Tensor:
        """Return a mean over unmasked targets, or their sum divided by `num_items`."""
        if self._data.kind == "values":
            return F.mse_loss(outputs, targets)
        reduction = "mean" if num_items is None else "sum"
        loss = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=_IGNORED, reduction=reduction)
        return loss if num_items is None else loss / num_items


class ModelOutput:
    """The loss and logits of a model, by name, by number, unpacked, or used as a tensor (the logits)."""

    def __init__(self, order: tuple[Tensor, Tensor], loss: Tensor, logits: Tensor) -> None:
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
        return torch.div(self.loss, divisor)

    def values(self) -> tuple[Tensor, ...]:
        """Return the losses of a model that returns a dict of losses in training."""
        return (self.loss,)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 (the function's result)
        """Use the logits as the tensor."""
        tensors = [value.logits if isinstance(value, cls) else value for value in args]
        return func(*tensors, **(kwargs or {}))


class ProbeBatch(dict[str, Any]):
    """A batch that can be unpacked as a pair, indexed by nearly any name, or asked for nearly any attribute."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __missing__(self, key: object) -> Any:  # noqa: ANN401 (as a dict)
        inputs, targets = self.values()
        if isinstance(key, int):
            return (inputs, targets)[key]
        if key == "attention_mask":
            return torch.ones_like(inputs)
        if key in {"net_input", "inputs_dict"}:  # the model's arguments, in a nested dict
            return {next(iter(self.keys())): inputs}
        return targets if key in _TARGET_NAMES else inputs

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (as a batch of graphs or sentences)
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _SIZE_NAMES:
            return len(self["inputs"])
        return None if name in _ABSENT_NAMES else self[name]

    def to(self, *args: Any, **kwargs: Any) -> Self:  # noqa: ANN401 (arguments of Tensor.to)
        """Return the batch on another device or in another data type."""
        return type(self)({name: value.to(*args, **kwargs) for name, value in self.items()})

    def cuda(self, *_: object, **_options: object) -> Self:
        """Return the batch unchanged."""
        return self


class ProbeLoader(DataLoader[Any]):
    """A loader of `ProbeBatch` that records its passes, and can also be asked for one batch at a time."""

    def __init__(self, data: ProbeData, ids: Sequence[int], micro_batch_size: int, recorder: Recorder) -> None:
        self._input_name = "input_ids" if data.kind == "tokens" else "inputs"
        self._recorder = recorder
        samples = TensorDataset(data.inputs[list(ids)], data.targets[list(ids)])
        super().__init__(samples, batch_size=micro_batch_size, collate_fn=self._collate)
        passes = (batch for _ in itertools.count() for batch in self)
        self._endless = (batch for batch in passes if len(batch["labels"]) == micro_batch_size)

    def __iter__(self) -> Any:  # noqa: ANN401 (an iterator of torch's own class)
        return self._recorder.one_pass(super().__iter__())

    def next_batch(self, *_: object, **_options: object) -> Any:  # noqa: ANN401 (a batch)
        """Return the next micro-batch of full size, without end."""
        return next(self._endless)

    get_batch = get_next_batch = next_batch

    def _collate(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> ProbeBatch:
        inputs, targets = zip(*pairs, strict=True)
        return ProbeBatch({self._input_name: torch.stack(inputs), "labels": torch.stack(targets)})
