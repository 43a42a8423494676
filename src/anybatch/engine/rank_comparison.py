"""Compare ranks: their arguments before the run, checksums of each step, and their weights every 100 steps."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from inspect import signature
from typing import Any, NoReturn
from zlib import crc32

import torch
from torch import nn

from anybatch.core.batch import Position
from anybatch.core.loss import Loss
from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch.engine.micro_batches import PlannedBatch
from anybatch.engine.schedule import num_scheduled
from anybatch.engine.updater import Updater
from anybatch.errors import DoesNotFitError, RanksDifferError, ReplicaError
from anybatch.parallel.strategy import Strategy
from anybatch.parallel.world import World

STEPS_BETWEEN = 100
_MAX_NAMES = 3
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # an odd factor; signed, since torch's 64-bit integers are


class ReplicaCheck:
    """Compares the weights of replicas (ranks that each have the whole model)."""

    def __init__(self, world: World, weights: Mapping[str, torch.Tensor], *, enabled: bool) -> None:
        self._world = world
        self._weights = weights
        self._enabled = enabled and world.call_tracker is not None

    def digest(self, step: int) -> int:
        """Return a checksum of the weights before every 100th step, and 0 in other steps.

        On an accelerator this waits until the device has finished the previous step.
        """
        return self._total(step) if self._enabled and not step % STEPS_BETWEEN else 0

    def compare(self, step: int) -> None:
        """Compare all weights now, before saving or evaluating.

        Raises:
            ReplicaError: on all ranks, with the names of the weights that differ.
        """
        if not self._enabled:
            return
        if len(set(self._world.gather_objects(self._total(step)))) > 1:
            self.refuse(step)

    def _total(self, step: int) -> int:
        """Return the checksum of all weights."""
        try:
            return int(checksums(list(self._weights.values())).sum()) if self._weights else 0
        except torch.OutOfMemoryError as error:
            message = (
                f"out of memory before step {step} (counted from 0), while comparing the weights of the ranks. "
                "Parameters and optimizer are unchanged. Free other tensors of your program on this device. "
                f"torch says: {str(error).partition(chr(10))[0]}"
            )
            raise DoesNotFitError(message, rank=self._world.rank, step=step) from None

    def refuse(self, step: int) -> NoReturn:
        """Raise a `ReplicaError` on all ranks, with the names of the weights that differ."""
        rows = self._world.gather_objects(checksums(list(self._weights.values())).tolist())
        names = tuple(name for name, *sums in zip(self._weights, *rows, strict=True) if len(set(sums)) > 1)
        ranks = tuple(rank for rank, row in enumerate(rows) if row != rows[0])
        some = ", ".join(map(repr, names[:_MAX_NAMES])) + ", ..." * (len(names) > _MAX_NAMES)
        message = (
            f"replicas differ before step {step}: {len(names)} of {len(self._weights)} weights ({some}) differ between "
            f"rank {', '.join(map(str, ranks))} and rank 0. Possible causes: weights or an optimizer "
            f"changed on one rank only, a failed update. To continue, call engine.load on every rank."
        )
        raise ReplicaError(message, ranks=ranks, names=names)


@torch.no_grad()
def checksums(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the checksum of each tensor, on the device: its bits, summed as integers modulo 2**64.

    It detects a change of any single value, but not an exchange of two values of a tensor, which is an unlikely fault.
    """
    sums = [_sum_of_bits(tensor) for tensor in tensors]
    # Multiplied by a different odd number for each tensor, to detect exchanged tensors.
    return torch.stack([value * (_ODD * (2 * number + 1) % (1 << 63)) for number, value in enumerate(sums)])


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().view(-1)
    size = flat.itemsize
    # As 8-byte integers where possible, because torch sums shorter integers many times slower.
    num_as_int64 = 0 if flat.storage_offset() * size % 8 else flat.numel() * size // 8 * (8 // size)
    total = flat[:num_as_int64].view(torch.int64).sum()
    if num_as_int64 < flat.numel():
        total = total + flat[num_as_int64:].view(_BITS[size]).sum(dtype=torch.int64)
    return total


_NAMES = ("call", "batch", "settings", "weights")
_WEIGHTS = _NAMES.index("weights")
_MAX_IDS, _MAX_IDS_IN_MESSAGE = 64, 4
_REMEDIES = {
    "call": "One rank caught an error while other ranks made the step, or one rank made an additional call: load the "
    "last checkpoint on every rank.",
    "batch": "One rank skipped, added or reordered a batch, or continued after catching an error: load the last "
    "checkpoint on every rank (engine.load), and use the same batches in the same order.",
    "settings": "Use the same settings on every rank.",
}


