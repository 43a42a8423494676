"""Fingerprint of a step: before each update ranks compare a few digests, in the step's last message.

A digest is a 20-bit checksum, so that sums of squares stay exact (`anybatch.parallel.agreement`). It misses one
difference in a million, and costs about 5 microseconds per step, nothing on a single rank.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NoReturn
from zlib import crc32

import torch
from torch.optim import Optimizer

from anybatch.core.batch import Position
from anybatch.engine.accumulation.planned_batch import PlannedBatch
from anybatch.engine.replica_check import ReplicaCheck
from anybatch.engine.update.schedule import num_scheduled
from anybatch.errors import RanksDifferError
from anybatch.parallel.world import World

_NAMES = ("call", "batch", "settings", "weights")
_CALL, _BATCH, _SETTINGS, _WEIGHTS = range(len(_NAMES))
_MOST_IDS, _MOST_WORDS = 64, 4
_REMEDIES = {
    "call": "One rank caught an error while the others made the step, or made an additional call: load the last "
    "checkpoint on every rank.",
    "batch": "One rank skipped, added or reordered a batch, or continued after catching an error: load the last "
    "checkpoint on every rank (engine.load), and use the same batches in the same order.",
    "settings": "Use the same settings on every rank.",
}


class StepMeaning:
    """Digests of the call, the batch, the settings and the weights of a step.

    Args:
        world: the ranks.
        optimizer: its parameter groups hold learning rates and the like.
        schedule: function () -> the scheduler, or None.
        rate_factor: function () -> factor of learning rates in addition to the schedule.
        replicas: compares weights.
    """

    def __init__(
        self,
        world: World,
        optimizer: Optimizer,
        schedule: Callable[[], Any],
        *,
        rate_factor: Callable[[], float],
        replicas: ReplicaCheck,
    ) -> None:
        self._world = world
        self._optimizer = optimizer
        self._schedule = schedule
        self._rate_factor = rate_factor
        self._replicas = replicas
        # A function may create the optimizer after the ranks have compared their arguments.
        self._kind = type(optimizer).__name__
        self._kind_digest = crc32(self._kind.encode())
        self._step = 0
        self._position = Position()
        self._ids: Sequence[int] = ()
        self._batch: tuple[int, ...] = ()
        self._num_samples = 0

    def note(self, planned: PlannedBatch, step: int) -> None:
        """Record the digests of the step that this rank is about to run."""
        roll_call = self._world.roll_call
        if roll_call is None:
            return
        self._step, self._position, self._num_samples = step, planned.end, planned.plan.num_samples
        self._ids, self._batch = planned.sample_ids, _probes(planned.sample_ids)
        end = planned.end
        settings = [number for group in self._optimizer.param_groups for number in _numbers(group)]
        settings += (self._num_scheduled(), self._rate_factor())
        weights, roll_call.shards_digest = self._replicas.digests(step)
        roll_call.digests = (
            crc32(f"{roll_call.here.name} {roll_call.number} {step}".encode()) & 0xFFFFF,
            _digest((planned.seed, end.epoch, end.sample_offset, self._num_samples, *self._batch)),
            crc32(array("d", settings).tobytes(), self._kind_digest) & 0xFFFFF,
            weights,
        )

    def refuse(self, differing: Sequence[int]) -> NoReturn:
        """Refuse a step that differs between ranks, on all ranks.

        Args:
            differing: numbers of the digests that differ.

        Raises:
            RanksDifferError: with the step of each rank.
            ReplicaError: only weights differ; with their names.
        """
        roll_call = self._world.roll_call
        assert roll_call is not None
        if tuple(differing) == (_WEIGHTS,):
            self._replicas.refuse(self._step)
        # All ranks raise in the same place, so this collective cannot hang.
        words = {"optimizer": self._kind, **{name: f"{value:g}" for name, value in self._settings().items()}}
        rows = self._world.gather_from_processes((roll_call.number, self._place(roll_call.here.name), words))
        roll_call.align([number for number, _, _ in rows])
        names = tuple(_NAMES[number] for number in differing if number != _WEIGHTS)
        settings = sorted(
            {name for _, _, row in rows for name in row if len({other.get(name) for *_, other in rows}) > 1}
        )
        meant = tuple(
            "; ".join([place, *(f"{name} {row.get(name, 'none')}" for name in settings)]) for _, place, row in rows
        )
        message = (
            f"ranks disagree about the step ({', '.join(names)}), so it was not made: "
            f"{' | '.join(f'rank {rank}: {text}' for rank, text in enumerate(meant))}. "
            f"{' '.join(_REMEDIES[name] for name in names)} "
            "Gradients are cleared, parameters are unchanged."
        )
        raise RanksDifferError(message, step=self._step, names=(*names, *settings), meant=meant)

    def _settings(self) -> dict[str, float]:
        """Return the numbers among the optimizer's hyperparameters, and the schedule's step, by name."""
        values = {}
        for number, group in enumerate(self._optimizer.param_groups):
            for name, value in group.items():
                for one in _numbers({name: value}):
                    key = f"{name} of group {number}"
                    values[key if key not in values else f"{key}, second"] = one
        values["steps of the scheduler"] = self._num_scheduled()
        values["factor of the spike watch"] = self._rate_factor()
        return values

    def _num_scheduled(self) -> float:
        return num_scheduled(self._schedule()) or 0

    def _place(self, name: str) -> str:
        end = self._position
        ids = ", ".join(str(int(one)) for one in self._ids[:_MOST_WORDS])
        return (
            f"{name} at step {self._step}, up to sample {end.sample_offset} of epoch {end.epoch}, "
            f"{self._num_samples} samples ({ids}, ...)"
        )


def _numbers(group: dict[str, Any]) -> list[float]:
    """Return the numerical settings of a parameter group."""
    found: list[float] = []
    for value in group.values():
        kind = type(value)
        if kind is float or kind is bool or kind is int:
            found.append(value)
        elif kind is tuple:  # such as betas
            found += [one for one in value if isinstance(one, (int, float))]
        # Reading a value from an accelerator would synchronize.
        elif isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
            found.append(float(value))
    return found


def _probes(ids: Sequence[int]) -> tuple[int, ...]:
    """Return some of the sample ids, evenly spaced, which change with the order or the samples."""
    if isinstance(ids, range):
        return ids.start, ids.stop, ids.step
    return tuple(map(int, ids[:: -(-len(ids) // _MOST_IDS) or 1]))


def _digest(numbers: Sequence[float]) -> int:
    return crc32(array("d", numbers).tobytes()) & 0xFFFFF
