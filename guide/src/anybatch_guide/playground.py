"""The playground: a run of the engine, or of a loop with a mistake in it, streamed to the page as it goes on."""

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

from anybatch.core.records import Observer
from anybatch.data.batches import Batches, batches
from anybatch.diagnostics.memory.memory_report import record_memory
from anybatch.engine.engine import Engine
from anybatch.errors import DataError, NonFiniteError
from anybatch_guide.experiment import Data, Emit
from anybatch_guide.lines import RecordLines
from anybatch_guide.loop_watch import LoopWatch
from anybatch_guide.mistakes.mistake import loop_of
from anybatch_guide.programs import as_command, as_python
from anybatch_guide.run_metrics import RunMetrics
from anybatch_guide.setting import MistakeName, PlaygroundSetting, SettingError, parse_setting
from anybatch_guide.tasks.task import MicroBatches, PlaygroundTask, cross_entropy, load

__all__ = ["PlaygroundSetting", "SettingError", "as_command", "as_python", "parse_setting", "run", "warm"]

FINAL_FACTOR = 0.1
"""The learning rate decays linearly to this fraction of its first value."""
MAX_NORM = 1.0
"""The norm to which gradients are clipped where the mistake is about clipping; no other run clips."""
_OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def run(setting: PlaygroundSetting, emit: Emit, *, clock: Callable[[], float] = time.monotonic) -> Data:
    """Train as asked, and emit every micro-batch and step as it happens; `emit` may block, and raises to end the run.

    The plain loop, which `as_python` returns as a program with the same losses:

    ```python
    torch.manual_seed(setting.seed)
    engine = ab.Engine(model, optimizer, task.loss, micro_batch_size=setting.micro_batch_size, scheduler=scheduler)
    for batch in ab.batches(task.rows, effective_batch_size=..., steps=setting.steps, seed=setting.seed):
        engine.step(batch)
    ```

    A reference run goes beside it, on the native batch: the same engine, without accumulation. After each step the
    event `guide.match` has the relative difference of the two runs' parameters, and after the first one
    `guide.first_gradient` that of their first gradients: rounding may grow to any difference of parameters, but the
    first gradients are the same, or this is another training. A loss that is not finite ends the run as failed, which
    is a result like any other.

    Args:
        setting: what to do.
        emit: receives the events: the engine's records, and kinds of the guide's own (`guide.match`, `guide.memory`,
            `guide.first_gradient`, `guide.surface`).
        clock: monotonic time in seconds.

    Returns:
        The metrics of the run by step, and the peak memory of one step by category.
    """
    task = load(setting.task, norm=setting.norm)
    with isolated():
        model, optimizer, scheduler = make(setting, task)
        reference = reference_run(setting, task)
        lines = RecordLines(emit, clock)
        first = first_gradient_difference(setting, task)
        metrics = RunMetrics(
            setting, task, model=model, reference=reference, first_difference=first, lines=lines, clock=clock
        )
        run_steps = _run_engine if not setting.mistake else _run_loop
        try:
            run_steps(setting, task, metrics, (model, optimizer, scheduler))
        except NonFiniteError:
            pass  # the last event says so
        finally:
            reference.close()
        return metrics.data()


