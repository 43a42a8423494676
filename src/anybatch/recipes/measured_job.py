"""A recipe for commands that measure steps; any process can build it from its name."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from anybatch.core.run_config import RunConfig
from anybatch.data.batches import Batches
from anybatch.engine.spec import TrainSpec
from anybatch.recipes.job import Job
from anybatch.recipes.load import load_recipe

_SMALL = 1e-6
"""Factor of the learning rate: repeated steps on one batch may diverge at the full rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredJob:
    """A recipe with settings that replace its defaults; can be pickled."""

    recipe: str
    config: RunConfig = dataclasses.field(default_factory=RunConfig)

    def train_spec(self) -> TrainSpec:
        """Build the `TrainSpec`, with a learning rate at which parameters hardly move."""
        job = load_recipe(self.recipe)
        assert job.defaults.learning_rate is not None
        return job.train_spec(
            seed=self.config.seed or 0,
            learning_rate=_SMALL * job.defaults.learning_rate,
            effective_batch_size=self._size(job),
            precision=self.config.precision,
        )

    def data(self, *, steps: int) -> Callable[[int], Batches]:
        """Return a function that maps a number of loading processes to the first `steps` effective batches.

        The data set is made once, here.
        """
        job = load_recipe(self.recipe)
        dataset = job.dataset()
        return lambda num_workers: job.train_batches(
            dataset,
            effective_batch_size=self._size(job),
            steps=steps,
            seed=self.config.seed or 0,
            num_workers=num_workers,
        )

    def _size(self, job: Job) -> int:
        return self.config.over(job.defaults).largest_batch_size
