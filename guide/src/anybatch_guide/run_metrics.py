"""`RunMetrics`: the metrics of a playground run, collected step by step and streamed to the page."""

import base64
import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from anybatch.core.records import EndRecord, OutOfMemoryRecord, Record, ReductionRecord, StepRecord
from anybatch.errors import NonFiniteError
from anybatch.memory.trace import MemoryTimeline
from anybatch_guide.experiment import Data
from anybatch_guide.held_out import HeldOut
from anybatch_guide.lines import RecordLines, finite
from anybatch_guide.setting import PlaygroundSetting
from anybatch_guide.tasks.spirals import surface
from anybatch_guide.tasks.task import PlaygroundTask

if TYPE_CHECKING:
    from anybatch_guide.native_batch import ReferenceRun

SURFACE_SIZE = 40
NUM_EVALUATIONS = 20


class RunMetrics:
    """An observer that streams a run's records to the page, and computes more metrics.

    It adds the memory of one step, each step of the reference run and the difference from it, and at intervals the
    accuracy and predictions of both networks, for the task `spirals` over the plane.
    """

    def __init__(
        self,
        setting: PlaygroundSetting,
        task: PlaygroundTask,
        *,
        model: nn.Module,
        reference: "ReferenceRun",
        held_out: HeldOut,
        lines: RecordLines,
        is_stepped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.measured_step = min(1, setting.steps - 1)  # the first one also creates the optimizer state
        self._setting, self._task, self._model, self._held_out = setting, task, model, held_out
        self._reference: ReferenceRun | None = reference
        self.first_difference: float | None = None
        self._lines, self._is_stepped = lines, is_stepped
        self._sizes: list[int] = []
        self._reduced_bytes = 0
        self._steps: list[StepRecord] = []
        self._native_losses: list[float | None] = []
        self._differences: list[float | None] = []
        self._evaluations: list[Mapping[str, Any]] = []
        self._peak: Mapping[str, int] = {}
        self._status, self._message = "failed", ""

    def begin(self) -> None:
        """Evaluate the untrained network, and make the first step of the reference run."""
        self._evaluate(0)
        self._step_reference()

    def observe(self, record: Record, /) -> None:
        """Update the metrics from a record, and stream it. Ranks other than the first send only micro-batches."""
        match record:
            case ReductionRecord(event="begin", payload="gradients") if record.step == self.measured_step:
                self._reduced_bytes += record.num_bytes
            case OutOfMemoryRecord(micro_batch_size_after=int(size)):
                self._sizes.append(size)
            case StepRecord():
                self._steps.append(record)
            case EndRecord():
                self._status, self._message = record.status, record.message or ""
                record = dataclasses.replace(record, digest=digest_of(self._model))
            case _:
                pass
        self._lines.observe(record)

    @property
    def is_stepped(self) -> bool:
        """Whether the run is in single-step mode, which shows every micro-batch."""
        return self._is_stepped()

    def add_micro_batch(self, fields: Mapping[str, Any]) -> None:
        """Stream the details of a micro-batch."""
        self._lines.emit("micro_batch", **fields)

    def add_memory(self, timeline: MemoryTimeline) -> None:
        """Store the peak memory of the measured step by category, and stream the peaks of its phases."""
        self._peak = timeline.at(timeline.peak_moment)
        for position, phase, moment in phase_peaks(timeline):
            self._lines.emit(
                "memory",
                step=self.measured_step,
                position=position,
                phase=phase,
                category_bytes=timeline.at(moment),
            )

    def after_step(self, step: int) -> None:
        """Stream the difference from the reference run; at intervals, evaluate; make the next reference step."""
        if step == 0:
            self._lines.emit("first_update", relative_difference=self.first_difference)
        difference = None if self._reference is None else finite(self._reference.difference(self._model))
        self._differences.append(difference)
        self._lines.emit("match", step=step, relative_difference=difference)
        updates, every = step + 1, max(1, self._setting.steps // NUM_EVALUATIONS)
        if updates % every == 0 or updates == self._setting.steps:
            self._evaluate(updates)
        if updates < self._setting.steps:
            self._step_reference()

    def data(self) -> Data:
        """Return the metrics of the run, step by step."""
        steps = self._steps
        return {
            "status": self._status,
            "message": self._message,
            "num_steps": len(steps),
            "losses": [finite(float(step.loss)) for step in steps],
            "gradient_norms": [
                None if step.gradient_norm is None else finite(float(step.gradient_norm)) for step in steps
            ],
            "learning_rates": [float(step.learning_rates[0]) for step in steps],
            "native_losses": self._native_losses,
            "first_update_difference": self.first_difference,
            "relative_differences": self._differences,
            "peak_bytes": sum(self._peak.values()),
            "peak": dict(self._peak),
            "evaluations": self._evaluations,
            "smaller_sizes": self._sizes,
            "reduced_bytes": self._reduced_bytes,
            "digest": digest_of(self._model),
        }

    def _evaluate(self, updates: int) -> None:
        """Stream the accuracy of both networks, and the predictions of the run."""
        accuracy, answers = self._held_out.evaluate(self._model)
        native = None if self._reference is None else self._held_out.evaluate(self._reference.model)[0]
        evaluation = {"updates": updates, "accuracy": accuracy, "native_accuracy": native, "answers": answers}
        self._evaluations.append(evaluation)
        self._lines.emit("evaluation", **evaluation)
        if self._task.name == "spirals":
            self._lines.emit("surface", updates=updates, size=SURFACE_SIZE, values=surface_of(self._model))

    def _step_reference(self) -> None:
        """Make the next step of the reference run, and stream its loss and gradient."""
        step = len(self._native_losses)
        try:
            made = None if self._reference is None else self._reference.step()
        except NonFiniteError:
            # The reference run has diverged: stop comparing.
            made = self._reference = None
        loss, gradient = made or (None, None)
        self._native_losses.append(loss)
        self._lines.emit("native", step=step, loss=loss, gradient=gradient)


def phase_peaks(timeline: MemoryTimeline) -> list[tuple[int | None, str, int]]:
    """Return (micro-batch or None for the update, phase, moment of the peak) for each phase of a step, in order."""
    totals = timeline.totals.tolist()
    peaks: dict[tuple[int | None, str], int] = {}
    for moment, phase in enumerate(timeline.phases):
        mark = timeline.mark_before(moment) or ""
        name, _, number = mark.rpartition(" ")
        part = (int(number) - 1 if name == "micro-batch" else None, phase)
        if part not in peaks or totals[moment] > totals[peaks[part]]:
            peaks[part] = moment
    return [(position, phase, moment) for (position, phase), moment in peaks.items()]


def digest_of(model: nn.Module) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of all parameters and buffers."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        # Hash bytes, so that equal digests mean equal bits, including -0.0 and NaN.
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def surface_of(model: nn.Module) -> str:
    """Return the network's predicted probabilities over the plane as bytes from 0 to 255, in base64."""
    values: Any = (surface(model, SURFACE_SIZE) * 255).round().to(torch.uint8).numpy()
    return base64.b64encode(values.tobytes()).decode("ascii")
