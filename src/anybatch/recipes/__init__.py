"""Complete runnable jobs. A recipe returns a `Job`, which every command accepts."""

from anybatch.core.run_config import RunConfig
from anybatch.recipes.job import Evaluation, Job
from anybatch.recipes.load import load_function, load_recipe

__all__ = ["Evaluation", "Job", "RunConfig", "load_function", "load_recipe"]
