"""Two data sets in one step: a classification and a regression share the model and the batch.

A micro-batch may have few or no samples of a task. By hand, the mean over nothing is NaN, and a sample counts more if
its task is rare in its micro-batch; each term of `ab.sum_of` is divided by its samples in the effective batch.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """Return a trunk with two heads, its optimizer, and two effective batches of 21 samples of both data sets."""
    torch.manual_seed(0)
    labelled = [
        {"x": x, "label": torch.randint(0, 3, ()), "value": torch.tensor(torch.nan)} for x in torch.randn(34, 6)
    ]
    measured = [{"x": x, "label": torch.tensor(-100), "value": x.sum()} for x in torch.randn(8, 6)]
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), ab.batches(labelled + measured, effective_batch_size=21)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the mean of each task over its samples."""
    outputs, is_measured = model(batch["x"]), batch["value"].isfinite()
    errors = outputs[is_measured, 3] - batch["value"][is_measured]
    return {"label": F.cross_entropy(outputs[:, :3], batch["label"]), "value": errors.square().mean()}


LABEL = ab.tokens("label", shift=False)  # samples with a label that is not -100
VALUE = ab.counted(lambda batch: batch["value"].isfinite().sum(), weight=0.5)


def train() -> nn.Module:
    """Train in micro-batches of at most 4 samples."""
    model, optimizer, batches = setup()
    with ab.Engine(model, optimizer, ab.sum_of(loss, label=LABEL, value=VALUE), micro_batch_size=4) as engine:
        for batch in batches:
            engine.step(batch)
    return model


def train_whole() -> nn.Module:
    """Train on whole batches in plain PyTorch."""
    model, optimizer, batches = setup()
    for batch in batches:
        optimizer.zero_grad()
        terms = loss(model, batch.load())
        (terms["label"] + 0.5 * terms["value"]).backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(f"error: {relative_error(train().state_dict(), train_whole().state_dict()):.0e}")
