"""Runs of the playground's task `text`, for a page without an engine."""

from anybatch_guide.grid import experiment_of, text

EXPERIMENT = experiment_of("text", text(), seconds=40)
