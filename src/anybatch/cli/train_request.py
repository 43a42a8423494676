"""The request of an `anybatch train` command line, as a value that can be sent to other processes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

DEFAULT_RECIPE = "digits"
RUNS = Path("runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """One run, as it was asked for.

    Attributes:
        recipe: what to train; None for the recipe of the run that is resumed, else the default one.
        folder: where; None for a new folder in `runs`.
        resume: go on with the run in `folder`.
        ranks: how many; None for as many as the run that is resumed was asked for, else "auto".
        choices: the arguments of `Choices` that were given.
    """

    recipe: str | None
    folder: Path | None
    resume: bool
    ranks: int | Literal["auto"] | None
    choices: Mapping[str, Any]


def short_name(recipe: str) -> str:
    """Return a word for a recipe: `digits`, and `train` for `jobs/train.py:main` or `jobs.train:main`."""
    place, _, function = recipe.rpartition(":")
    # The colon of a Windows drive separates no function.
    place = place if place and function.isidentifier() else recipe
    return Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
