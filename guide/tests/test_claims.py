"""The claims: rules with several verdicts, numbers in texts and cards, reproducible recordings."""

import inspect
import json
import string
from collections.abc import Mapping
from typing import Any

import pytest

from anybatch_guide.claims.catalogue import CLAIMS
from anybatch_guide.claims.claim import card_data
from anybatch_guide.recording import plain
from guide.tests.recorded_again import recording
from tests.extras import skip_without

skip_without("sklearn", "anybatch[guide]")


def test_texts_use_existing_numbers() -> None:
    """Each `{name}` of a text is a number of its claim; texts contain no literal digits."""
    for claim in CLAIMS.values():
        for text in claim.texts.values():
            parts = list(string.Formatter().parse(text))
            assert {name for _, name, _, _ in parts if name} <= set(claim.numbers), claim.name


@pytest.mark.parametrize("name", CLAIMS)
def test_a_recording_matches_its_claim(name: str) -> None:
    """Claim, rule and text of a recording match the current code."""
    claim = CLAIMS[name]
    data = recording(f"claims_{name}")["data"]
    numbers = {key: float(number["value"]) for key, number in data["numbers"].items()}

    assert plain(card_data(claim, numbers)) == json.loads(json.dumps(data)) | {"numbers": _as_floats(data["numbers"])}


def _as_floats(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: {**number, "value": plain(float(number["value"]))} for name, number in numbers.items()}


def test_forecasts_are_named_as_such() -> None:
    """A claim is a forecast if and only if its numbers come from the model of `anybatch scale --forecast`."""
    forecasts = {name for name, claim in CLAIMS.items() if claim.is_forecast}
    from_model = {name for name, claim in CLAIMS.items() if '"forecasts")' in inspect.getsource(claim.measure)}

    assert forecasts == from_model
    assert not any("measured" in CLAIMS[name].how.lower() for name in forecasts)
    assert {name for name in CLAIMS if recording(f"claims_{name}")["data"].get("forecast")} == forecasts


def test_one_machine_is_not_any_hardware() -> None:
    """Whatever is measured on one machine, the claim about any hardware is never simply true."""
    claim = CLAIMS["on_cpus"]

    assert claim.rule({"gradient_error": 0.0, "memory_ratio": 0.1}) == "only_if"
    assert claim.rule({"gradient_error": 1e-3, "memory_ratio": 0.1}) == "false"
    assert "true" not in claim.texts
