"""A mixture of experts whose load-balance loss is over all tokens of the effective batch.

The loss multiplies two means over tokens, so by hand, the mean over micro-batches is another function: it forces
balance inside each micro-batch. `ab.joint` gathers each sample's sums of the router, and multiplies the batch's sums.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.ModuleDict, torch.optim.Optimizer, Batches]:
    """Return experts with a router, their optimizer, and two effective batches of 21 sequences of 6 tokens."""
    torch.manual_seed(0)
    samples = list(zip(*torch.randn(2, 42, 6, 8), strict=True))
    model = nn.ModuleDict({"router": nn.Linear(8, 4), "experts": nn.Linear(8, 4 * 8)})
    return model, torch.optim.SGD(model.parameters(), lr=0.5), ab.batches(samples, effective_batch_size=21)


def encode(model: nn.ModuleDict, batch: list[Tensor]) -> dict[str, Tensor]:
    """Return each sample's error, and the sums over its tokens of the router's probabilities and choices."""
    p = model["router"](batch[0]).softmax(-1)
    chosen = F.one_hot(p.argmax(-1), 4)
    outputs = model["experts"](batch[0]).unflatten(-1, (4, 8)) * (p * chosen).unsqueeze(-1)
    return {"error": (outputs.sum(2) - batch[1]).square().mean((1, 2)), "p": p.sum(1), "chosen": chosen.sum(1)}


def loss(_: nn.ModuleDict, outputs: dict[str, Tensor]) -> Tensor:
    """Return the error plus the load-balance loss of Fedus et al. (2021, arXiv 2101.03961) of the effective batch."""
    p, chosen = outputs["p"].sum(0), outputs["chosen"].sum(0)
    return outputs["error"].mean() + 0.1 * 4 * (p @ chosen.to(p)) / p.sum() ** 2


def train() -> nn.Module:
    """Train in micro-batches of at most 4 sequences."""
    model, optimizer, batches = setup()
    with ab.Engine(model, optimizer, ab.joint(encode, loss), micro_batch_size=4) as engine:
        for batch in batches:
            engine.step(batch)
    return model


def train_whole() -> nn.Module:
    """Train on whole batches in plain PyTorch."""
    model, optimizer, batches = setup()
    for batch in batches:
        optimizer.zero_grad()
        loss(model, encode(model, batch.load())).backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(f"error: {relative_error(train().state_dict(), train_whole().state_dict()):.0e}")
