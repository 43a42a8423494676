"""State that a forward changes (a queue, a centre, a codebook), other than normalisation statistics.

A native batch reads such state once, but each micro-batch would read the value from the previous one. `BufferUpdates`
updates chosen buffers once per step; `StateWatch` finds other state, and warns once.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anybatch.core.loss import Loss
from anybatch.core.splitting import BatchPlan, CutConstraints
from anybatch.core.torch_internals import BatchNormBase, InstanceNormBase, num_changes
from anybatch.data.random_state import host_random_digest
from anybatch.engine.accumulate import MicroBatch
from anybatch.engine.notifier import Notifier
from anybatch.engine.torch_internals import is_compiled
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
            raise CompositionError(message, code="forwards_run_twice")
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
            with self._world.collective():
                shares = self._world.gather_objects(local)
            # In the order of the effective batch, which does not depend on the cut or the number of ranks.
            found = sorted((entry for share in shares for entry in share), key=lambda entry: entry[0])
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

    def _found(self, chosen: Mapping[str, BufferUpdate], modules: nn.Module) -> list[_Pool]:
        pools: dict[str, _Pool] = {}
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


_NUM_STEPS = 2
"""Steps in which changes are detected: a tensor created in the first step can only change in the second."""
_NAMED = 4
_READ_AS_NUMBERS = frozenset({"item", "tolist", "__bool__", "__float__", "__int__", "numpy"})
_PARTS = frozenset({"_parameters", "_buffers", "_modules"})
_IN_PLACE = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
) | {"__setitem__", "__set__"}
_PURPOSE = "Detecting changes by a forward"
_State = Mapping[str, tuple[Tensor, ...]]


@dataclass(eq=False, repr=False)
class StateWatch:
    """Warns of state that a forward changes and reads, and of random numbers that are not keyed."""

    modules: nn.Module
    chosen: Collection[str]
    notifier: Notifier
    num_ranks: int
    _: KW_ONLY
    keyed: bool
    watches_state: bool

    def __post_init__(self) -> None:
        self._steps_left = _NUM_STEPS if self.watches_state else 0
        self.draws_left = _NUM_STEPS if self.keyed else 0
        self._changed: set[str] = set()

    @property
    def is_looking(self) -> bool:
        """Whether steps with several micro-batches are still checked for state."""
        return bool(self._steps_left or self._changed)

    def effective_batch(self, plan: BatchPlan) -> AbstractContextManager[None]:
        """Return the context for the micro-batches of an effective batch."""
        num_micro_batches = sum(map(len, plan.shares))
        is_watched = num_micro_batches > 1 and (self._steps_left or self._changed)
        watched = self._watched(num_micro_batches) if is_watched else _NOTHING
        return self._draws_watched(watched) if self.draws_left else watched

    @contextmanager
    def _draws_watched(self, watched: AbstractContextManager[None]) -> Iterator[None]:
        """Warn if a forward draws numbers that the engine does not key."""
        before = host_random_digest()
        with watched:
            yield
        self.draws_left -= 1
        drew = [
            name for name, a, b in zip(("random", "numpy.random"), before, host_random_digest(), strict=False) if a != b
        ]
        if drew:
            self.draws_left = 0
            self.notifier.warn(
                "draws_are_not_keyed",
                f"the model or the loss function draws from {' and '.join(drew)}, which the engine does not key. So "
                "the numbers depend on the cut and the number of ranks, and differ after a resume. Draw from torch's "
                "generators (torch.rand), or in the data set, whose numbers belong to samples.",
            )

    @contextmanager
    def _watched(self, num_micro_batches: int) -> Iterator[None]:
        if self._steps_left:
            before = self._states()
            versions = {name: num_changes(tensors, _PURPOSE) for name, tensors in before.items()}
            yield
            self._compare(before, versions)
        else:
            read = _ReadWatch({name: tensors for name, tensors in self._states().items() if name in self._changed})
            with read:
                yield
            self._changed = set()  # not after an error, when the step is repeated
            if read.names:
                self._warn(sorted(read.names), num_micro_batches)

    def _states(self) -> dict[str, tuple[Tensor, ...]]:
        """Return the tensors of modules by name, except parameters and running statistics."""
        states = {}
        for prefix, module in self.modules.named_modules():
            if isinstance(module, (BatchNormBase, InstanceNormBase)):
                continue
            for name, value in (*module.named_buffers(recurse=False), *vars(module).items()):
                tensors = () if name in _PARTS else _tensors(value)
                full = f"{prefix}.{name}" if prefix else name
                if tensors and full not in self.chosen:
                    states[full] = tensors
        return states

    def _compare(self, before: _State, versions: Mapping[str, Sequence[int]]) -> None:
        after = self._states()
        for name, tensors in before.items():
            now = after.get(name, ())
            # A different shape means a cache that has grown, such as a cache of positions.
            alike = len(now) == len(tensors) and all(a.shape == b.shape for a, b in zip(now, tensors, strict=True))
            same = all(a is b for a, b in zip(now, tensors, strict=False))
            if alike and not (same and num_changes(tensors, _PURPOSE) == versions[name]):
                self._changed.add(name)
        self._steps_left -= 1
        # Reads in compiled code cannot be detected.
        if not self._steps_left and any(map(is_compiled, self.modules.modules())):
            self._changed.clear()

    def _warn(self, names: Sequence[str], num_micro_batches: int) -> None:
        named = ", ".join(map(repr, names[:_NAMED])) + (f" and {len(names) - _NAMED} more" * (len(names) > _NAMED))
        buffers = dict(self.modules.named_buffers())
        first = next((name for name in names if name in buffers), None)
        apart = "" if self.num_ranks == 1 else ", and values differ between ranks"
        cure = (
            f"With Engine(buffers={{{first!r}: 'mean'}}), every micro-batch starts from the value before the step, and "
            "the new value is their mean over samples. Other choices: 'first' uses the value of the first micro-batch "
            "(for state that depends on weights only, as in a spectral norm), a function (before, after, num_samples) "
            "combines the values, and 'keep' silences this warning."
            if first
            else "Make it a buffer (register_buffer) and choose its update with Engine(buffers={name: 'mean'}), or "
            "keep it outside of the model."
        )
        self.notifier.warn(
            "forward_updates_state",
            f"the forward updates state that it also reads: {named}. Each of {num_micro_batches} micro-batches read "
            f"the value from the previous one{apart}, but the native batch reads it once, so the gradient depends on "
            f"the cut. {cure}",
        )


class _ReadWatch(TorchFunctionMode):
    """Records which of some tensors are read; a write does not count as a read."""

    def __init__(self, states: _State) -> None:
        super().__init__()
        # Keep the tensors alive, so that no other tensor can get the same id.
        self._states = states
        self._owners = {id(tensor): name for name, tensors in states.items() for tensor in tensors}
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 (torch's protocol)
        """Run the function, and record its reads."""
        given = dict(kwargs or {})
        result = func(*args, **given)
        name = getattr(func, "__name__", "")
        # `.data` is used to write without autograd.
        is_handle = name == "__get__" and func.__self__ in (Tensor.data, Tensor.grad)
        computes = name in _READ_AS_NUMBERS or (bool(_tensors(result)) and not is_handle)
        if computes and self._owners:
            read = list(args[1:] if _writes(name) else args) + [v for key, v in given.items() if key != "out"]
            self.names |= {
                self._owners[id(item)] for value in read for item in _tensors(value) if id(item) in self._owners
            }
        return result


def _writes(name: str) -> bool:
    """Return whether a function writes to its first argument: `add_`, `__setitem__`, `__iadd__`."""
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _tensors(value: object) -> tuple[Tensor, ...]:
    """Return a tensor, or the tensors in a list, tuple, deque or dict, without parameters."""
    values = (
        value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, deque)) else [value]
    )
    return tuple(
        item
        for item in values
        if isinstance(item, Tensor) and not isinstance(item, nn.Parameter) and not item.is_inference()
    )
