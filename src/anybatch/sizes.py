"""Options of the automatic micro-batch size, plans that limit it, and files that keep measurements."""

from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch.engine.micro_batch_size.search import Auto
from anybatch.planner.measurements import KnownDevices, KnownSizes
from anybatch.recipes.planning.plan import planned_largest

__all__ = ["Auto", "Hardware", "KnownDevices", "KnownSizes", "TrainSpec", "planned_largest"]
