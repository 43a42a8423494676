"""Runs of the playground's task `digits`, for a page without an engine."""

from anybatch_guide.grid import digits_settings, experiment_of

EXPERIMENT = experiment_of("digits", digits_settings(), seconds=110)
