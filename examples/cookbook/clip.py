"""CLIP: each image is compared with all texts of the effective batch.

By hand, accumulation compares only inside a micro-batch: fewer negatives, another loss. `ab.joint` encodes in
micro-batches, computes the loss of the effective batch once, and needs the memory of one micro-batch.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.ParameterDict, torch.optim.Optimizer, Batches]:
    """Return two encoders with a temperature, their optimizer, and two effective batches of 21 pairs."""
    torch.manual_seed(0)
    samples = list(zip(*torch.randn(2, 42, 10), strict=True))
    model = nn.ParameterDict({"image": torch.randn(10, 6), "text": torch.randn(10, 6), "log_scale": torch.ones(())})
    return model, torch.optim.SGD(model.parameters(), lr=0.5), ab.batches(samples, effective_batch_size=21)


def encode(model: nn.ParameterDict, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the features of images and texts."""
    return F.normalize(batch[0] @ model["image"]), F.normalize(batch[1] @ model["text"])


def loss(model: nn.ParameterDict, features: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of Radford et al. (2021, arXiv 2103.00020) of the effective batch."""
    images, texts = features
    logits, own = model["log_scale"].exp() * images @ texts.T, torch.arange(len(images), device=images.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


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
