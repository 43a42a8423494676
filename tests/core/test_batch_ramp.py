"""A ramp of effective batch sizes depends only on the samples of a run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.schedules import BatchRamp, Stage, sizes_of, steps_of_samples
from anybatch.errors import BatchSizeError

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


def test_stages_are_named_and_follow_each_other() -> None:
    """Each stage lasts for its number of samples, and the ramp reports it."""
    ramp = BatchRamp((4, 10), (8, 16), (32, None))
    assert [ramp.at(number) for number in (0, 9, 10, 25, 26, 10**9)] == [4, 4, 8, 8, 32, 32]
    assert (ramp.sizes, ramp.num_samples) == ((4, 8, 32), 26)
    assert str(ramp) == "4 for 10 samples, then 8 for 16 samples, then 32"


def test_stages_in_tokens_are_whole_samples() -> None:
    """Tokens are divided by tokens per sample, lengths rounded up; fractions of samples raise."""
    assert BatchRamp.in_tokens((64, 1000), (128, None), tokens_per_sample=32) == BatchRamp((2, 32), (4, None))
    with pytest.raises(BatchSizeError, match=r"stage 1 has 100 tokens .* The nearest are 96 and 128 tokens"):
        BatchRamp.in_tokens((64, 1000), (100, None), tokens_per_sample=32)


@pytest.mark.parametrize(
    ("given_stages", "words"),
    [
        ((), "needs stages"),
        (((0, None),), "effective batch size of stage 0=0"),
        (((4, 100),), "is the last and ends after 100"),
        (((4, None), (8, None)), "stage 0 of a ramp has no end"),
        (((8, 4), (16, None)), "not one whole step"),
        (((8, 0), (16, None)), "samples of stage 0=0"),
    ],
)
def test_ramps_that_cannot_be_are_refused(given_stages: tuple[Stage, ...], words: str) -> None:
    """An invalid ramp raises an error when it is made."""
    with pytest.raises(BatchSizeError, match=words):
        BatchRamp(*given_stages)


@given(given_stages=stages)
def test_a_ramp_is_read_as_it_is_written(given_stages: list[tuple[int, int]]) -> None:
    """Reading the notation of any ramp gives the same ramp."""
    *first, last = [(size, size + more) for size, more in given_stages]
    ramp = BatchRamp(*first, (last[0], None))
    assert BatchRamp.parse(ramp.notation) == ramp


def test_a_ramp_is_written_by_the_samples_at_which_stages_begin() -> None:
    """Positions count from the beginning of the run; they are not lengths."""
    ramp = BatchRamp.parse("32, 128@20000,512@100000")
    assert ramp == BatchRamp((32, 20_000), (128, 80_000), (512, None))
    assert ramp.notation == "32,128@20000,512@100000"
    assert (sizes_of(ramp), sizes_of(7)) == ((32, 128, 512), (7,))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("32,128", "each but the first"),
        ("32@5,128@20", "each but the first"),
        ("32:128@20000", "must be sizes"),
        ("", "must be sizes"),
        ("32,x@5", "must be sizes"),
        ("8,16@40,32@40", "begins at 40, not after the one before it, at 40"),
        ("8,16@0", "begins at 0, not after the one before it, at 0"),
        ("8,16@4", "not one whole step"),
        ("0,16@4", "effective batch size of stage 0=0"),
    ],
)
def test_text_that_is_no_ramp_is_refused(text: str, words: str) -> None:
    """The error for invalid text names the fault and shows the notation."""
    with pytest.raises(BatchSizeError, match=words):
        BatchRamp.parse(text)
