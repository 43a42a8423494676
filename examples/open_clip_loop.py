"""open_clip's training loop with an engine: the contrastive loss of one effective batch, in micro-batches.

Model, loss, schedule and the limit of the temperature are open_clip's. `ab.joint` computes one matrix of similarities
for the effective batch, over all ranks. The program compares the result with open_clip's loop over whole batches.

    pip install open_clip_torch
    python examples/open_clip_loop.py
"""

import copy
import itertools
import math

import open_clip
import torch
from open_clip_train.scheduler import cosine_lr
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import anybatch as ab

EFFECTIVE_BATCH_SIZE, MICRO_BATCH_SIZE, EPOCHS = 20, 3, 2
VISION = {"layers": 1, "width": 32, "head_width": 16, "image_size": 16, "patch_size": 8}
TEXT = {"layers": 1, "width": 32, "heads": 2, "context_length": 8, "vocab_size": 50}
clip_loss = open_clip.ClipLoss()  # of one rank: the engine gathers the features of all ranks


def encode(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the features of images and texts."""
    images, texts = batch
    return model.encode_image(images, normalize=True), model.encode_text(texts, normalize=True)


def loss_function(model: nn.Module, features: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of the features of an effective batch."""
    return clip_loss(*features, model.logit_scale.exp())


def train(model: nn.Module, samples: TensorDataset) -> None:
    """Train in micro-batches; the loader may be open_clip's, with batches of any size."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = cosine_lr(optimizer, 0.1, 3, 100)
    engine = ab.Engine(model, optimizer, ab.joint(encode, loss_function), micro_batch_size=MICRO_BATCH_SIZE)
    for _ in range(EPOCHS):
        for share in ab.shares(DataLoader(samples, batch_size=8), effective_batch_size=EFFECTIVE_BATCH_SIZE):
            scheduler(engine.num_steps)
            engine.step(share)
            model.logit_scale.data.clamp_(0, math.log(100))


def train_whole(model: nn.Module, samples: TensorDataset) -> None:
    """Train as open_clip does, each effective batch in one forward and backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = cosine_lr(optimizer, 0.1, 3, 100)
    for step, batch in enumerate(itertools.chain(*[DataLoader(samples, batch_size=EFFECTIVE_BATCH_SIZE)] * EPOCHS)):
        scheduler(step)
        optimizer.zero_grad()
        loss_function(model, encode(model, batch)).backward()
        optimizer.step()
        model.logit_scale.data.clamp_(0, math.log(100))


def run(dtype: torch.dtype = torch.float32) -> float:
    """Train a model both ways, and return the largest difference of a parameter."""
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(50, 3, 16, 16, dtype=dtype), torch.randint(1, 50, (50, 8)))
    model = open_clip.CLIP(16, VISION, TEXT).to(dtype)
    whole = copy.deepcopy(model)
    train(model, samples)
    train_whole(whole, samples)
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    return max(float((value - expected).detach().abs().max()) for value, expected in pairs)


if __name__ == "__main__":
    print(f"largest difference from whole batches: {run():.1e}")
