"""The playground: a run of the engine, or of a loop with a mistake in it, reported line by line while it goes on."""

import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

from anybatch.core.records import Observer
from anybatch.data.batches import Batches, batches
from anybatch.diagnostics.memory.memory_report import record_memory
from anybatch.engine.engine import Engine
from anybatch.errors import DataError, NonFiniteError
from anybatch_guide.course import Course
from anybatch_guide.experiment import Data, Tell
from anybatch_guide.lines import RecordLines
from anybatch_guide.loop_watch import LoopWatch
from anybatch_guide.mistakes.mistake import loop_of
from anybatch_guide.programs import as_command, as_python
from anybatch_guide.setting import PlaygroundSetting, SettingError, parse_setting
from anybatch_guide.tasks.task import MicroBatches, PlaygroundTask, load

__all__ = ["PlaygroundSetting", "SettingError", "as_command", "as_python", "parse_setting", "run", "warm"]

FINAL_FACTOR = 0.1
"""The learning rate falls in a line to this part of what it begins with."""
MAX_NORM = 1.0
"""Where the mistake is about clipping, gradients longer than this are clipped; everywhere else none is."""
_OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def run(setting: PlaygroundSetting, tell: Tell, *, clock: Callable[[], float] = time.monotonic) -> Data:
    """Train as asked, and tell every micro-batch and step as it happens; `tell` may wait, and raises to end it.

    The plain loop, which `as_python` returns as a program with the same losses:

    ```python
    torch.manual_seed(setting.seed)
    engine = ab.Engine(model, optimizer, task.loss, micro_batch_size=setting.micro_batch_size, scheduler=scheduler)
    for batch in ab.batches(task.rows, effective_batch_size=..., steps=setting.steps, seed=setting.seed):
        engine.step(batch)
    ```

    Beside it runs the native batch: the same engine, whose micro-batch is the whole batch. After each step the line
    `guide.match` tells how far the parameters of the two are apart. A loss that is not finite ends the run as failed,
    which is a result like any other.

    Args:
        setting: what to do.
        tell: takes the lines: the engine's records, and kinds of the page's own (`guide.match`, `guide.memory`,
            `guide.surface`).
        clock: seconds that only go forward.

    Returns:
        The numbers of the run, by step, and what its memory held at the highest moment of one step.
    """
    task = load(setting.task, norm=setting.norm)
    with alone():
        model, optimizer, scheduler = make(setting, task)
        native = native_of(setting, task)
        course = Course(setting, task, model=model, native=native, lines=RecordLines(tell, clock), clock=clock)
        play = _play_engine if not setting.mistake else _play_loop
        try:
            play(setting, task, course, (model, optimizer, scheduler))
        except NonFiniteError:
            pass  # the last line says so
        finally:
            native.close()
        return course.data()


@contextmanager
def alone(num_threads: int = 1) -> Iterator[None]:
    """Compute on so many threads, with a random generator of one's own; what was before is there again afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(before)


def warm() -> None:
    """Do once what takes long the first time: import what images come from, and make one step."""
    # Without scikit-learn there are no digits to warm up with.
    with suppress(DataError):
        run(PlaygroundSetting(micro_batch_size=1, accumulation_steps=1, steps=1), lambda _: None)


def make(setting: PlaygroundSetting, task: PlaygroundTask) -> tuple[nn.Module, Optimizer, LinearLR]:
    """Return a new network, its optimizer and scheduler."""
    # Seeded for each network, so that a run and its native batch begin with the same parameters.
    torch.default_generator.manual_seed(setting.seed)
    model = task.model()
    optimizer = _OPTIMIZERS[setting.optimizer](model.parameters(), lr=setting.learning_rate)
    return model, optimizer, LinearLR(optimizer, 1.0, FINAL_FACTOR, total_iters=setting.steps)


def batches_of(setting: PlaygroundSetting, task: PlaygroundTask) -> Batches:
    """Return the effective batches of a run."""
    return batches(task.rows, effective_batch_size=setting.effective_batch_size, steps=setting.steps, seed=setting.seed)


def engine_of(
    setting: PlaygroundSetting,
    task: PlaygroundTask,
    parts: tuple[nn.Module, Optimizer, LinearLR],
    *,
    micro_batch_size: int,
    observer: Observer | None = None,
) -> Engine:
    """Return an engine that trains these parts as asked."""
    model, optimizer, scheduler = parts
    return Engine(
        model,
        optimizer,
        task.loss,
        micro_batch_size=micro_batch_size,
        scheduler=scheduler,
        precision=setting.precision,
        clip=MAX_NORM if setting.mistake == "clip_each" else None,
        observer=observer,
    )


def native_of(setting: PlaygroundSetting, task: PlaygroundTask) -> "Native":
    """Return the run of the same setting whose micro-batch is the whole batch, before its first step."""
    parts = make(setting, task)
    engine = engine_of(setting, task, parts, micro_batch_size=setting.effective_batch_size)
    return Native(parts[0], engine, iter(batches_of(setting, task)))


class Native:
    """The native batch, stepped beside a run to compare with. It stops where its loss is not finite."""

    def __init__(self, model: nn.Module, engine: Engine, data: Iterator[object]) -> None:
        self._model, self._engine, self._data = model, engine, data

    @torch.no_grad()
    def step(self, model: nn.Module) -> float:
        """Make one more step; return how far the parameters of `model` are from its own, as a part of their norm."""
        # The comparison below needs no gradient, but the step does.
        with torch.enable_grad():
            # One batch, or none where the data is at its end.
            for batch in itertools.islice(self._data, 1):
                self._engine.step(batch)
        own = torch.cat([parameter.flatten() for parameter in self._model.parameters()]).double()
        other = torch.cat([parameter.flatten() for parameter in model.parameters()]).double()
        return float((other - own).norm() / own.norm())

    def close(self) -> None:
        """Drop the reference to the model."""
        self._engine.close()


def _play_engine(
    setting: PlaygroundSetting, task: PlaygroundTask, course: Course, parts: tuple[nn.Module, Optimizer, LinearLR]
) -> None:
    engine = engine_of(setting, task, parts, micro_batch_size=setting.micro_batch_size, observer=course)
    with engine:
        for step, batch in enumerate(batches_of(setting, task)):
            recording = record_memory(engine) if step == course.measured_step else None
            with recording or nullcontext():
                engine.step(batch)
            if recording is not None:
                course.note_memory(recording.report.timeline)
            course.after_step(step)


def _play_loop(
    setting: PlaygroundSetting, task: PlaygroundTask, course: Course, parts: tuple[nn.Module, Optimizer, LinearLR]
) -> None:
    """Give a hand-written loop epoch after epoch, until it has made the steps that were asked for."""
    model, optimizer, scheduler = parts
    loader = MicroBatches(task.rows, setting.micro_batch_size, setting.seed)
    with warnings.catch_warnings(), LoopWatch(setting, model=model, optimizer=optimizer, course=course) as watch:
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler", UserWarning)  # shown on purpose
        while not watch.is_done:
            loop_of(setting.mistake)(
                model,
                loader,
                optimizer=optimizer,
                scheduler=scheduler,
                criterion=watch.criterion,
                accumulation_steps=setting.accumulation_steps,
                max_norm=MAX_NORM if setting.mistake == "clip_each" else float("inf"),
            )
