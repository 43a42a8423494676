"""The code walk-through of the nine programs in `examples/from_scratch`: the executed lines of each."""

from pathlib import Path

from anybatch.errors import UserError
from anybatch_guide.experiment import Data, Emit, Experiment
from anybatch_guide.tracing import TracedFile, trace_program, trace_rank

PROGRAMS_FOLDER = Path(__file__).parents[4] / "examples" / "from_scratch"
PRINTING_RANKS = {"07_ddp_with_sampler.py": 1}
"""The printing rank, by program; rank 0 in all others."""


def run(emit: Emit) -> Data:
    """Return the trace of each program by name; for programs with ranks, of the printing rank.

    Raises:
        UserError: the programs are missing: they are in the repository, not in the package.
    """
    paths = sorted(PROGRAMS_FOLDER.glob("0*.py"))
    if not paths:
        message = f"{PROGRAMS_FOLDER} has no programs. Record this in a clone of the repository."
        raise UserError(message)
    traces = {}
    for number, path in enumerate(paths):
        emit({"kind": "guide.progress", "done": number, "of": len(paths), "what": path.name})
        source = TracedFile(path, f"examples/from_scratch/{path.name}")
        has_ranks = "def run_rank(" in path.read_text(encoding="utf-8")
        rank = PRINTING_RANKS.get(path.name, 0)
        traces[path.name] = trace_rank(source, "run_rank", rank=rank) if has_ranks else trace_program([source])
    return {"programs": traces}


EXPERIMENT = Experiment(
    name="walk_ladder",
    question="Which line runs when, in each program of the ladder?",
    run=run,
    seconds=120,
    runs_here=False,
)
