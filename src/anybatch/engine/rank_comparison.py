"""Compare ranks: arguments before the run, a few digests in every step, and weights every 100 steps."""

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
from anybatch.parallel.local_parts import is_whole, local_part
from anybatch.parallel.strategy import Strategy
from anybatch.parallel.world import World

STEPS_BETWEEN = 100
_MOST_NAMES = 3
_UNLIKE = (
    ", or a layer with plain weights that runs on a part of its input (a norm missing in a sequence-parallel plan)"
)
_PIECE_BYTES = 1 << 24
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # signed, since torch computes with signed 64-bit integers only


class ReplicaCheck:
    """Compares the weights of replicas."""

    def __init__(self, world: World, weights: Mapping[str, torch.Tensor], *, enabled: bool) -> None:
        self._world = world
        self._weights = weights
        self._enabled = enabled and world.roll_call is not None
        self._seen_equal: int | None = None
        self._pending: int | None = None

    def digests(self, step: int) -> tuple[int, int]:
        """Return 20-bit checksums of whole weights and of parts before a step; 0 in steps without a comparison.

        If several processes run a model together, also compare before the second step: a layer that they run
        differently, such as a norm missing in a sequence-parallel plan, has different gradients on each.

        On an accelerator this waits until the device has finished the previous step.
        """
        # The previous step was not refused, so its comparison was successful.
        self._seen_equal, self._pending = self._pending if self._pending is not None else self._seen_equal, None
        if not self._enabled or (step % STEPS_BETWEEN and not (step == 1 and self._world.has_model_groups)):
            return 0, 0
        self._pending = step
        whole, parts = self._totals(step)
        return _fold(whole), _fold(parts)

    def compare(self, step: int) -> None:
        """Compare all weights now, before saving or evaluating.

        Raises:
            ReplicaError: on all ranks, with the names of the weights that differ.
        """
        if not self._enabled:
            return
        rows = self._world.gather_from_processes(self._totals(step))
        if any(rows[one] != rows[group[0]] for group in self._world.data_groups for one in group) or (
            len({whole for whole, _ in rows}) > 1
        ):
            self.refuse(step)
        self._seen_equal, self._pending = step, None

    def differing(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the names of the weights that differ, and the processes that differ from the first."""
        if not self._enabled:
            return (), ()
        weights = [local_part(weight) for weight in self._weights.values()]
        rows = self._world.gather_from_processes(checksums(weights).tolist())
        # Compare whole weights with the first process, and parts with the first process of the data group.
        first = {process: group[0] for group in self._world.data_groups for process in group}
        names, processes = [], set()
        for number, (name, weight) in enumerate(self._weights.items()):
            other = {
                p for p, row in enumerate(rows) if row[number] != rows[0 if is_whole(weight) else first[p]][number]
            }
            if other:
                names.append(name)
                processes |= other
        return tuple(names), tuple(sorted(processes))

    def _totals(self, step: int) -> tuple[int, int]:
        """Return the checksums of whole weights and of parts."""
        by_kind: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for weight in self._weights.values():
            by_kind[0 if is_whole(weight) else 1].append(local_part(weight))
        try:
            whole, parts = (int(checksums(weights).sum()) if weights else 0 for weights in by_kind)
        except torch.OutOfMemoryError as error:
            message = (
                f"out of memory before step {step} (counted from 0), while comparing the weights of the ranks. "
                "Parameters and optimizer are unchanged. Free other tensors of your program on this device. "
                f"torch says: {str(error).partition(chr(10))[0]}"
            )
            raise DoesNotFitError(message, rank=self._world.process, step=step) from None
        return whole, parts

    def refuse(self, step: int) -> NoReturn:
        """Refuse to continue with replicas that differ, on all ranks."""
        names, ranks = self.differing()
        # A pending comparison of an earlier step was successful.
        equal = self._seen_equal if self._pending in (None, step) else self._pending
        seen = "were not compared before" if equal is None else f"were equal before step {equal}"
        some = ", ".join(map(repr, names[:_MOST_NAMES])) + ", ..." * (len(names) > _MOST_NAMES)
        message = (
            f"replicas differ before step {step}: {len(names)} of {len(self._weights)} weights ({some}) differ between "
            f"rank {', '.join(map(str, ranks))} and rank 0; they {seen}. Possible causes: weights or an optimizer "
            f"changed on one rank only, a failed update{_UNLIKE if self._world.has_model_groups else ''}. To continue, "
            "call engine.align_replicas(), which copies the state of rank 0, or engine.load, on every rank."
        )
        raise ReplicaError(message, ranks=ranks, names=names)


@torch.no_grad()
def checksums(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the checksum of each tensor, on the device: its bits, summed as integers modulo 2**64.

    It detects a change of any single value, but not an exchange of values, which drifting weights do not cause.
    """
    sums = [_sum_of_bits(tensor) for tensor in tensors]
    # Multiplied by a different odd number for each tensor, to detect exchanged tensors.
    return torch.stack([one * (_ODD * (2 * number + 1) % (1 << 63)) for number, one in enumerate(sums)])


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if plain.is_contiguous():
        return _sum_of_flat(plain.view(-1))
    # Such as channels-last weights: copy pieces of at least eight rows, so that each piece has whole words.
    num_rows = max(1, _PIECE_BYTES * len(plain) // (8 * max(1, plain.nbytes))) * 8
    pieces = [_sum_of_flat(piece.contiguous().view(-1)) for piece in plain.split(num_rows)]
    return torch.stack(pieces).sum()


def _sum_of_flat(flat: torch.Tensor) -> torch.Tensor:
    size = flat.itemsize
    # As words of 8 bytes where possible: torch sums these many times faster than narrower ones.
    num_in_words = 0 if flat.storage_offset() * size % 8 else flat.numel() * size // 8 * (8 // size)
    total = flat[:num_in_words].view(torch.int64).sum()
    if num_in_words < flat.numel():
        total = total + flat[num_in_words:].view(_BITS[size]).sum(dtype=torch.int64)
    return total


def _fold(number: int) -> int:
    """Return 20 bits that depend on all 64."""
    number &= (1 << 64) - 1
    return (number ^ number >> 20 ^ number >> 40 ^ number >> 60) & 0xFFFFF


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


@dataclass(kw_only=True, eq=False)
class StepMeaning:
    """Digests of the call, the batch, the settings and the weights of a step."""

    world: World
    updater: Updater
    replicas: ReplicaCheck

    def __post_init__(self) -> None:
        # A function may create the optimizer after the ranks have compared their arguments.
        self._kind = type(self.updater.target.optimizer).__name__
        self._kind_digest = crc32(self._kind.encode())
        self._step = 0
        self._position = Position()
        self._ids: Sequence[int] = ()
        self._batch: tuple[int, ...] = ()
        self._num_samples = 0

    def note(self, planned: PlannedBatch, step: int) -> None:
        """Record the digests of the step that this rank is about to run."""
        roll_call = self.world.roll_call
        assert roll_call is not None
        self._step, self._position, self._num_samples = step, planned.end, planned.plan.num_samples
        self._ids, self._batch = planned.sample_ids, _probes(planned.sample_ids)
        end = planned.end
        settings = [number for group in self.updater.target.optimizer.param_groups for number in _numbers(group)]
        settings += (self._num_scheduled(), self.updater.rate_factor)
        weights, roll_call.shards_digest = self.replicas.digests(step)
        roll_call.digests = (
            crc32(f"{roll_call.here.name} {roll_call.number} {step}".encode()) & 0xFFFFF,
            _digest((planned.seed, end.epoch, end.sample_offset, self._num_samples, *self._batch)),
            crc32(array("d", settings).tobytes(), self._kind_digest) & 0xFFFFF,
            weights,
        )

    def refuse(self, differing: Sequence[int]) -> NoReturn:
        """Refuse a step that differs between ranks, on all ranks."""
        roll_call = self.world.roll_call
        assert roll_call is not None
        if tuple(differing) == (_WEIGHTS,):
            self.replicas.refuse(self._step)
        # All ranks raise in the same place, so this collective cannot hang.
        words = {"optimizer": self._kind, **{name: f"{value:g}" for name, value in self._settings().items()}}
        rows = self.world.gather_from_processes((roll_call.number, self._place(roll_call.here.name), words))
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
        for number, group in enumerate(self.updater.target.optimizer.param_groups):
            for name, value in group.items():
                for one in _numbers({name: value}):
                    key = f"{name} of group {number}"
                    values[key if key not in values else f"{key}, second"] = one
        values["steps of the scheduler"] = self._num_scheduled()
        values["factor of the spike watch"] = self.updater.rate_factor
        return values

    def _num_scheduled(self) -> float:
        return num_scheduled(self.updater.scheduler) or 0

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


_COMPARED_BY_CONTENT = ("model", "loss", "strategy", "world")
_MAX_CHARACTERS = 200
_SIMPLE = (str, int, float, bool, type(None), torch.dtype)


def refuse_other_builds(spec: TrainSpec, hardware: Hardware, loss: Loss, modules: nn.Module, world: World) -> None:
    """Refuse to build engines that differ between ranks, on all ranks.

    Functions are compared by name, so different functions with the same name pass.
    """
    found = {
        field.name: _text(getattr(one, field.name))
        for one in (spec, hardware)
        for field in fields(one)
        if field.name not in _COMPARED_BY_CONTENT
    }
    found["loss"] = _loss(loss)
    found["strategy"] = _text(hardware.strategy)
    found["device"] = world.device.type
    tensors = [*modules.named_parameters(), *modules.named_buffers()]
    found["model"] = ", ".join(f"{name} {_shape(tensor)}" for name, tensor in tensors)
    found["trainable"] = ", ".join(name for name, one in modules.named_parameters() if one.requires_grad)
    _refuse_differing("built the engine", found, world)


def refuse_other_forms(form: object, world: World) -> None:
    """Refuse to save in forms that differ between ranks, on all ranks."""
    if world.roll_call is not None:
        found = {one.name: _text(getattr(form, one.name)) for one in fields(form)}  # type: ignore[arg-type]
        _refuse_differing("called engine.save", found, world)


def _refuse_differing(act: str, found: Mapping[str, str], world: World) -> None:
    rows = world.gather_from_processes({name: crc32(text.encode()) for name, text in found.items()})
    names = [name for name in rows[0] if any(row.get(name) != rows[0][name] for row in rows)]
    if not names:
        return
    # All ranks have the same rows, so all join this collective.
    texts = world.gather_from_processes({name: found.get(name, "nothing") for name in names})
    meant = tuple("; ".join(f"{name}: {_around(name, text, texts)}" for name, text in row.items()) for row in texts)
    values = " | ".join(f"rank {rank}: {text}" for rank, text in enumerate(meant))
    message = (
        f"ranks {act} with different {', '.join(names)}: {values}. Use the same values on every rank; if they come "
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
        return f"{{{', '.join(f'{name}: {_text(one)}' for name, one in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    if is_dataclass(value) and not isinstance(value, type):
        inner = ", ".join(f"{one.name}={_text(getattr(value, one.name))}" for one in fields(value))
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
    return f"{type(loss.kind).__name__} of {', '.join(functions)} ({'; '.join(terms)})"


def _options(strategy: Strategy) -> str:
    """Return the class and the arguments of a strategy, and of the strategies inside it."""
    arguments = [f"_{name}" for name in signature(type(strategy)).parameters]
    parts = {name: value for name, value in vars(strategy).items() if name in arguments or hasattr(value, "prepare")}
    return f"{type(strategy).__name__}({', '.join(f'{name[1:]}={_text(one)}' for name, one in parts.items())})"


def _name(value: Callable[..., Any] | object) -> str:
    while hasattr(value, "func"):  # a partial
        value = value.func
    return getattr(value, "__qualname__", type(value).__qualname__)


def _shape(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
