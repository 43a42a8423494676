"""A recipe as the verbs run it that measure steps: made again from its name, in whatever process."""

from collections.abc import Callable
from dataclasses import dataclass

from anybatch.data.batches import Batches
from anybatch.engine.spec import TrainSpec
from anybatch.engine.update.precision import PrecisionName
from anybatch.recipes.job import Job
from anybatch.recipes.load import load_recipe

_SMALL = 1e-6
"""Times the learning rate: one batch over and over may diverge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredJob:
    """A recipe and what is asked of it; a value that other processes can be sent.

    Args:
        recipe: as `load_recipe` takes it.
        effective_batch_size: samples of one optimizer step, over all ranks; None for the recipe's.
        precision: number format of forward and backward.
        seed: of the initial parameters and the order of samples.
    """

    recipe: str
    effective_batch_size: int | None = None
    precision: PrecisionName = "fp32"
    seed: int = 0

    def train_spec(self) -> TrainSpec:
        """Return what is trained, made anew, with a learning rate at which parameters hardly move.

        Raises:
            UserError: the recipe cannot be loaded or made.
        """
        job = load_recipe(self.recipe)
        return job.train_spec(
            seed=self.seed,
            learning_rate=_SMALL * job.defaults.learning_rate,
            effective_batch_size=self._size(job),
            precision=self.precision,
        )

    def data(self, *, steps: int) -> Callable[[int], Batches]:
        """Return a function of the number of loading processes to the first effective batches; 0 loads in this one.

        The data set is made once, here.

        Args:
            steps: how many batches.

        Raises:
            UserError: the recipe cannot be loaded, or its data cannot be used.
        """
        job = load_recipe(self.recipe)
        dataset = job.dataset()
        return lambda num_workers: job.train_batches(
            dataset, effective_batch_size=self._size(job), steps=steps, seed=self.seed, num_workers=num_workers
        )

    def _size(self, job: Job) -> int:
        return self.effective_batch_size or job.defaults.largest_batch_size
