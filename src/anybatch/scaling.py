"""Why N ranks are less than N times as fast: measured with `measure_scaling`, predicted with `forecast`."""

from anybatch.diagnostics.scale import measure_scaling, scale_on_ranks
from anybatch.planner.forecast import forecast
from anybatch.planner.forecast_report import Cluster, Workload

__all__ = ["Cluster", "Workload", "forecast", "measure_scaling", "scale_on_ranks"]
