"""Errors and bytes of gradient sums over 2, 3 and 4 ranks: float32, bf16 with float32 additions, and plain bf16.

Each rank has a million normally distributed numbers. The error is the 2-norm of the difference to the sum in float64,
over the 2-norm of that sum. Bytes are what one rank hands to collectives, for each number of the gradient.

    python benchmarks/compressed_sums.py [--out benchmarks/results/NAME.md]
"""

import report
import torch
import torch.distributed as dist

from anybatch.parallel.compressed_sum import CompressedSum
from anybatch.testing import RankPool

NUM_NUMBERS = 1_000_000
Row = tuple[float, float]


def compare() -> dict[str, Row]:
    """Run on every rank: return error and bytes per number of each kind of sum."""
    rank, size = dist.get_rank(), dist.get_world_size()
    every = [torch.randn(NUM_NUMBERS, generator=torch.Generator().manual_seed(number)) for number in range(size)]
    exact = torch.stack(every).double().sum(0)
    wide, narrow, compressed = every[rank].clone(), every[rank].bfloat16(), every[rank].clone()
    dist.all_reduce(wide)
    dist.all_reduce(narrow)
    summed = CompressedSum(compressed, rank, size)
    summed.start(None, 0).wait()
    summed.gather(None, 0).wait()
    summed.finish()
    num_bytes = sum(summed.num_bytes) / NUM_NUMBERS
    found = {
        "float32": (wide, 4.0),
        "compression='bf16'": (compressed, num_bytes),
        "bf16 all-reduce": (narrow, 2.0),
    }
    return {kind: (float((one - exact).norm() / exact.norm()), cost) for kind, (one, cost) in found.items()}


def main() -> None:
    """Measure, print the table and write it."""
    chosen = report.parser(__doc__).parse_args()
    lines = ["| ranks | sum | relative error | bytes handed over per number |", "|---|---|---|---|"]
    for num_ranks in (2, 3, 4):
        with RankPool(num_ranks, timeout_seconds=120.0) as pool:
            outcome = pool.outcomes(compare)[0]
        assert not outcome.error, outcome.error
        lines += [
            f"| {num_ranks} | {kind} | {error:.1e} | {cost:.2f} |" for kind, (error, cost) in outcome.value.items()
        ]
    report.publish(
        lines,
        title="Sums with messages in bf16",
        command="python benchmarks/compressed_sums.py",
        setting="gloo",
        out=chosen.out,
    )


if __name__ == "__main__":
    main()
