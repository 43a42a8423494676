"""Label smoothing over masked tokens: a mean over the targets of the effective batch.

Sentences have 1 to 9 targets. By hand, the mean of micro-batch means gives targets in short sentences more weight;
`ab.mean_over_tokens` counts the targets of all micro-batches and ranks before the first backward.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """Return a model that predicts the next token, its optimizer, and two effective batches of 21 sentences."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 12, (42, 10))
    labels = tokens.masked_fill(torch.arange(10) > torch.randint(1, 10, (42, 1)), -100)
    samples = [{"tokens": row, "labels": target} for row, target in zip(tokens, labels, strict=True)]
    model = nn.Sequential(nn.Embedding(12, 8), nn.Tanh(), nn.Linear(8, 12))
    return model, torch.optim.SGD(model.parameters(), lr=0.5), ab.batches(samples, effective_batch_size=21)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over the unmasked targets."""
    return F.cross_entropy(model(batch["tokens"])[:, :-1].mT, batch["labels"][:, 1:], label_smoothing=0.1)


def train() -> nn.Module:
    """Train in micro-batches of at most 4 sentences."""
    model, optimizer, batches = setup()
    with ab.Engine(model, optimizer, ab.mean_over_tokens(loss), micro_batch_size=4) as engine:
        for batch in batches:
            engine.step(batch)
    return model


def train_whole() -> nn.Module:
    """Train on whole batches in plain PyTorch."""
    model, optimizer, batches = setup()
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch.load()).backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(f"error: {relative_error(train().state_dict(), train_whole().state_dict()):.0e}")
