"""The code walk-through of the ladder from scratch: the lines that ran in each of its nine programs."""

from pathlib import Path

from anybatch.errors import UserError
from anybatch_guide.experiment import Data, Experiment, Tell
from anybatch_guide.tracing import TracedFile, trace_program, trace_rank

LADDER = Path(__file__).parents[4] / "examples" / "from_scratch"
SPEAKERS = {"07_ddp_with_sampler.py": 1}
"""The rank that prints, where it is not rank 0."""


def run(tell: Tell) -> Data:
    """Return the trace of each program by its name; of those with ranks, the rank that prints.

    Raises:
        UserError: the programs are not there: they are part of the repository and not of the package.
    """
    paths = sorted(LADDER.glob("0*.py"))
    if not paths:
        message = f"there is no program in {LADDER}. Record this in a clone of the repository."
        raise UserError(message)
    traces = {}
    for number, path in enumerate(paths):
        tell({"kind": "guide.progress", "done": number, "of": len(paths), "what": path.name})
        source = TracedFile(path, f"examples/from_scratch/{path.name}")
        has_ranks = "def run_rank(" in path.read_text(encoding="utf-8")
        rank = SPEAKERS.get(path.name, 0)
        traces[path.name] = trace_rank(source, "run_rank", rank=rank) if has_ranks else trace_program([source])
    return {"programs": traces}


EXPERIMENT = Experiment(
    name="walk_ladder",
    question="Which line runs when, in each program of the ladder?",
    run=run,
    seconds=120,
    runs_here=False,
)
