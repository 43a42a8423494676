"""The reference of a playground run: the same steps on one rank, without accumulation (the native batch)."""

import itertools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

from anybatch.engine.engine import Engine
from anybatch.errors import MemoryExhaustedError, NonFiniteError
from anybatch.norms import Policy, PolicyName
from anybatch_guide.micro_batch_view import GradientCells, rounded
from anybatch_guide.setting import PlaygroundSetting
from anybatch_guide.tasks.task import MicroBatches, PlaygroundTask, cross_entropy
from anybatch_guide.training import FINAL_FACTOR, Parts, batches_of, engine_of, limited, make, policy_of, run_loop


def first_update_difference(setting: PlaygroundSetting, task: PlaygroundTask, change: Tensor | None) -> float | None:
    """Return |change - native change| / |native change| of the first step; None if a change is missing or infinite."""
    if change is None:
        return None
    parts = _first_parts(setting, task)
    engine = engine_of(setting, task, parts, micro_batch_size=setting.effective_batch_size)
    native = _parameter_change(parts, setting, task, engine, nullcontext())
    difference = float((change - native).norm() / native.norm())
    return difference if math.isfinite(difference) else None


def first_step(setting: PlaygroundSetting, task: PlaygroundTask) -> Tensor | None:
    """Return the change of the parameters in the first step of a run, as a flat tensor.

    The step is an SGD step with a learning rate of 1, so the change includes the effect of a mistake on the gradient
    and the rate. Call it on every rank. None if the memory limit of the run is too low.
    """
    parts = _first_parts(setting, task)
    if setting.mistake:
        return _parameter_change_of_loop(parts, setting, task)
    norms: Policy | PolicyName = policy_of(setting.norm_policy)
    engine = engine_of(setting, task, parts, micro_batch_size=setting.micro_batch_size, norms=norms)
    try:
        return _parameter_change(parts, setting, task, engine, limited(setting, task, parts))
    except (MemoryExhaustedError, torch.OutOfMemoryError):
        return None


def _first_parts(setting: PlaygroundSetting, task: PlaygroundTask) -> Parts:
    model = make(setting, task)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer, LinearLR(optimizer, 1.0, FINAL_FACTOR, total_iters=setting.steps)


def _parameter_change(
    parts: Parts,
    setting: PlaygroundSetting,
    task: PlaygroundTask,
    engine: Engine,
    limit: AbstractContextManager[object],
) -> Tensor:
    before = flat(parts[0])
    with engine, limit, suppress(NonFiniteError):
        engine.step(next(iter(batches_of(setting, task))))
    return before - flat(parts[0])


def _parameter_change_of_loop(parts: Parts, setting: PlaygroundSetting, task: PlaygroundTask) -> Tensor:
    before = flat(parts[0])
    loader = MicroBatches(task.rows, setting.micro_batch_size, setting.seed)
    run_loop(setting, parts, list(itertools.islice(loader, setting.accumulation_steps)), cross_entropy)
    return before - flat(parts[0])


@torch.no_grad()
def flat(model: nn.Module) -> Tensor:
    """Return a copy of all parameters as a flat float64 tensor."""
    return torch.cat([parameter.flatten() for parameter in model.parameters()]).double()


def reference_run(setting: PlaygroundSetting, task: PlaygroundTask) -> "ReferenceRun":
    """Return the run of the same setting without accumulation, before its first step."""
    parts = make(setting, task)
    engine = engine_of(setting, task, parts, micro_batch_size=setting.effective_batch_size)
    return ReferenceRun(parts[0], engine, iter(batches_of(setting, task)))


class ReferenceRun:
    """A run on the native batch (the effective batch in one micro-batch), stepped in parallel with another run."""

    def __init__(self, model: nn.Module, engine: Engine, data: Iterator[object]) -> None:
        self.model, self._engine, self._data = model, engine, data
        self._cells = GradientCells(model)

    def step(self) -> tuple[float, list[float | None]] | None:
        """Make one more step; return its loss and the shown components of its gradient, or None at the end of the data.

        Raises:
            NonFiniteError: if its loss is not finite.
        """
        for batch in itertools.islice(self._data, 1):
            return float(self._engine.step(batch).loss), rounded(self._cells.added)
        return None

    @torch.no_grad()
    def difference(self, model: nn.Module) -> float:
        """Return |parameters of `model` - reference parameters| / |reference parameters|."""
        expected = flat(self.model)
        return float((flat(model) - expected).norm() / expected.norm())

    def close(self) -> None:
        """Close the engine, and remove the hook."""
        self._engine.close()
        self._cells.close()
