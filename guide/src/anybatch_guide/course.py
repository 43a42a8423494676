"""`Course`: what is noted of a run of the playground, and reported beside its records."""

import base64
import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from anybatch.core.records import EndRecord, MicroBatchRecord, Record, StepRecord
from anybatch.errors import NonFiniteError
from anybatch.memory.timeline import MemoryTimeline
from anybatch_guide.experiment import Data
from anybatch_guide.lines import RecordLines, finite
from anybatch_guide.setting import PlaygroundSetting
from anybatch_guide.tasks.spirals import surface
from anybatch_guide.tasks.task import PlaygroundTask

if TYPE_CHECKING:
    from anybatch_guide.playground import Native

SURFACE_SIZE = 40
NUM_SURFACES = 20


class Course:
    """An observer of a run that keeps its numbers by step, and tells what the page knows beyond the records.

    Args:
        setting: what the run does.
        task: what is learned.
        model: the network that learns.
        native: the native batch, stepped after each step.
        lines: where everything is reported.
        clock: seconds that only go forward; for the throughput.
    """

    def __init__(
        self,
        setting: PlaygroundSetting,
        task: PlaygroundTask,
        *,
        model: nn.Module,
        native: "Native",
        lines: RecordLines,
        clock: Callable[[], float],
    ) -> None:
        self.measured_step = min(1, setting.steps - 1)  # the first one also makes the optimizer's state
        self._setting, self._task, self._model = setting, task, model
        self._native: Native | None = native
        self._lines, self._clock = lines, clock
        self._steps: list[StepRecord] = []
        self._differences: list[float | None] = []
        self._peak: Mapping[str, int] = {}
        self._status, self._message = "failed", ""
        self._begun = 0.0
        self._seconds: list[float] = []

    def observe(self, record: Record, /) -> None:
        """Note a record, and tell it."""
        match record:
            case MicroBatchRecord(event="begin", position=0):
                self._begun = self._clock()
            case StepRecord():
                self._seconds.append(self._clock() - self._begun)
                self._steps.append(record)
            case EndRecord():
                self._status, self._message = record.status, record.message or ""
                record = dataclasses.replace(record, digest=digest_of(self._model))
            case _:
                pass
        self._lines.observe(record)

    def note_memory(self, course: MemoryTimeline) -> None:
        """Keep the peak memory of the measured step by category, and report the peak of each of its parts."""
        self._peak = course.at(course.peak_moment)
        for position, phase, moment in parts_of(course):
            self._lines.say(
                "memory",
                step=self.measured_step,
                position=position,
                phase=phase,
                category_bytes=course.at(moment),
            )

    def after_step(self, step: int) -> None:
        """Step the native batch and tell how far it is away; now and then tell the surface."""
        difference = self._compare()
        self._differences.append(difference)
        self._lines.say("match", step=step, relative_difference=difference)
        every = max(1, self._setting.steps // NUM_SURFACES)
        if self._task.name == "spirals" and ((step + 1) % every == 0 or step + 1 == self._setting.steps):
            self._lines.say("surface", step=step, size=SURFACE_SIZE, values=surface_of(self._model))

    def data(self) -> Data:
        """Return the numbers of the run, step by step."""
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
            "relative_differences": self._differences,
            "peak_bytes": sum(self._peak.values()),
            "peak": dict(self._peak),
            "samples_per_second": self._samples_per_second(),
            "digest": digest_of(self._model),
        }

    def _compare(self) -> float | None:
        if self._native is None:
            return None
        try:
            return finite(self._native.step(self._model))
        except NonFiniteError:
            # The native batch has diverged, so there is nothing to compare with from now on.
            self._native = None
            return None

    def _samples_per_second(self) -> float | None:
        """Return the throughput after the measured step, which is slow since it is looked at."""
        first = self.measured_step + 1
        samples = sum(step.num_samples for step in self._steps[first:])
        seconds = sum(self._seconds[first:])
        return samples / seconds if samples and seconds else None


def parts_of(course: MemoryTimeline) -> list[tuple[int | None, str, int]]:
    """Return micro-batch (None for the update), phase and highest moment of each part of a step, in order."""
    totals = course.totals.tolist()
    found: dict[tuple[int | None, str], int] = {}
    for moment, phase in enumerate(course.phases):
        mark = course.mark_before(moment) or ""
        word, _, number = mark.rpartition(" ")
        part = (int(number) - 1 if word == "micro-batch" else None, phase)
        if part not in found or totals[moment] > totals[found[part]]:
            found[part] = moment
    return [(position, phase, moment) for (position, phase), moment in found.items()]


def digest_of(model: nn.Module) -> str:
    """Return 16 hexadecimal digits that stand for all parameters and buffers, to the bit."""
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        # As bytes: equal digests mean equal bits, also for -0.0 and NaN.
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def surface_of(model: nn.Module) -> str:
    """Return the surface of a network in bytes from 0 to 255, as base64."""
    values: Any = (surface(model, SURFACE_SIZE) * 255).round().to(torch.uint8).numpy()
    return base64.b64encode(values.tobytes()).decode("ascii")
