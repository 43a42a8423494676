"""`MicroBatchView`: the gradient of single micro-batches, and in single-step mode their samples."""

import base64
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from anybatch.core.records import MicroBatchRecord, Record
from anybatch_guide.lines import finite, significant
from anybatch_guide.tasks.task import PlaygroundTask

NUM_SAMPLES: Final = 16
"""Maximum number of shown samples per micro-batch."""
NUM_CELLS: Final = 48
"""Maximum number of shown components of a gradient."""
NUM_SHOWN_STEPS: Final = 100
"""Steps of a run whose gradients are shown outside single-step mode, evenly spaced; the last step is shown as well."""


class ViewObserver(Protocol):
    """Receives the details of micro-batches."""

    @property
    def is_stepped(self) -> bool:
        """Whether the run is in single-step mode, which also shows samples."""
        ...

    def add_micro_batch(self, fields: Mapping[str, Any]) -> None:
        """Receive the details of a micro-batch."""
        ...


class GradientCells:
    """The shown components of a model's gradient: evenly spaced in the weight of its last layer.

    `added` holds the latest backward's components, read where autograd accumulates them, before the engine's hooks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.added: Any = None
        self._weight = [parameter for parameter in model.parameters() if parameter.dim() > 1][-1]
        size = self._weight.numel()
        self._indices = torch.linspace(0, size - 1, min(NUM_CELLS, size)).round().long().numpy()
        # The node in which autograd adds to `.grad`. Keep a reference, because the hook lives only as long as the node.
        node: Any = self._weight.view_as(self._weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self._node, self._handle = node, node.register_prehook(self._read)

    @property
    def sum(self) -> Any:  # noqa: ANN401 (an array of numpy)
        """The components of `.grad`."""
        return 0.0 if self._weight.grad is None else self._cells(self._weight.grad)

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def _read(self, gradients: tuple[Tensor, ...]) -> None:
        self.added = self._cells(gradients[0])

    def _cells(self, gradient: Tensor) -> Any:  # noqa: ANN401 (an array of numpy)
        # Use numpy, because a tensor would count as memory of the step. Indexing copies.
        numbers: Any = gradient.detach().reshape(-1).numpy()
        return numbers[self._indices]


class MicroBatchView:
    """An observer that reports the gradient of each micro-batch, and the sum so far.

    Single-step mode reports every micro-batch with some of its samples; otherwise up to `NUM_SHOWN_STEPS` steps are
    reported. The sum is over this rank's micro-batches, even while the last backward reduces it over ranks. The view
    creates no tensors, because they would count as memory of the step.
    """

    def __init__(self, model: nn.Module, task: PlaygroundTask, observer: ViewObserver, *, steps: int) -> None:
        self._observer = observer
        self._encode = ENCODERS[task.name]
        self._cells = GradientCells(model)
        self._shown = {*range(0, steps, -(-steps // NUM_SHOWN_STEPS)), steps - 1}
        self._is_shown = False
        self._samples: Mapping[str, Any] | None = None
        self._previous_sum: Any = 0.0

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Record the inputs of every forward of a model while the context is active."""
        handle = model.register_forward_pre_hook(lambda _, inputs: self.begin(inputs[0]))
        try:
            yield
        finally:
            handle.remove()

    def begin(self, inputs: Tensor) -> None:
        """Record the inputs of the next micro-batch."""
        self._cells.added = None
        if self._is_shown:
            self._samples = self._encode(inputs[:NUM_SAMPLES]) if self._observer.is_stepped else None
            self._previous_sum = self._cells.sum

    def observe(self, record: Record, /) -> None:
        """Report a micro-batch after its backward."""
        if not isinstance(record, MicroBatchRecord):
            return
        if record.event == "begin":
            self._is_shown = self._observer.is_stepped or record.step in self._shown
        # A BatchNorm policy may run all forwards before one backward, so single micro-batches have no gradient.
        elif self._is_shown and self._cells.added is not None:
            self._observer.add_micro_batch(
                {
                    "rank": record.rank,
                    "step": record.step,
                    "position": record.position,
                    "num_samples": record.num_samples,
                    **({"samples": self._samples} if self._samples else {}),
                    "gradient": rounded(self._cells.added),
                    "sum": rounded(self._previous_sum + self._cells.added),
                }
            )
            self._samples = self._cells.added = None

    def close(self) -> None:
        """Remove the hook."""
        self._cells.close()


def rounded(numbers: Any) -> list[float | None]:  # noqa: ANN401 (an array of numpy)
    """Return numbers with four significant digits; None for NaN and infinities."""
    return [finite(significant(float(number), 4)) for number in numbers]


def _images(inputs: Tensor) -> Mapping[str, Any]:
    """Return images as bytes, scaled from their darkest to their brightest pixel."""
    pixels: Any = inputs.detach().numpy()
    low, high = float(pixels.min()), float(pixels.max())
    levels = ((pixels - low) * (255 / max(high - low, 1e-12))).round().astype("uint8")
    side = round((levels.size // len(levels)) ** 0.5)
    return {"kind": "images", "side": side, "values": base64.b64encode(levels.tobytes()).decode("ascii")}


def _points(inputs: Tensor) -> Mapping[str, Any]:
    return {"kind": "points", "values": [[round(x, 3), round(y, 3)] for x, y in inputs.tolist()]}


def _texts(inputs: Tensor) -> Mapping[str, Any]:
    return {"kind": "texts", "values": [bytes(row).decode("ascii").strip("\n\0") for row in inputs.tolist()]}


ENCODERS: Mapping[str, Callable[[Tensor], Mapping[str, Any]]] = {
    "digits": _images,
    "shapes": _images,
    "spirals": _points,
    "text": _texts,
}
"""Samples of each task as JSON."""
