"""Buffers that a forward updates (a queue, a centre, a codebook): once per effective batch instead of per micro-batch.

Every micro-batch begins with the value from before the step, as the un-split batch does, and what the micro-batches
have made of it becomes one new value, the same on all ranks.
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
"""Function (value before the step, values that micro-batches left, their numbers of samples) -> value after it."""
BufferUpdate = Literal["keep", "first", "mean"] | PooledUpdate
_NAMES = ("keep", "first", "mean")
_NOTHING = nullcontext()


@dataclass(slots=True, eq=False)
class _Pool:
    """One buffer, and what has been made of it in this step.

    Attributes:
        owner: the module that it belongs to.
        name: its name there.
        update: what becomes of it.
        before: the tensor itself, which the module may replace.
        value: its value from before the step.
        found: (first sample, number of samples, value) of micro-batches that have run; for "mean" one weighted sum,
            for "first" the first one on this rank.
        pooled: the new value, once it is known.
    """

    owner: nn.Module
    name: str
    update: BufferUpdate
    before: Tensor = field(default_factory=lambda: torch.empty(0))
    value: Tensor = field(default_factory=lambda: torch.empty(0))
    found: list[tuple[int, int, Tensor]] = field(default_factory=list)
    pooled: Tensor | None = None

    def begin(self) -> None:
        """Keep the value, and forget those of another step or try."""
        self.before = self.owner.get_buffer(self.name)
        self.value = self.before.detach().clone()
        self.found, self.pooled = [], None

    def restore(self) -> None:
        """Put the value from before the step back, also where the module has replaced the tensor."""
        self.before.copy_(self.value)
        setattr(self.owner, self.name, self.before)

    def note(self, start: int, number: int) -> None:
        """Take what a micro-batch has left."""
        value = self.owner.get_buffer(self.name).detach()
        if self.update == "mean":
            total = self.found[0][2] if self.found else torch.zeros_like(value, dtype=_wide(value))
            self.found = [(start, number, total + value.to(total.dtype) * number)]
        elif self.update != "first" or not self.found:
            self.found.append((start, number, value.clone()))


class BufferUpdates:
    """Updates chosen buffers once per effective batch.

    Args:
        chosen: by the buffer's name or a pattern such as "*.queue", what becomes of it: "mean" over samples, what the
            "first" micro-batch made of it, a function, or "keep" for one update after the other.
        modules: the model.
        strategy: sums over ranks.
        world: the ranks.

    Raises:
        UserError: a pattern matches nothing, or something that it does not suit.
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
        """Refuse what runs micro-batches twice, in turns or in parts.

        Args:
            loss: the declaration.
            constraints: what the policy about BatchNorm demands.
            needs: of the strategy.

        Raises:
            CompositionError: with what to use instead.
        """
        if self._pools and (loss.kind.encode is not None or constraints.every_unit):
            what = "ab.joint" if loss.kind.encode else "norms='exact'"
            message = (
                f"buffers={{{self._pools[0].name!r}: ...}} lets each micro-batch begin with the value from before the "
                f"step, and {what} runs parts of each more than once, in turns with others. Leave buffers= out and "
                "update them outside of the forward, once per step."
            )
            raise CompositionError(message)
        if self._pools and needs.splits_micro_batches:
            message = (
                f"buffers={{{self._pools[0].name!r}: ...}} takes what each micro-batch has left in the model, and "
                f"under strategy {needs.name!r} that is what one replica has seen of it. Use strategy='all_reduce' "
                "(torchrun)."
            )
            raise CompositionError(message)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._pools

    def effective_batch(self) -> AbstractContextManager[None]:
        """Return the context in which the micro-batches of an effective batch are run, anew for each try."""
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
        """Let a micro-batch begin with the values from before the step."""
        self._restore()

    def after(self, micro_batch: MicroBatch, _contributions: Sequence[Tensor]) -> None:
        """Take the values that a micro-batch has left."""
        unit = micro_batch.unit
        if unit.weight:  # not of one that only keeps ranks in lockstep
            self._num_counted += unit.num_samples
            for pool in self._pools:
                pool.note(unit.start, unit.num_samples)

    def pool(self) -> None:
        """Make the new values, together with all ranks: once none of them can leave the step any more."""
        # Not the plan's numbers: a micro-batch that counts nothing does not run.
        rows = self._world.gather_numbers((self._num_counted,)) if self._pools else []
        for pool in self._pools:
            with torch.no_grad():
                pool.pooled = self._new_value(pool, [number for (number,) in rows])
            pool.found = []

    def update(self) -> None:
        """Write the new values, with the update of the parameters."""
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
        """Return a buffer's new value: its old one if no micro-batch counted anything.

        Args:
            pool: the buffer.
            numbers: samples of micro-batches that counted something, by rank.
        """
        if callable(pool.update):
            own = [(start, number, value.cpu()) for start, number, value in pool.found]
            # In the order of the effective batch, which no cut and no number of ranks changes.
            found = sorted((one for of_rank in self._gathered(own) for one in of_rank), key=lambda one: one[0])
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

    def _gathered(self, own: list[Any]) -> list[list[Any]]:
        with self._world.collective():
            return self._world.gather_objects(own)

    def _found(self, chosen: Mapping[str, BufferUpdate], modules: nn.Module) -> list[_Pool]:
        found: dict[str, _Pool] = {}
        own = dict(_own_buffers(modules))
        for pattern, update in chosen.items():
            if not callable(update) and update not in _NAMES:
                message = f"buffers[{pattern!r}]={update!r} must be 'keep', 'first', 'mean' or a function."
                raise UserError(message)
            matched = [name for name in own if fnmatchcase(name, pattern)]
            if not matched:
                known = ", ".join(list(own)[:8]) or "none"
                message = (
                    f"buffers[{pattern!r}] is the name of no buffer (statistics of normalisation layers belong to "
                    f"norms=...). The model has: {known}."
                )
                raise UserError(message)
            for name in matched:
                owner, attribute = own[name]
                if update == "mean" and not owner.get_buffer(attribute).is_floating_point():
                    dtype = owner.get_buffer(attribute).dtype
                    message = f"buffers[{pattern!r}]='mean', but {name!r} is {dtype}: use 'first' or a function."
                    raise UserError(message)
                found[name] = _Pool(owner, attribute, update)
        self.names = frozenset(found)
        return [pool for pool in found.values() if pool.update != "keep"]


def _own_buffers(modules: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """Yield the buffers that are no statistics of normalisation layers: full name, and module and name there."""
    for prefix, module in modules.named_modules():
        if not isinstance(module, (BatchNormBase, InstanceNormBase)):
            for name, _ in module.named_buffers(recurse=False):
                yield f"{prefix}.{name}" if prefix else name, (module, name)


def _wide(tensor: Tensor) -> torch.dtype:
    """Return a type in which values of micro-batches can be added up."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.int64
    return torch.promote_types(tensor.dtype, torch.float32)
