"""`digits`: handwritten digits, with the data and the network of the recipe `digits`."""

import torch
from torch import nn

import anybatch as ab
from anybatch.recipes.digits import Digits, Network, scikit_learn_folder
from anybatch_guide.tasks.task import LabelledSamples, PlaygroundTask, loss


def task() -> PlaygroundTask:
    """Return the task: 1,437 images of 8 x 8 pixels, ten classes."""
    scikit_learn_folder("digits")
    train, held_out = Digits("train"), Digits("held_out")
    return PlaygroundTask(
        name="digits",
        num_classes=10,
        model=network,
        loss=ab.mean_over_samples(loss),
        rows=LabelledSamples(train.images, train.labels),
        held_out=LabelledSamples(held_out.images, held_out.labels),
    )


def network() -> Network:
    """Return the recipe's network with a hundredth of the usual weights in its last layer.

    With small weights, the first predictions are nearly uniform, and the first loss is close to ln 10.
    """
    model = Network()
    last = model[-1]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.weight.mul_(0.01)
        last.bias.zero_()
    return model
