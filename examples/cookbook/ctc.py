"""CTC: each utterance is divided by the length of its text, then the mean is over utterances.

By hand, equal shares for micro-batches overweight the utterances of a smaller last one, and torch's "mean" hides that
it is over utterances, not over symbols. `ab.mean_over_samples` weighs each micro-batch by its utterances.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """Return an acoustic model, its optimizer, and two effective batches of 21 utterances of 12 to 20 frames."""
    torch.manual_seed(0)
    frames, text = torch.randn(42, 20, 6), torch.randint(1, 5, (42, 5))
    num_frames, num_symbols = torch.randint(12, 21, (42,)), torch.randint(1, 6, (42,))
    samples = list(zip(frames, text, num_frames, num_symbols, strict=True))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.LogSoftmax(-1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), ab.batches(samples, effective_batch_size=21)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean over utterances."""
    frames, text, num_frames, num_symbols = batch
    return F.ctc_loss(model(frames).transpose(0, 1), text, num_frames, num_symbols)


def train() -> nn.Module:
    """Train in micro-batches of at most 4 utterances."""
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
        loss(model, batch.load()).backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(f"error: {relative_error(train().state_dict(), train_whole().state_dict()):.0e}")
