"""SigLIP: a sigmoid for each pair of an image and a text of the effective batch.

The loss is a sum over pairs, so by hand, micro-batches look additive, but pairs of different micro-batches and ranks
are missing. `ab.joint` computes all of them, and trains the scale and the bias too.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.ParameterDict, torch.optim.Optimizer, Batches]:
    """Return two encoders with a scale and a bias, their optimizer, and two effective batches of 21 pairs."""
    torch.manual_seed(0)
    samples = list(zip(*torch.randn(2, 42, 10), strict=True))
    model = nn.ParameterDict({"image": torch.randn(10, 6), "text": torch.randn(10, 6)})
    model.update({"log_scale": torch.tensor(2.3), "bias": torch.tensor(-10.0)})
    return model, torch.optim.SGD(model.parameters(), lr=0.1), ab.batches(samples, effective_batch_size=21)


def encode(model: nn.ParameterDict, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the features of images and texts."""
    return F.normalize(batch[0] @ model["image"]), F.normalize(batch[1] @ model["text"])


def loss(model: nn.ParameterDict, features: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of Zhai et al. (2023, arXiv 2303.15343) of the effective batch."""
    images, texts = features
    logits = model["log_scale"].exp() * images @ texts.T + model["bias"]
    return -F.logsigmoid(logits * (2 * torch.eye(len(images), device=images.device) - 1)).sum() / len(images)


def train() -> nn.Module:
    """Train in micro-batches of at most 4 pairs."""
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
