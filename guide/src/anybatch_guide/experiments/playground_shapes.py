"""Runs of the playground's task `shapes`, for a page without an engine."""

from anybatch_guide.grid import experiment_of, shapes_settings

EXPERIMENT = experiment_of("shapes", shapes_settings(), seconds=100)
