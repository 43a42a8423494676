"""The initial runs of the playground: digits, 16 x 4 = 64, without and with each mistake."""

from anybatch_guide.experiment import Experiment
from anybatch_guide.grid import NOISY, run_opening

EXPERIMENT = Experiment(
    name="playground_opening",
    question="What does the playground show initially?",
    run=run_opening,
    seconds=15,
    runs_here=False,
    tolerance=1e-3,
    noisy=NOISY,
)
