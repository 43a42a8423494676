"""The token mean: sentences differ in length, so equal micro-batches have unequal targets.

gradient = sum over the micro-batches of d/dw (sum of their losses / targets of the whole batch)
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def text(num_sentences: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return sentences from short to long, and the next tokens as labels, padded with -100."""
    chains = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0)).mul(2).softmax(dim=2)
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 25, (num_sentences,), generator=random).sort().values
    tokens = torch.randint(8, (num_sentences, 25), generator=random)
    for t in range(24):  # one Markov chain for the short sentences, another for the long
        odds = chains[(lengths > 12).long(), tokens[:, t]]
        tokens[:, t + 1] = odds.multinomial(1, generator=random)[:, 0]
    return tokens[:, :-1], tokens[:, 1:].where(torch.arange(24) < lengths[:, None], -100)


def make_model() -> nn.Module:
    """Return a network that predicts each token from the previous one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()


def gradient(model: nn.Module, tokens: Tensor, labels: Tensor, size: int, *, exact: bool) -> Tensor:
    """Return the gradient of the batch (exact), or a mean of the micro-batches' means."""
    model.zero_grad()
    num_targets = (labels != -100).sum(dim=1)
    micro_batches = torch.arange(len(labels)).split(size)
    for rows in micro_batches:
        loss_sum = cross_entropy(model(tokens[rows]).mT, labels[rows], reduction="sum")
        divisor = num_targets.sum() if exact else num_targets[rows].sum() * len(micro_batches)
        (loss_sum / divisor).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def train(model: nn.Module, num_steps: int, *, exact: bool) -> None:
    """Take optimizer steps, each on a new batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for step in range(num_steps):
        gradient(model, *text(32, seed=step), 8, exact=exact)
        optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    batch, (tokens, labels) = text(32, seed=0), text(1000, seed=10_000)
    print("targets per micro-batch:", *((rows != -100).sum().item() for rows in batch[1].split(8)))
    whole = gradient(make_model(), *batch, 32, exact=True)
    for name, exact in ("sum over count", True), ("mean of means", False):
        error = (gradient(make_model(), *batch, 8, exact=exact) - whole).norm() / whole.norm()
        model = make_model()
        train(model, 200, exact=exact)
        loss = cross_entropy(model(tokens).mT, labels)
        print(f"{name:14}  gradient error {error:.1e}  after 200 steps loss {loss:.3f} per target")
