"""Settings of the playground: exact keys, exact types, limits on each value and on combinations."""

import math
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch_guide.play import read
from anybatch_guide.programs import as_command
from anybatch_guide.setting import LIMITS, PlaygroundSetting, SettingError, parse_setting

GOOD: dict[str, Any] = asdict(PlaygroundSetting())
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def code_of(value: object) -> str:
    """Return the reason for refusing a value."""
    with pytest.raises(SettingError) as refused:
        parse_setting(value)
    return refused.value.code


def test_settings_round_trip() -> None:
    """The result of `asdict` is parsed as the same setting, even if a rate is a whole number."""
    assert parse_setting(GOOD) == PlaygroundSetting()
    assert parse_setting({**GOOD, "learning_rate": 1}) == PlaygroundSetting(learning_rate=1.0)


@given(st.sampled_from(sorted(GOOD)), ANYTHING)
def test_any_value_is_refused_or_valid(name: str, value: object) -> None:
    """With one value replaced, a setting is refused, or has that value with its type and within its limits."""
    try:
        setting = parse_setting({**GOOD, name: value})
    except SettingError:
        return
    found = getattr(setting, name)
    assert found == value
    assert type(found) is type(GOOD[name])
    if name in LIMITS:
        lowest, highest = LIMITS[name]
        assert lowest <= found <= highest


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"micro_batch_size": True}, "micro_batch_size"),
        ({"micro_batch_size": 16.0}, "micro_batch_size"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"micro_batch_size": "16"}, "micro_batch_size"),
        ({"learning_rate": math.nan}, "learning_rate"),
        ({"learning_rate": math.inf}, "learning_rate"),
        ({"learning_rate": True}, "learning_rate"),
        ({"learning_rate": 10**400}, "learning_rate"),
        ({"seed": 2**32}, "seed"),
        ({"seed": -1}, "seed"),
        ({"task": "os"}, "task"),
        ({"task": ["digits"]}, "task"),
        ({"mistake": "right"}, "mistake"),
        ({"norm": "batch"}, "norm_of_task"),
        ({"mistake": "zero_each", "precision": "bf16"}, "precision_of_mistake"),
        ({"micro_batch_size": 256, "accumulation_steps": 64}, "batch_too_large"),
        ({"micro_batch_size": 256, "accumulation_steps": 16, "steps": 2_000}, "too_much_work"),
        ({"task": "text", "micro_batch_size": 256, "accumulation_steps": 16, "steps": 1}, "too_much_memory"),
        ({"extra": 1}, "keys"),
        ({"ranks": 3}, "ranks"),
        ({"ranks": True}, "ranks"),
        ({"memory_limit_kib": -1}, "memory_limit_kib"),
        ({"memory_limit_kib": 1.5}, "memory_limit_kib"),
        ({"norm_policy": "layer"}, "norm_policy"),
        ({"norm_policy": "exact"}, "policy_of_norm"),
        ({"task": "shapes", "norm": "group", "norm_policy": "exact"}, "policy_of_norm"),
        ({"task": "shapes", "norm": "batch", "norm_policy": "ghost", "micro_batch_size": 3}, "policy_of_norm"),
        ({"mistake": "zero_each", "ranks": 2}, "engine_only"),
        ({"mistake": "zero_each", "memory_limit_kib": 512}, "engine_only"),
        ({"micro_batch_size": 256, "accumulation_steps": 16, "ranks": 2, "steps": 1}, "batch_too_large"),
    ],
)
def test_each_refusal_has_its_code(change: dict[str, Any], code: str) -> None:
    """Types are exact, limits are enforced, and combinations that are too large are refused."""
    assert code_of({**GOOD, **change}) == code


@given(
    st.builds(
        PlaygroundSetting,
        task=st.sampled_from(["digits", "spirals", "text"]),
        micro_batch_size=st.integers(1, 16),
        accumulation_steps=st.integers(1, 16),
        optimizer=st.sampled_from(["sgd", "adamw"]),
        learning_rate=st.floats(1e-6, 10.0),
        steps=st.integers(1, 2_000),
        seed=st.integers(0, 2**32 - 1),
        mistake=st.sampled_from(["", "drop_tail"]),
    )
    | st.builds(
        PlaygroundSetting,
        task=st.just("shapes"),
        norm=st.just("batch"),
        norm_policy=st.sampled_from(["keep", "exact", "ghost", "freeze", "sync"]),
        ranks=st.integers(1, 2),
        memory_limit_kib=st.integers(0, 2**20),
    )
)
def test_a_command_line_is_the_setting(setting: PlaygroundSetting) -> None:
    """The arguments of the command line are parsed as the same setting."""
    program, *words = as_command(setting).split()[2:]

    assert program == "anybatch_guide.play"
    assert read(words) == setting


@pytest.mark.parametrize("word", ["steps", "stepz=1", "steps=many", "steps=1.5", "=", "steps=true"])
def test_unknown_arguments_are_refused(word: str) -> None:
    """An unknown argument is refused."""
    with pytest.raises(SettingError):
        read([word])
