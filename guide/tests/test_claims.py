"""The claims: rules with several verdicts, numbers in texts and cards, reproducible recordings."""

import json
import math
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from anybatch_guide.catalogue import experiments, names
from anybatch_guide.claims import equality, loops, rules
from anybatch_guide.claims.catalogue import CLAIMS
from anybatch_guide.claims.claim import Verdict, judged
from anybatch_guide.recording import differences, plain, read_recording
from tests.extras import skip_without

skip_without("sklearn", "anybatch[guide]")

RECORDINGS = Path(__file__).parents[1] / "web" / "recordings"
QUICK = (
    *("divide_by_n", "equivalent", "less_memory", "not_free", "on_cpus", "stale_gradients"),
    *("linear_to_eight", "sampler_overlap", "sync_batch_norm", "three_lines", "usual_buckets"),
)
STEPS: dict[str, float] = {"steps_16": 100, "steps_64": 50, "steps_256": 20}
WORST = dict.fromkeys(CLAIMS["one_rule"].numbers, 2.0)
EIGENVALUES = [name for name in CLAIMS["sharp"].numbers if name.startswith("eigenvalue")]
MADE_UP: list[tuple[str, Verdict, dict[str, float]]] = [
    ("less_memory", "true", {"ratio_in_four": 0.5}),
    ("less_memory", "false", {"ratio_in_four": 0.95}),
    ("equivalent", "true", dict.fromkeys(CLAIMS["equivalent"].numbers, 1e-7)),
    ("equivalent", "only_if", dict.fromkeys(CLAIMS["equivalent"].numbers, 1e-7) | {"token_error": 0.1}),
    ("equivalent", "false", dict.fromkeys(CLAIMS["equivalent"].numbers, 0.1)),
    ("on_cpus", "true", {"gradient_error": 1e-7, "memory_ratio": 0.3}),
    ("on_cpus", "false", {"gradient_error": 1e-2, "memory_ratio": 0.3}),
    ("on_cpus", "false", {"gradient_error": 1e-7, "memory_ratio": 1.3}),
    ("three_lines", "true", {"changed_lines": 3, "findings": 0}),
    ("three_lines", "only_if", {"changed_lines": 3, "findings": 1}),
    ("three_lines", "false", {"changed_lines": 4, "findings": 0}),
    ("n_times_longer", "true", {"accumulation_steps": 4, "ratio_to_same_samples": 3.9, "ratio_to_one_micro_batch": 4}),
    ("n_times_longer", "only_if", {"accumulation_steps": 4, "ratio_to_same_samples": 1, "ratio_to_one_micro_batch": 4}),
    ("n_times_longer", "false", {"accumulation_steps": 4, "ratio_to_same_samples": 1, "ratio_to_one_micro_batch": 1}),
    ("batch_norm", "true", {"gradient_error": 0.2, "group_norm_error": 1e-7}),
    ("batch_norm", "only_if", {"gradient_error": 0.2, "group_norm_error": 0.1}),
    ("batch_norm", "false", {"gradient_error": 1e-6, "group_norm_error": 1e-7}),
    ("stale_gradients", "false", {"moved": 0.0, "gradient_error": 1e-7}),
    ("stale_gradients", "true", {"moved": 0.1, "gradient_error": 1e-7}),
    ("stale_gradients", "true", {"moved": 0.0, "gradient_error": 0.1}),
    ("not_free", "true", {"extra_at_peak": 5, "extra_in_forward": 10, "weight_bytes": 10}),
    ("not_free", "only_if", {"extra_at_peak": 5, "extra_in_forward": 5, "weight_bytes": 10}),
    ("not_free", "false", {"extra_at_peak": 0, "extra_in_forward": 10, "weight_bytes": 10}),
    ("small_micro_batches", "true", {"ratio_16": 1.5, "ratio_4": 2, "ratio_1": 8}),
    ("small_micro_batches", "only_if", {"ratio_16": 1.05, "ratio_4": 2, "ratio_1": 8}),
    ("small_micro_batches", "false", {"ratio_16": 1, "ratio_4": 1, "ratio_1": 1.1}),
    ("larger_is_faster", "true", dict(zip(CLAIMS["larger_is_faster"].numbers, (2, 2, 2, 2), strict=True))),
    ("larger_is_faster", "only_if", dict(zip(CLAIMS["larger_is_faster"].numbers, (2, 2, 1.5, 1), strict=True))),
    ("larger_is_faster", "false", dict(zip(CLAIMS["larger_is_faster"].numbers, (1, 1, 1, 1), strict=True))),
    ("divide_by_n", "true", {"even_error": 1e-7, "uneven_error": 1e-7, "token_error": 1e-7}),
    ("divide_by_n", "only_if", {"even_error": 1e-7, "uneven_error": 1e-7, "token_error": 0.1}),
    ("divide_by_n", "false", {"even_error": 0.1, "uneven_error": 0.1, "token_error": 0.1}),
    ("forgetting", "true", {"chance": 2.3, "sgd_no_division": math.inf, "adam_no_division": 2.3}),
    ("forgetting", "only_if", {"chance": 2.3, "sgd_no_division": math.inf, "adam_no_division": 0.1}),
    ("forgetting", "false", {"chance": 2.3, "sgd_no_division": 1.0, "adam_no_division": 0.1}),
    ("sync_batch_norm", "true", {"sync_error": 1e-7, "sync_error_4_ranks": 1e-7}),
    ("sync_batch_norm", "only_if", {"sync_error": 0.1, "sync_error_4_ranks": 1e-7}),
    ("sync_batch_norm", "false", {"sync_error": 0.1, "sync_error_4_ranks": 0.1}),
    ("all_reduce_saves", "true", {"through_one_ratio": 2.0, "exposed": 1.0}),
    ("all_reduce_saves", "only_if", {"through_one_ratio": 2.0, "exposed": 20.0}),
    ("all_reduce_saves", "false", {"through_one_ratio": 1.0, "exposed": 1.0}),
    ("no_average", "true", {"sum_error": 1e-7}),
    ("no_average", "false", {"sum_error": 1.0}),
    ("sampler_overlap", "true", {"twice_on_2": 0, "twice_on_4": 0, "twice_on_8": 0, "twice_if_divisible": 0}),
    ("sampler_overlap", "only_if", {"twice_on_2": 1, "twice_on_4": 3, "twice_on_8": 3, "twice_if_divisible": 0}),
    ("sampler_overlap", "false", {"twice_on_2": 1, "twice_on_4": 3, "twice_on_8": 3, "twice_if_divisible": 1}),
    ("data_parallel", "true", {"lines": 2, "lines_ddp": 2, "time_ratio": 1.0, "memory_ratio": 1.0}),
    ("data_parallel", "only_if", {"lines": 2, "lines_ddp": 2, "time_ratio": 1.0, "memory_ratio": 2.0}),
    ("data_parallel", "false", {"lines": 3, "lines_ddp": 2, "time_ratio": 1.0, "memory_ratio": 1.0}),
    ("shards_travel", "true", {"by_micro_batch": 1.0, "by_layer": 1.0}),
    ("shards_travel", "only_if", {"by_micro_batch": 7.0, "by_layer": 1.0}),
    ("shards_travel", "false", {"by_micro_batch": 7.0, "by_layer": 2.0}),
    ("ddp_memory", "true", {"ddp_ratio": 0.25}),
    ("linear_to_eight", "true", dict.fromkeys(CLAIMS["linear_to_eight"].numbers, 95.0)),
    ("linear_to_eight", "only_if", dict.fromkeys(CLAIMS["linear_to_eight"].numbers, 95.0) | {"at_1_gbit": 20.0}),
    ("linear_to_eight", "false", dict.fromkeys(CLAIMS["linear_to_eight"].numbers, 80.0)),
    ("usual_buckets", "true", {"most_lost_at_25": 1.0, "most_lost_at_50": 5.0}),
    ("usual_buckets", "only_if", {"most_lost_at_25": 6.0, "most_lost_at_50": 5.0}),
    ("usual_buckets", "false", {"most_lost_at_25": 12.0, "most_lost_at_50": 15.0}),
    ("ddp_memory", "false", {"ddp_ratio": 1.0}),
    ("larger_batch", "true", STEPS | {"samples_16": 1000, "samples_64": 1000, "samples_256": 1050}),
    ("larger_batch", "only_if", STEPS | {"samples_16": 1000, "samples_64": 1000, "samples_256": 2000}),
    ("larger_batch", "false", STEPS | {"steps_256": 100, "samples_16": 1, "samples_64": 1, "samples_256": 1}),
    ("one_rule", "true", WORST | {"sqrt_digits_sgd": 1.2, "sqrt_digits_adamw": 1.0, "sqrt_text_sgd": 1.1}),
    ("one_rule", "only_if", WORST | {"gain_digits_sgd": 1.2, "gain_digits_adamw": 1.0, "gain_text_sgd": 1.1}),
    ("one_rule", "false", WORST | {"gain_digits_sgd": 1.2, "none_digits_adamw": 1.0, "sqrt_text_sgd": 1.1}),
    ("less_noise", "true", {"noise_ratio": 1, "loss_small": 1, "loss_same_samples": 0.9, "loss_same_steps": 0.5}),
    ("less_noise", "only_if", {"noise_ratio": 1, "loss_small": 1, "loss_same_samples": 2, "loss_same_steps": 0.5}),
    ("less_noise", "false", {"noise_ratio": 4, "loss_small": 1, "loss_same_samples": 2, "loss_same_steps": 0.5}),
    ("less_noise", "false", {"noise_ratio": 1, "loss_small": 1, "loss_same_samples": 2, "loss_same_steps": 1.5}),
    ("sharp", "true", dict(zip(EIGENVALUES, (1.0, 2.0, 2.0, 2.0), strict=True))),
    ("sharp", "only_if", dict(zip(EIGENVALUES, (1.0, 2.0, 2.0, 0.5), strict=True))),
    ("sharp", "only_if", dict(zip(EIGENVALUES, (1.0, 2.0, 1.1, 2.0), strict=True))),
    ("sharp", "false", dict(zip(EIGENVALUES, (1.0, 1.1, 2.0, 2.0), strict=True))),
]


