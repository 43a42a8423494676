"""timm's training loop with an engine: each update has the gradient of one effective batch, in micro-batches.

Model, loss, optimizer and scheduler are timm's. BatchNorm normalizes over the effective batch, and the last batch of an
epoch may have any size. The program compares the result with timm's loop over whole batches.

    pip install timm
    python examples/timm_loop.py
"""

import copy
import itertools

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import anybatch as ab

EFFECTIVE_BATCH_SIZE, MICRO_BATCH_SIZE, EPOCHS = 20, 3, 2
criterion = LabelSmoothingCrossEntropy(smoothing=0.1)


def loss_function(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean over samples, as timm's loop computes it."""
    images, labels = batch
    loss: Tensor = criterion(model(images), labels)
    return loss


def optimization(model: nn.Module) -> tuple[torch.optim.Optimizer, CosineLRScheduler]:
    """Return timm's optimizer and scheduler; the scheduler counts updates."""
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, momentum=0.9, weight_decay=1e-4)
    return optimizer, CosineLRScheduler(optimizer, t_initial=100, warmup_t=3, t_in_epochs=False)


def train(model: nn.Module, samples: TensorDataset) -> None:
    """Train in micro-batches; the loader may be timm's, with batches of any size."""
    optimizer, scheduler = optimization(model)
    loss = ab.mean_over_samples(loss_function)
    engine = ab.Engine(model, optimizer, loss, micro_batch_size=MICRO_BATCH_SIZE, norms="exact")
    engine.save_also(scheduler=scheduler)
    for _ in range(EPOCHS):
        for share in ab.shares(DataLoader(samples, batch_size=8), effective_batch_size=EFFECTIVE_BATCH_SIZE):
            engine.step(share)
            scheduler.step_update(engine.num_steps)


def train_whole(model: nn.Module, samples: TensorDataset) -> None:
    """Train as timm does, each effective batch in one forward and backward."""
    optimizer, scheduler = optimization(model)
    loader = DataLoader(samples, batch_size=EFFECTIVE_BATCH_SIZE)
    for update, batch in enumerate(itertools.chain(*[loader] * EPOCHS)):
        optimizer.zero_grad()
        loss_function(model, batch).backward()
        optimizer.step()
        scheduler.step_update(update + 1)


def run(name: str = "test_resnet", dtype: torch.dtype = torch.float32) -> float:
    """Train a model both ways, and return the largest difference of a parameter or buffer."""
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(50, 3, 32, 32, dtype=dtype), torch.randint(5, (50,)))
    options = {"img_size": 32} if "vit" in name else {}
    model = timm.create_model(name, num_classes=5, **options).to(dtype)
    whole = copy.deepcopy(model)
    train(model, samples)
    train_whole(whole, samples)
    pairs = zip(model.state_dict().values(), whole.state_dict().values(), strict=True)
    return max(float((value - expected).abs().max()) for value, expected in pairs)


if __name__ == "__main__":
    print(f"largest difference from whole batches: {run():.1e}")
