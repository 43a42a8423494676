"""`PlaygroundTask`: data, a network and a loss, small enough to be learned within seconds; and `load`, by name."""

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from anybatch.core.geometry import ceil_div
from anybatch.core.loss import Loss
from anybatch.data.indexed import sample_order
from anybatch.errors import UserError

TaskName = Literal["digits", "spirals", "shapes", "text"]
Norm = Literal["batch", "group", "none"]
IGNORED = -100
"""The target of positions that the loss ignores."""


class LabelledSamples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Inputs and targets as a map-style data set; `ab.batches` shuffles it."""

    def __init__(self, inputs: Shaped[Tensor, "sample ..."], targets: Int[Tensor, "sample ..."]) -> None:
        self.inputs, self.targets = inputs, targets

    @property
    def num_bytes(self) -> int:
        """Bytes of inputs and targets, including the held-out samples in the same storage."""
        return self.inputs.untyped_storage().nbytes() + self.targets.untyped_storage().nbytes()

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.targets)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sample."""
        return {"inputs": self.inputs[index], "targets": self.targets[index]}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PlaygroundTask:
    """A small classification task: data, network and loss."""

    name: TaskName  # its name
    num_classes: int  # classes of a target
    model: Callable[[], nn.Module]  # function () -> network. Its parameters come from torch's global generator
    loss: Loss  # the declared loss, for the engine
    rows: LabelledSamples = field(repr=False)  # the training set
    held_out: LabelledSamples = field(repr=False)  # the held-out set

    @property
    def chance(self) -> float:
        """Return the loss of a uniform prediction over all classes: the logarithm of the number of classes."""
        return math.log(self.num_classes)


class MicroBatches:
    """The training set in micro-batches, in the order of `ab.batches`, as a loader for a hand-written loop.

    Each call of `iter` starts the next epoch. The last micro-batch of an epoch may be smaller.
    """

    def __init__(self, rows: LabelledSamples, micro_batch_size: int, seed: int) -> None:
        self._rows, self._size, self._seed, self._epoch = rows, micro_batch_size, seed, 0

    def __len__(self) -> int:
        """Return the number of micro-batches of an epoch."""
        return ceil_div(len(self._rows), self._size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of inputs and targets."""
        order = sample_order(len(self._rows), seed=self._seed, epoch=self._epoch, shuffle=True)
        self._epoch += 1
        for ids in order.split(self._size):
            yield self._rows.inputs[ids], self._rows.targets[ids]


def cross_entropy(logits: Float[Tensor, "*item class"], targets: Int[Tensor, "*item"]) -> Float[Tensor, ""]:
    """Return the mean cross-entropy over all targets that are not ignored."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Float[Tensor, ""]:
    """Return the mean cross-entropy of a batch: a loss as users write it."""
    return cross_entropy(model(batch["inputs"]), batch["targets"])


def load(name: str, *, norm: Norm = "none") -> PlaygroundTask:
    """Return a task by its name."""
    if name not in get_args(TaskName):
        message = f"{name=} must be one of {', '.join(map(repr, get_args(TaskName)))}."
        raise UserError(message)
    make: Callable[..., PlaygroundTask] = importlib.import_module(f"anybatch_guide.tasks.{name}").task
    return make(norm) if name == "shapes" else make()