@pytest.mark.parametrize(("name", "verdict", "numbers"), MADE_UP)
def test_rules_give_each_verdict(name: str, verdict: Verdict, numbers: Mapping[str, float]) -> None:
    """Each rule gives each of its verdicts for suitable numbers."""
    assert CLAIMS[name].rule(numbers) == verdict


def test_every_verdict_that_has_a_text_is_given() -> None:
    """There is exactly one text for each verdict that the rule can give."""
    given: dict[str, set[Verdict]] = {name: set() for name in CLAIMS}
    for name, verdict, _ in MADE_UP:
        given[name].add(verdict)

    assert given == {name: set(claim.texts) for name, claim in CLAIMS.items()}


def test_texts_use_existing_numbers() -> None:
    """Each `{name}` of a text is a number of its claim; texts contain no literal digits."""
    for claim in CLAIMS.values():
        for text in claim.texts.values():
            parts = list(string.Formatter().parse(text))
            assert {name for _, name, _, _ in parts if name} <= set(claim.numbers), claim.name


def test_the_lists_are_complete() -> None:
    """The four usual advantages and four usual limitations exist, with an experiment for each claim."""
    sides = {
        side: [claim.name for claim in CLAIMS.values() if claim.side == side] for side in ("advantage", "limitation")
    }

    assert sides["advantage"] == ["less_memory", "equivalent", "on_cpus", "three_lines"]
    assert {"n_times_longer", "batch_norm", "stale_gradients", "not_free"} < set(sides["limitation"])
    assert {name.removeprefix("claims_") for name in names() if name.startswith("claims_")} == set(CLAIMS)


