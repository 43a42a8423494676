"""The request of an `anybatch train` command line, as a value that can be sent to other processes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

DEFAULT_RECIPE = "digits"
RUNS = Path("runs")
Resume = Literal["always", "auto", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """One run, as it was asked for.

    Attributes:
        recipe: what to train; None for the recipe of the run that is resumed, else the default one.
        folder: where; None for a new folder in `runs`.
        resume: whether to go on with the run in `folder`: "always"; "auto" if it was begun there, and after memory has
            run out; "never"; None as "auto", but only where it is sure to be this very run: memory has run out, or the
            launcher starts these ranks again.
        ranks: how many; None for as many as the run that is resumed was asked for, else "auto".
        checkpoint_seconds: most time between two checkpoints; None for that of a session.
        choices: the arguments of `Choices` that were given.
    """

    recipe: str | None
    folder: Path | None
    resume: Resume | None
    ranks: int | Literal["auto"] | None
    checkpoint_seconds: float | None = None
    choices: Mapping[str, Any]


def short_name(recipe: str) -> str:
    """Return a word for a recipe: `digits`, and `train` for `jobs/train.py:main` or `jobs.train:main`."""
    place, _, function = recipe.rpartition(":")
    # The colon of a Windows drive separates no function.
    place = place if place and function.isidentifier() else recipe
    return Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
