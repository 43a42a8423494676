"""`MicroBatchView`: samples and gradient of single micro-batches, for runs in single-step mode."""

import base64
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from anybatch.core.records import MicroBatchRecord, Record
from anybatch_guide.tasks.task import PlaygroundTask

NUM_SAMPLES: Final = 16
"""Maximum number of samples shown of a micro-batch."""
NUM_CELLS: Final = 48
"""Maximum number of components shown of a gradient."""


class ViewObserver(Protocol):
    """Receives the details of micro-batches, if requested."""

    @property
    def is_stepped(self) -> bool:
        """Whether single micro-batches are requested now."""
        ...

    def add_micro_batch(self, fields: Mapping[str, Any]) -> None:
        """Receive the details of a micro-batch."""
        ...


class MicroBatchView:
    """An observer that shows each micro-batch in single-step mode: its samples, its gradient, and the sum so far.

    The shown components are evenly spaced in the gradient of the last layer's weight. The gradient of one backward is
    read where autograd accumulates it. The sum is this rank's, even if the last backward has started to reduce it.
    Outside single-step mode, the observer does nothing and creates no tensor.
    """

    def __init__(self, model: nn.Module, task: PlaygroundTask, observer: ViewObserver) -> None:
        self._observer = observer
        self._encode = _ENCODERS[task.name]
        self._weight = [parameter for parameter in model.parameters() if parameter.dim() > 1][-1]
        size = self._weight.numel()
        self._indices = torch.linspace(0, size - 1, min(NUM_CELLS, size)).round().long().numpy()
        self._samples: Mapping[str, Any] = {}
        self._previous_sum: Any = 0.0
        self._grad: Any = None
        # The node where autograd adds to `.grad`. Keep it, because the hook, which only reads, lives as long as it.
        accumulate_node: Any = self._weight.view_as(self._weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self._accumulate_node, self._handle = accumulate_node, accumulate_node.register_prehook(self._read_gradient)

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
        self._grad = None
        if self._observer.is_stepped:
            self._samples = self._encode(inputs[:NUM_SAMPLES])
            gradient = self._weight.grad
            self._previous_sum = 0.0 if gradient is None else self._cells(gradient)

    def observe(self, record: Record, /) -> None:
        """Report a micro-batch after its backward."""
        # A BatchNorm policy may run all forwards before one backward, so there is no gradient per micro-batch.
        if isinstance(record, MicroBatchRecord) and record.event == "end" and self._grad is not None and self._samples:
            self._observer.add_micro_batch(
                {
                    "rank": record.rank,
                    "step": record.step,
                    "position": record.position,
                    "num_samples": record.num_samples,
                    "samples": self._samples,
                    "gradient": _rounded(self._grad),
                    "sum": _rounded(self._previous_sum + self._grad),
                }
            )
            self._samples, self._grad = {}, None

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def _read_gradient(self, gradients: tuple[Tensor, ...]) -> None:
        if self._observer.is_stepped:
            self._grad = self._cells(gradients[0])

    def _cells(self, gradient: Tensor) -> Any:  # noqa: ANN401 (an array of numpy)
        # Use numpy, because a tensor would count as memory of the step. Indexing copies.
        numbers: Any = gradient.detach().reshape(-1).numpy()
        return numbers[self._indices]


def _rounded(numbers: Any) -> list[float]:  # noqa: ANN401 (an array of numpy)
    return [float(f"{number:.4g}") for number in numbers]


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


_ENCODERS: Mapping[str, Callable[[Tensor], Mapping[str, Any]]] = {
    "digits": _images,
    "shapes": _images,
    "spirals": _points,
    "text": _texts,
}
