"""The recipe "digits": its data, its model, and that it learns."""

import dataclasses
import importlib
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import default_collate

import anybatch as ab
from anybatch.core.batch import Placement
from anybatch.core.run_config import RunConfig
from anybatch.core.splitting import Cut
from anybatch.recipes.digits import Digits, Network, accuracy, digits, loss
from anybatch.recipes.start import start
from anybatch.testing.gradients import assert_same_gradients
from tests.extras import skip_without

skip_without("sklearn", "anybatch[recipes]")


@pytest.fixture(scope="module")
def datasets() -> ModuleType:
    """Return scikit-learn's datasets module, which sets environment variables on import."""
    return importlib.import_module("sklearn.datasets")


def doubled(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate samples into float64 images."""
    batch: dict[str, torch.Tensor] = default_collate(samples)
    return batch | {"image": batch["image"].double()}


def counted(*splits: Digits) -> Counter[tuple[Any, ...]]:
    """Return how often each labeled image is in these splits."""
    pairs = [pair for split in splits for pair in zip(split.images, split.labels, strict=True)]
    return Counter((*(16 * image).int().flatten().tolist(), int(label)) for image, label in pairs)


def test_the_split_is_whole_and_fixed(datasets: ModuleType) -> None:
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


@pytest.mark.usefixtures("datasets")
def test_a_scikit_learn_with_its_file_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """If scikit-learn stores its file elsewhere, its function is used, with the same images."""
    found = Digits("train")
    monkeypatch.setattr("anybatch.recipes.digits.scikit_learn_folder", lambda recipe: Path(f"no {recipe} here"))
    other = Digits("train")
    assert torch.equal(other.images, found.images)
    assert torch.equal(other.labels, found.labels)


def test_the_images_come_without_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the images does not import scikit-learn or SciPy, which would cost each process a second."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    Digits("train")
    assert "sklearn" not in sys.modules


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
def test_shifts_do_not_depend_on_the_cut() -> None:
    """The images of a step are the same for every micro-batch size and world size, and differ in the next epoch."""

    def images(cut: Cut, world_size: int, epoch: int) -> dict[int, torch.Tensor]:
        batches = ab.batches(Digits("train", shifted=True), effective_batch_size=1437, epochs=2, seed=4)
        batch = list(batches)[epoch]
        places = [Placement(cut, world_size, rank) for rank in range(world_size)]
        fed = torch.cat([unit["image"] for place in places for unit in place.micro_batches(batch)])
        return dict(zip(batch.sample_ids, fed, strict=True))

    whole, cut, later = images(Cut(), 1, 0), images(Cut(micro_batch_size=100), 3, 0), images(Cut(), 1, 1)
    assert all(torch.equal(whole[number], cut[number]) for number in range(1437))
    assert sum(torch.equal(whole[number], later[number]) for number in range(1437)) < 300  # by chance one in nine


def test_the_network() -> None:
    """The network has 66,314 parameters, returns ten logits per image, and does not couple samples."""
    network, images = Network().double(), torch.rand(5, 1, 8, 8, dtype=torch.float64)
    num_convolved = (9 * 1 + 1) * 32 + (9 * 32 + 1) * 64 + (9 * 64 + 1) * 64
    expected = num_convolved + 2 * (32 + 64 + 64) + (64 * 4 * 4 + 1) * 10
    assert sum(parameter.numel() for parameter in network.parameters()) == expected == 66_314
    logits = network(images)
    assert logits.shape == (5, 10)
    torch.testing.assert_close(network(images[2:3]), logits[2:3], rtol=0, atol=1e-12)


def test_loss_and_accuracy() -> None:
    """The loss is the mean cross-entropy; the accuracy is 1 for a correct prediction and 0 otherwise."""
    logits = torch.tensor([[0.0] * 9 + [9.0], [9.0] + [0.0] * 9])
    batch = {"image": torch.zeros(2, 1, 8, 8), "label": torch.tensor([9, 1])}

    class Sure(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return logits[: len(images)]

    assert accuracy(Sure(), batch)["accuracy"].tolist() == [1.0, 0.0]
    expected = -(logits.log_softmax(1)[0, 9] + logits.log_softmax(1)[1, 1]) / 2
    torch.testing.assert_close(loss(Sure(), batch), expected)


def test_any_cut_is_exact() -> None:
    """In float64 the gradient matches the plain loop at any micro-batch size."""
    job = dataclasses.replace(digits(), model=lambda: Network().double(), collate=doubled)
    whole, cut = (start(job, RunConfig(effective_batch_size=50, steps=1, micro_batch_size=size)) for size in (50, 7))
    (batch,) = whole.batches
    (samples,) = Placement(Cut(), 1, 0).micro_batches(batch)
    model = whole.engine.model
    assert isinstance(model, nn.Module)
    names, parameters = zip(*model.named_parameters(), strict=True)
    plain = dict(zip(names, torch.autograd.grad(loss(model, samples), parameters), strict=True))
    assert_same_gradients(whole.engine.gradients(batch), plain)
    assert_same_gradients(cut.engine.gradients(next(iter(cut.batches))), plain)


@pytest.mark.slow
def test_it_learns() -> None:
    """Five epochs reach over 85% held-out accuracy (chance is 10%)."""
    run = start(digits(), RunConfig(epochs=5))
    losses = [run.engine.step(batch).loss for batch in run.batches]
    assert losses[0] > 2.0
    assert losses[-1] < 0.8
    assert run.evaluate()["accuracy"] > 0.85
