"""Multi-token prediction: three heads, each with a mean over its own targets.

The head for the token after next has one target less per document, so the terms have different counts. By hand, one
divisor for all of them, or the mean of micro-batch means, gives documents other weights for each head.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error

WEIGHTS = {"1": 1.0, "2": 0.3, "3": 0.1}  # by distance of the predicted token


def setup() -> tuple[nn.ModuleDict, torch.optim.Optimizer, Batches]:
    """Return a trunk with three heads, its optimizer, and two effective batches of 21 documents of 4 to 10 tokens."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 12, (42, 10)).masked_fill(torch.arange(10) >= torch.randint(4, 11, (42, 1)), -100)
    samples = [{"tokens": row} | {n: F.pad(row[int(n) :], (0, int(n)), value=-100) for n in WEIGHTS} for row in tokens]
    heads = nn.ModuleDict({n: nn.Linear(8, 12) for n in WEIGHTS})
    model = nn.ModuleDict({"trunk": nn.Embedding(13, 8), "heads": heads})
    return model, torch.optim.SGD(model.parameters(), lr=0.5), ab.batches(samples, effective_batch_size=21)


def loss(model: nn.ModuleDict, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the mean of each head over its targets (Gloeckle et al. 2024, arXiv 2404.19737)."""
    trunk = model["trunk"](batch["tokens"].where(batch["tokens"] >= 0, 12)).tanh()
    return {n: F.cross_entropy(model["heads"].get_submodule(n)(trunk).mT, batch[n]) for n in WEIGHTS}


TERMS = {n: ab.tokens(n, shift=False, weight=weight) for n, weight in WEIGHTS.items()}


def train() -> nn.Module:
    """Train in micro-batches of at most 4 documents."""
    model, optimizer, batches = setup()
    with ab.Engine(model, optimizer, ab.sum_of(loss, **TERMS), micro_batch_size=4) as engine:
        for batch in batches:
            engine.step(batch)
    return model


def train_whole() -> nn.Module:
    """Train on whole batches in plain PyTorch."""
    model, optimizer, batches = setup()
    for batch in batches:
        optimizer.zero_grad()
        terms = loss(model, batch.load())
        sum((weight * terms[n] for n, weight in WEIGHTS.items()), torch.zeros(())).backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(f"error: {relative_error(train().state_dict(), train_whole().state_dict()):.0e}")
