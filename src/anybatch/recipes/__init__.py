"""Complete runnable jobs, and how one is described: `Job` is what a recipe returns and what every verb takes."""

from anybatch.recipes.job import Defaults, Evaluation, Job
from anybatch.recipes.load import load_recipe
from anybatch.recipes.start import Run, start

__all__ = ["Defaults", "Evaluation", "Job", "Run", "load_recipe", "start"]
