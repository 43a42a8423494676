"""The token mean: where sentences differ in length, as many of them are not as many targets.

gradient = sum over the K micro-batches of d/dw (sum of their losses / divisor)
divisor = targets of the whole batch; a mean of means has K * (targets of the micro-batch)
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

CHAINS = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0)).mul(2).softmax(dim=2)


def text(num_sentences: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return sentences from short to long, and the targets: what follows, -100 after the end."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 25, (num_sentences,), generator=random).sort().values
    tokens = torch.randint(8, (num_sentences, 25), generator=random)
    for t in range(24):  # one Markov chain makes the short sentences, another one the long
        odds = CHAINS[(lengths > 12).long(), tokens[:, t]]
        tokens[:, t + 1] = odds.multinomial(1, generator=random)[:, 0]
    return tokens[:, :-1], tokens[:, 1:].where(torch.arange(24) < lengths[:, None], -100)


def make_model() -> nn.Module:
    """Return a network that guesses each next token from the one before it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()


def gradient(model: nn.Module, tokens: Tensor, targets: Tensor, size: int, exact: bool) -> Tensor:
    """Return the gradient of the batch, or else a mean of means, from micro-batches of `size`."""
    model.zero_grad()
    num_targets = (targets != -100).sum(dim=1)
    micro_batches = torch.arange(len(targets)).split(size)
    for rows in micro_batches:
        loss_sum = cross_entropy(model(tokens[rows]).mT, targets[rows], reduction="sum")
        divisor = num_targets.sum() if exact else len(micro_batches) * num_targets[rows].sum()
        (loss_sum / divisor).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def train(model: nn.Module, num_steps: int, *, exact: bool) -> None:
    """Take optimizer steps, each on a batch of its own."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for step in range(num_steps):
        gradient(model, *text(32, seed=step), 8, exact=exact)
        optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("targets per micro-batch:", *(t.ne(-100).sum().item() for t in text(32, 0)[1].split(8)))
    whole = gradient(make_model(), *text(32, seed=0), 32, exact=True)
    tokens, targets = text(1000, seed=10_000)
    for name, exact in ("sum over count", True), ("mean of means", False):
        found = gradient(make_model(), *text(32, seed=0), 8, exact=exact)
        error = (found - whole).norm() / whole.norm()
        model = make_model()
        train(model, 200, exact=exact)
        loss = cross_entropy(model(tokens).mT, targets)
        print(f"{name:14}  gradient error {error:.1e}  after 200 steps loss {loss:.3f} per target")
