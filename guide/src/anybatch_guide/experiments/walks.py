"""The code walk-throughs of the page: the executed lines of programs, in order."""

from pathlib import Path

from anybatch.engine import accumulate
from anybatch.errors import UserError
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress
from anybatch_guide.listings import listing
from anybatch_guide.tracing import TracedFile, trace_program, trace_rank

PROGRAMS_FOLDER = Path(__file__).parents[4] / "examples" / "from_scratch"
PRINTING_RANKS = {"07_ddp_with_sampler.py": 1}
"""The rank that prints, for programs in which another rank than 0 prints."""


def trace_plain(emit: Emit) -> Data:
    """Return the trace of a plain loop."""
    _begin(emit)
    return trace_program([listing("plain.py")], repeats=100)


def trace_accumulation(emit: Emit) -> Data:
    """Return the trace of the usual accumulation loop, with all weights of its small network after each line."""
    _begin(emit)
    return trace_program([listing("accumulation.py")], repeats=100, vectors=True)


def trace_anybatch(emit: Emit) -> Data:
    """Return the trace of a program with the engine, and of the engine's hot loop."""
    _begin(emit)
    hot_loop = TracedFile(Path(accumulate.__file__), "src/anybatch/engine/accumulate.py")
    return trace_program([listing("with_anybatch.py"), hot_loop], repeats=100)


def trace_ddp(emit: Emit) -> Data:
    """Return the trace of one of two ranks under DDP."""
    _begin(emit)
    return trace_rank(listing("with_ddp.py"), "train", repeats=100)


def trace_ladder(emit: Emit) -> Data:
    """Return the trace of each program in `examples/from_scratch`; for programs with ranks, of the printing rank."""
    paths = sorted(PROGRAMS_FOLDER.glob("0*.py"))
    if not paths:
        message = f"{PROGRAMS_FOLDER} has no programs. Record this in a clone of the repository."
        raise UserError(message)
    traces = {}
    for number, path in enumerate(paths):
        emit_progress(emit, number, len(paths), path.name)
        source = TracedFile(path, f"examples/from_scratch/{path.name}")
        has_ranks = "def run_rank(" in path.read_text(encoding="utf-8")
        rank = PRINTING_RANKS.get(path.name, 0)
        traces[path.name] = trace_rank(source, "run_rank", rank=rank) if has_ranks else trace_program([source])
    return {"programs": traces}


def _begin(emit: Emit) -> None:
    emit_progress(emit, 0, 1, "lines")


PLAIN = Experiment(name="walk_plain", question="Which line of a plain loop runs when?", run=trace_plain, seconds=10)
ACCUMULATION = Experiment(
    name="walk_accumulation",
    question="How does each line of the usual loop change the gradient and the weights?",
    run=trace_accumulation,
    seconds=10,
    tolerance=1e-6,
)
ANYBATCH = Experiment(
    name="walk_anybatch", question="Which line of the engine's hot loop runs when?", run=trace_anybatch, seconds=10
)
DDP = Experiment(
    name="walk_ddp",
    question="Which line runs when, on one of two ranks under DDP?",
    run=trace_ddp,
    seconds=10,
    runs_here=False,
)
LADDER = Experiment(
    name="walk_ladder",
    question="Which line runs when, in each program of the ladder?",
    run=trace_ladder,
    seconds=120,
    runs_here=False,
)
