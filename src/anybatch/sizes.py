"""Options of the automatic micro-batch size, and planned upper limits for it."""

from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch.engine.micro_batch_size.search import Auto
from anybatch.recipes.planning.plan import planned_largest

__all__ = ["Auto", "Hardware", "TrainSpec", "planned_largest"]
