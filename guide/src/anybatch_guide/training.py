"""The model, optimizer and data of a playground run, and its loop with the engine, for one rank or two."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

from anybatch.core.records import Observer, Observers
from anybatch.data.batches import Batches, batches
from anybatch.diagnostics.memory_report import record_memory
from anybatch.engine.engine import Engine
from anybatch.errors import MemoryExhaustedError, NonFiniteError
from anybatch.memory.trace import MemoryTimeline
from anybatch.norms import Ghost, Policy, PolicyName
from anybatch.testing import memory_budget
from anybatch_guide.micro_batch_view import MicroBatchView, ViewObserver
from anybatch_guide.mistakes.mistake import loop_of
from anybatch_guide.setting import GHOST_SAMPLES, NormPolicy, PlaygroundSetting
from anybatch_guide.tasks.task import PlaygroundTask

FINAL_FACTOR = 0.1
"""The learning rate decays linearly to this fraction of its first value."""
MAX_NORM = 1.0
"""The maximum gradient norm of runs that clip after every micro-batch, a mistake; other runs do not clip."""
KIBIBYTE = 2**10
RUN_ENDS = (NonFiniteError, MemoryExhaustedError, torch.OutOfMemoryError)
"""Errors that end a run with the status "failed", after its last record."""
Parts = tuple[nn.Module, Optimizer, LinearLR]
_OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


class StepMetrics(Observer, ViewObserver, Protocol):
    """Collects the metrics of a run, or sends them to the process that collects them."""

    @property
    def measured_step(self) -> int:
        """Number of the step whose memory is recorded."""
        ...

    def add_memory(self, timeline: MemoryTimeline) -> None:
        """Receive the memory of the measured step."""
        ...

    def after_step(self, step: int) -> None:
        """Measure the updated model after a step."""
        ...


@contextmanager
def isolated(num_threads: int = 1) -> Iterator[None]:
    """Set the number of threads, and restore it and the random state afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(before)


def make(setting: PlaygroundSetting, task: PlaygroundTask) -> Parts:
    """Return a new network, its optimizer and scheduler."""
    # Seed for each network, so that a run and its reference run start with the same parameters.
    torch.default_generator.manual_seed(setting.seed)
    model = task.model()
    optimizer = _OPTIMIZERS[setting.optimizer](model.parameters(), lr=setting.learning_rate)
    return model, optimizer, LinearLR(optimizer, 1.0, FINAL_FACTOR, total_iters=setting.steps)


def batches_of(setting: PlaygroundSetting, task: PlaygroundTask) -> Batches:
    """Return the effective batches of a run."""
    return batches(task.rows, effective_batch_size=setting.effective_batch_size, steps=setting.steps, seed=setting.seed)


def run_loop(
    setting: PlaygroundSetting,
    parts: Parts,
    loader: Iterable[tuple[Tensor, Tensor]],
    criterion: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Run the loop with the mistake of a setting over the micro-batches of a loader."""
    model, optimizer, scheduler = parts
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler", UserWarning)  # shown on purpose
        loop_of(setting.mistake)(
            model,
            loader,
            optimizer=optimizer,
            scheduler=scheduler,
            criterion=criterion,
            accumulation_steps=setting.accumulation_steps,
            max_norm=MAX_NORM if setting.mistake == "clip_each" else float("inf"),
        )


def policy_of(name: NormPolicy) -> Policy | PolicyName:
    """Return the engine's BatchNorm policy for a name in the playground."""
    return Ghost(GHOST_SAMPLES) if name == "ghost" else name


def engine_of(
    setting: PlaygroundSetting,
    task: PlaygroundTask,
    parts: Parts,
    *,
    micro_batch_size: int,
    norms: Policy | PolicyName = "keep",
    observer: Observer | None = None,
) -> Engine:
    """Return an engine for these parts and this setting."""
    model, optimizer, scheduler = parts
    return Engine(
        model,
        optimizer,
        task.loss,
        micro_batch_size=micro_batch_size,
        scheduler=scheduler,
        precision=setting.precision,
        clip=MAX_NORM if setting.mistake == "clip_each" else None,
        norms=norms,
        observer=observer,
    )


def limited(setting: PlaygroundSetting, task: PlaygroundTask, parts: Parts) -> AbstractContextManager[object]:
    """Return a context that limits memory to the setting's limit, not counting the data set.

    Model and optimizer count. The data set does not count, because each sample is a view of the whole data set.
    """
    if not setting.memory_limit_kib:
        return nullcontext()
    (model, optimizer, _), rows = parts, task.rows
    num_bytes = setting.memory_limit_kib * KIBIBYTE + rows.num_bytes
    return memory_budget(num_bytes, model, optimizer, rows.inputs, rows.targets)


def run_engine(setting: PlaygroundSetting, task: PlaygroundTask, metrics: StepMetrics, parts: Parts) -> None:
    """Make the steps of a run in the engine, and record the memory of one of them."""
    # The view comes first, so that it reads a gradient before the engine's hook may reduce it.
    with closing(MicroBatchView(parts[0], task, metrics, steps=setting.steps)) as view:
        engine = engine_of(
            setting,
            task,
            parts,
            micro_batch_size=setting.micro_batch_size,
            norms=policy_of(setting.norm_policy),
            observer=Observers(metrics, view),
        )
        with engine, view.watching(parts[0]):
            for step, batch in enumerate(batches_of(setting, task)):
                recorded = record_memory(engine) if step == metrics.measured_step else nullcontext()
                # Leave these contexts before the metrics use memory, which does not belong to the step.
                with recorded as recording, limited(setting, task, parts):
                    engine.step(batch)
                if recording is not None:
                    metrics.add_memory(recording.report.timeline)
                metrics.after_step(step)
