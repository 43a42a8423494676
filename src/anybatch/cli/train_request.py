"""The request of an `anybatch train` command line; can be pickled."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from anybatch.core.run_config import RunConfig

DEFAULT_RECIPE = "digits"
RUNS = Path("runs")
PRELOADED = ("anybatch.cli.local_ranks", "torch._dynamo")
"""Modules that the fork server of the ranks imports, so that a rank's first optimizer need not import torch._dynamo."""
Resume = Literal["always", "auto", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """A requested run.

    Attributes:
        recipe: the recipe to train; None: from the resumed run, else the default.
        folder: the run's folder; None: a new one in `runs`.
        resume: "always"; "auto": if the run was started in `folder`, and after out of memory; "never"; None: as "auto",
            but only if it is certainly this run: after out of memory, or when the launcher restarts these ranks.
        ranks: number of ranks; None: from the resumed run, else "auto".
        checkpoint_seconds: maximum seconds between checkpoints; None: the session's default.
        config: the settings that are given.
    """

    recipe: str | None
    folder: Path | None
    resume: Resume | None
    ranks: int | Literal["auto"] | None
    checkpoint_seconds: float | None = None
    config: RunConfig


def short_name(recipe: str) -> str:
    """Return a short name for a recipe: `digits`, and `train` for `jobs/train.py:main` or `jobs.train:main`."""
    place, _, function = recipe.rpartition(":")
    # The colon of a Windows drive does not separate a function.
    place = place if place and function.isidentifier() else recipe
    return Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
