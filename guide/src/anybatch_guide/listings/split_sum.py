"""The sum of the parts is the whole: a gradient of 64 numbers, summed micro-batch by micro-batch.

gradient of the batch = sum over its micro-batches of d/dw (sum of their losses / samples of the batch)
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits


def spirals(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return 64 points of the plane, and the spiral arm of each: 0 or 1."""
    random = torch.Generator().manual_seed(0)
    points = torch.randn(64, 2, generator=random, dtype=torch.float64)
    turns = torch.atan2(points[:, 1], points[:, 0]) + points.norm(dim=1)
    return points.to(dtype), (turns.sin() > 0).to(dtype)


def make_model(dtype: torch.dtype) -> nn.Module:
    """Return a network with exactly 64 parameters: 32 + 16 in its first layer, 16 in its second."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1, bias=False))
        for p in model[2].parameters():
            nn.init.normal_(p)  # as large as the first layer's weights, so that no gradient is too small to see
        return model.to(dtype)


def running_sums(sizes: Sequence[int], dtype: torch.dtype, *, exact: bool = True) -> Iterator[Tensor]:
    """Yield the sum in `p.grad` after each micro-batch of these sizes.

    The divisor is the number of samples in the whole batch or, wrongly, micro-batch size x number of micro-batches.
    """
    model, (points, arms) = make_model(dtype), spirals(dtype)
    for rows in torch.arange(64).split(list(sizes)):
        divisor = 64 if exact else len(rows) * len(sizes)
        logits = model(points[rows])[:, 0]
        (binary_cross_entropy_with_logits(logits, arms[rows], reduction="sum") / divisor).backward()
        yield torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def micro_batch_sizes(num_parts: int, *, even: bool) -> list[int]:
    """Return the sizes of the micro-batches: all equal, or a single sample in the last one."""
    if even:
        return [64 // num_parts] * num_parts
    return [63 // (num_parts - 1)] * (num_parts - 1) + [1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.float64):
        (whole,) = running_sums([64], dtype)
        for num_parts in (2, 4, 8):
            for even, exact in ((True, True), (False, True), (False, False)):
                sizes = micro_batch_sizes(num_parts, even=even)
                *_, total = running_sums(sizes, dtype, exact=exact)
                name = f"{dtype}  {' + '.join(map(str, sizes)):32}  {'right' if exact else 'wrong'}"
                print(f"{name}  largest difference {(total - whole).abs().max():.2e}")
