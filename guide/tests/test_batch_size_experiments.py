"""Recordings about batch size: properties on any machine, and their runs."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch

from anybatch.core.learning_rate import noise_gain
from anybatch_guide import study
from anybatch_guide.claims.batch_size import to_target
from anybatch_guide.experiments import batch_strategies, noise_scale, rates_by_batch, sharp_minima, spikes
from anybatch_guide.recording import read_recording
from anybatch_guide.tasks.task import LabelledSamples, cross_entropy
from guide.tests.recorded_again import RECORDINGS
from tests.extras import skip_without

skip_without("sklearn", "anybatch[guide]")

ALL = (batch_strategies, noise_scale, rates_by_batch, sharp_minima, spikes)
MAX_BYTES = 60_000


def data_of(name: str) -> Any:
    """Return the data of a recording."""
    return read_recording(RECORDINGS / f"{name}.json").data


def mean_of(losses: list[float | str]) -> float:
    """Return the mean over seeds; infinite if one of them diverged."""
    return statistics.fmean(math.inf if isinstance(loss, str) else loss for loss in losses)


def test_recordings_are_small_and_name_their_study() -> None:
    """Each is small, lists its seeds, and names the larger study it represents."""
    for module in ALL:
        name = module.EXPERIMENT.name
        assert (RECORDINGS / f"{name}.json").stat().st_size <= MAX_BYTES, name
        stands_for = data_of(name)["stands_for"]
        assert (RECORDINGS.parents[2] / stands_for.partition(":")[0]).exists(), name
        assert '"seed' in (RECORDINGS / f"{name}.json").read_text(encoding="utf-8"), name


@pytest.mark.parametrize("number", range(3))
def test_rules_run_where_their_formulas_say(number: int) -> None:
    """The best rates have the lowest losses, and a rule's line starts there and follows its formula."""
    found = data_of("rates_by_batch")["maps"][number]
    sizes, rates = found["batch_sizes"], found["rates"]
    means = [[mean_of(cell) for cell in row] for row in found["losses"]]
    for column in range(len(sizes)):
        best = min(range(len(rates)), key=lambda row: means[row][column])
        assert rates[best] == found["best_rates"][column]
    base, first = found["base_rate"], sizes[0]
    assert base == found["best_rates"][0]
    is_sgd = found["optimizer"] == "SGD"
    factors: dict[str, Callable[[float], float]] = {
        "none": lambda _: 1.0,
        "linear": lambda kappa: kappa,
        "sqrt": math.sqrt,
        "sqrt, betas kept": math.sqrt,
        "gain": lambda kappa: (
            noise_gain(found["noise_scale"], base_batch_size=first, effective_batch_size=round(first * kappa))
            ** (1.0 if is_sgd else 0.5)
        ),
    }
    for rule in found["rules"]:
        # At the smallest batch all rules give the same run.
        assert rule["points"][0]["losses"] == found["losses"][rates.index(base)][0]
        if rule["name"] in factors:
            expected = [base * factors[rule["name"]](size / first) for size in sizes]
            assert [point["learning_rate"] for point in rule["points"]] == pytest.approx(expected)


@pytest.mark.parametrize("number", range(3))
def test_how_far_rules_go_is_what_their_losses_say(number: int) -> None:
    """A rule counts as tuned up to the largest size with a loss near the best at all sizes up to it."""
    data = data_of("rates_by_batch")
    found = data["maps"][number]
    tuned = [min(mean_of(row[column]) for row in found["losses"]) for column in range(len(found["batch_sizes"]))]
    for rule in found["rules"]:
        near = [
            mean_of(point["losses"]) <= data["as_good"] * best
            for point, best in zip(rule["points"], tuned, strict=True)
        ]
        whole = [size for place, size in enumerate(found["batch_sizes"]) if all(near[: place + 1])]
        assert rule["as_good_to"] == whole[-1]


def test_the_noise_scale_is_that_of_single_samples() -> None:
    """At fixed parameters the interval narrows around the true value; during a run it grows, up to infinity."""
    data = data_of("noise_scale")
    fixed, truth = data["with_fixed_parameters"], data["fixed_true_scale"]
    bounded = [one for one in fixed if one["high"] is not None]
    assert all(one["low"] <= truth <= one["high"] for one in bounded)
    widths = [math.log(one["high"] / one["low"]) for one in bounded]
    assert widths[-1] < widths[0] / 3
    assert bounded[-1]["scale"] == pytest.approx(truth, rel=0.1)
    true = [one["true_scale"] for one in data["along_a_run"] if one["true_scale"] is not None]
    assert true[-1] > 10 * true[0]
    assert data["along_a_run"][-1]["high"] is None
    assert data["along_a_run"][-1]["low"] > true[0]


