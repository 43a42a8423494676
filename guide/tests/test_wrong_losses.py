"""The effects of mistakes on a step, and splits by length: properties of the recordings and of new runs."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import anybatch as ab
from anybatch.diagnostics import check
from anybatch.errors import UserError
from anybatch_guide.experiments import length_cuts, trainer_losses, wrong_losses
from anybatch_guide.mistakes.mistake import MISTAKES
from anybatch_guide.recording import read_recording
from anybatch_guide.tasks.task import load
from guide.tests.recorded_again import RECORDINGS, made_again
from tests.extras import skip_without

skip_without("sklearn", "anybatch[guide]")

RIGHT = ("right", "no_sync_backward")
FOUND = {
    "with_ranks": "zero_grad_missing",
    "no_sync_backward": "no_sync_around_backward_only",
    "no_sync_always": "not_reduced",
    **{name: mistake.finding for name, mistake in MISTAKES.items()},
}


def data_of(name: str) -> Any:
    """Return the data of a recording."""
    return read_recording(RECORDINGS / f"{name}.json").data


@pytest.mark.published
def test_no_sync_around_the_backward_only_is_named() -> None:
    """The checker distinguishes the two misplacements of no_sync from reducing in every micro-batch."""
    named = {one["name"]: {finding["code"] for finding in one["findings"]} for one in wrong_losses.checked_loops()}

    assert {name: code for name, code in FOUND.items() if code not in named[name]} == {}


def test_loops_are_named_by_the_checker() -> None:
    """Each recorded loop has its finding, its wrong lines, and a command for the check."""
    loops = {one["name"]: one for one in data_of("wrong_losses")["loops"]}

    assert set(loops) == set(FOUND)
    for name, one in loops.items():
        assert FOUND[name] in {finding["code"] for finding in one["findings"]}
        assert one["lines"]
        assert one["command"].endswith(f"/{name}.py:train")


def test_what_is_wrong_is_far_off_and_what_is_right_is_not() -> None:
    """A correct gradient is off by rounding, each wrong one by over 1%; a misplaced no_sync sends everything."""
    data = data_of("wrong_losses")
    for name, error in data["errors"].items():
        assert error < 1e-12 if name in RIGHT else error > 0.01, name
    sent = data["sent_bytes"]
    assert sent["no_sync_always"] == 0
    assert sent["no_sync_backward"] == 2 * sent["right"]  # each rank runs two micro-batches


@pytest.mark.slow
def test_a_sum_of_four_means_is_four_times_the_gradient() -> None:
    """The loops of the mistakes are run: without division, the relative gradient error is three."""
    digits = load("digits")
    full = wrong_losses.FULL

    assert wrong_losses.gradient_error("no_division", digits, full) == pytest.approx(3, rel=1e-12)
    assert wrong_losses.gradient_error("right", digits, full) < 1e-12
    assert wrong_losses.gradient_error("right", digits, wrong_losses.RAGGED) < 1e-12


def test_a_trainer_is_right_with_the_losses_of_transformers_and_wrong_with_means() -> None:
    """Recorded: dividing by the items of a step is exact, a mean is off, and an undivided mean is off by K - 1."""
    recording = read_recording(RECORDINGS / "trainer_losses.json")
    last = {name: errors[-1] for name, errors in recording.data["errors"].items()}

    assert set(trainer_losses.PACKAGES) < set(recording.made.versions)
    by_items = ("own_model", "module_items", "module_items_ragged", "compute_loss_func")
    assert max(map(last.pop, by_items)) < 1e-6
    assert last.pop("compute_loss") == pytest.approx(trainer_losses.SENTENCES.accumulation_steps - 1, rel=0.01)
    assert set(last) == {"module", "module_ragged", "compute_loss_said"}
    assert min(last.values()) > 0.01
    assert recording.data["errors"]["module_ragged"][0] < 1e-12  # a step whose micro-batches are all full


@pytest.mark.slow
def test_each_step_is_compared_with_what_it_has_seen() -> None:
    """A loop that divides by items has no error, a loop of means has one; this needs no Trainer."""
    rows = trainer_losses.rows_of("digits")
    parts = [rows[0:16], rows[16:21], rows[21:37], rows[37:42]]
    for weights, is_right in (((16 / 21, 5 / 21), True), ((1 / 2, 1 / 2), False)):
        model = trainer_losses.Averaging(load("digits"))
        optimizer = trainer_losses.Comparing(model)
        for window in (parts[:2], parts[2:]):
            optimizer.zero_grad()
            for part, weight in zip(window, weights, strict=True):
                micro_batch = {name: torch.stack([row[name] for row in part]) for name in part[0]}
                optimizer.seen.append(micro_batch)
                (model(**micro_batch)["loss"] * weight).backward()
            optimizer.step()

        assert len(optimizer.errors) == 2
        assert all((error < 1e-12) == is_right for error in optimizer.errors)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "codes"), [("text", ["loss_declaration"]), ("digits", [])])
def test_check_finds_means_of_tokens_in_a_loss_for_a_trainer(task: str, codes: list[str]) -> None:
    """A mean over tokens declared as a mean over samples is found; a mean over samples is accepted."""
    rows = trainer_losses.rows_of(task)[:8]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    declared = ab.mean_over_samples(lambda model, some: model(**some)["loss"])

    report = check(trainer_losses.Averaging(load(task)), declared, batch)

    assert [finding.code for finding in report.findings] == codes


def test_what_a_trainer_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without accelerate, the error names the extra that installs it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else name)

    with pytest.raises(UserError, match=r"accelerate must be installed.*anybatch\[peers\]"):
        trainer_losses.run(lambda _: None)


@pytest.mark.published
def test_a_trainer_does_the_same_again(tmp_path: Path) -> None:
    """New Trainer steps have the recorded errors."""
    pytest.importorskip("accelerate", reason="needs the extra anybatch[peers]")

    assert made_again("trainer_losses", tmp_path) == []


def test_every_cut_has_each_sentence_once_and_one_gradient() -> None:
    """For every split: each sentence once, tokens within the cap, and the gradient of the unsplit batch."""
    data = data_of("length_cuts")
    for way in data["ways"]:
        assert sorted(length for cut in way["cuts"] for length in cut) == sorted(data["lengths"])
        assert max(len(cut) * max(cut) for cut in way["cuts"]) <= way["cap"]
        assert way["gradient_error"] < 1e-12


@pytest.mark.slow
def test_the_engine_makes_the_recorded_cut_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one cap, the engine runs the recorded micro-batches."""
    cap = length_cuts.CAPS[-2]
    monkeypatch.setattr(length_cuts, "CAPS", (cap,))
    made = length_cuts.run(lambda _: None)

    recorded = [way for way in data_of("length_cuts")["ways"] if way["cap"] == cap]
    assert [way["cuts"] for way in made["ways"]] == [way["cuts"] for way in recorded]
    assert max(way["gradient_error"] for way in made["ways"]) < 1e-12
