"""What operations on tensors without data make, remembered: it depends on shapes and types, which come again and again.

A model of equal blocks asks the same few dozen questions thousands of times, and torch takes longer to answer one than
to compute it. What was answered once is made again from what is remembered of it: shape, type, and whose memory it is.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from anybatch.core.torch_internals import storage_key
from anybatch.memory.ledger import DEVICE, KernelWorkspaces, MemoryLedger, OperationObserver, PoolSelector
from anybatch.memory.torch_internals import FakeTensor, FakeTensorMode, is_traceable_wrapper_subclass_type
from anybatch.planner.torch_internals import (
    fake_device_getter,
    keys_of,
    makes_fake_tensors,
    operation,
    schema_of,
    set_conjugate,
    set_negative,
    subclass_of,
    undispatched,
    warn_of_data,
)
from anybatch.planner.trace.data_reads import WATCHED

_PLAIN = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_LISTS = frozenset({list, tuple, torch.Size})
_ELSEWHERE = frozenset({torch.Tag.data_dependent_output, torch.Tag.inplace_view})
"""Operations that look at numbers, or that change the shape of what they are given."""
_KEEP_UNTOLD = frozenset({torch.ops.aten.mkldnn_rnn_layer.default})
"""Operations that keep memory for their backward of which torch's description of them says nothing."""
_READ = operation("_local_scalar_dense.default")
_META = torch.device("meta")
_device_of = fake_device_getter()


