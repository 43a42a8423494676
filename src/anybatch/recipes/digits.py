"""`digits`: a small convolutional network learns to read handwritten digits, in seconds on a CPU.

Trains on the 1,797 images of 8 x 8 pixels that scikit-learn includes; downloads nothing.
"""

import gzip
import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

import anybatch as ab
from anybatch.errors import DataError

HELD_OUT_PER_DIGIT = 36


def digits() -> ab.Job:
    """Return the job: 1,437 training images; evaluated by accuracy on 360 held-out images."""
    scikit_learn_folder("digits")  # raises early if scikit-learn is missing
    return ab.Job(
        model=Network,
        optimizer=torch.optim.AdamW,
        loss=ab.mean_over_samples(loss),
        dataset=lambda: Digits("train", shifted=True),
        evaluate=ab.Evaluation(dataset=lambda: Digits("held_out"), metric=accuracy),
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR,
        defaults=ab.RunConfig(effective_batch_size=256, epochs=30, learning_rate=3e-3),
    )


class Network(nn.Sequential):
    """Three convolutions and a linear layer. GroupNorm is per image, so the gradient does not depend on the split."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.GELU()),  # 32 channels x 8 x 8
            *(nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.GroupNorm(8, 64), nn.GELU()),  # 64 x 4 x 4
            *(nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.GELU()),
            *(nn.Flatten(), nn.Linear(64 * 4 * 4, 10)),
        )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Float[Tensor, ""]:
    """Return the mean cross-entropy over the images of the batch."""
    return F.cross_entropy(model(batch["image"]), batch["label"])


def accuracy(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Float[Tensor, " image"]]:
    """Return 1 for each image that is classified correctly, else 0; the mean is the accuracy."""
    right = model(batch["image"]).argmax(dim=1) == batch["label"]
    return {"accuracy": right.float()}


class Digits(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Images of handwritten digits with labels.

    "held_out" is 36 images of each digit, the same in every run. With `shifted`, each image moves by up to one pixel in
    each direction, drawn for each sample and epoch.
    """

    def __init__(self, split: Literal["train", "held_out"], *, shifted: bool = False) -> None:
        images, labels = _load()
        is_in_split = _is_held_out(labels) if split == "held_out" else ~_is_held_out(labels)
        self.images: Float[Tensor, "image 1 8 8"] = images[is_in_split]
        self.labels: Int[Tensor, " image"] = labels[is_in_split]
        self.shifted = shifted

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one image (values from 0, white, to 1) and its label."""
        image = self.images[index]
        if self.shifted:
            # Drawn from torch's global generator, which `ab.batches` seeds for each sample and epoch.
            down, right = torch.randint(0, 3, (2,)).tolist()
            image = F.pad(image, (1, 1, 1, 1))[:, down : down + 8, right : right + 8]
        return {"image": image, "label": self.labels[index]}


def _load() -> tuple[Float[Tensor, "image 1 8 8"], Int[Tensor, " image"]]:
    file = scikit_learn_folder("digits") / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():
        table = torch.tensor([[*map(float, row.split(b","))] for row in gzip.decompress(file.read_bytes()).split()])
        pixels, labels = table[:, :-1], table[:, -1]
    else:  # scikit-learn guarantees its function, not the path of its file
        pixels, labels = map(torch.from_numpy, importlib.import_module("sklearn.datasets").load_digits(return_X_y=True))
    # Pixels are whole numbers from 0 to 16.
    return pixels.float().view(-1, 1, 8, 8) / 16, labels.long()


def _is_held_out(labels: Int[Tensor, " image"]) -> Bool[Tensor, " image"]:
    # A separate generator, because the split must not depend on the run's seed.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        held_out[order[labels[order] == digit][:HELD_OUT_PER_DIGIT]] = True
    return held_out


def scikit_learn_folder(recipe: str) -> Path:
    """Return scikit-learn's folder, without importing the package, which would take a second."""
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        message = (
            f"the recipe {recipe!r} reads images from scikit-learn, which is not installed (module 'sklearn'). "
            "Install it: pip install 'anybatch[recipes]'"
        )
        raise DataError(message, code="needs_scikit_learn")
    return Path(package.submodule_search_locations[0])
