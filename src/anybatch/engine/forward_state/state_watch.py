"""Detects tensors that a forward both changes and reads (a queue, a centre, a hidden state), and warns once.

Each micro-batch reads the value that the previous one wrote, but the native batch reads it once. The first steps show
which tensors change, and the next step shows which of them the model reads: a tensor that is only written, such as a
statistic for a plot, does no harm.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anybatch.core.splitting import BatchPlan
from anybatch.core.torch_internals import BatchNormBase, InstanceNormBase, num_changes
from anybatch.data.random_state import host_random_digest
from anybatch.engine.telemetry.notifier import Notifier
from anybatch.engine.torch_internals import is_compiled

_NUM_STEPS = 2
"""Steps in which changes are detected: a tensor created in the first step can only change in the second."""
_NAMED = 4
_READ_AS_NUMBERS = frozenset({"item", "tolist", "__bool__", "__float__", "__int__", "numpy"})
_PARTS = frozenset({"_parameters", "_buffers", "_modules"})
_IN_PLACE = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
) | {"__setitem__", "__set__"}
_PURPOSE = "Detecting changes by a forward"
_NOTHING = nullcontext()
_State = Mapping[str, tuple[Tensor, ...]]


class StateWatch:
    """Warns of state that a forward changes and reads, and of random numbers that are not keyed."""

    def __init__(
        self,
        modules: nn.Module,
        chosen: Collection[str],
        notifier: Notifier,
        num_ranks: int,
        *,
        keyed: bool,
        watches_state: bool,
    ) -> None:
        self._modules = modules
        self._chosen = chosen
        self._notifier = notifier
        self._num_ranks = num_ranks
        self._steps_left = _NUM_STEPS if watches_state else 0
        self.draws_left = _NUM_STEPS if keyed else 0
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
            self._notifier.warn(
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
        for prefix, module in self._modules.named_modules():
            if isinstance(module, (BatchNormBase, InstanceNormBase)):
                continue
            for name, value in (*module.named_buffers(recurse=False), *vars(module).items()):
                tensors = () if name in _PARTS else _tensors(value)
                full = f"{prefix}.{name}" if prefix else name
                if tensors and full not in self._chosen:
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
        if not self._steps_left and any(map(is_compiled, self._modules.modules())):
            self._changed.clear()

    def _warn(self, names: Sequence[str], num_micro_batches: int) -> None:
        named = ", ".join(map(repr, names[:_NAMED])) + (f" and {len(names) - _NAMED} more" * (len(names) > _NAMED))
        buffers = dict(self._modules.named_buffers())
        first = next((name for name in names if name in buffers), None)
        apart = "" if self._num_ranks == 1 else ", and values differ between ranks"
        cure = (
            f"With Engine(buffers={{{first!r}: 'mean'}}), every micro-batch starts from the value before the step, and "
            "the new value is their mean over samples. Other choices: 'first' uses the value of the first micro-batch "
            "(for state that depends on weights only, as in a spectral norm), a function (before, after, num_samples) "
            "combines the values, and 'keep' silences this warning."
            if first
            else "Make it a buffer (register_buffer) and choose its update with Engine(buffers={name: 'mean'}), or "
            "keep it outside of the model."
        )
        self._notifier.warn(
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

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401 (torch's protocol)
        types: Any,  # noqa: ANN401 (torch's protocol)
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (torch's protocol)
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