def test_other_numbers_are_refused() -> None:
    """A measurement that differs from the numbers on its card raises an error."""
    with pytest.raises(ValueError, match="measured"):
        judged(CLAIMS["on_cpus"], {"gradient_error": 0.0})


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_recording_is_reproducible(name: str) -> None:
    """A new measurement of a claim has the recorded numbers, within its tolerance, and the same verdict."""
    experiment = experiments()[f"claims_{name}"]
    recording = read_recording(RECORDINGS / f"claims_{name}.json")
    found = plain(experiment.run(lambda _: None))

    assert differences(recording.data, found, tolerance=experiment.tolerance, noisy=experiment.noisy) == []


@pytest.mark.parametrize("name", CLAIMS)
def test_a_recording_matches_its_claim(name: str) -> None:
    """Claim, rule and text of a recording match the current code."""
    claim = CLAIMS[name]
    data = read_recording(RECORDINGS / f"claims_{name}.json").data
    numbers = {key: float(number["value"]) for key, number in data["numbers"].items()}

    assert plain(judged(claim, numbers)) == json.loads(json.dumps(data)) | {"numbers": _as_floats(data["numbers"])}


def _as_floats(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: {**number, "value": plain(float(number["value"]))} for name, number in numbers.items()}


def test_changed_lines_are_counted() -> None:
    """Indented lines count as unchanged, and the name of the function does not count."""
    assert equality.changed(loops.whole_batch, loops.whole_batch) == 0
    assert equality.changed(loops.whole_batch, loops.three_lines) == 3
    assert rules.three_lines({"changed_lines": 3, "findings": 0}) == "true"


def test_claims_are_in_our_words() -> None:
    """No claim is a quotation, because its source could not be shown."""
    assert [name for name, claim in CLAIMS.items() if quotes(claim.statement)] == []


def test_a_quotation_is_seen() -> None:
    """The check above recognizes all usual quotation marks, and ignores apostrophes."""
    assert all(
        quotes(text) for text in ('They say "faster".', "They say \u201cfaster\u201d.", "They say \u00abfaster\u00bb.")
    )
    assert not quotes("A batch's gradient is the mean.")


def quotes(text: str) -> bool:
    """Return whether a claim has words in quotation marks."""
    return any(mark in text for mark in '"\u201c\u201d\u201e\u00ab\u00bb')
