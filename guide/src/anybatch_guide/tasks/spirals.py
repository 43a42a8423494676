"""`spirals`: points of two spiral arms in the plane, and a small network that predicts the arm of each point."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import anybatch as ab
from anybatch_guide.tasks.task import LabelledSamples, PlaygroundTask, loss

NUM_POINTS, NUM_HELD_OUT = 500, 200
TURNS = 1.25
NOISE = 0.03
EXTENT = 1.2
"""All coordinates are between -EXTENT and EXTENT."""


def task() -> PlaygroundTask:
    """Return the task: 500 points, two classes."""
    points, arms = spirals(NUM_POINTS + NUM_HELD_OUT, seed=0)
    return PlaygroundTask(
        name="spirals",
        num_classes=2,
        model=network,
        loss=ab.mean_over_samples(loss),
        rows=LabelledSamples(points[:NUM_POINTS], arms[:NUM_POINTS]),
        held_out=LabelledSamples(points[NUM_POINTS:], arms[NUM_POINTS:]),
    )


def network() -> nn.Sequential:
    """Return a network with two hidden layers."""
    return nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2))


def spirals(num_points: int, *, seed: int) -> tuple[Float[Tensor, "point 2"], Int[Tensor, " point"]]:
    """Return points and their arms; the radius grows with the angle."""
    random = torch.Generator().manual_seed(seed)
    arms = torch.randint(0, 2, (num_points,), generator=random)
    # The square root puts more points far from the centre, where an arm is longer.
    radii = torch.rand(num_points, generator=random).sqrt()
    angles = 2 * math.pi * TURNS * radii + math.pi * arms
    points = radii[:, None] * torch.stack((angles.cos(), angles.sin()), dim=1)
    return points + NOISE * torch.randn(num_points, 2, generator=random), arms


@torch.no_grad()
def surface(model: nn.Module, size: int = 40) -> Float[Tensor, "row column"]:
    """Return the predicted probability of the second arm on a grid over the square, rows from the top down."""
    coordinates = (torch.arange(size) + 0.5) * (2 * EXTENT / size) - EXTENT
    rows, columns = torch.meshgrid(-coordinates, coordinates, indexing="ij")
    logits: Tensor = model.forward(torch.stack((columns, rows), dim=-1).flatten(0, 1))  # runs no hooks
    probabilities: Tensor = logits.softmax(dim=1)[:, 1].unflatten(0, (size, size))
    return probabilities
