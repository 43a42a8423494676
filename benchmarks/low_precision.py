"""Accumulation of bf16 gradients: in bf16, as in `.grad`, and in float32, as in the engine.

The reference is the float64 sum of the same bf16 micro-batch gradients, so only the accumulation is compared.

    python benchmarks/low_precision.py [--out benchmarks/results/NAME.md]
"""

import report
import torch
from torch import nn
from torch.nn import functional

import anybatch as ab
from anybatch.testing import relative_error

Batch = dict[str, torch.Tensor]


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy, computed in float32."""
    return functional.cross_entropy(model(batch["x"]).float(), batch["y"])


def errors(num_micro_batches: int) -> tuple[float, float]:
    """Return the relative errors of accumulating in bf16 and in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10)).bfloat16()
    size = 2 * num_micro_batches
    batch = {"x": torch.randn(size, 32).bfloat16(), "y": torch.randint(0, 10, (size,))}
    reference = {name: torch.zeros_like(parameter, dtype=torch.float64) for name, parameter in model.named_parameters()}
    narrow = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for start in range(0, size, 2):
        piece = {name: value[start : start + 2] for name, value in batch.items()}
        gradients = torch.autograd.grad(loss(model, piece) * (2 / size), list(model.parameters()))
        for name, gradient in zip(reference, gradients, strict=True):
            reference[name] += gradient.double()
            narrow[name] += gradient
    engine = ab.Engine(model, torch.optim.SGD(model.parameters()), ab.mean_over_samples(loss), micro_batch_size=2)
    with engine:
        return relative_error(narrow, reference), relative_error(engine.gradients(batch), reference)


def main() -> None:
    """Print the table, and write it to a file if asked."""
    out = report.parser(__doc__).parse_args().out
    torch.set_num_threads(1)
    lines = ["| micro-batches | added up in bf16 | in float32 (the engine) |", "|--:|--:|--:|"]
    for num_micro_batches in (8, 64, 512, 4096):
        narrow, wide = errors(num_micro_batches)
        lines.append(f"| {num_micro_batches} | {narrow:.1e} | {wide:.1e} |")
    report.publish(
        lines,
        title="Adding up gradients of bf16 parameters",
        command="python benchmarks/low_precision.py",
        setting="relative errors against float64",
        out=out,
    )


if __name__ == "__main__":
    main()
