"""The recipe "digits": its data, its model, and that it learns."""

import importlib
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from anybatch.core.run_config import RunConfig
from anybatch.recipes.digits import Digits, digits
from anybatch.recipes.start import start
from tests.extras import skip_without

skip_without("sklearn", "anybatch[recipes]")


@pytest.fixture(scope="module")
def datasets() -> ModuleType:
    """Return scikit-learn's datasets module, which sets environment variables on import."""
    return importlib.import_module("sklearn.datasets")


def counted(*splits: Digits) -> Counter[tuple[Any, ...]]:
    """Return how often each labeled image is in these splits."""
    pairs = [pair for split in splits for pair in zip(split.images, split.labels, strict=True)]
    return Counter((*(16 * image).int().flatten().tolist(), int(label)) for image, label in pairs)


def test_the_split_is_complete_and_fixed(datasets: ModuleType) -> None:
    """Each of the 1,797 images is in exactly one fixed split, with 36 of each digit held out."""
    train, held_out = Digits("train"), Digits("held_out")
    assert (len(train), len(held_out)) == (1437, 360)
    assert held_out.labels.bincount().tolist() == [36] * 10
    found = datasets.load_digits()
    assert counted(train, held_out) == Counter(
        (*image.astype(int).flatten().tolist(), int(label))
        for image, label in zip(found.images, found.target, strict=True)
    )
    torch.manual_seed(1)
    assert torch.equal(Digits("held_out").images, held_out.images)


def test_shifts_are_moves_by_at_most_a_pixel() -> None:
    """A shifted image is one of the nine crops of the padded image, and all nine occur."""
    plain, shifted = Digits("train"), Digits("train", shifted=True)
    padded = F.pad(plain[5]["image"], (1, 1, 1, 1))
    crops = [padded[:, down : down + 8, right : right + 8] for down in range(3) for right in range(3)]
    seen = set()
    for _ in range(200):
        image = shifted[5]["image"]
        (place,) = (place for place, crop in enumerate(crops) if torch.equal(crop, image))
        seen.add(place)
    assert seen == set(range(9))
    assert torch.equal(plain[5]["image"], plain.images[5])


@pytest.mark.slow
def test_it_learns() -> None:
    """Five epochs reach over 85% held-out accuracy (chance is 10%)."""
    run = start(digits(), RunConfig(epochs=5))
    losses = [run.engine.step(batch).loss for batch in run.batches]
    assert losses[0] > 2.0
    assert losses[-1] < 0.8
    assert run.evaluate()["accuracy"] > 0.85
