"""The contents of a screen at one moment, as host values and text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Level = Literal["plain", "result", "warning", "error"]

CELL_WIDTH = 24
"""Maximum characters of a label, a space and its value."""


@dataclass(frozen=True, slots=True)
class ScreenCell:
    """A number with its label; `value_width` keeps columns from moving when the value changes."""

    label: str
    value: str
    value_width: int = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenContents:
    """The contents of a screen at one moment.

    Attributes:
        num_steps: steps made since the start of the run.
        total_steps: steps of the whole run; None if unknown.
        share_of_step: completed part of the next step, from 0 to 1.
        is_within_step: whether the next step has begun.
        time_left: remaining time as text; None if unknown.
        cells: the current numbers.
        underway: progress within the step, such as `micro-batch 3 of 16`; None if it has one micro-batch.
    """

    num_steps: int
    total_steps: int | None
    share_of_step: float
    is_within_step: bool
    time_left: str | None
    cells: Sequence[ScreenCell]
    underway: ScreenCell | None

    @property
    def heading(self) -> str:
        """`step 1,234 of 5,000`, with a constant width."""
        return step_of(self.num_steps, self.total_steps)

    @property
    def share(self) -> float | None:
        """Completed part of the run, from 0 to 1; None if its length is unknown."""
        if self.total_steps is None:
            return None
        # A run without steps is complete.
        return min(1.0, (self.num_steps + self.share_of_step) / self.total_steps) if self.total_steps else 1.0


class Screen(Protocol):
    """Shows a run. The console decides what to show and when."""

    @property
    def seconds_per_step(self) -> float:
        """Minimum seconds between updates after steps."""
        ...

    @property
    def seconds_per_micro_batch(self) -> float:
        """Minimum seconds between updates within a step."""
        ...

    @property
    def shows_beginning(self) -> bool:
        """Whether it shows the state before the first step."""
        ...

    def say(self, line: str, level: Level, /) -> None:
        """Print a permanent line."""
        ...

    def show(self, moment: ScreenContents, /) -> None:
        """Show the progress of the run."""
        ...

    def close(self) -> None:
        """Restore the terminal. Later output starts over."""
        ...


def step_of(num_steps: int, total_steps: int | None) -> str:
    """Return `step 1,234 of 5,000`, or `step 1,234` without a total, with a constant width."""
    if total_steps is None:
        return f"step {num_steps:>7,}"
    total = f"{total_steps:,}"
    return f"step {f'{num_steps:,}':>{len(total)}} of {total}"
