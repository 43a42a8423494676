"""Dropout masks by sample, number by number in plain Python: the reference for the tensor version."""

from collections.abc import Sequence
from itertools import product

import torch

from anybatch.core.randomness import BatchKey

WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
STEP, CALL, AXIS = (int.from_bytes(name, "big") for name in (b"step", b"call", b"axis"))


def finalised(word: int) -> int:
    """Apply the output function of splitmix64."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)


def folded(*words: int) -> int:
    """Hash several words to 63 bits."""
    state = words[0]
    for word in words[1:]:
        state = finalised((state + word + GOLDEN) & WORD)
    return state >> 1


def bits(seed: int, step: int, sample: int, call: int, indices: Sequence[int]) -> int:
    """Return the 32 bits of one element, as a number below 2**32."""
    key = finalised((folded(STEP, seed, step, 1) + (sample + 1) * GOLDEN) & WORD)
    last, *others = reversed(indices)
    state = key + 2 * folded(CALL, call, 0, 0)
    for axis, index in enumerate((last // 2, *others)):
        state += (2 * folded(AXIS, axis, 0, 0) + 1) * index
    return finalised(state & WORD) >> 32 * (last % 2) & 0xFFFFFFFF


def mask(key: BatchKey, call: int, shape: Sequence[int], p: float) -> torch.Tensor:
    """Return which elements (samples, *shape) are kept. Bits are compared as signed numbers, from -2**31 on."""
    limit = round(p * 2**32) - 2**31
    rows = [
        [signed(bits(key.seed, key.step, sample, call, indices)) >= limit for indices in product(*map(range, shape))]
        for sample in key.sample_ids
    ]
    return torch.tensor(rows).reshape(len(key.sample_ids), *shape)


def signed(word: int) -> int:
    """Return the signed 32-bit number with the same bits."""
    return word - (1 << 32) if word >> 31 else word
