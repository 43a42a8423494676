"""The contents of a screen at one moment, as values: every number is on the host and has its words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Level = Literal["plain", "result", "warning", "error"]

CELL_WIDTH = 24
"""Most characters of a label, a space and its value."""


@dataclass(frozen=True, slots=True)
class ScreenCell:
    """A number with its name.

    Attributes:
        label: name of the number, and its unit if the value has none.
        value: the number, as text.
        value_width: characters to keep free for the value, so that nothing moves when it changes.
    """

    label: str
    value: str
    value_width: int = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenContents:
    """The contents of a screen at one moment.

    Attributes:
        num_steps: steps made since the very beginning.
        total_steps: steps of the whole run; None if that is not known.
        share_of_step: how much of the next step is done, from 0 to 1.
        is_within_step: whether the next step has begun.
        time_left: as text; None if nothing can be said.
        cells: the numbers of the last step and of now.
        underway: where the step stands, such as `micro-batch 3 of 16`; None if it has only one.
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
        """`step 1,234 of 5,000`, as wide at the first step as at the last."""
        return step_of(self.num_steps, self.total_steps)

    @property
    def share(self) -> float | None:
        """How much of the run is done, from 0 to 1; None if its length is not known."""
        if self.total_steps is None:
            return None
        # A run of no steps is complete.
        return min(1.0, (self.num_steps + self.share_of_step) / self.total_steps) if self.total_steps else 1.0


class Screen(Protocol):
    """Where a run is shown. It shows the moments it is given; the console decides which and when."""

    @property
    def seconds_per_step(self) -> float:
        """Least time between two showings of a moment after a step."""
        ...

    @property
    def seconds_per_micro_batch(self) -> float:
        """Least time between two showings of a moment within a step."""
        ...

    @property
    def shows_beginning(self) -> bool:
        """Whether it shows the moment before the first step."""
        ...

    def say(self, line: str, level: Level, /) -> None:
        """Show a line that stays."""
        ...

    def show(self, moment: ScreenContents, /) -> None:
        """Show how far the run is."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was. Showing something afterwards starts over."""
        ...


def step_of(num_steps: int, total_steps: int | None) -> str:
    """Return `step 1,234 of 5,000`, or `step 1,234`, as wide as the last step's.

    Args:
        num_steps: steps made since the very beginning.
        total_steps: steps of the whole run; None if that is not known.
    """
    if total_steps is None:
        return f"step {num_steps:>7,}"
    total = f"{total_steps:,}"
    return f"step {f'{num_steps:,}':>{len(total)}} of {total}"
