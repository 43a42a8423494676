"""A recipe with a residual network: generated images of 32 x 32 pixels, in ten classes. Nothing is downloaded.

    anybatch train examples/resnet_recipe.py --epochs 1
    anybatch scale examples/resnet_recipe.py

GroupNorm instead of BatchNorm normalises each image separately, so every split of a batch is exact.
"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import anybatch as ab

NUM_IMAGES, NUM_CLASSES = 2048, 10


class Images(Dataset[dict[str, torch.Tensor]]):
    """Noisy stripes; the direction of the stripes is the class."""

    def __len__(self) -> int:
        """Return the number of images."""
        return NUM_IMAGES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return an image and its class."""
        label = index % NUM_CLASSES
        angle = torch.tensor(torch.pi * label / NUM_CLASSES)
        rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
        stripes = torch.sin(0.7 * (rows * angle.cos() + columns * angle.sin()))
        return {"image": stripes.expand(3, 32, 32) + torch.randn(3, 32, 32), "label": torch.tensor(label)}


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.GroupNorm(8, after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.GroupNorm(8, after),
        )
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the convolutions' output to the shortcut's."""
        return functional.relu(self.path(x) + self.shortcut(x))


class ResNet(nn.Sequential):
    """Six blocks, 2.8 million parameters."""

    def __init__(self) -> None:
        widths = ((32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 256, 1))
        super().__init__(
            nn.Conv2d(3, 32, 3, padding=1, bias=False),
            nn.GroupNorm(8, 32),
            nn.ReLU(),
            *(Block(*width) for width in widths),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(256, NUM_CLASSES),
        )


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy over the images of the batch."""
    return functional.cross_entropy(model(batch["image"]), batch["label"])


def resnet() -> ab.Job:
    """Return the job."""
    return ab.Job(
        model=ResNet,
        optimizer=torch.optim.AdamW,
        loss=ab.mean_over_samples(loss),
        dataset=Images,
        defaults=ab.RunConfig(effective_batch_size=64, epochs=1, learning_rate=1e-3),
    )
