"""Complete runnable jobs. A recipe returns a `Job`, which every command accepts."""

from anybatch.recipes.job import Defaults, Evaluation, Job
from anybatch.recipes.load import load_function, load_recipe

__all__ = ["Defaults", "Evaluation", "Job", "load_function", "load_recipe"]
