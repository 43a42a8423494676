"""The claims: rules with several verdicts, numbers in texts and cards, reproducible recordings."""

import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from anybatch_guide.catalogue import experiments
from anybatch_guide.claims.catalogue import CLAIMS
from anybatch_guide.claims.claim import judged
from anybatch_guide.recording import differences, plain, read_recording
from tests.extras import skip_without

skip_without("sklearn", "anybatch[guide]")

RECORDINGS = Path(__file__).parents[1] / "web" / "recordings"
QUICK = (
    *("divide_by_n", "equivalent", "less_memory", "not_free", "on_cpus", "stale_gradients"),
    *("linear_to_eight", "sampler_overlap", "sync_batch_norm", "usual_buckets"),
)


def test_texts_use_existing_numbers() -> None:
    """Each `{name}` of a text is a number of its claim; texts contain no literal digits."""
    for claim in CLAIMS.values():
        for text in claim.texts.values():
            parts = list(string.Formatter().parse(text))
            assert {name for _, name, _, _ in parts if name} <= set(claim.numbers), claim.name


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
