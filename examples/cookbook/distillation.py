"""Distillation: a mean over targets plus the divergence from a teacher over all tokens.

By hand, `F.kl_div(reduction="batchmean")` divides by the rows of a micro-batch, and the two terms need different
divisors: targets are masked, the teacher's tokens are not. `ab.sum_of` divides each term by its own count.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """Return a student, its optimizer, and two effective batches of 21 sentences with the teacher's logits."""
    torch.manual_seed(0)
    teacher, student = (nn.Sequential(nn.Embedding(12, 8), nn.Tanh(), nn.Linear(8, 12)) for _ in range(2))
    tokens = torch.randint(1, 12, (42, 10)) * (torch.arange(10) < torch.randint(2, 10, (42, 1)))  # 0 is padding
    labels = torch.randint(1, 12, (42, 10)).masked_fill((tokens == 0) | (torch.rand(42, 10) < 0.5), -100)
    samples = list(zip(tokens, labels, teacher(tokens).detach(), strict=True))
    return student, torch.optim.SGD(student.parameters(), lr=0.5), ab.batches(samples, effective_batch_size=21)


def loss(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    """Return the mean over unmasked targets and, at temperature 2, the mean over tokens."""
    tokens, labels, teacher = batch
    logits, mask = model(tokens), tokens != 0
    divergence = F.kl_div((logits / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="none").sum(-1)
    return {"hard": F.cross_entropy(logits.mT, labels), "soft": (divergence * mask).sum() / mask.sum()}


HARD = ab.tokens(lambda batch: batch[1], shift=False, weight=0.5)
SOFT = ab.counted(lambda batch: (batch[0] != 0).sum(), weight=0.5 * 2**2)


def train() -> nn.Module:
    """Train in micro-batches of at most 4 sentences."""
    model, optimizer, batches = setup()
    with ab.Engine(model, optimizer, ab.sum_of(loss, hard=HARD, soft=SOFT), micro_batch_size=4) as engine:
        for batch in batches:
            engine.step(batch)
    return model


def train_whole() -> nn.Module:
    """Train on whole batches in plain PyTorch."""
    model, optimizer, batches = setup()
    for batch in batches:
        optimizer.zero_grad()
        terms = loss(model, batch.load())
        (0.5 * terms["hard"] + 0.5 * 2**2 * terms["soft"]).backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(f"error: {relative_error(train().state_dict(), train_whole().state_dict()):.0e}")
