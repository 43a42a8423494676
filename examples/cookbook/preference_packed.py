"""Preference pairs (SimPO), packed: all completions of a micro-batch are one row, without padding.

A packed row is not a sample, so by hand, a mean over rows counts nothing that the loss is about. The collate function
keeps the lengths of the completions, from which the declaration counts the pairs of the effective batch.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import AnyRows, Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """Return a policy, its optimizer, and two effective batches of 11 pairs of completions of different lengths."""
    torch.manual_seed(0)
    pairs = [tuple(torch.randint(9, (int(n),)) for n in torch.randint(2, 9, (2,))) for _ in range(22)]
    model = nn.Sequential(nn.Embedding(9, 8), nn.Tanh(), nn.Linear(8, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return model, optimizer, ab.batches(pairs, effective_batch_size=11, collate=AnyRows(pack))


def pack(pairs: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return the tokens of all completions of a micro-batch in one row, and the length of each."""
    rows = [completion for pair in pairs for completion in pair]
    return {"tokens": torch.cat(rows), "lengths": torch.tensor([len(row) for row in rows])}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over pairs (SimPO: Meng et al. 2024, arXiv 2405.14734, which has no reference model)."""
    tokens, lengths = batch["tokens"], batch["lengths"]
    log_p = F.pad(-F.cross_entropy(model(tokens[:-1]), tokens[1:], reduction="none"), (1, 0))
    score = torch.stack([completion[1:].mean() for completion in log_p.split(lengths.tolist())])
    return -F.logsigmoid(2.0 * (score[0::2] - score[1::2]) - 0.5).mean()


def train() -> nn.Module:
    """Train in micro-batches of at most 4 pairs."""
    model, optimizer, batches = setup()
    with ab.Engine(model, optimizer, ab.mean_over(loss, lambda b: len(b["lengths"]) / 2), micro_batch_size=4) as engine:
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
