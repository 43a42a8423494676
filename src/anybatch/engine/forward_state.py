"""State that a forward changes (a queue, a centre, a codebook), other than normalisation statistics.

In an unsplit batch, the forward reads such state once; in a split batch, each micro-batch would read the value that
the previous one has written. `BufferUpdates` updates the buffers that the user chose, once per step; `StateWatch` warns
about other buffers that a forward changes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn

from anybatch.core.loss import Loss
from anybatch.core.splitting import BatchPlan, SplitConstraints
from anybatch.core.torch_internals import BatchNormBase, InstanceNormBase, num_changes
from anybatch.data.random_state import host_random_digest
from anybatch.engine.accumulate import MicroBatch
from anybatch.engine.notifier import Notifier
from anybatch.errors import CompositionError, UserError
from anybatch.parallel.strategy import Capabilities, Strategy
from anybatch.parallel.world import World

PooledUpdate = Callable[[Tensor, Sequence[Tensor], Sequence[int]], Tensor]
"""Function (value before the step, value after each micro-batch, samples of each) -> value after the step."""
BufferUpdate = Literal["keep", "first", "mean"] | PooledUpdate
_NAMES = ("keep", "first", "mean")
_NOTHING = nullcontext()


@dataclass(slots=True, eq=False)
class _PooledBuffer:
    """One buffer, its value before the step, and its (start, samples, value) after each micro-batch."""

    owner: nn.Module
    name: str
    update: BufferUpdate
    before: Tensor = field(default_factory=lambda: torch.empty(0))
    value: Tensor = field(default_factory=lambda: torch.empty(0))
    values: list[tuple[int, int, Tensor]] = field(default_factory=list)
    pooled: Tensor | None = None

    def begin(self) -> None:
        """Copy the value before the step, and drop the values of an earlier step or attempt."""
        self.before = self.owner.get_buffer(self.name)
        self.value = self.before.detach().clone()
        self.values, self.pooled = [], None

    def restore(self) -> None:
        """Restore the value before the step, even if the module has replaced the tensor."""
        self.before.copy_(self.value)
        setattr(self.owner, self.name, self.before)

    def record(self, start: int, number: int) -> None:
        """Record the value after a micro-batch of `number` samples that begins at sample `start`."""
        value = self.owner.get_buffer(self.name).detach()
        if self.update == "mean":
            total = self.values[0][2] if self.values else torch.zeros_like(value, dtype=_wide(value))
            self.values = [(start, number, total + value.to(total.dtype) * number)]
        elif self.update != "first" or not self.values:
            self.values.append((start, number, value.clone()))


class BufferUpdates:
    """Updates chosen buffers once per effective batch."""

    def __init__(
        self, chosen: Mapping[str, BufferUpdate], modules: nn.Module, strategy: Strategy, world: World
    ) -> None:
        self._strategy = strategy
        self._world = world
        self.names = frozenset[str]()
        self._pools = self._matching(chosen, modules)
        self._num_counted = 0

    def check_with(self, loss: Loss, constraints: SplitConstraints, capabilities: Capabilities) -> None:
        """Raise a `CompositionError` if a micro-batch runs twice, in parts, or interleaved with other micro-batches."""
        if self._pools and (loss.kind.encode is not None or constraints.every_unit):
            what = "ab.joint" if loss.kind.encode else "norms='exact'"
            message = (
                f"buffers={{{self._pools[0].name!r}: ...}} cannot be combined with {what}. Each micro-batch must start "
                f"from the value before the step, but {what} runs micro-batches twice, or interleaves them. "
                "Omit buffers=, and update the buffers outside of the forward, once per step."
            )
            raise CompositionError(message, code="forwards_run_twice")
        if self._pools and capabilities.splits_micro_batches:
            message = (
                f"buffers={{{self._pools[0].name!r}: ...}} cannot be combined with strategy {capabilities.name!r}. It "
                "divides each micro-batch among replicas, so that a replica's buffer depends on only a part of it. Use "
                "strategy='all_reduce' (torchrun)."
            )
            raise CompositionError(message)

    @property
    def is_idle(self) -> bool:
        """Whether no buffer is updated."""
        return not self._pools

    def effective_batch(self) -> AbstractContextManager[None]:
        """Return the context for the micro-batches of an effective batch; each attempt needs a new context."""
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
        """Restore the values from before the step, so that the next micro-batch starts from them."""
        self._restore()

    def after(self, micro_batch: MicroBatch, _contributions: Sequence[Tensor]) -> None:
        """Record the values after a micro-batch."""
        unit = micro_batch.unit
        if unit.weight:  # not a filler
            self._num_counted += unit.num_samples
            for pool in self._pools:
                pool.record(unit.start, unit.num_samples)

    def pool(self) -> None:
        """Compute the new values from all ranks; call this when no rank can abort the step any more."""
        # Count, because the plan has more samples: micro-batches without items of the loss do not run.
        rows = self._world.gather_numbers((self._num_counted,)) if self._pools else []
        for pool in self._pools:
            with torch.no_grad():
                pool.pooled = self._new_value(pool, [number for (number,) in rows])
            pool.values = []

    def update(self) -> None:
        """Write the new values; called when the parameters are updated."""
        for pool in self._pools:
            if pool.pooled is not None:
                with torch.no_grad():
                    pool.before.copy_(pool.pooled)
                pool.pooled = None

    @torch.no_grad()
    def _restore(self) -> None:
        for pool in self._pools:
            pool.restore()

    def _new_value(self, pool: _PooledBuffer, numbers: Sequence[float]) -> Tensor:
        """Return a buffer's new value, or its value from before the step if no micro-batch ran."""
        if callable(pool.update):
            local = [(start, number, value.cpu()) for start, number, value in pool.values]
            with self._world.collective():
                shares = self._world.gather_objects(local)
            # In the order of the effective batch, which does not depend on the number of ranks.
            entries = sorted((entry for share in shares for entry in share), key=lambda entry: entry[0])
            values = [value.to(pool.value.device) for _, _, value in entries]
            return pool.update(pool.value, values, [number for _, number, _ in entries]) if entries else pool.value
        first = next((rank for rank, number in enumerate(numbers) if number), None)
        if first is None:
            return pool.value
        dtype = _wide(pool.value)
        # Shares are consecutive, so the first rank that ran a micro-batch has the value of the first micro-batch.
        counts = bool(pool.values) and (pool.update == "mean" or first == self._world.rank)
        share = pool.values[0][2].to(dtype) if counts else torch.zeros_like(pool.value, dtype=dtype)
        with self._world.collective():
            total = self._strategy.sum(share)
        return total / sum(numbers) if pool.update == "mean" else total

    def _matching(self, chosen: Mapping[str, BufferUpdate], modules: nn.Module) -> list[_PooledBuffer]:
        pools: dict[str, _PooledBuffer] = {}
        buffers = dict(_candidate_buffers(modules))
        for pattern, update in chosen.items():
            if not callable(update) and update not in _NAMES:
                message = f"buffers[{pattern!r}]={update!r} must be 'keep', 'first', 'mean' or a function."
                raise UserError(message, code="unknown_update")
            matched = [name for name in buffers if fnmatchcase(name, pattern)]
            if not matched:
                known = ", ".join(list(buffers)[:8]) or "none"
                message = (
                    f"buffers[{pattern!r}] matches no buffer (norms=... controls the statistics of normalisation "
                    f"layers). The model has: {known}."
                )
                raise UserError(message, code="no_such_buffer")
            for name in matched:
                owner, attribute = buffers[name]
                if update == "mean" and not owner.get_buffer(attribute).is_floating_point():
                    dtype = owner.get_buffer(attribute).dtype
                    message = f"buffers[{pattern!r}]='mean', but {name!r} is {dtype}: use 'first' or a function."
                    raise UserError(message, code="mean_of_integers")
                pools[name] = _PooledBuffer(owner, attribute, update)
        self.names = frozenset(pools)
        return [pool for pool in pools.values() if pool.update != "keep"]


