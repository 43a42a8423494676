"""The cost of a wrong loss: the recipe `contrastive` with the exact loss and with a loss per micro-batch.

The naive loop computes the loss of each micro-batch separately, as accumulation in other trainers does: each half image
is contrasted with its micro-batch only. Data, order, model and optimizer are the same. Accuracy is on held-out images.

    python benchmarks/contrastive.py [--out benchmarks/results/NAME.md]
"""

import dataclasses

import report
import torch
from torch import nn

import anybatch as ab
from anybatch.core.run_config import RunConfig
from anybatch.recipes.contrastive import contrastive, encode, loss
from anybatch.recipes.start import start

NUM_EPOCHS = 15
SEEDS = (0, 1, 2)


def naive_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of a micro-batch without the rest of the batch."""
    return loss(model, encode(model, batch))


def accuracy(seed: int, micro_batch_size: int, *, exact: bool) -> float:
    """Return the held-out retrieval accuracy after training."""
    job = contrastive()
    if not exact:
        job = dataclasses.replace(job, loss=ab.mean_over_samples(naive_loss))
    run = start(job, RunConfig(epochs=NUM_EPOCHS, micro_batch_size=micro_batch_size, seed=seed), check_loss=False)
    for batch in run.batches:
        run.engine.step(batch)
    return run.evaluate()["retrieval_accuracy"]


def rows() -> list[str]:
    """Run everything and return the table."""
    lines = [
        "| loss | micro-batch | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " | mean |",
        "|---|--:|" + "--:|" * (len(SEEDS) + 1),
    ]
    for name, size, exact in (
        ("`ab.joint`", 16, True),
        ("naive", 32, False),
        ("naive", 16, False),
        ("naive", 4, False),
    ):
        found = [accuracy(seed, size, exact=exact) for seed in SEEDS]
        values = " | ".join(f"{value:.3f}" for value in [*found, sum(found) / len(found)])
        lines.append(f"| {name} | {size} | {values} |")
    return lines


def main() -> None:
    """Print the table, and write it to a file if asked."""
    out = report.parser(__doc__).parse_args().out
    torch.set_num_threads(1)
    report.publish(
        rows(),
        title="Held-out retrieval accuracy of the recipe `contrastive`",
        command="python benchmarks/contrastive.py",
        setting=f"effective batch 256, {NUM_EPOCHS} epochs, 1 of 360 by chance",
        out=out,
    )


if __name__ == "__main__":
    main()
