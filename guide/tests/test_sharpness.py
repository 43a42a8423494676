"""The largest eigenvalue of the Hessian matches the dense Hessian, for every cut and number of ranks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch as ab
from anybatch.core.loss import Loss
from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch_guide.sharpness import Sharpness, measure_sharpness
from tests.ranks_fixture import Ranks

Batch = dict[str, torch.Tensor]
NUM_SAMPLES = 11


def network() -> nn.Module:
    """Return a small network in float64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch_of() -> Batch:
    """Return a batch of labeled vectors with some labels masked."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)
    labels[::4] = -100
    return {"x": torch.randn(NUM_SAMPLES, 4, generator=generator, dtype=torch.float64), "labels": labels}


def mean(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean over unmasked labels."""
    return F.cross_entropy(model(batch["x"]), batch["labels"])


def squares(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return one loss for each sample."""
    outputs: torch.Tensor = model(batch["x"])
    return outputs.square().sum(1)


def terms(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return two terms, one as a sum with its count."""
    labels = batch["labels"]
    total = F.cross_entropy(model(batch["x"]), labels, reduction="sum")
    return {"labels": ab.LossSum(total, int((labels != -100).sum())), "size": squares(model, batch)}


UNMASKED = ab.tokens(shift=False)
LOSSES: dict[str, Loss] = {
    "tokens": ab.mean_over_tokens(mean, shift=False),
    "per-sample": ab.mean_over_samples(squares),
    "terms": ab.sum_of(terms, labels=UNMASKED, size=ab.samples(weight=0.3)),
}


def whole(name: str, model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of the unsplit batch, by plain torch."""
    if name == "tokens":
        return mean(model, batch)
    size = squares(model, batch).mean()
    return size if name == "per-sample" else mean(model, batch) + 0.3 * size


def dense(name: str) -> torch.Tensor:
    """Return all eigenvalues of the Hessian, from the dense matrix."""
    model, batch = network(), batch_of()
    shapes = {key: parameter.shape for key, parameter in model.named_parameters()}

    def of_flat(flat: torch.Tensor) -> torch.Tensor:
        parts = flat.split([shape.numel() for shape in shapes.values()])
        values = {key: part.view(shape) for (key, shape), part in zip(shapes.items(), parts, strict=True)}

        class Called(nn.Module):
            def forward(self, x: torch.Tensor) -> Any:
                return torch.func.functional_call(model, values, (x,))

        return whole(name, Called(), batch)

    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    hessian: torch.Tensor = torch.autograd.functional.hessian(of_flat, flat)
    values: torch.Tensor = torch.linalg.eigvalsh(hessian)
    return values


def measured(name: str, micro_batch_size: int, ranks: tuple[int, int] = (0, 1)) -> Sharpness:
    """Return the sharpness measured on this rank's share of the batch."""
    rank, world_size = ranks
    cut = [0, NUM_SAMPLES] if world_size == 1 else [0, 4, NUM_SAMPLES]
    own = {key: value[cut[rank] : cut[rank + 1]] for key, value in batch_of().items()}
    spec = TrainSpec(model=network(), optimizer=lambda named: torch.optim.SGD(named, lr=1.0), loss=LOSSES[name])
    return measure_sharpness(spec, own, Hardware(micro_batch_size=micro_batch_size), max_products=60, tolerance=1e-13)


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("micro_batch_size", [NUM_SAMPLES, 3])
def test_the_eigenvalue_matches_the_dense_hessian(name: str, micro_batch_size: int) -> None:
    """For every form of loss and cut, with masked labels, the eigenvalue is right to 1e-12."""
    truth = float(dense(name)[-1])
    found = measured(name, micro_batch_size)
    assert found.eigenvalue == pytest.approx(truth, rel=1e-12)
    assert "largest eigenvalue" in str(found)


def measured_on_a_rank(name: str, micro_batch_size: int) -> Sharpness:
    """Return the sharpness measured on this rank."""
    with ab.World.from_environment() as world:
        place = world.rank, world.size
    return measured(name, micro_batch_size, place)


def test_ranks_measure_the_whole_batch(two_ranks: Ranks) -> None:
    """Two ranks with unequal shares and label counts measure the eigenvalue of the full batch."""
    truth = float(dense("terms")[-1])
    for found in two_ranks.run(measured_on_a_rank, "terms", 3):
        assert found.eigenvalue == pytest.approx(truth, rel=1e-12)
