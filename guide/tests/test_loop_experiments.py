"""The loop experiments, compared with the plain computation."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import anybatch as ab
from anybatch.events.jsonl import read_jsonl
from anybatch_guide.experiments import full_loop as loop_experiment
from anybatch_guide.experiments import one_batch as batch_experiment
from anybatch_guide.experiments import split_sum as split_experiment
from anybatch_guide.listings import full_loop, one_batch, one_mistake, split_sum
from anybatch_guide.recording import read_recording
from tests.architecture.source_tree import ROOT
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
    return read_recording(ROOT / "guide" / "web" / "recordings" / "one_batch.json").data


@pytest.fixture(scope="module")
def split_data() -> Any:
    """The result of the experiment "split, accumulate"."""
    return split_experiment.run(ignore)


@pytest.mark.parametrize("size", [64, 16, 4])
@pytest.mark.parametrize("clip", [None, one_mistake.CLIP])
def test_ways_train_as_the_plain_loop(size: int, clip: float | None) -> None:
    """For every split, 60 steps have the losses of the unsplit plain loop, with and without clipping."""
    found = one_batch.train(size, torch.float64, clip)

    assert found == pytest.approx(plain_losses(torch.float64, clip), rel=EXACT)


def test_loop_without_mistake_is_right() -> None:
    """Without a mistake, the loop for mistakes equals plain training, ragged or not."""
    expected = plain_losses(torch.float64)

    assert one_mistake.train(16, "") == pytest.approx(expected, rel=EXACT)
    assert one_mistake.train(21, "") == pytest.approx(expected, rel=EXACT)


def test_four_ways_coincide(batch_data: Any) -> None:
    """All four ways, including two real ranks, differ by rounding: 1e-12 in float64, 1e-4 in float32."""
    assert set(batch_data["gaps"]["float64"]) == {"16x4", "4x16", "2x8x4"}
    assert batch_data["largest_gap"]["float64"] < EXACT
    assert batch_data["largest_gap"]["float32"] < 1e-4
    assert batch_data["losses"] == pytest.approx(plain_losses(torch.float64), rel=1e-5)


@pytest.mark.parametrize("name", ["no_division", "clip_each", "mean_of_means"])
def test_mistakes_split_the_ways(batch_data: Any, name: str) -> None:
    """Each mistake changes every split by 1% or more; 64 x 1 is unaffected."""
    (found,) = [mistake for mistake in batch_data["mistakes"] if mistake["name"] == name]
    clip = one_mistake.CLIP if name == "clip_each" else None

    assert found["reference"] == pytest.approx(plain_losses(torch.float64, clip), rel=1e-5)
    assert max(found["reference_gap"].values()) < EXACT
    assert found["largest_gap"]["64x1"] < EXACT
    assert all(found["largest_gap"][way] > 0.01 for way in ("16x4", "4x16", "2x8x4"))


def test_parts_add_up_to_the_whole(split_data: Any) -> None:
    """Every split sum, and the recorded full batch, equal the unsplit gradient to 1e-12 in float64."""
    model, (points, arms) = split_sum.make_model(torch.float64), split_sum.spirals(torch.float64)
    binary_cross_entropy_with_logits(model(points)[:, 0], arms).backward()
    whole = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    assert len(whole) == 64
    for cut in split_data["cuts"]:
        *_, total = split_sum.running_sums(cut["sizes"], torch.float64)
        assert split_experiment.relative(total, whole) < EXACT
        assert sum(cut["sizes"]) == 64
        assert cut["largest_difference"] < 1e-6
        assert cut["largest_difference_float64"] < 1e-15
    drawn = torch.tensor(split_data["whole"], dtype=torch.float64) * split_data["unit"]
    assert float((drawn - whole).abs().max()) <= 0.6 * split_data["unit"]


def test_wrong_division_shows(split_data: Any) -> None:
    """A tail of one sample, divided by its size, changes the gradient by more than 10%."""
    ragged = [cut for cut in split_data["cuts"] if "wrong_sums" in cut]

    assert [cut["sizes"][-1] for cut in ragged] == [1, 1, 1]
    assert all(cut["wrong_relative_difference"] > 0.1 for cut in ragged)


def test_running_sums_grow_by_micro_batch(split_data: Any) -> None:
    """Each strip is the previous one plus the gradient of one micro-batch's loss sum divided by the batch's count."""
    cut = split_data["cuts"][1]
    model, (points, arms) = split_sum.make_model(torch.float64), split_sum.spirals(torch.float64)
    loss = binary_cross_entropy_with_logits(model(points[21:42])[:, 0], arms[21:42], reduction="sum") / 64
    second = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    assert cut["sizes"] == [21, 21, 21, 1]
    found = torch.tensor(cut["sums"][1]) - torch.tensor(cut["sums"][0])
    assert float((found * split_data["unit"] - second).abs().max()) < 2 * split_data["unit"]


def test_log_is_of_the_same_training_as_the_snapshots(tmp_path: Path) -> None:
    """The run that writes the log and the run whose gradients are copied have bitwise the same losses."""
    with ab.JsonlLog(tmp_path / "log.jsonl") as log:
        logged = full_loop.train(3, log, full_loop.make_model())
    snapshots = loop_experiment.GradientSnapshots()

    assert full_loop.train(3, snapshots, snapshots.model) == logged


def test_log_columns_hold_the_log(tmp_path: Path) -> None:
    """Decoded, the columns have the log's fields and times of each line."""
    path = tmp_path / "log.jsonl"
    with ab.JsonlLog(path) as log:
        full_loop.train(1, log, full_loop.make_model())
    lines = [line for line in read_jsonl(path) if line.get("step") == 0]
    columns = json.loads(json.dumps(loop_experiment.log_columns(lines)))

    for index, line in enumerate(lines):
        for field in loop_experiment.FIELDS:
            assert columns[field]["words"][columns[field]["of"][index]] == line.get(field)
        assert columns["seconds"][index] == pytest.approx(line["time_seconds"] - lines[0]["time_seconds"], abs=2e-6)


