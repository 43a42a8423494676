"""Runs of the playground's task `spirals`, with points and surfaces for drawing."""

from anybatch_guide.grid import experiment_of, spirals_settings
from anybatch_guide.tasks.spirals import EXTENT
from anybatch_guide.tasks.task import load

_ROWS = load("spirals").rows
_POINTS = zip(_ROWS.inputs.tolist(), _ROWS.targets.tolist(), strict=True)
EXPERIMENT = experiment_of(
    "spirals",
    spirals_settings(),
    seconds=20,
    points=[[round(x, 3), round(y, 3), arm] for (x, y), arm in _POINTS],
    extent=EXTENT,
)