@dataclass(kw_only=True, eq=False)
class StepFingerprint:
    """Checksums (digests) of the call, the batch, the settings and the weights of a step."""

    world: World
    updater: Updater
    replicas: ReplicaCheck

    def __post_init__(self) -> None:
        # Compared in each step: a function that creates the optimizer runs after ranks have compared arguments.
        self._kind = type(self.updater.target.optimizer).__name__
        self._kind_digest = crc32(self._kind.encode())
        self._step = 0
        self._position = Position()
        self._ids: Sequence[int] = ()
        self._num_samples = 0

    def record(self, planned: PlannedBatch, step: int) -> None:
        """Record the digests of the step that this rank is about to run; the ranks compare them within the step."""
        call_tracker = self.world.call_tracker
        assert call_tracker is not None
        self._step, self._position, self._num_samples = step, planned.end, planned.plan.num_samples
        self._ids, end = planned.sample_ids, planned.end
        settings = [number for group in self.updater.target.optimizer.param_groups for number in _numbers(group)]
        settings += (self._num_scheduled(), self.updater.rate_factor)
        some_ids = _some_ids(planned.sample_ids)
        call_tracker.digests = (
            crc32(f"{call_tracker.position.name} {call_tracker.number} {step}".encode()),
            crc32(array("d", (planned.seed, end.epoch, end.sample_offset, self._num_samples, *some_ids)).tobytes()),
            crc32(array("d", settings).tobytes(), self._kind_digest),
            self.replicas.digest(step),
        )

    def refuse(self, differing: Sequence[int]) -> NoReturn:
        """Raise an error on all ranks, because they are about to run different steps."""
        call_tracker = self.world.call_tracker
        assert call_tracker is not None
        if tuple(differing) == (_WEIGHTS,):
            self.replicas.refuse(self._step)
        # All ranks raise in the same place, so this collective cannot hang.
        values = {"optimizer": self._kind, **{name: f"{value:g}" for name, value in self._settings().items()}}
        rows = self.world.gather_objects((call_tracker.number, self._describe(call_tracker.position.name), values))
        call_tracker.align([number for number, _, _ in rows])
        names = tuple(_NAMES[number] for number in differing if number != _WEIGHTS)
        settings = sorted(
            {name for _, _, row in rows for name in row if len({other.get(name) for *_, other in rows}) > 1}
        )
        meant = tuple(
            "; ".join([text, *(f"{name} {row.get(name, 'none')}" for name in settings)]) for _, text, row in rows
        )
        message = (
            f"ranks disagree about the step ({', '.join(names)}), so it was not run: "
            f"{' | '.join(f'rank {rank}: {text}' for rank, text in enumerate(meant))}. "
            f"{' '.join(_REMEDIES[name] for name in names)} Gradients are cleared, parameters are unchanged."
        )
        raise RanksDifferError(message, step=self._step, names=(*names, *settings), meant=meant)

    def _settings(self) -> dict[str, float]:
        """Return the numbers among the optimizer's hyperparameters, and the schedule's step, by name."""
        values = {}
        for number, group in enumerate(self.updater.target.optimizer.param_groups):
            for name, value in group.items():
                for setting in _numbers({name: value}):
                    key = f"{name} of group {number}"
                    values[key if key not in values else f"{key}, second"] = setting
        values["steps of the scheduler"] = self._num_scheduled()
        values["factor of the spike watch"] = self.updater.rate_factor
        return values

    def _num_scheduled(self) -> float:
        scheduler = self.updater.scheduler
        return 0 if scheduler is None else num_scheduled(scheduler) or 0

    def _describe(self, name: str) -> str:
        end = self._position
        ids = ", ".join(str(int(sample_id)) for sample_id in self._ids[:_MAX_IDS_IN_MESSAGE])
        return (
            f"{name} at step {self._step}, up to sample {end.sample_offset} of epoch {end.epoch}, "
            f"{self._num_samples} samples ({ids}, ...)"
        )


def _numbers(group: dict[str, Any]) -> list[float]:
    """Return the numerical settings of a parameter group."""
    numbers: list[float] = []
    for value in group.values():
        kind = type(value)
        if kind is float or kind is bool or kind is int:
            numbers.append(value)
        elif kind is tuple:  # such as betas
            numbers += [item for item in value if isinstance(item, (int, float))]
        # Reading a value from an accelerator would synchronize.
        elif isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
            numbers.append(float(value))
    return numbers


