"""Measurements on a GPU, read from the tables in `benchmarks/results`.

The tables have the memory by counter (allocated, reserved, device), and the speed by micro-batch size.
"""

from pathlib import Path
from typing import Final

from anybatch.errors import UserError
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress

FOLDER: Final = Path(__file__).parents[4] / "benchmarks" / "results"
MEMORY: Final = "gpu_memory_second_h200_2026-11-26.md"
SPEED: Final = "gpu_out_of_memory_second_h200_2026-11-26.md"
COUNTERS: Final = ("allocated", "reserved", "device")
MIB: Final = 2**20


def run(emit: Emit) -> Data:
    """Return the memory of a step by counter, in bytes, and samples per second by micro-batch size."""
    emit_progress(emit, 0, 1, "tables")
    memory = [
        {"model": row["model"], **{name: round(number(row[f"{name}, measured"]) * MIB) for name in COUNTERS}}
        for row in table(MEMORY, "Peak memory of a step")
    ]
    speed = [
        {
            "model": row["model"],
            "samples": number(row["samples of a step"]),
            "budget_gib": number(row["budget, GiB"]),
            "speeds": [[number(size), number(value)] for size, value in pairs(row["sweep, samples/s"])],
        }
        for row in table(SPEED, '"auto" / the best')
    ]
    return {"device": device_of(SPEED), "memory_file": MEMORY, "memory": memory, "speed_file": SPEED, "speed": speed}


def table(file: str, title: str) -> list[dict[str, str]]:
    """Return the rows of the table below a heading, by column."""
    after = text_of(file).split(f"\n## {title}", 1)[1]
    lines = [line for line in after.split("\n## ", 1)[0].splitlines() if line.startswith("|")]
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(header, row, strict=True)) for row in rows]


def pairs(cell: str) -> list[list[str]]:
    """Return the pairs of a cell such as "2: 119, 4: 1,270"."""
    return [pair.split(": ") for pair in cell.split(", ")]


def number(cell: str) -> float:
    """Return a number that is written with commas."""
    return float(cell.replace(",", ""))


def device_of(file: str) -> str:
    """Return the GPU of a file of results."""
    return text_of(file).split("\n\n")[1].split(", ")[1].split(" (")[0]


def text_of(file: str) -> str:
    """Return the text of a results file; these files exist only in a clone of the repository, not in the package."""
    path = FOLDER / file
    if not path.exists():
        message = f"{path} does not exist. Record this in a clone of the repository."
        raise UserError(message)
    return path.read_text(encoding="utf-8")


EXPERIMENT: Experiment = Experiment(
    name="gpu_results",
    question="How much memory does each counter show on a GPU, and how fast is each micro-batch size?",
    run=run,
    seconds=1,
    runs_here=False,
)
