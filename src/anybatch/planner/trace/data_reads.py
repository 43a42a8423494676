"""Numbers that a program reads from tensors without data: answered with a made-up value, and counted by phase."""

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
"""The operations that have to be seen here each time."""


class HostReads(TorchDispatchMode):
    """Answers `.item()`, `if tensor:` and `torch.equal` on tensors without data, which refuse that by themselves.

    Whether fp16 gradients have overflowed is answered with no, since no update would follow otherwise.

    What follows from an answer may be another program than with data. To find out,
    it is run a second time with the other answers, and compared.

    A number that `torch.rand` has drawn, and a comparison of it, is answered as for a draw near 1, and as for one near
    0: what is left out with probability 0 never is. (`torch.rand` draws 0 itself once in 16 million times.)

    Args:
        phase: returns the current phase of the step.
        other: give the other answers: True instead of False, 2 instead of 1, -1.5 instead of 0.5, a draw near 0.

    Attributes:
        numbers: how many numbers were read, by phase.
        truths: how many truth values were read, by phase.
        at: where the first was read in a forward or backward, as words that follow a sentence; empty if none was.
        is_drawn: whether what was read first follows from a number that `torch.rand` has drawn.
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
        # By identity, and without keeping them: what lives on would be memory of the step.
        self._drawn: dict[int, tuple[weakref.ref[torch.Tensor], int, float]] = {}

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
            result = func(*args, **(kwargs or {}))
            if func in _DRAWS and result.numel() == 1:
                self._remember(result, 2**-24 if self._other else 1 - 2**-24)
            elif func in _COMPARES and (drawn := self._draw_in(args[0])) is not None:
                self._remember(result, _COMPARES[func](drawn, args[1]))
            return result
        try:
            return func(*args, **(kwargs or {}))  # a number that the program itself has written is known
        except DataDependentOutputException:
            return self._made_up(func, args[0])

    def _made_up(self, func: Any, read: torch.Tensor) -> float:  # noqa: ANN401 (as above)
        """Return the answer to a read of a tensor without data, and count it."""
        # By identity, since comparing values would itself be a read.
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
        if not tensor.is_inference():  # whose changes torch does not count
            self._drawn[id(tensor)] = weakref.ref(tensor), num_changes([tensor], _FOLLOWING)[0], drawn

    def _draw_in(self, tensor: torch.Tensor) -> float | None:
        """Return the drawn number that a tensor holds, or what a comparison has made of it; None for anything else."""
        reference, changes, drawn = self._drawn.get(id(tensor), (None, 0, None))
        is_it = reference is not None and reference() is tensor and [changes] == num_changes([tensor], _FOLLOWING)
        return drawn if is_it else None
