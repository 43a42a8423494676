"""Random numbers are determined by keys, not by generator state."""

import itertools

import torch
from hypothesis import strategies as st

from anybatch.core.randomness import (
    BatchKey,
    micro_batch_seed,
    order_seed,
    sample_bits,
    sample_keys,
    sample_seed,
    step_seed,
)
from tests.engine.masks_by_hand import bits as bits_by_hand

WORDS = st.integers(0, 2**31)
UNIT_SEED, SAMPLE_SEED, ORDER_SEED = 7126881891259586119, 8089038617884654512, 6661945773170389229


def test_seeds_are_stable() -> None:
    """The same key gives the same seed in every version, as a resumed run would otherwise draw other numbers."""
    assert micro_batch_seed(0, 0, 0) == UNIT_SEED
    assert sample_seed(7, 3, 1000) == SAMPLE_SEED
    assert order_seed(7, 3) == ORDER_SEED


KEY = BatchKey(7, 3, (0, 5, 9, 10**12, -2))
BITS, STEP_SEED = [514556067, -1431063392], 223493028623666674


def bits(key: BatchKey, call: int, *shape: int) -> torch.Tensor:
    """Return the bits of all samples of a batch."""
    return sample_bits(sample_keys(key, 0, len(key.sample_ids)), call, shape)


def test_bits_match_plain_arithmetic() -> None:
    """Wrap-around tensor arithmetic matches Python's integers, sample by sample."""
    shape = 3, 2, 5
    found = bits(KEY, 2, *shape)
    for number, sample in enumerate(KEY.sample_ids):
        for indices in itertools.product(*map(range, shape)):
            assert int(found[(number, *indices)]) & 0xFFFFFFFF == bits_by_hand(7, 3, sample, 2, indices)


def test_bits_belong_to_samples() -> None:
    """A sample's bits do not depend on its neighbors, their order, or the lengths of the axes."""
    whole = bits(KEY, 0, 4, 6)
    for number, sample in enumerate(KEY.sample_ids):
        assert torch.equal(bits(BatchKey(7, 3, (sample,)), 0, 4, 6)[0], whole[number])
        assert torch.equal(sample_bits(sample_keys(KEY, number, number + 1), 0, (4, 6))[0], whole[number])
    assert torch.equal(bits(KEY, 0, 7, 9)[:, :4, :6], whole)


def test_bits_are_stable() -> None:
    """The same key gives the same bits in every version, and step seeds are within torch's range."""
    assert bits(KEY, 1, 2)[3].tolist() == BITS
    assert step_seed(7, 3) == STEP_SEED
    assert 0 <= step_seed(-1, 2**31) < 2**62
