"""Detection as in DETR: a weighted mean over queries plus a mean over boxes.

By hand, DETR averages the number of boxes over ranks, but not over accumulated micro-batches: a box in a crowded one
counts less. A micro-batch without boxes would divide by 0; the engine leaves a term without items out.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """Return a model of 6 queries, its optimizer, and two effective batches of 21 images with 0 to 5 boxes."""
    torch.manual_seed(0)
    images, boxes, kinds = torch.randn(42, 6, 8), torch.rand(42, 6, 4), torch.randint(1, 4, (42, 6))
    kinds *= torch.arange(6) < torch.randint(-9, 6, (42, 1))  # the matched queries come first; 0 is background
    samples = list(zip(images, kinds, torch.where(kinds == 0, 0.1, 1.0), boxes, strict=True))
    model = nn.Linear(8, 4 + 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), ab.batches(samples, effective_batch_size=21)


def loss(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    """Return two terms of Carion et al. (2020, arXiv 2005.12872): 4 classes with weights, and the corners of boxes."""
    images, kinds, weights, boxes = batch
    logits, corners = model(images).split(4, -1)
    entropy = F.cross_entropy(logits.mT, kinds, reduction="none") * weights
    return {"kind": entropy.sum() / weights.sum(), "box": (corners - boxes)[kinds > 0].abs().sum(-1).mean()}


KINDS = ab.counted(lambda batch: batch[2].sum())
BOXES = ab.counted(lambda batch: (batch[1] > 0).sum(), weight=5.0)


def train() -> nn.Module:
    """Train in micro-batches of at most 4 images."""
    model, optimizer, batches = setup()
    with ab.Engine(model, optimizer, ab.sum_of(loss, kind=KINDS, box=BOXES), micro_batch_size=4) as engine:
        for batch in batches:
            engine.step(batch)
    return model


def train_whole() -> nn.Module:
    """Train on whole batches in plain PyTorch."""
    model, optimizer, batches = setup()
    for batch in batches:
        optimizer.zero_grad()
        terms = loss(model, batch.load())
        (terms["kind"] + 5.0 * terms["box"]).backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(f"error: {relative_error(train().state_dict(), train_whole().state_dict()):.0e}")
