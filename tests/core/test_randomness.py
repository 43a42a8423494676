"""Keys, not state: which random numbers belong to what."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.randomness import joint_seed, order_seed, sample_seed, unit_seed

WORDS = st.integers(0, 2**31)
UNIT_SEED, SAMPLE_SEED, ORDER_SEED = 7126881891259586119, 8089038617884654512, 6661945773170389229


@given(seed=st.integers(-(2**63), 2**64), step=WORDS, sample=WORDS)
def test_seeds_are_what_torch_takes(seed: int, step: int, sample: int) -> None:
    """Every key gives a seed from 0 to 2**63, which all of torch's generators take, also from a negative seed."""
    for found in (unit_seed(seed, step, sample), sample_seed(seed, step, sample), order_seed(seed, step)):
        assert 0 <= found < 2**63
        torch.Generator().manual_seed(found)


@given(seed=WORDS, first=WORDS, second=WORDS)
def test_purposes_do_not_share_seeds(seed: int, first: int, second: int) -> None:
    """The micro-batch, the sample, the order and the loss of equal numbers have seeds of their own."""
    of_two, of_one = (unit_seed, sample_seed), (order_seed, joint_seed)
    seeds = [of(seed, first, second) for of in of_two] + [of(seed, first) for of in of_one]
    assert len(set(seeds)) == 4


def test_close_keys_are_unrelated() -> None:
    """Neighbouring seeds, steps and samples: no seed twice among 8,000, and every bit is set half of the time."""
    seeds = [unit_seed(seed, step, sample) for seed in range(20) for step in range(20) for sample in range(20)]
    assert len(set(seeds)) == len(seeds)
    for bit in range(63):
        share = sum(seed >> bit & 1 for seed in seeds) / len(seeds)
        assert abs(share - 0.5) < 0.03


def test_words_are_not_interchangeable() -> None:
    """(seed, step, sample) in another order is another key."""
    assert len({unit_seed(1, 2, 3), unit_seed(2, 1, 3), unit_seed(3, 2, 1), unit_seed(1, 3, 2)}) == 4


def test_seeds_are_for_ever() -> None:
    """The same key gives the same seed in every version: a resumed run would draw other numbers otherwise."""
    assert unit_seed(0, 0, 0) == UNIT_SEED
    assert sample_seed(7, 3, 1000) == SAMPLE_SEED
    assert order_seed(7, 3) == ORDER_SEED
