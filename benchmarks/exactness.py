"""Compare gradients with the unsplit batch: the engine's, and those from the usual hand-written loop.

The loop divides each micro-batch's loss by the number of micro-batches, and averages over ranks. Errors are relative,
over all parameters together, in float64; the engine's error is the largest over its strategies and all ranks.

    python benchmarks/exactness.py [--out benchmarks/results/NAME.md]
"""

import math
import sys
from pathlib import Path

import report

from anybatch.testing import RankPool

sys.path.insert(0, str(Path(__file__).parents[1]))  # the cases come from the tests
from tests.engine.cases import CASES, SPLITS
from tests.engine.test_exactness import gradient_errors, naive_errors

WORLD_SIZES = (1, 2, 3)
Errors = dict[tuple[str, str], float]

LOOP_SPLITS = ("1", "3", "7", "all")
"""Splits that the plain loop runs too."""


def measure(world_size: int) -> tuple[Errors, Errors]:
    """Return the errors of engine and loop by case and split."""
    sizes = [SPLITS[split].micro_batch_size for split in LOOP_SPLITS]
    with RankPool(world_size) as pool:
        by_engine = [item for rank in pool.run(gradient_errors, list(CASES)) for item in rank.items()]
        by_loop = pool.run(naive_errors, list(CASES), sizes)[0]
    engine: Errors = {}
    for (case, split, strategy), error in by_engine:
        if isinstance(error, str):
            message = f"{case}, {split}, {strategy}:\n{error}"
            raise RuntimeError(message)  # noqa: TRY004 (a failure on a rank, in words)
        engine[case, split] = max(engine.get((case, split), 0.0), error)
    loop = {(case, split): row[number] for case, row in by_loop.items() for number, split in enumerate(LOOP_SPLITS)}
    return engine, loop


def written(error: float) -> str:
    """Return an error as text."""
    if math.isnan(error):
        return "NaN"
    return "0" if error == 0 else f"{error:.0e}"


def table(world_size: int) -> list[str]:
    """Return the table for one number of ranks."""
    engine, loop = measure(world_size)
    heads = [f"engine, {split}" for split in SPLITS] + [f"loop, {split}" for split in LOOP_SPLITS]
    lines = [
        f"## {world_size} rank{'s' * (world_size > 1)}",
        "",
        "Columns are micro-batch sizes, or how the batch is cut instead.",
        "",
        f"| case | {' | '.join(heads)} |",
        f"|---|{'--:|' * len(heads)}",
    ]
    for case in CASES:
        cells = [engine[case, split] for split in SPLITS] + [loop[case, split] for split in LOOP_SPLITS]
        lines.append(f"| {case} | {' | '.join(map(written, cells))} |")
    return [*lines, ""]


def main() -> None:
    """Print the tables, and write them to a file if asked."""
    out = report.parser(__doc__).parse_args().out
    lines = [line for world_size in WORLD_SIZES for line in table(world_size)]
    report.publish(
        lines,
        title="Exactness",
        command="python benchmarks/exactness.py",
        setting="1, 2 and 3 ranks over gloo, float64",
        out=out,
    )


if __name__ == "__main__":
    main()