def _candidate_buffers(modules: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """Yield buffers other than normalisation statistics: the full name, and (the module, the name in the module)."""
    for prefix, module in modules.named_modules():
        if not isinstance(module, (BatchNormBase, InstanceNormBase)):
            for name, _ in module.named_buffers(recurse=False):
                yield f"{prefix}.{name}" if prefix else name, (module, name)


def _wide(tensor: Tensor) -> torch.dtype:
    """Return a type in which the values of micro-batches can be summed."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.int64
    return torch.promote_types(tensor.dtype, torch.float32)


_NUM_STEPS = 2
"""Number of first steps in which draws from Python's and numpy's generators are detected."""
_MAX_NAMES = 4


@dataclass(eq=False, repr=False)
class StateWatch:
    """Warns of buffers that a forward changes, and of random numbers that the engine does not seed.

    `chosen` are the buffers in `Engine(buffers=...)`; `keyed` is whether the engine seeds random numbers.
    """

    modules: nn.Module
    chosen: Collection[str]
    notifier: Notifier
    _: KW_ONLY
    keyed: bool
    watches_state: bool

    def __post_init__(self) -> None:
        self.is_looking = self.watches_state  # until the first step with several micro-batches
        self.draw_checks_left = _NUM_STEPS if self.keyed else 0

    @contextmanager
    def effective_batch(self, plan: BatchPlan) -> Iterator[None]:
        """Watch the micro-batches of an effective batch; an attempt that fails does not count."""
        num_micro_batches = sum(map(len, plan.shares))
        buffers = self._buffers() if self.is_looking and num_micro_batches > 1 else {}
        versions = num_changes(buffers.values(), "Detecting changes by a forward")
        draws = host_random_digest() if self.draw_checks_left else ()
        yield
        if self.is_looking and num_micro_batches > 1:
            self.is_looking = False
            now = self._buffers()
            names = [
                name
                for (name, before), version in zip(buffers.items(), versions, strict=True)
                if name in now and _has_changed(before, version, now[name])
            ]
            if names:
                self._warn(names, num_micro_batches)
        if self.draw_checks_left:
            self._compare_draws(draws)

    def _buffers(self) -> dict[str, Tensor]:
        """Return the floating-point buffers whose update was not chosen; integers are usually counters."""
        values = {name: owner.get_buffer(attribute) for name, (owner, attribute) in _candidate_buffers(self.modules)}
        return {
            name: buffer
            for name, buffer in values.items()
            if name not in self.chosen and buffer.is_floating_point() and not buffer.is_inference()
        }

    def _compare_draws(self, before: Sequence[int]) -> None:
        """Warn if a forward has drawn random numbers from generators that the engine does not seed."""
        self.draw_checks_left -= 1
        drew = [
            name for name, a, b in zip(("random", "numpy.random"), before, host_random_digest(), strict=False) if a != b
        ]
        if drew:
            self.draw_checks_left = 0
            self.notifier.warn(
                "draws_are_not_keyed",
                f"the model or the loss function draws from {' and '.join(drew)}, which the engine does not seed. So "
                "the numbers depend on the split and the number of ranks, and differ after a resume. Draw from "
                "torch's generators (torch.rand), or in the data set, where each sample has its own seed.",
            )

    def _warn(self, names: Sequence[str], num_micro_batches: int) -> None:
        more = f" and {len(names) - _MAX_NAMES} more" * (len(names) > _MAX_NAMES)
        self.notifier.warn(
            "forward_updates_state",
            f"the forward updates state: {', '.join(map(repr, names[:_MAX_NAMES]))}{more}, in each of "
            f"{num_micro_batches} micro-batches instead of once per step. If the forward also reads this state, the "
            "gradient depends on the split and differs from the gradient of the unsplit batch. "
            f"Engine(buffers={{{names[0]!r}: 'mean'}}) starts each micro-batch from the value "
            "before the step and sets the mean over samples; 'first' takes the first micro-batch's value (spectral "
            "norms), a function combines the values (queues), and 'keep' silences this warning.",
        )


def _has_changed(before: Tensor, version: int, now: Tensor) -> bool:
    """Return whether a buffer has another value; a buffer with another shape or type is a cache, which may change."""
    if now is before:
        return num_changes([now], "Detecting changes by a forward") != [version]
    if now.shape != before.shape or now.dtype != before.dtype or now.device != before.device:
        return False
    return not torch.equal(now, before)
