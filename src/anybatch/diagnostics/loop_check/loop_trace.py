"""The trace of a loop, as a value: its forwards, backwards and steps in order, with the gradient at each of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float64
from torch import Tensor

TableGradient = Float64[Tensor, "sample position output"]


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward that a backward could follow.

    Attributes:
        ids: the samples.
        rates: learning rates of the optimizers known by then.
        synced: whether DistributedDataParallel would reduce the backward of it; None without that wrapper.
        line: line of the user's file.
    """

    ids: tuple[int, ...]
    rates: tuple[float, ...]
    synced: bool | None
    line: int | None


@dataclass(frozen=True, slots=True)
class Backward:
    """One backward.

    Attributes:
        forwards: numbers of the forwards it went through.
        incoming: the gradient that it added.
        before: the gradient it added to; zeros where there was none, None where it added to nothing, as
            `torch.autograd.grad`.
        synced: as in `Forward`, at the moment of the backward.
        line: line of the user's file.
    """

    forwards: tuple[int, ...]
    incoming: TableGradient
    before: TableGradient | None
    synced: bool | None
    line: int | None

    @property
    def after(self) -> TableGradient:
        """The gradient it left, before any reduction."""
        return self.incoming if self.before is None else self.before + self.incoming


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One optimizer step.

    Attributes:
        num_forwards: forwards made until then, since the beginning.
        num_backwards: the same of backwards.
        num_reductions: the same of reductions by DistributedDataParallel.
        gradient: what the optimizer met; zeros where there was none.
        line: line of the user's file.
    """

    num_forwards: int
    num_backwards: int
    num_reductions: int
    gradient: TableGradient
    line: int | None


@dataclass(slots=True)
class LoopTrace:
    """Everything a loop did, on one rank.

    Attributes:
        forwards: in order.
        backwards: in order.
        steps: in order.
        reductions: number of reductions by DistributedDataParallel until the end; None without that wrapper.
        by_sample: the first gradient with respect to the outputs that each sample's forward received.
        left: the gradient at the very end; zeros where there was none.
        returned: what the function returned, if it was a number or a sequence of numbers.
        calls: number of forwards made at the end of each call of the function.
        ended: whether the loop came to its end, or to the end of the passes that are looked at.
        has_more_passes: whether it would have gone on to further passes.
        guesses: settings that the loop asked for and that no role is known of, with what it was given.
    """

    forwards: list[Forward] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)
    steps: list[OptimizerStep] = field(default_factory=list)
    reductions: int | None = None
    by_sample: dict[int, Tensor] = field(default_factory=dict)
    left: Tensor | None = None
    returned: tuple[float, ...] | None = None
    calls: list[int] = field(default_factory=list)
    ended: bool = True
    has_more_passes: bool = False
    guesses: dict[str, Any] = field(default_factory=dict)


def numbers_in(value: Any) -> tuple[float, ...] | None:  # noqa: ANN401 (whatever a loop returns)
    """Return a loss, or several, if that is what a loop returned: a number, a sequence, or a dict that has "loss"."""
    if isinstance(value, dict):
        named = [entry for name, entry in value.items() if isinstance(name, str) and "loss" in name.lower()]
        return numbers_in(named[0]) if len(named) == 1 else None
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
        return (float(value),)
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        found = [numbers_in(entry) for entry in value]
        if all(entry is not None and len(entry) == 1 for entry in found):
            return tuple(entry[0] for entry in found if entry)
    return None
