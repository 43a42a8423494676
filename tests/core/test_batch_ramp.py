"""A ramp of effective batch sizes depends only on the samples of a run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.schedules import BatchRamp, Stage, steps_of_samples
from anybatch.errors import BatchSizeError
from tests.raising import raises

stages = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60)), min_size=1, max_size=4)


@given(given_stages=stages, num_samples=st.integers(0, 300))
def test_counting_the_steps_of_a_ramp_is_walking_them(given_stages: list[tuple[int, int]], num_samples: int) -> None:
    """The number of steps matches a step-by-step count with the size of each step's stage."""
    *first, last = [(size, size + more) for size, more in given_stages]
    ramp = BatchRamp(*first, (last[0], None))
    done = steps = 0
    while done < num_samples:
        done, steps = done + ramp.at(done), steps + 1
    assert steps_of_samples(num_samples, effective_batch_size=ramp) == steps


def test_stages_in_tokens_are_whole_samples() -> None:
    """Tokens are divided by tokens per sample, lengths rounded up; fractions of samples raise."""
    assert BatchRamp.in_tokens((64, 1000), (128, None), tokens_per_sample=32) == BatchRamp((2, 32), (4, None))
    with raises(BatchSizeError, "no-whole-samples"):
        BatchRamp.in_tokens((64, 1000), (100, None), tokens_per_sample=32)


@pytest.mark.parametrize(
    ("given_stages", "code"),
    [
        ((), "no-stages"),
        (((0, None),), "not-a-whole-number"),
        (((4, 100),), "end-of-stage"),
        (((4, None), (8, None)), "end-of-stage"),
        (((8, 4), (16, None)), "stage-too-short"),
        (((8, 0), (16, None)), "not-a-whole-number"),
    ],
)
def test_ramps_that_cannot_be_are_refused(given_stages: tuple[Stage, ...], code: str) -> None:
    """An invalid ramp raises an error when it is made."""
    with raises(BatchSizeError, code):
        BatchRamp(*given_stages)


@given(given_stages=stages)
def test_a_ramp_is_read_as_it_is_written(given_stages: list[tuple[int, int]]) -> None:
    """Reading the notation of any ramp gives the same ramp."""
    *first, last = [(size, size + more) for size, more in given_stages]
    ramp = BatchRamp(*first, (last[0], None))
    assert BatchRamp.parse(ramp.notation) == ramp


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("32,128", "not-a-ramp"),
        ("32@5,128@20", "not-a-ramp"),
        ("32:128@20000", "not-a-ramp"),
        ("", "not-a-ramp"),
        ("32,x@5", "not-a-ramp"),
        ("8,16@40,32@40", "stages-out-of-order"),
        ("8,16@0", "stages-out-of-order"),
        ("8,16@4", "stage-too-short"),
        ("0,16@4", "not-a-whole-number"),
    ],
)
def test_text_that_is_no_ramp_is_refused(text: str, code: str) -> None:
    """The error for invalid text names the fault and shows the notation."""
    with raises(BatchSizeError, code):
        BatchRamp.parse(text)
