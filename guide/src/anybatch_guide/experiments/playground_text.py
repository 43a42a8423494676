"""Runs of the playground's task `text`, for a page without an engine."""

from anybatch_guide.grid import experiment_of, text_settings

EXPERIMENT = experiment_of("text", text_settings(), seconds=40)
