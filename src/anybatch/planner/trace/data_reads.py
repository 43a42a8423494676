"""Answer reads of numbers from fake tensors with made-up values, and count them by phase."""

import operator
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from anybatch.core.torch_internals import num_changes
from anybatch.memory.torch_internals import DataDependentOutputException, TorchDispatchMode
from anybatch.memory.trace import Phase
from anybatch.planner.torch_internals import known_operations, operation
from anybatch.planner.trace.refusals import place

_LOOKS_FOR_OVERFLOW = operation("_amp_foreach_non_finite_check_and_unscale_.default")
_READS = (operation("_local_scalar_dense.default"), torch.ops.aten.equal.default)
_DRAWS = known_operations(("rand.default", "rand.generator"))
_COMPARES: Mapping[Any, Callable[[Any, Any], bool]] = {
    operation("gt.Scalar"): operator.gt,
    operation("ge.Scalar"): operator.ge,
    operation("lt.Scalar"): operator.lt,
    operation("le.Scalar"): operator.le,
}
_FOLLOWING = "Following a number that is drawn"

WATCHED = frozenset({_LOOKS_FOR_OVERFLOW, *_READS, *_DRAWS, *_COMPARES})
"""Operations that must reach `HostReads` every time, so their results are not cached."""


class HostReads(TorchDispatchMode):
    """Answers `.item()`, `if tensor:` and `torch.equal` on fake tensors, which would raise otherwise.

    The check of fp16 gradients for overflow returns no overflow, since the update would be skipped otherwise.

    With real data the program might branch differently. To detect this, it runs again with alternative answers, and the
    two traces are compared.

    Reads of a number drawn by `torch.rand`, or of a comparison with it, are answered as for a draw near 1 (alternative:
    near 0), so that a layer with drop probability 0 is never dropped. (`torch.rand` returns 0 once in 16 million.)

    Args:
        phase: returns the current phase of the step.
        other: give the alternative answers: True instead of False, 2 instead of 1, -1.5 instead of 0.5, a draw near 0.

    Attributes:
        numbers: how many numbers were read, by phase.
        truths: how many truth values were read, by phase.
        at: location of the first read in a forward or backward, as text to append to a sentence; empty for no read.
        is_drawn: whether the first read depends on a number drawn by `torch.rand`.
    """

    def __init__(self, phase: Callable[[], Phase], *, other: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers: Counter[Phase] = Counter()
        self.truths: Counter[Phase] = Counter()
        self.at = ""
        self.is_drawn = False
        self._phase = phase
        self._other = other
        self._overflows: list[torch.Tensor] = []
        # Weak references: keeping the tensors alive would change the memory of the step.
        self._drawn: dict[int, tuple[weakref.ref[torch.Tensor], int, float]] = {}

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 (torch's type has no name in public)
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (any result)
        """Run an operation; make up the result if it reads a number from a fake tensor."""
        del types
        if func is _LOOKS_FOR_OVERFLOW:
            # The operation's flag; later reads of it return no overflow.
            self._overflows.append(args[1])
        if func not in _READS:
            result = func(*args, **(kwargs or {}))
            if func in _DRAWS and result.numel() == 1:
                self._remember(result, 2**-24 if self._other else 1 - 2**-24)
            elif func in _COMPARES and (drawn := self._draw_in(args[0])) is not None:
                self._remember(result, _COMPARES[func](drawn, args[1]))
            return result
        try:
            return func(*args, **(kwargs or {}))  # a number written by the program itself is known
        except DataDependentOutputException:
            return self._substitute(func, args[0])

    def _substitute(self, func: Any, read: torch.Tensor) -> float:  # noqa: ANN401 (as above)
        """Return the answer to a read of a fake tensor, and count it."""
        # Compare identities, since comparing values would be another read.
        if any(read is overflow for overflow in self._overflows):
            return 0.0
        drawn = None if func is torch.ops.aten.equal.default else self._draw_in(read)
        if not self.at and self._phase() in {"forward", "backward"}:
            self.at = place(reversed(list(traceback.walk_stack(None))))
            self.is_drawn = drawn is not None
        is_truth = func is not _READS[0] or read.dtype is torch.bool
        (self.truths if is_truth else self.numbers)[self._phase()] += 1
        if drawn is not None:
            return drawn
        if is_truth:
            return self._other
        if read.dtype.is_floating_point or read.dtype.is_complex:
            return -1.5 if self._other else 0.5
        return 2 if self._other else 1

    def _remember(self, tensor: torch.Tensor, drawn: float) -> None:
        if not tensor.is_inference():  # torch does not count changes of inference tensors
            self._drawn[id(tensor)] = weakref.ref(tensor), num_changes([tensor], _FOLLOWING)[0], drawn

    def _draw_in(self, tensor: torch.Tensor) -> float | None:
        """Return a tensor's drawn number, or the result of comparing one; None for other tensors."""
        reference, changes, drawn = self._drawn.get(id(tensor), (None, 0, None))
        is_it = reference is not None and reference() is tensor and [changes] == num_changes([tensor], _FOLLOWING)
        return drawn if is_it else None
