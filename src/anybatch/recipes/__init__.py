"""Complete runnable jobs, and how one is described: `Job` is what a recipe returns and what every verb takes."""

from anybatch.recipes.job import Defaults, Evaluation, Job
from anybatch.recipes.load import load_function, load_recipe

__all__ = ["Defaults", "Evaluation", "Job", "load_function", "load_recipe"]
