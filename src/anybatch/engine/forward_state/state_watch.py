"""Finds tensors that a forward updates and computes with (a queue, a centre, a hidden state), and says so once.

Each micro-batch meets them as the one before has left them, where the un-split batch meets them once. The first steps
show what changes, and the step after them whether the model computes with it: what is only written, as a statistic for
a plot is, does no harm.
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
"""Steps in which changes are looked for: what is made in the first one can only be seen to change in the second."""
_NAMED = 4
_READ_AS_NUMBERS = frozenset({"item", "tolist", "__bool__", "__float__", "__int__", "numpy"})
_PARTS = frozenset({"_parameters", "_buffers", "_modules"})
_IN_PLACE = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
) | {"__setitem__", "__set__"}
_PURPOSE = "Seeing what a forward changes"
_NOTHING = nullcontext()
_State = Mapping[str, tuple[Tensor, ...]]


class StateWatch:
    """Warns of state that a forward updates and computes with.

    Args:
        modules: the model.
        chosen: names of the buffers about which the user has decided.
        notifier: gives the warning.
        num_ranks: ranks, whose states drift apart.
        keyed: torch's random numbers are keyed, so that others are to be spoken of.
        watches_state: look for state; otherwise for random numbers only.
    """

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
        self._draws_left = _NUM_STEPS if keyed else 0
        self._changed: set[str] = set()

    def effective_batch(self, plan: BatchPlan) -> AbstractContextManager[None]:
        """Return the context in which the micro-batches of an effective batch are run."""
        if not (self._steps_left or self._changed or self._draws_left):
            return _NOTHING
        num_micro_batches = sum(map(len, plan.shares))
        is_watched = num_micro_batches > 1 and (self._steps_left or self._changed)
        watched = self._watched(num_micro_batches) if is_watched else _NOTHING
        return self._draws_watched(watched) if self._draws_left else watched

    @contextmanager
    def _draws_watched(self, watched: AbstractContextManager[None]) -> Iterator[None]:
        """Look in the first steps whether a forward draws numbers that the engine does not key."""
        before = host_random_digest()
        with watched:
            yield
        self._draws_left -= 1
        drew = [
            name for name, a, b in zip(("random", "numpy.random"), before, host_random_digest(), strict=False) if a != b
        ]
        if drew:
            self._draws_left = 0
            self._notifier.warn(
                "draws_are_not_keyed",
                f"the model or the loss function draws from {' and '.join(drew)}, which the engine does not key: "
                "another cut, another number of ranks and a resumed run draw other numbers. Draw from torch's "
                "generators (torch.rand), or draw in the data set, whose numbers belong to samples.",
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
            self._changed = set()  # not after an error: the step is begun again
            if read.names:
                self._warn(sorted(read.names), num_micro_batches)

    def _states(self) -> dict[str, tuple[Tensor, ...]]:
        """Return the tensors that modules keep beside their parameters, by name, but for running statistics."""
        found = {}
        for prefix, module in self._modules.named_modules():
            if isinstance(module, (BatchNormBase, InstanceNormBase)):
                continue
            for name, value in (*module.named_buffers(recurse=False), *vars(module).items()):
                tensors = () if name in _PARTS else _tensors(value)
                full = f"{prefix}.{name}" if prefix else name
                if tensors and full not in self._chosen:
                    found[full] = tensors
        return found

    def _compare(self, before: _State, versions: Mapping[str, Sequence[int]]) -> None:
        after = self._states()
        for name, tensors in before.items():
            now = after.get(name, ())
            # Of another shape it is a cache that has grown, such as one of positions.
            alike = len(now) == len(tensors) and all(a.shape == b.shape for a, b in zip(now, tensors, strict=True))
            same = all(a is b for a, b in zip(now, tensors, strict=False))
            if alike and not (same and num_changes(tensors, _PURPOSE) == versions[name]):
                self._changed.add(name)
        self._steps_left -= 1
        # Compiled code does not show what it reads.
        if not self._steps_left and any(map(is_compiled, self._modules.modules())):
            self._changed.clear()

    def _warn(self, names: Sequence[str], num_micro_batches: int) -> None:
        named = ", ".join(map(repr, names[:_NAMED])) + (f" and {len(names) - _NAMED} more" * (len(names) > _NAMED))
        buffers = dict(self._modules.named_buffers())
        first = next((name for name in names if name in buffers), None)
        apart = "" if self._num_ranks == 1 else ", and each rank has its own"
        cure = (
            f"Engine(buffers={{{first!r}: 'mean'}}) lets every micro-batch begin with the value from before the step "
            "and takes the mean over samples of what they have made of it; 'first' takes what the first one made of "
            "it (for what depends on the weights alone, as in a spectral norm), a function (before, after, "
            "num_samples) pools as it likes, and 'keep' says that this is meant."
            if first
            else "Keep it as a buffer (register_buffer), and say with Engine(buffers={name: 'mean'}) what becomes of "
            "it once per effective batch; or carry it outside of the model."
        )
        self._notifier.warn(
            "forward_updates_state",
            f"the forward updates state that it also computes with: {named}. Each of {num_micro_batches} micro-batches "
            f"met it as the one before had left it{apart}, where the un-split batch meets it once, so the gradient "
            f"depends on the cut. {cure}",
        )


class _ReadWatch(TorchFunctionMode):
    """Notes which of some tensors a function computes with; writing to one is not computing with it.

    Args:
        states: the tensors, by name.

    Attributes:
        names: of those that were read.
    """

    def __init__(self, states: _State) -> None:
        super().__init__()
        # The tensors are kept, so that no other one gets the identity of one that is gone.
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
        """Run the function, and look at what it is given."""
        given = dict(kwargs or {})
        result = func(*args, **given)
        name = getattr(func, "__name__", "")
        # `.data` is taken to write past autograd.
        is_handle = name == "__get__" and func.__self__ in (Tensor.data, Tensor.grad)
        computes = name in _READ_AS_NUMBERS or (bool(_tensors(result)) and not is_handle)
        if computes and self._owners:
            read = list(args[1:] if _writes(name) else args) + [v for key, v in given.items() if key != "out"]
            self.names |= {
                self._owners[id(one)] for value in read for one in _tensors(value) if id(one) in self._owners
            }
        return result


def _writes(name: str) -> bool:
    """Whether a function writes to its first argument: `add_`, `__setitem__`, `__iadd__`."""
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _tensors(value: object) -> tuple[Tensor, ...]:
    """Return a tensor, or the tensors in a list, tuple, deque or dict; parameters are left out."""
    values = (
        value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, deque)) else [value]
    )
    return tuple(
        one
        for one in values
        if isinstance(one, Tensor) and not isinstance(one, nn.Parameter) and not one.is_inference()
    )
