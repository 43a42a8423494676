"""Settings of a run: the order in which they replace each other, refused values, and the run's header."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.run_config import RunConfig
from anybatch.core.schedules import BatchRamp
from anybatch.errors import BatchSizeError, UserError
from tests.faults import sees

COUNTS = st.integers(1, 1000)
ALTERNATIVES = (("epochs", "steps"), ("micro_batch_tokens", "micro_batch_size", "accumulation_steps"))
RAMP = BatchRamp((32, 20_000), (128, None))


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    """Draw settings without contradictions."""
    values = {
        "effective_batch_size": draw(st.none() | COUNTS | st.just(RAMP)),
        "learning_rate": draw(st.none() | st.floats(1e-6, 1.0)),
        "precision": draw(st.sampled_from([None, "fp32", "bf16"])),
        "seed": draw(st.none() | st.integers(0, 9)),
    }
    values |= draw(st.sampled_from([{}, {"epochs": 2}, {"steps": 3}]))
    cuts: list[dict[str, Any]] = [{}, {"micro_batch_size": 4}, {"micro_batch_size": "auto"}, {"accumulation_steps": 2}]
    cuts += [{"micro_batch_tokens": 64}, {"micro_batch_size": 4, "accumulation_steps": 2}]
    return RunConfig(**values | draw(st.sampled_from(cuts)))


@sees(
    "run config: settings that replace each other are kept together",
    "src/anybatch/core/run_config.py",
    "if name not in replaced}",
    "if name not in given}",
)
@given(configs(), configs())
def test_given_settings_replace_lower_ones(upper: RunConfig, lower: RunConfig) -> None:
    """A given setting wins and drops the ones it replaces; all others come from below."""
    both = upper.with_defaults(lower)
    for name, value in upper.given.items():
        assert getattr(both, name) == value
    for name, value in lower.given.items():
        group = next((group for group in ALTERNATIVES if name in group), (name,))
        expected = getattr(upper, name) if any(one in upper.given for one in group) else value
        assert getattr(both, name) == expected
    assert both.given.keys() <= upper.given.keys() | lower.given.keys()


@given(configs())
def test_a_header_keeps_every_setting(config: RunConfig) -> None:
    """Settings come back from JSON, a ramp included."""
    config = config.with_defaults(RunConfig(effective_batch_size=8))
    assert RunConfig.from_json(config.as_json()) == config


@pytest.mark.parametrize("other", [{"accumulation_steps": 2}, {"micro_batch_tokens": 64}])
def test_headers_of_earlier_versions_are_read(other: dict[str, Any]) -> None:
    """Earlier versions wrote a size of "auto" next to the setting that replaced it, and lacked newer settings."""
    settings = {"effective_batch_size": "32,128@20000", "micro_batch_size": "auto", "seed": 3, **other}
    assert RunConfig.from_json(settings) == RunConfig(effective_batch_size=RAMP, seed=3, **other)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"effective_batch_size": 0}, BatchSizeError),
        ({"micro_batch_size": "large"}, BatchSizeError),
        ({"base_batch_size": True}, BatchSizeError),
        ({"accumulation_steps": "auto"}, UserError),
        ({"seed": 1.5}, UserError),
        ({"learning_rate": -1e-3}, UserError),
        ({"learning_rate": float("nan")}, UserError),
        ({"precision": "fp8"}, UserError),
        ({"learning_rate_rule": "cubic"}, UserError),
        ({"epochs": 1, "steps": 1}, UserError),
        ({"micro_batch_tokens": 64, "micro_batch_size": "auto"}, UserError),
        ({"micro_batch_tokens": 64, "accumulation_steps": 2}, UserError),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], error: type[UserError]) -> None:
    """Wrong values, and settings that contradict each other, are refused when the object is made."""
    with pytest.raises(error) as raised:
        RunConfig(**settings)
    for name in settings:
        assert name in str(raised.value)
