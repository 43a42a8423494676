"""The loop experiments, compared with the plain computation."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from anybatch_guide.claims.measuring import relative
from anybatch_guide.experiments import mathematics
from anybatch_guide.experiments import one_batch as batch_experiment
from anybatch_guide.experiments import split_sum as split_experiment
from anybatch_guide.lines import rounded
from anybatch_guide.listings import one_batch, one_mistake, split_sum
from guide.tests.recorded_again import recording
from tests.ranks_fixture import Ranks

pytestmark = pytest.mark.slow

EXACT = 1e-12


def ignore(_line: object) -> None:
    """Take an event and do nothing."""


def plain_losses(dtype: torch.dtype, clip: float | None = None) -> list[float]:
    """Return the losses of "one batch", unsplit and without the engine."""
    model, (points, arms) = one_batch.make_model(dtype), one_batch.spirals()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = cross_entropy(model(points.to(dtype)), arms)
        loss.backward()
        losses.append(loss.item())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return losses


@pytest.fixture(scope="module")
def batch_data() -> Any:
    """The recording of the experiment "one batch"."""
    return recording("one_batch")["data"]


@pytest.fixture(scope="module")
def split_data() -> Any:
    """The result of the experiment "split, accumulate"."""
    return split_experiment.run(ignore)


@pytest.mark.parametrize("size", [64, 16, 4])
@pytest.mark.parametrize("clip", [None, one_mistake.CLIP])
def test_splits_train_like_the_plain_loop(size: int, clip: float | None) -> None:
    """For every split, 60 steps have the losses of the unsplit plain loop, with and without clipping."""
    found = one_batch.train(size, torch.float64, clip)

    assert found == pytest.approx(plain_losses(torch.float64, clip), rel=EXACT)


def test_parts_add_up_to_the_whole(split_data: Any) -> None:
    """Every split sum, and the recorded full batch, equal the unsplit gradient to 1e-12 in float64."""
    model, (points, arms) = split_sum.make_model(torch.float64), split_sum.spirals(torch.float64)
    binary_cross_entropy_with_logits(model(points)[:, 0], arms).backward()
    whole = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    assert len(whole) == 64
    for cut in split_data["cuts"]:
        *_, total = split_sum.running_sums(cut["sizes"], torch.float64)
        assert relative(total, whole) < EXACT
        assert sum(cut["sizes"]) == 64
        assert cut["largest_difference"] < 1e-6
        assert cut["largest_difference_float64"] < 1e-15
    drawn = torch.tensor(split_data["whole"], dtype=torch.float64) * split_data["unit"]
    assert float((drawn - whole).abs().max()) <= 0.6 * split_data["unit"]


def test_only_batch_norm_breaks_the_sum() -> None:
    """With layers that normalize each sample alone, four parts have the gradient of the batch; with BatchNorm not."""
    errors = {name: mathematics.norm_error(make) for name, make in mathematics.NORMS.items()}

    assert errors.pop("BatchNorm") > 0.1
    assert errors.keys() == {"LayerNorm", "RMSNorm", "GroupNorm"}
    assert max(errors.values()) < EXACT


def printed(program: str, *arguments: str) -> str:
    """Return the output of a program of the guide, started with the command on the page."""
    command = [sys.executable, "-m", f"anybatch_guide.listings.{program}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)  # noqa: S603 (ours)
    return done.stdout


def test_two_ranks_train_like_the_plain_loop(two_ranks: Ranks) -> None:
    """Two real ranks, four micro-batches each, have the losses of the unsplit plain loop."""
    for found in two_ranks.run(one_batch.train, 8, torch.float64):
        assert found == pytest.approx(plain_losses(torch.float64), rel=EXACT)


@pytest.mark.published
def test_offered_programs_print_the_shown_numbers(batch_data: Any, split_data: Any) -> None:
    """The programs offered to readers print the losses and differences of the figures, to the digits shown."""
    single, double = (line.split()[1:] for line in printed("one_batch", "16").splitlines())
    clipped = printed("one_batch", "4", str(one_mistake.CLIP)).splitlines()[1].split()[1:]
    wrong = printed("one_mistake", "clip_each", "16").split()
    differences = [float(line.split()[-1]) for line in printed("split_sum").splitlines()]
    mistakes = {one["name"]: one for one in batch_data["mistakes"]}

    assert rounded(map(float, double), 6) == batch_data["losses"]
    assert list(map(float, single)) == pytest.approx(batch_data["losses"], rel=1e-4)
    assert rounded(map(float, clipped), 6) == mistakes["clip_each"]["reference"]
    assert rounded(map(float, wrong), 6) == mistakes["clip_each"]["losses"]["16x4"]
    shown = {cut["wrong_largest_difference"] for cut in split_data["cuts"] if "wrong_sums" in cut}
    assert shown <= set(differences)
    assert {cut["largest_difference"] for cut in split_data["cuts"]} <= set(differences)


@pytest.mark.published
def test_recorded_losses_are_reproduced(batch_data: Any) -> None:
    """Training the four ways again, and with each mistake, gives the recorded losses to the recorded digits."""
    made = batch_experiment.run(ignore)

    assert batch_data["losses"] == pytest.approx(made["losses"], rel=2e-6)
    for old, new in zip(batch_data["mistakes"], made["mistakes"], strict=True):
        for way, losses in old["losses"].items():
            assert losses == pytest.approx(new["losses"][way], rel=1e-3), (old["name"], way)
