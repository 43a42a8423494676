"""The largest micro-batch size: as planned, and as found under an enforced budget.

For six models and three budgets each, the plan has the largest size whose tensors fit; the true one is found by
bisection, with the real engine in two steps of two micro-batches each under `anybatch.testing.memory_budget`. Budgets
are multiples of the real engine's memory with micro-batches of 2. The effective batch is in memory from the
beginning, as usual on a CPU. The enforced budget counts tensors, and so does the plan.

    python benchmarks/largest_micro_batch.py [--out benchmarks/results/NAME.md]
"""

import time
import warnings
from collections.abc import Callable

import report
import torch
from memory_accuracy import CASES, Case

import anybatch as ab
from anybatch.errors import MemoryExhaustedError
from anybatch.planner.envelopes import find_envelopes
from anybatch.testing import memory_budget

NAMES = (
    "transformer S (2 x 128), 64 tokens, AdamW",
    "transformer M, SGD",
    "transformer M, checkpointing",
    "Llama of transformers, tied, bf16",
    "CNN with BatchNorm, AdamW",
    "CNN without norms, AdamW",
)
MULTIPLES = (1.5, 2.5, 4.0)
ENDLESS = 1 << 40
HEAD = "| model | budget, MiB | planned | true | tries | planned in, s | tried in, s |"


def run(case: Case, size: int, num_bytes: int) -> tuple[int, bool]:
    """Run two steps of two micro-batches under a budget; return the peak, and whether they fitted.

    An engine that continued with a smaller size did not fit.
    """
    model = case.model()
    batch = case.batch(2 * size)
    fitted = False
    with warnings.catch_warnings(), memory_budget(num_bytes, model, *batch.values()) as budget:
        warnings.simplefilter("ignore")
        try:
            engine = ab.Engine(
                model,
                case.optimizer,
                case.loss,
                micro_batch_size=size,
                clip=1.0,
                check_loss=False,
                world=ab.World(),
                **case.options,
            )
            too_large = [engine.step(batch).too_large for _ in range(2)]
            fitted = not any(too_large)
        except (torch.OutOfMemoryError, MemoryExhaustedError):
            pass
    return budget.peak_bytes, fitted


def largest(fits: Callable[[int], bool]) -> tuple[int, int]:
    """Return the largest size that fits, and the number of sizes tried."""
    num_tried, low, high = 0, 0, 1
    while True:
        num_tried += 1
        if not fits(high):
            break
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        num_tried += 1
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, num_tried


def main() -> None:
    """Compare, and print the table."""
    arguments = report.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    lines = [HEAD, "|---|--:|--:|--:|--:|--:|--:|"]
    for name in NAMES:
        case = CASES[name]
        base, _ = run(case, 2, ENDLESS)
        for multiple in MULTIPLES:
            num_bytes = int(base * multiple)
            start = time.perf_counter()
            planned = find_envelopes(case.spec(), num_bytes).largest_allocated(num_bytes)
            planned_at = time.perf_counter()
            true, num_tried = largest(lambda size, case=case, n=num_bytes: run(case, size, n)[1])  # type: ignore[misc]
            tried_at = time.perf_counter()
            lines.append(
                f"| {name} | {num_bytes / 2**20:.1f} | {planned} | {true} | {num_tried} | "
                f"{planned_at - start:.1f} | {tried_at - planned_at:.1f} |"
            )
            print(lines[-1], flush=True)
    report.publish(
        lines,
        title="The largest micro-batch size, planned and tried",
        command="python benchmarks/largest_micro_batch.py",
        setting="one thread",
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
