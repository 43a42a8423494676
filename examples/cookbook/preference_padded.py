"""Preference pairs (DPO), padded: a sample is a pair, so no micro-batch separates its completions.

By hand, chosen and rejected completions are often rows of one batch, and a micro-batch of the first rows has no
rejected ones. The reference is the policy before training; its log-probabilities are computed with the data.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """Return a policy, its optimizer, and two effective batches of 11 pairs of completions, padded with 0."""
    torch.manual_seed(0)
    pairs = torch.randint(1, 9, (22, 2, 8)) * (torch.arange(8) < torch.randint(2, 9, (22, 2, 1)))
    model = nn.Sequential(nn.Embedding(9, 8), nn.Tanh(), nn.Linear(8, 9))
    samples = list(zip(pairs, log_p(model, pairs).detach(), strict=True))
    return model, torch.optim.SGD(model.parameters(), lr=0.5), ab.batches(samples, effective_batch_size=11)


def log_p(model: nn.Module, pair: Tensor) -> Tensor:
    """Return the log-probability of each completion of (pairs, 2, tokens)."""
    losses = F.cross_entropy(model(pair[..., :-1]).movedim(-1, 1), pair[..., 1:], reduction="none", ignore_index=0)
    return -losses.sum(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return one loss per pair (Rafailov et al. 2023, arXiv 2305.18290)."""
    chosen, rejected = (log_p(model, batch[0]) - batch[1]).unbind(1)
    return -F.logsigmoid(0.1 * (chosen - rejected))


def train() -> nn.Module:
    """Train in micro-batches of at most 4 pairs."""
    model, optimizer, batches = setup()
    with ab.Engine(model, optimizer, ab.mean_over_samples(loss), micro_batch_size=4) as engine:
        for batch in batches:
            engine.step(batch)
    return model


def train_whole() -> nn.Module:
    """Train on whole batches in plain PyTorch."""
    model, optimizer, batches = setup()
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch.load()).mean().backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(f"error: {relative_error(train().state_dict(), train_whole().state_dict()):.0e}")