@contextmanager
def isolated(num_threads: int = 1) -> Iterator[None]:
    """Compute on so many threads with a random state of its own; restore threads and random state afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(before)


def warm() -> None:
    """Do once what takes long the first time: import scikit-learn for the images, and make one step."""
    # Without scikit-learn there are no digits to warm up with.
    with suppress(DataError):
        run(PlaygroundSetting(micro_batch_size=1, accumulation_steps=1, steps=1), lambda _: None)


def make(setting: PlaygroundSetting, task: PlaygroundTask) -> tuple[nn.Module, Optimizer, LinearLR]:
    """Return a new network, its optimizer and scheduler."""
    # Seeded for each network, so that a run and its reference run begin with the same parameters.
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
        norms="keep",  # what the cut does to BatchNorm is there to be seen
        observer=observer,
    )


def first_gradient_difference(setting: PlaygroundSetting, task: PlaygroundTask) -> float | None:
    """Return |first gradient - that of the native batch| / |that|; None where one of them is not finite.

    Both are what a step of SGD with a learning rate of 1 subtracts from the first parameters, so whatever a mistake
    does to the gradient, or to the rate, on its way there counts.
    """
    native, own = (_first_step(setting, task, size, mistake) for size, mistake in _two_ways(setting))
    difference = float((own - native).norm() / native.norm())
    return difference if math.isfinite(difference) else None


def _two_ways(setting: PlaygroundSetting) -> tuple[tuple[int, MistakeName], tuple[int, MistakeName]]:
    """Return micro-batch size and mistake of the native batch, and of the setting."""
    return (setting.effective_batch_size, ""), (setting.micro_batch_size, setting.mistake)


def _first_step(
    setting: PlaygroundSetting, task: PlaygroundTask, micro_batch_size: int, mistake: MistakeName
) -> Tensor:
    """Return by how much the first step moves the parameters, as one row of numbers."""
    model = make(setting, task)[0]
    before = flat(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = LinearLR(optimizer, 1.0, FINAL_FACTOR, total_iters=setting.steps)
    if mistake:
        loader = MicroBatches(task.rows, micro_batch_size, setting.seed)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler", UserWarning)  # shown on purpose
            loop_of(mistake)(
                model,
                list(itertools.islice(loader, setting.accumulation_steps)),
                optimizer=optimizer,
                scheduler=scheduler,
                criterion=cross_entropy,
                accumulation_steps=setting.accumulation_steps,
                max_norm=MAX_NORM if mistake == "clip_each" else float("inf"),
            )
    else:
        engine = engine_of(setting, task, (model, optimizer, scheduler), micro_batch_size=micro_batch_size)
        with engine, suppress(NonFiniteError):
            engine.step(next(iter(batches_of(setting, task))))
    return before - flat(model)


@torch.no_grad()
def flat(model: nn.Module) -> Tensor:
    """Return a copy of all parameters as one row of numbers in float64."""
    return torch.cat([parameter.flatten() for parameter in model.parameters()]).double()


def reference_run(setting: PlaygroundSetting, task: PlaygroundTask) -> "ReferenceRun":
    """Return the run of the same setting without accumulation, before its first step."""
    parts = make(setting, task)
    engine = engine_of(setting, task, parts, micro_batch_size=setting.effective_batch_size)
    return ReferenceRun(parts[0], engine, iter(batches_of(setting, task)))


class ReferenceRun:
    """A run on the native batch (the effective batch in one micro-batch), stepped beside a run to compare with.

    It stops where its loss is not finite.
    """

    def __init__(self, model: nn.Module, engine: Engine, data: Iterator[object]) -> None:
        self._model, self._engine, self._data = model, engine, data

    @torch.no_grad()
    def step(self, model: nn.Module) -> float:
        """Make one more step; return |parameters of `model` - own parameters| / |own parameters|."""
        # The comparison below needs no gradient, but the step does.
        with torch.enable_grad():
            # One batch, or none where the data is at its end.
            for batch in itertools.islice(self._data, 1):
                self._engine.step(batch)
        own = flat(self._model)
        return float((flat(model) - own).norm() / own.norm())

    def close(self) -> None:
        """Drop the reference to the model."""
        self._engine.close()


def _run_engine(
    setting: PlaygroundSetting, task: PlaygroundTask, metrics: RunMetrics, parts: tuple[nn.Module, Optimizer, LinearLR]
) -> None:
    engine = engine_of(setting, task, parts, micro_batch_size=setting.micro_batch_size, observer=metrics)
    with engine:
        for step, batch in enumerate(batches_of(setting, task)):
            recording = record_memory(engine) if step == metrics.measured_step else None
            with recording or nullcontext():
                engine.step(batch)
            if recording is not None:
                metrics.add_memory(recording.report.timeline)
            metrics.after_step(step)


def _run_loop(
    setting: PlaygroundSetting, task: PlaygroundTask, metrics: RunMetrics, parts: tuple[nn.Module, Optimizer, LinearLR]
) -> None:
    """Give a hand-written loop epoch after epoch, until it has made the steps that were asked for."""
    model, optimizer, scheduler = parts
    loader = MicroBatches(task.rows, setting.micro_batch_size, setting.seed)
    with warnings.catch_warnings(), LoopWatch(setting, model=model, optimizer=optimizer, metrics=metrics) as watch:
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
