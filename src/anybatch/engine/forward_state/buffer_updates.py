"""Updates buffers that a forward changes (a queue, a centre, a codebook) once per effective batch.

Every micro-batch starts from the value before the step, like the native batch, and the micro-batches' values are
combined into one new value, the same on all ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anybatch.core.loss import Loss
from anybatch.core.splitting import CutConstraints
from anybatch.core.torch_internals import BatchNormBase, InstanceNormBase
from anybatch.engine.accumulation.accumulate import MicroBatch
from anybatch.errors import CompositionError, UserError
from anybatch.parallel.strategy import Capabilities, Strategy
from anybatch.parallel.world import World

PooledUpdate = Callable[[Tensor, Sequence[Tensor], Sequence[int]], Tensor]
"""Function (value before the step, values after each micro-batch, their numbers of samples) -> value after the step."""
BufferUpdate = Literal["keep", "first", "mean"] | PooledUpdate
_NAMES = ("keep", "first", "mean")
_NOTHING = nullcontext()


@dataclass(slots=True, eq=False)
class _Pool:
    """One buffer, and its values in this step."""

    owner: nn.Module
    name: str
    update: BufferUpdate
    before: Tensor = field(default_factory=lambda: torch.empty(0))
    value: Tensor = field(default_factory=lambda: torch.empty(0))
    found: list[tuple[int, int, Tensor]] = field(default_factory=list)
    pooled: Tensor | None = None

    def begin(self) -> None:
        """Save the value, and drop the values of an earlier step or attempt."""
        self.before = self.owner.get_buffer(self.name)
        self.value = self.before.detach().clone()
        self.found, self.pooled = [], None

    def restore(self) -> None:
        """Restore the value before the step, even if the module has replaced the tensor."""
        self.before.copy_(self.value)
        setattr(self.owner, self.name, self.before)

    def note(self, start: int, number: int) -> None:
        """Record the value after a micro-batch."""
        value = self.owner.get_buffer(self.name).detach()
        if self.update == "mean":
            total = self.found[0][2] if self.found else torch.zeros_like(value, dtype=_wide(value))
            self.found = [(start, number, total + value.to(total.dtype) * number)]
        elif self.update != "first" or not self.found:
            self.found.append((start, number, value.clone()))


class BufferUpdates:
    """Updates chosen buffers once per effective batch.

    Raises:
        UserError: an update is unknown, or a pattern matches no buffer or one of an unsuitable type.
    """

    def __init__(
        self, chosen: Mapping[str, BufferUpdate], modules: nn.Module, strategy: Strategy, world: World
    ) -> None:
        self._strategy = strategy
        self._world = world
        self.names = frozenset[str]()
        self._pools = self._found(chosen, modules)
        self._num_counted = 0

    def refuse_with(self, loss: Loss, constraints: CutConstraints, needs: Capabilities) -> None:
        """Raise a `CompositionError` if micro-batches run twice, interleaved or in parts."""
        if self._pools and (loss.kind.encode is not None or constraints.every_unit):
            what = "ab.joint" if loss.kind.encode else "norms='exact'"
            message = (
                f"buffers={{{self._pools[0].name!r}: ...}} does not work with {what}. Each micro-batch must start from "
                f"the value before the step, but {what} runs parts of each more than once, interleaved with others. "
                "Omit buffers=, and update the buffers outside of the forward, once per step."
            )
            raise CompositionError(message)
        if self._pools and needs.splits_micro_batches:
            message = (
                f"buffers={{{self._pools[0].name!r}: ...}} does not work with strategy {needs.name!r}, which splits "
                "each micro-batch over replicas, so that a buffer sees only a part of it. Use strategy='all_reduce' "
                "(torchrun)."
            )
            raise CompositionError(message)

    @property
    def is_idle(self) -> bool:
        """Whether no buffer is updated."""
        return not self._pools

    def effective_batch(self) -> AbstractContextManager[None]:
        """Return the context for the micro-batches of an effective batch, a new one for each attempt."""
        return self._running() if self._pools else _NOTHING

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._num_counted = 0
        for pool in self._pools:
            pool.begin()
        try:
            yield
        finally:
            self._restore()

    def before(self, micro_batch: MicroBatch) -> None:  # noqa: ARG002 (the loop's)
        """Restore the values before the step for a micro-batch."""
        self._restore()

    def after(self, micro_batch: MicroBatch, _contributions: Sequence[Tensor]) -> None:
        """Record the values after a micro-batch."""
        unit = micro_batch.unit
        if unit.weight:  # not a filler
            self._num_counted += unit.num_samples
            for pool in self._pools:
                pool.note(unit.start, unit.num_samples)

    def pool(self) -> None:
        """Compute the new values with all ranks, after none of them can abort the step any more."""
        # Not the plan's numbers of samples: micro-batches with a count of 0 do not run.
        rows = self._world.gather_numbers((self._num_counted,)) if self._pools else []
        for pool in self._pools:
            with torch.no_grad():
                pool.pooled = self._new_value(pool, [number for (number,) in rows])
            pool.found = []

    def update(self) -> None:
        """Write the new values, when the parameters are updated."""
        for pool in self._pools:
            if pool.pooled is not None:
                with torch.no_grad():
                    pool.before.copy_(pool.pooled)
                pool.pooled = None

    @torch.no_grad()
    def _restore(self) -> None:
        for pool in self._pools:
            pool.restore()

    def _new_value(self, pool: _Pool, numbers: Sequence[float]) -> Tensor:
        """Return a buffer's new value, or the old one if no micro-batch ran."""
        if callable(pool.update):
            local = [(start, number, value.cpu()) for start, number, value in pool.found]
            # In the order of the effective batch, which does not depend on the cut or the number of ranks.
            found = sorted((entry for share in self._gathered(local) for entry in share), key=lambda entry: entry[0])
            values = [value.to(pool.value.device) for _, _, value in found]
            return pool.update(pool.value, values, [number for _, number, _ in found]) if found else pool.value
        first = next((rank for rank, number in enumerate(numbers) if number), None)
        if first is None:
            return pool.value
        dtype = _wide(pool.value)
        # Shares are consecutive, so the first rank that ran anything has the value of the first micro-batch.
        counts = bool(pool.found) and (pool.update == "mean" or first == self._world.rank)
        share = pool.found[0][2].to(dtype) if counts else torch.zeros_like(pool.value, dtype=dtype)
        with self._world.collective():
            total = self._strategy.sum(share)
        return total / sum(numbers) if pool.update == "mean" else total

    def _gathered(self, local: list[Any]) -> list[list[Any]]:
        with self._world.collective():
            return self._world.gather_objects(local)

    def _found(self, chosen: Mapping[str, BufferUpdate], modules: nn.Module) -> list[_Pool]:
        pools: dict[str, _Pool] = {}
        buffers = dict(_candidate_buffers(modules))
        for pattern, update in chosen.items():
            if not callable(update) and update not in _NAMES:
                message = f"buffers[{pattern!r}]={update!r} must be 'keep', 'first', 'mean' or a function."
                raise UserError(message)
            matched = [name for name in buffers if fnmatchcase(name, pattern)]
            if not matched:
                known = ", ".join(list(buffers)[:8]) or "none"
                message = (
                    f"buffers[{pattern!r}] matches no buffer (norms=... controls the statistics of normalisation "
                    f"layers). The model has: {known}."
                )
                raise UserError(message)
            for name in matched:
                owner, attribute = buffers[name]
                if update == "mean" and not owner.get_buffer(attribute).is_floating_point():
                    dtype = owner.get_buffer(attribute).dtype
                    message = f"buffers[{pattern!r}]='mean', but {name!r} is {dtype}: use 'first' or a function."
                    raise UserError(message)
                pools[name] = _Pool(owner, attribute, update)
        self.names = frozenset(pools)
        return [pool for pool in pools.values() if pool.update != "keep"]


def _candidate_buffers(modules: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """Yield buffers other than normalisation statistics: the full name, and the module and the name in it."""
    for prefix, module in modules.named_modules():
        if not isinstance(module, (BatchNormBase, InstanceNormBase)):
            for name, _ in module.named_buffers(recurse=False):
                yield f"{prefix}.{name}" if prefix else name, (module, name)


def _wide(tensor: Tensor) -> torch.dtype:
    """Return a type in which the values of micro-batches can be summed."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.int64
    return torch.promote_types(tensor.dtype, torch.float32)