def _some_ids(ids: Sequence[int]) -> tuple[int, ...]:
    """Return some of the sample ids, evenly spaced, to detect other samples or another order."""
    if isinstance(ids, range):
        return ids.start, ids.stop, ids.step
    return tuple(map(int, ids[:: -(-len(ids) // _MAX_IDS) or 1]))


_COMPARED_BY_CONTENT = ("model", "loss", "strategy", "world")
_MAX_CHARACTERS = 200
_SIMPLE = (str, int, float, bool, type(None), torch.dtype)


def check_same_build(spec: TrainSpec, hardware: Hardware, loss: Loss, modules: nn.Module, world: World) -> None:
    """Raise an error on all ranks if the arguments of their engines differ.

    Functions are compared by name, so different functions with the same name pass.
    """
    texts = {
        field.name: _text(getattr(arguments, field.name))
        for arguments in (spec, hardware)
        for field in fields(arguments)
        if field.name not in _COMPARED_BY_CONTENT
    }
    texts["loss"] = _loss(loss)
    texts["strategy"] = _text(hardware.strategy)
    texts["device"] = world.device.type
    tensors = [*modules.named_parameters(), *modules.named_buffers()]
    texts["model"] = ", ".join(f"{name} {_shape(tensor)}" for name, tensor in tensors)
    texts["trainable"] = ", ".join(name for name, weight in modules.named_parameters() if weight.requires_grad)
    _check_equal("built the engine", texts, world)


def check_same_form(form: object, world: World) -> None:
    """Raise an error on all ranks if they save checkpoints with different options."""
    if world.call_tracker is not None:
        options = {field.name: _text(getattr(form, field.name)) for field in fields(form)}  # type: ignore[arg-type]
        _check_equal("called engine.save", options, world)


def _check_equal(act: str, values: Mapping[str, str], world: World) -> None:
    rows = world.gather_objects({name: crc32(text.encode()) for name, text in values.items()})
    names = [name for name in rows[0] if any(row.get(name) != rows[0][name] for row in rows)]
    if not names:
        return
    # All ranks have the same rows, so all join this collective.
    texts = world.gather_objects({name: values.get(name, "nothing") for name in names})
    meant = tuple("; ".join(f"{name}: {_around(name, text, texts)}" for name, text in row.items()) for row in texts)
    listed = " | ".join(f"rank {rank}: {text}" for rank, text in enumerate(meant))
    message = (
        f"ranks {act} with different {', '.join(names)}: {listed}. Use the same values on every rank; if they come "
        "from a file or the command line, check the input of each rank."
    )
    raise RanksDifferError(message, names=tuple(names), meant=meant)


def _around(name: str, text: str, texts: Sequence[Mapping[str, str]]) -> str:
    """Return a text; if it is long, only the part where it begins to differ."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    others = [other.get(name, "") for other in texts]
    same = next((i for i, letters in enumerate(zip(*others, strict=False)) if len(set(letters)) > 1), 0)
    start = max(0, text.rfind(", ", 0, same) + 2)
    return f"... {text[start : start + _MAX_CHARACTERS]} ..."


def _text(value: Any) -> str:  # noqa: ANN401 (any argument of an engine)
    """Return a text that is equal on all ranks if the value is equal."""
    if isinstance(value, _SIMPLE):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_text(item)}' for name, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    if is_dataclass(value) and not isinstance(value, type):
        inner = ", ".join(f"{field.name}={_text(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__name__}({inner})"
    if hasattr(value, "prepare") and hasattr(value, "capabilities"):
        return _options(value)
    return _name(value)


def _loss(loss: Loss) -> str:
    terms = [
        f"{name}: {'sum' if term.is_sum else 'mean'} over {term.items.name}, weight {term.weight:g}"
        for name, term in loss.kind.terms.items()
    ]
    functions = [_name(function) for function in loss.functions.values()]
    return f"{loss.kind.feature.label} of {', '.join(functions)} ({'; '.join(terms)})"


def _options(strategy: Strategy) -> str:
    """Return the class and the arguments of a strategy, and of the strategies inside it."""
    arguments = [f"_{name}" for name in signature(type(strategy)).parameters]
    parts = {name: value for name, value in vars(strategy).items() if name in arguments or hasattr(value, "prepare")}
    return f"{type(strategy).__name__}({', '.join(f'{name[1:]}={_text(value)}' for name, value in parts.items())})"


def _name(value: Callable[..., Any] | object) -> str:
    while hasattr(value, "func"):  # a partial
        value = value.func
    return getattr(value, "__qualname__", type(value).__qualname__)


def _shape(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
