"""Gradient variance by strategy at equal samples: a small batch, the large one accumulated, the large one unsplit.

At fixed parameters, gradients of many batches are compared with the gradient over all data, in float64. In theory the
large batch has 1/8 of the small one's variance, accumulated or not, in every layer, and the accumulated gradient equals
the native one up to rounding. The data are drawn with replacement, the same for all three.

    python benchmarks/variance_by_strategy.py [--kept FILE] [--out benchmarks/results/NAME.md]
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import noise_against_brute_force as models
import report
import torch
from torch import Tensor

import anybatch as ab
from anybatch.testing import relative_error

SMALL, STEPS, DRAWS = 16, 8, 200
LARGE = SMALL * STEPS
Gradients = dict[str, Tensor]


def engine_of(case: models.Case, micro_batch_size: int) -> ab.Engine:
    """Return an engine over the case's model."""

    def loss(model: object, batch: models.Batch) -> Tensor:
        return case.sums(model, batch) / case.count(batch).sum()

    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.0)
    mean = ab.mean_over(loss, count=lambda batch: case.count(batch).sum())
    return ab.Engine(case.model, optimizer, mean, micro_batch_size=micro_batch_size, check_loss=False)


def doubled(batch: models.Batch) -> models.Batch:
    """Return a batch with its floating-point values in float64."""
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def gradients(engine: ab.Engine, batches: list[models.Batch]) -> Iterator[Gradients]:
    """Yield the gradient of each batch."""
    for batch in batches:
        yield {name: value for name, value in engine.gradients(batch).items() if value is not None}


def by_layer(off: Gradients) -> dict[str, float]:
    """Return the squared norm of each layer, and the total."""
    found = {"all parameters": 0.0}
    for name, value in off.items():
        square = float(value.square().sum())
        for row in ("all parameters", name.rpartition(".")[0] or name):
            found[row] = found.get(row, 0.0) + square
    return found


def variance(found: list[Gradients], truth: Gradients) -> dict[str, float]:
    """Return the mean squared distance to the gradient over all data, by layer."""
    squares = [by_layer({name: value - truth[name] for name, value in one.items()}) for one in found]
    return {row: sum(one[row] for one in squares) / len(squares) for row in squares[0]}


def rows(name: str) -> list[str]:
    """Measure one model, and return its lines."""
    case = models.CASES[name]()
    case.model.double()
    data = doubled(case.data)
    generator = torch.Generator().manual_seed(3)
    large = [models.drawn(data, LARGE, generator) for _ in range(DRAWS)]
    bounds = list(pairwise(range(0, LARGE + 1, SMALL)))
    small = [{key: value[start:stop] for key, value in one.items()} for one in large for start, stop in bounds]
    with engine_of(case, len(data["y"])) as engine:
        truth = next(gradients(engine, [data]))
    with engine_of(case, SMALL) as engine:
        of_small, accumulated = list(gradients(engine, small)), list(gradients(engine, large))
    with engine_of(case, LARGE) as engine:
        native = list(gradients(engine, large))
    worst = max(relative_error(one, other) for one, other in zip(accumulated, native, strict=True))
    spread = [variance(one, truth) for one in (of_small, accumulated, native)]
    lines = []
    for row in spread[0]:
        first, second, third = (one[row] for one in spread)
        lines.append(
            f"| {name} | {row} | {first:.3e} | {second:.3e} | {third:.3e} | {STEPS * second / first:.3f} | "
            f"{abs(second / third - 1):.0e} | {worst:.0e} |"
        )
    print("\n".join(lines), flush=True)
    return lines


def main() -> None:
    """Print the table, and write it to a file if asked."""
    parser = report.parser(__doc__)
    parser.add_argument("--kept", type=Path, help="keep each model there, and take those that are there already")
    given = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("model", "layer", f"variance at {SMALL}", f"accumulated {STEPS} x {SMALL}", f"native {LARGE}")
    table = [
        f"| {' | '.join((*columns, f'ratio x {STEPS}', 'accumulated by native - 1', 'worst gradient error'))} |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name in models.CASES:
        table += report.kept(given.kept, name, partial(rows, name))
    report.publish(
        table,
        title="Gradient variance by strategy",
        command="python benchmarks/variance_by_strategy.py",
        setting=f"1 thread, float64, {DRAWS} large batches and {DRAWS * STEPS} small ones",
        out=given.out,
    )


if __name__ == "__main__":
    main()
