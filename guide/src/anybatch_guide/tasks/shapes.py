"""`shapes`: noisy images of 16 x 16 pixels with a disc, square, triangle or cross, and a network with any norm."""

import itertools
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

import anybatch as ab
from anybatch_guide.tasks.task import LabelledSamples, Norm, PlaygroundTask, loss

NUM_IMAGES, NUM_HELD_OUT = 1_000, 400
SIDE = 16
NOISE = 0.3
WIDTHS = (1, 16, 32, 32)


def task(norm: Norm = "batch") -> PlaygroundTask:
    """Return the task: 1,000 images, four classes."""
    images, labels = draw_images(NUM_IMAGES + NUM_HELD_OUT, seed=0)
    return PlaygroundTask(
        name="shapes",
        num_classes=4,
        model=partial(network, norm),
        loss=ab.mean_over_samples(loss),
        rows=LabelledSamples(images[:NUM_IMAGES], labels[:NUM_IMAGES]),
        held_out=LabelledSamples(images[NUM_IMAGES:], labels[NUM_IMAGES:]),
    )


def network(norm: Norm) -> nn.Sequential:
    """Return three convolutions, with or without normalization, and a linear layer."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(WIDTHS):
        stride = 1 if before == 1 else 2
        # No bias before a norm: a norm cancels it, so its gradient is rounding error, which AdamW scales to full steps.
        convolution = nn.Conv2d(before, after, 3, padding=1, stride=stride, bias=norm == "none")
        layers += [convolution, _norm(norm, after), nn.GELU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(WIDTHS[-1] * 16, 4))


def _norm(norm: Norm, width: int) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(width)
    return nn.GroupNorm(8, width) if norm == "group" else nn.Identity()


def draw_images(num_images: int, *, seed: int) -> tuple[Float[Tensor, "image 1 16 16"], Int[Tensor, " image"]]:
    """Return images and their classes; position, size and brightness are random, and noise is added."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (num_images,), generator=random)
    centres = 5 + 6 * torch.rand(num_images, 2, generator=random)
    radii = 3 + 2 * torch.rand(num_images, generator=random)
    brightness = 0.6 + 0.8 * torch.rand(num_images, generator=random)
    pixels = torch.arange(SIDE) + 0.5
    down = (pixels[None, :, None] - centres[:, 0, None, None]) / radii[:, None, None]
    right = (pixels[None, None, :] - centres[:, 1, None, None]) / radii[:, None, None]
    drawn = torch.stack(_figures(down, right), dim=1)[torch.arange(num_images), labels].float()
    images = brightness[:, None, None] * drawn + NOISE * torch.randn(num_images, SIDE, SIDE, generator=random)
    return images[:, None], labels


def _figures(
    down: Float[Tensor, "image row 1"], right: Float[Tensor, "image 1 column"]
) -> list[Bool[Tensor, "image row column"]]:
    """Return the pixels that a disc, square, triangle and cross cover; arguments are offsets in units of the radius."""
    inside = (down.abs() <= 1) & (right.abs() <= 1)
    return [
        down**2 + right**2 <= 1,
        (down.abs() <= 0.85) & (right.abs() <= 0.85),  # noqa: PLR2004 (about the area of the disc)
        inside & (2 * right.abs() <= 1 + down),
        inside & ((down.abs() <= 0.3) | (right.abs() <= 0.3)),  # noqa: PLR2004 (width of the bars)
    ]
