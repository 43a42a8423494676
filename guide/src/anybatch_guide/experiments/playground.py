"""Recorded playground runs for a page without a server: the initial runs, and a grid of settings for each task."""

from anybatch_guide import grid
from anybatch_guide.experiment import Experiment

OPENING = Experiment(
    name="playground_opening",
    question="What does the playground show initially?",
    run=grid.run_opening,
    seconds=15,
    runs_here=False,
    tolerance=1e-3,
    noisy=grid.NOISY,
)
DIGITS = grid.experiment_of("digits", grid.digits_settings(), seconds=110)
SHAPES = grid.experiment_of("shapes", grid.shapes_settings(), seconds=100)
SPIRALS = grid.experiment_of("spirals", grid.spirals_settings(), seconds=20)
TEXT = grid.experiment_of("text", grid.text_settings(), seconds=40)
