"""Numbers that a program reads from tensors without data: answered with a made-up value, and counted by phase."""

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from anybatch.memory.torch_internals import DataDependentOutputException, TorchDispatchMode
from anybatch.memory.trace import Phase
from anybatch.planner.torch_internals import operation
from anybatch.planner.trace.refusals import place

_LOOKS_FOR_OVERFLOW = operation("_amp_foreach_non_finite_check_and_unscale_.default")
_READS = (operation("_local_scalar_dense.default"), torch.ops.aten.equal.default)

WATCHED = frozenset({_LOOKS_FOR_OVERFLOW, *_READS})
"""The operations that have to be seen here each time."""


class HostReads(TorchDispatchMode):
    """Answers `.item()`, `if tensor:` and `torch.equal` on tensors without data, which refuse that by themselves.

    Whether fp16 gradients have overflowed is answered with no, since no update would follow otherwise.

    What follows from an answer may be another program than with data. To find out,
    it is run a second time with the other answers, and compared.

    Args:
        phase: returns the current phase of the step.
        other: give the other answers: True instead of False, 2 instead of 1, -1.5 instead of 0.5.

    Attributes:
        numbers: how many numbers were read, by phase.
        truths: how many truth values were read, by phase.
        at: where the first was read in a forward or backward, as words that follow a sentence; empty if none was.
    """

    def __init__(self, phase: Callable[[], Phase], *, other: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers: Counter[Phase] = Counter()
        self.truths: Counter[Phase] = Counter()
        self.at = ""
        self._phase = phase
        self._other = other
        self._overflows: list[torch.Tensor] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 (torch's type has no name in public)
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (whatever the operation returns)
        """Run an operation; make up the result if it reads a number of a tensor without data."""
        del types
        if func is _LOOKS_FOR_OVERFLOW:
            # The flag that this operation writes: a read of it later on is answered with no.
            self._overflows.append(args[1])
        if func not in _READS:
            return func(*args, **(kwargs or {}))
        try:
            return func(*args, **(kwargs or {}))  # a number that the program itself has written is known
        except DataDependentOutputException:
            pass
        # By identity, since comparing values would itself be a read.
        if any(args[0] is overflow for overflow in self._overflows):
            return 0.0
        if not self.at and self._phase() in {"forward", "backward"}:
            self.at = place(reversed(list(traceback.walk_stack(None))))
        if func is not _READS[0] or args[0].dtype is torch.bool:
            self.truths[self._phase()] += 1
            return self._other
        self.numbers[self._phase()] += 1
        if args[0].dtype.is_floating_point or args[0].dtype.is_complex:
            return -1.5 if self._other else 0.5
        return 2 if self._other else 1