class FakeLedger(MemoryLedger):
    """A ledger for tensors without data, which does not run what it knows the result of.

    It books what a `MemoryLedger` would book, in a quarter of the time.

    Args:
        mode: the mode the tensors live in, entered below this ledger.
        on_operation: is told each operation.
        pool: says which of the allocator's pools memory comes from that is taken now; None: all from pool 0.
        kernels: says what an operation's kernel takes for itself.
        answers: what is known already, of other traces too.
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        *,
        on_operation: OperationObserver | None = None,
        pool: PoolSelector | None = None,
        kernels: KernelWorkspaces | None = None,
        answers: "Answers | None" = None,
    ) -> None:
        super().__init__(on_operation=on_operation, pool=pool, kernels=kernels)
        self._results = KnownResults(mode, answers)

    def answered(self) -> object | None:
        """Return what stands for the last operation and all it was given; None where it was run as it came."""
        return self._results.answer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch not to switch its compiler off and on around each operation: nothing is compiled here."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 (torch's type has no name in public)
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (whatever the operation returns)
        """Answer an operation, and book what it returns.

        Raises:
            NotImplementedError: what the operation holds cannot be told without running it.
        """
        if func is DEVICE and type(args[0]) is FakeTensor:
            return _device_of(args[0])
        for kind in types:
            if kind is not FakeTensor and is_traceable_wrapper_subclass_type(kind):
                return NotImplemented  # its parts come next
        kwargs = kwargs or {}
        result = self._results(func, args, kwargs)
        self._see(func, args, kwargs, result)
        return result


def fake_mode() -> FakeTensorMode:
    """Return a mode for tensors without data that may meet others.

    It remembers nothing itself: what it would is asked only when it is new, and hashing it takes as long as computing.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor that was made, but for its mode and its memory.

    Attributes:
        home: the number of the argument whose memory it looks at; None if it has its own.
        size: its lengths.
        stride: its strides.
        offset: where it begins in its memory.
        dtype: its type.
        device: that it says it is on.
        is_conjugate: whether its numbers are those of its memory, conjugated.
        is_negative: the same of negation.
        notes: what torch notes at it in Python.
    """

    home: int | None
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    is_conjugate: bool
    is_negative: bool
    notes: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _Given:
    """One of the arguments, returned as it is.

    Attributes:
        number: which.
    """

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """What an operation returned.

    Attributes:
        kind: `tuple` or `list`; None for a single result.
        parts: the results, one by one; a number or None stands for itself.
    """

    kind: type | None
    parts: tuple[_Tensor | _Given | int | None, ...]


@dataclass(frozen=True, slots=True)
class _Operation:
    """An operation, and what it returned.

    Attributes:
        is_known: whether its results depend on shapes, types and numbers alone.
        answers: by question; None where the first result cannot be made again.
    """

    is_known: bool
    answers: dict[tuple[object, ...], _Answer | None] = field(default_factory=dict)


class Answers:
    """What operations have returned. A question holds all that its answer depends on, so they serve many traces."""

    def __init__(self) -> None:
        self._operations: dict[Any, _Operation] = {}

    def of(self, func: Any) -> _Operation:  # noqa: ANN401 (torch's type has no name in public)
        """Return what is known of an operation.

        Raises:
            NotImplementedError: what it holds cannot be told without running it.
        """
        found = self._operations.get(func)
        if found is None:
            if func in _KEEP_UNTOLD:
                message = f"torch does not say what {func} keeps for its backward"
                raise NotImplementedError(message)
            found = self._operations[func] = _Operation(_depends_on_shapes(func))
        return found


class KnownResults:
    """Runs an operation on tensors without data once for each set of shapes, types and numbers it is given.

    Run as they come are operations that look at numbers or are watched for, those of other libraries, and those whose
    first result cannot be made again, with everything that can be told of it, from what is remembered.

    Args:
        mode: the mode the tensors live in.
        answers: what is known already; None for nothing.
        remembers: results are made again from what is remembered; otherwise each operation is run, which takes four
            times as long and gives the same. None: they are where this torch has what that takes.

    Attributes:
        answer: what the last result was made from; None if it was run.
    """

    def __init__(self, mode: FakeTensorMode, answers: Answers | None = None, *, remembers: bool | None = None) -> None:
        self._mode = mode
        self._remembers = makes_fake_tensors() if remembers is None else remembers
        self._answers = Answers() if answers is None else answers
        self.answer: object | None = None

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 (as torch)
        """Return what `func(*args, **kwargs)` would return.

        Raises:
            NotImplementedError: what the operation holds cannot be told without running it.
        """
        operation = self._answers.of(func)
        self.answer = None
        if not self._remembers:
            return func(*args, **kwargs)
        if func is _READ and self._is_constant(args[0]):
            with undispatched():
                return func(args[0].constant)
        words: list[object] = [torch.get_default_dtype(), torch.is_inference_mode_enabled(), *kwargs]
        given: list[FakeTensor] = []
        if (
            not operation.is_known
            or not self._describe(args, words, given)
            or (kwargs and not self._describe(kwargs.values(), words, given))
        ):
            return func(*args, **kwargs)
        question = tuple(words)
        answer = operation.answers.get(question)
        if answer is not None:
            self.answer = answer
            if answer.kind is None:
                return self._part(answer.parts[0], given)
            return answer.kind([self._part(part, given) for part in answer.parts])
        result = func(*args, **kwargs)
        if question not in operation.answers:
            operation.answers[question] = self._learn(result, given)
        return result

    def _is_constant(self, tensor: Any) -> bool:  # noqa: ANN401 (any argument)
        """Return whether the program itself has written the numbers of a tensor of this mode."""
        return type(tensor) is FakeTensor and tensor.constant is not None and tensor.fake_mode is self._mode

    def _describe(self, values: Iterable[Any], words: list[object], given: list[FakeTensor]) -> bool:
        """Append all that results depend on, and the tensors; return whether that is possible."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.constant is not None or value.fake_mode is not self._mode:
                    return False  # its numbers are known, and torch computes with them
                given.append(value)
                words += (value.shape, value.stride(), value.dtype, value.storage_offset(), _device_of(value))
                words += (value.layout, value.requires_grad, value.is_conj(), value.is_neg())
            elif kind in _PLAIN:
                words += (kind, value)  # 1 and 1.0 are equal, and give other types
            elif kind in _LISTS:
                words += (kind, len(value))
                if not self._describe(value, words, given):
                    return False
            else:
                return False
        return True

    def _part(self, part: _Tensor | _Given | int | None, given: Sequence[FakeTensor]) -> FakeTensor | int | None:
        if isinstance(part, _Tensor):
            return self._made(part, given)
        return given[part.number] if isinstance(part, _Given) else part

    def _made(self, part: _Tensor, given: Sequence[FakeTensor]) -> FakeTensor:
        """Make a tensor as `FakeTensor` does it, and without asking it for what is known."""
        with undispatched():
            if part.home is None:
                empty = torch.empty_strided(part.size, part.stride, dtype=part.dtype, device=_META)
            else:
                empty = torch.empty(0, dtype=part.dtype, device=_META)
                empty.set_(given[part.home].untyped_storage(), part.offset, part.size, part.stride)
            options = {"dispatch_device": True, "device_for_backend_keys": part.device}
            tensor: FakeTensor = subclass_of(FakeTensor, empty, False, **options)  # noqa: FBT003 (takes no keyword)
            if part.is_conjugate:
                set_conjugate(tensor, True)  # noqa: FBT003 (takes no keyword)
            if part.is_negative:
                set_negative(tensor, True)  # noqa: FBT003 (the same)
        warn_of_data(tensor)
        vars(tensor).update(part.notes, fake_mode=self._mode)
        return tensor

    def _learn(self, result: object, given: Sequence[FakeTensor]) -> _Answer | None:
        """Return what is needed to make such a result; None if it cannot be made."""
        kind = type(result) if isinstance(result, list | tuple) else None
        if kind not in {None, list, tuple}:
            return None
        results: Sequence[Any] = result if isinstance(result, list | tuple) else (result,)
        parts: list[_Tensor | _Given | int | None] = []
        homes: set[int] = set()
        for one in results:
            if one is None or type(one) is int:
                parts.append(one)
                continue
            part = self._learn_tensor(one, given)
            if part is None:
                return None
            if type(part) is _Tensor and part.home is None:
                if home(one) in homes:
                    return None  # two results in the same new memory
                homes.add(home(one))
            parts.append(part)
        return _Answer(kind, tuple(parts))

    def _learn_tensor(self, tensor: Any, given: Sequence[FakeTensor]) -> _Tensor | _Given | None:  # noqa: ANN401
        if type(tensor) is not FakeTensor or tensor.constant is not None or tensor.layout is not torch.strided:
            return None
        for number, one in enumerate(given):
            if one is tensor:
                return _Given(number)
        homes = [number for number, one in enumerate(given) if home(one) == home(tensor)]
        notes = {name: value for name, value in vars(tensor).items() if name != "fake_mode"}
        if len(homes) > 1 or any(value is not None and type(value) is not torch.device for value in notes.values()):
            return None
        part = _Tensor(
            home=homes[0] if homes else None,
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
            dtype=tensor.dtype,
            device=tensor.fake_device,
            is_conjugate=tensor.is_conj(),
            is_negative=tensor.is_neg(),
            notes=notes,
        )
        return part if told(self._made(part, given)) == told(tensor) else None


def _depends_on_shapes(func: Any) -> bool:  # noqa: ANN401 (torch's type has no name in public)
    """Return whether an operation gives the same for the same shapes and types, and leaves those of its arguments."""
    if getattr(func, "namespace", "") != "aten" or func in WATCHED or not _ELSEWHERE.isdisjoint(func.tags):
        return False
    name = func.overloadpacket.__name__
    if name.startswith("lift"):  # makes tensors without data of others
        return False
    return not schema_of(func).is_mutable or name.endswith("_")


def home(tensor: torch.Tensor) -> int:
    """Return what its memory is known by for as long as it lives."""
    return storage_key(tensor.untyped_storage())


def told(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return all that can be told of a tensor without data."""
    return (
        type(tensor),
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.dtype,
        tensor.layout,
        tensor.device,
        tensor.requires_grad,
        tensor.is_inference(),
        str(keys_of(tensor)),
        vars(tensor),
    )