def test_engine_and_hand_take_the_same_step() -> None:
    """All timed steps, including the engine's, have the gradient of the native batch."""
    model = full_loop.make_model().double()
    batch = torch.utils.data.default_collate(full_loop.sentences(64))
    full_loop.token_loss(model, batch).backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters())
    loss = ab.mean_over_tokens(full_loop.token_loss, shift=False)
    found = ab.Engine(model, optimizer, loss, micro_batch_size=16).gradients(batch)

    for name, gradient in found.items():
        assert gradient is not None
        assert torch.allclose(gradient, whole[name], rtol=1e-10, atol=1e-14)


def printed(program: str, *arguments: str) -> str:
    """Return the output of a program of the guide, started with the command on the page."""
    command = [sys.executable, "-m", f"anybatch_guide.listings.{program}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)  # noqa: S603 (ours)
    return done.stdout


def test_two_ranks_train_as_the_plain_loop(two_ranks: Ranks) -> None:
    """Two real ranks, four micro-batches each, have the losses of the unsplit plain loop."""
    for found in two_ranks.run(one_batch.train, 8, torch.float64):
        assert found == pytest.approx(plain_losses(torch.float64), rel=EXACT)


@pytest.mark.parametrize("name", ["no_division", "clip_each", "mean_of_means"])
def test_mistakes_are_those_recorded(batch_data: Any, name: str) -> None:
    """A loop of four micro-batches with a mistake has the recorded losses."""
    (recorded,) = [mistake for mistake in batch_data["mistakes"] if mistake["name"] == name]
    size = batch_experiment.sizes_of_mistakes()[name]["16x4"]

    assert one_mistake.train(size, name) == pytest.approx(recorded["losses"]["16x4"], rel=1e-3)


@pytest.mark.published
def test_programs_to_take_along_print_what_is_shown(batch_data: Any, split_data: Any) -> None:
    """The programs offered to readers print the losses and differences of the figures, to the digits shown."""
    single, double = (line.split()[1:] for line in printed("one_batch", "16").splitlines())
    clipped = printed("one_batch", "4", str(one_mistake.CLIP)).splitlines()[1].split()[1:]
    wrong = printed("one_mistake", "clip_each", "16").split()
    differences = [float(line.split()[-1]) for line in printed("split_sum").splitlines()]
    mistakes = {one["name"]: one for one in batch_data["mistakes"]}

    assert batch_experiment.significant(map(float, double), 6) == batch_data["losses"]
    assert list(map(float, single)) == pytest.approx(batch_data["losses"], rel=1e-4)
    assert batch_experiment.significant(map(float, clipped), 6) == mistakes["clip_each"]["reference"]
    assert batch_experiment.significant(map(float, wrong), 6) == mistakes["clip_each"]["losses"]["16x4"]
    shown = {cut["wrong_largest_difference"] for cut in split_data["cuts"] if "wrong_sums" in cut}
    assert shown <= set(differences)
    assert {cut["largest_difference"] for cut in split_data["cuts"]} <= set(differences)


def test_recorded_log_is_of_the_program() -> None:
    """The losses in the recorded log equal the output of the program, to six digits."""
    data = read_recording(ROOT / "guide" / "web" / "recordings" / "full_loop.json").data
    losses = full_loop.train(4, None, full_loop.make_model())
    logged = [numbers["loss"] for _, numbers in data["log"]["numbers"] if "loss" in numbers]

    assert logged == pytest.approx(losses[data["first_step"] :], rel=1e-6)


@pytest.mark.published
def test_recorded_losses_come_again(batch_data: Any) -> None:
    """Training the four ways again, and with each mistake, gives the recorded losses to the recorded digits."""
    made = batch_experiment.run(ignore)

    assert batch_data["losses"] == pytest.approx(made["losses"], rel=2e-6)
    for old, new in zip(batch_data["mistakes"], made["mistakes"], strict=True):
        for way, losses in old["losses"].items():
            assert losses == pytest.approx(new["losses"][way], rel=1e-3), (old["name"], way)