def test_accumulated_is_native_but_for_memory_and_time() -> None:
    """Accumulated and native gradients have the same variance, about 1/8 of the small batch's, but different memory."""
    data = data_of("batch_strategies")
    small, accumulated, native = data["ways"]
    parts = data["large"] / small["samples_per_step"]
    assert data["worst_gradient_error"] < 1e-12
    assert accumulated["variance"] == pytest.approx(native["variance"], rel=1e-12)
    assert parts * native["variance"] / small["variance"] == pytest.approx(1.0, abs=0.15)
    assert small["peak_bytes"] < accumulated["peak_bytes"] < native["peak_bytes"] / 2
    for way in data["ways"]:
        layers = dict(way["variance_by_layer"])
        assert sum(layers.values()) == pytest.approx(2 * layers["all parameters"])
        assert sum(way["peak"].values()) == way["peak_bytes"]


def test_the_watch_leaves_a_healthy_run_alone() -> None:
    """Without a plant, no action changes a loss or raises a warning; "warn" never changes one."""
    runs = {(run["plant"], run["action"]): run for run in data_of("spikes")["runs"]}
    for action in ("warn", "lower", "roll_back"):
        assert (runs["none", action]["is_as_unwatched"], runs["none", action]["told"]) == (True, [])
    for plant in spikes.PLANTS:
        assert runs[plant, "warn"]["is_as_unwatched"]
        assert runs[plant, "warn"]["held_out"] == runs[plant, None]["held_out"]


def test_planted_divergences_are_seen_and_undone() -> None:
    """Each plant harms the unwatched run, is detected within a few steps, and a rollback ends near the healthy run."""
    data = data_of("spikes")
    runs = {(run["plant"], run["action"]): run for run in data["runs"]}
    healthy = runs["none", None]["held_out"]
    for plant in (name for name in spikes.PLANTS if name != "none"):
        assert runs[plant, None]["told"] == []
        for action, code in (("warn", "spike"), ("lower", "rate_lowered"), ("roll_back", "rolled_back")):
            told = [one for one in runs[plant, action]["told"] if one["code"] == code]
            assert data["planted_at"] <= told[0]["step"] <= data["planted_at"] + 10, (plant, action)
        assert mean_of([runs[plant, None]["held_out"]]) > runs[plant, "roll_back"]["held_out"]
        assert runs[plant, "roll_back"]["held_out"] < 1.5 * healthy


def test_sharpness_follows_the_rate() -> None:
    """A larger batch is sharper at the same rate than at the scaled one, and flattest after equal steps."""
    data = data_of("sharp_minima")
    means = {
        (run["way"], run["batch_size"]): statistics.fmean(one["eigenvalue"] for one in run["seeds"])
        for run in data["runs"]
    }
    for size in sharp_minima.SIZES:
        ways = [means[way, size] for way in ("same rate", "scaled rate", "scaled rate, same steps")]
        assert ways == sorted(ways, reverse=True)
        assert ways[0] > means["base", sharp_minima.BASE.batch_size]
    assert all(one["residual"] <= 0.02 * one["eigenvalue"] for run in data["runs"] for one in run["seeds"])


@pytest.mark.slow
def test_a_study_run_is_the_plain_loop() -> None:
    """Order, rates and updates of a run equal a loop in plain PyTorch, up to rounding."""
    run = study.StudyRun(
        task="digits", optimizer="SGD", batch_size=256, learning_rate=0.1, epochs=2, betas=(0.9,), seed=3
    )
    plain = study.new_model(run)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    whole = 12
    losses = []
    for step, batch in enumerate(study.steps_of(run)):
        # One warm-up step from half the rate, then a cosine from the full rate to a tenth of it.
        cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 1) / (whole - 1))) / 2
        optimizer.param_groups[0]["lr"] = 0.1 * (0.5 if step == 0 else cosine)
        optimizer.zero_grad()
        loss = cross_entropy(plain(batch["inputs"]), batch["targets"])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    model, found = study.trained(run)
    assert len(found) == study.num_steps_of(run) == whole
    assert found == pytest.approx(losses, rel=1e-4)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_target_that_is_never_reached_is_infinitely_far() -> None:
    """A run that ends above the target counts as infinite, so that a failing rate is never the fastest."""
    run = study.StudyRun(task="digits", optimizer="SGD", batch_size=1024, learning_rate=1e-3, epochs=1, betas=(0.9,))
    assert to_target(run)[:3] == (math.inf, math.inf, math.inf)


@pytest.mark.slow
def test_the_true_noise_scale_is_that_of_gradients_one_by_one() -> None:
    """The result of `vmap` equals variance / |G|^2 of gradients computed in a loop."""
    model = study.new_model(noise_scale.RUN)
    whole = study.task_of("digits").rows
    rows = LabelledSamples(whole.inputs[:40], whole.targets[:40])
    gradients = []
    for image, label in zip(rows.inputs, rows.targets, strict=True):
        taken = torch.autograd.grad(cross_entropy(model(image[None]), label[None]), list(model.parameters()))
        gradients.append(torch.cat([one.flatten() for one in taken]).double())
    stacked = torch.stack(gradients)
    mean = stacked.mean(0)
    expected = float(stacked.var(0, correction=0).sum() / mean.square().sum())
    assert noise_scale.true_scale(model, rows) == pytest.approx(expected, rel=1e-4)
