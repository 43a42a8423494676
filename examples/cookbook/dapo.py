"""DAPO: groups with equal rewards are dropped; one mean over all tokens of the effective batch.

Dropped groups leave batches with different numbers of tokens. By hand, dividing each micro-batch by its own tokens
gives short completions more weight; here the tokens of the effective batch are counted before the first backward.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """Return a policy, its optimizer, and effective batches of 20 completions from groups with different rewards."""
    torch.manual_seed(0)
    tokens, old = torch.randint(0, 9, (48, 8)), -2 - torch.rand(48, 7)
    mask = torch.arange(7) < torch.randint(1, 8, (48, 1))
    reward = torch.randint(0, 2, (12, 4)).to(old)
    advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
    samples = list(zip(tokens, mask, advantage.flatten(), old, strict=True))
    samples = [sample for sample in samples if sample[2] != 0]
    model = nn.Sequential(nn.Embedding(9, 8), nn.Tanh(), nn.Linear(8, 9))
    return model, torch.optim.SGD(model.parameters(), lr=0.5), ab.batches(samples, effective_batch_size=20)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean over tokens (Yu et al. 2025, arXiv 2503.14476), with the upper limit of the ratio raised."""
    tokens, mask, advantage, old = batch
    log_p = -F.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:], reduction="none")
    ratio, advantage = (log_p - old).exp(), advantage.unsqueeze(1)
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    return -(gain * mask).sum() / mask.sum()


def train() -> nn.Module:
    """Train in micro-batches of at most 3 completions."""
    model, optimizer, batches = setup()
    with ab.Engine(model, optimizer, ab.mean_over(loss, lambda batch: batch[1].sum()), micro_batch_size=3) as engine:
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
