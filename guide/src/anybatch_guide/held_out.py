"""`HeldOut`: accuracy and predictions on held-out samples."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from anybatch_guide.micro_batch_view import ENCODERS
from anybatch_guide.tasks.task import IGNORED, PlaygroundTask

MAX_EVALUATED: Final = 256
NUM_SHOWN: Final[Mapping[str, int]] = {"digits": 32, "shapes": 24, "spirals": 0, "text": 4}
"""Samples of each task whose predictions the page shows; for spirals it shows the plane instead."""


class HeldOut:
    """Evaluates networks of a task on its held-out samples, in a copy in eval mode, so that no hook runs."""

    def __init__(self, task: PlaygroundTask) -> None:
        self._network = task.model().eval()
        self._num_shown = NUM_SHOWN[task.name]
        self._inputs, self._targets = task.held_out.inputs[:MAX_EVALUATED], task.held_out.targets[:MAX_EVALUATED]

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> tuple[float, str]:
        """Return the accuracy of a network, and its answers for the shown samples: see `shown_samples`."""
        self._network.load_state_dict(model.state_dict())
        answers = self._network(self._inputs).argmax(dim=-1)
        counted = self._targets != IGNORED
        accuracy = float((answers == self._targets)[counted].float().mean())
        return accuracy, _as_text(answers, self._targets, self._num_shown)


def shown_samples(task: PlaygroundTask) -> Mapping[str, Any]:
    """Return the shown samples and the correct answers: a character for each image, or a line for each sentence."""
    number = NUM_SHOWN[task.name]
    targets = task.held_out.targets
    samples = ENCODERS[task.name](task.held_out.inputs[:number])
    return {"samples": samples, "answers": _as_text(targets, targets, number)}


def _as_text(answers: torch.Tensor, targets: torch.Tensor, number: int) -> str:
    if answers.dim() == 1:
        return "".join(map(str, answers[:number].tolist()))
    # The last target of a sentence is a newline, which is not shown.
    return "\n".join(
        "".join(_letter(code) for code in row[known != IGNORED][:-1].tolist())
        for row, known in zip(answers[:number], targets[:number], strict=True)
    )


def _letter(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isprintable() else "\u00b7"
