"""Keys for random numbers instead of state: the same key gives the same numbers on any rank."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

_MASK = (1 << 64) - 1
# One constant per purpose (its first letters in ASCII), so that equal keys give unrelated seeds for each purpose.
_AUGMENTATION, _MICRO_BATCH, _ORDER, _JOINT = 0x61756766, 0x6D696372, 0x6F726465, 0x6A6F696E
_STEP, _CALL, _AXIS, _ROUNDING = 0x73746570, 0x63616C6C, 0x61786973, 0x726F756E
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
(_SHIFT, _FACTOR), (_SECOND_SHIFT, _SECOND_FACTOR) = _ROUNDS
_GOLDEN = 0x9E3779B97F4A7C15


class BatchKey(NamedTuple):
    """The key of an effective batch's random numbers. A tuple for speed, since each step makes one."""

    seed: int
    step: int
    sample_ids: Sequence[int]


def unit_seed(seed: int, step: int, first_sample_id: int) -> int:
    """Return the 63-bit seed of a micro-batch, which depends on (seed, step, first global sample id) only."""
    return _mix(_MICRO_BATCH, seed, step, first_sample_id)


def joint_seed(seed: int, step: int) -> int:
    """Return the 63-bit seed of a loss across samples that draws random numbers: once per step, equal on every rank."""
    return _mix(_JOINT, seed, step, 0)


def sample_seed(seed: int, epoch: int, sample_id: int) -> int:
    """Return the 63-bit seed for loading and augmenting a sample in an epoch."""
    return sample_seeds(seed, epoch, [sample_id])[0]


def sample_seeds(seed: int, epoch: int, sample_ids: Sequence[int]) -> list[int]:
    """Return `sample_seed` of several samples, faster: the seed and epoch are folded in once."""
    state = _folded(_folded(_AUGMENTATION, seed), epoch)
    return [_folded(state, sample) >> 1 for sample in sample_ids]


def order_seed(seed: int, epoch: int) -> int:
    """Return the 63-bit seed of the global sample order of an epoch."""
    return _mix(_ORDER, seed, epoch, 0)


def step_seed(seed: int, step: int) -> int:
    """Return the 62-bit seed of a step, which leaves room for counting up from it."""
    return _mix(_STEP, seed, step, 0) >> 1


def rounding_seed(seed: int, step: int, parameter: int) -> int:
    """Return the 63-bit seed for rounding the update of a parameter (by its number) in a step: equal on every rank."""
    return _mix(_ROUNDING, seed, step, parameter)


def sample_keys(key: BatchKey, start: int, stop: int) -> Int64[Tensor, " sample"]:
    """Return the int64 keys, on the CPU, of the samples at positions `start` to `stop` (exclusive) of a batch.

    A key depends on (seed, step, global sample id) only.
    """
    ids = torch.tensor([int(sample) for sample in key.sample_ids[start:stop]], dtype=torch.int64)
    return _finalise(ids.add_(1).mul_(_signed(_GOLDEN)).add_(_mix(_STEP, key.seed, key.step, 1)))


def sample_bits(keys: Int64[Tensor, " sample"], call: int, shape: Sequence[int]) -> Int32[Tensor, "sample ..."]:
    """Return 32 uniform random bits, as a signed number, for every element of every sample.

    They depend only on the sample's key, the number of the call (from 0 on) and the element's indices, counted from the
    last axis: not on the other samples, the lengths of the axes, or the device. `shape` is the shape of one sample's
    numbers, with at least one axis. The plain loop: `bits[n, ..., j, i] = half(i % 2, splitmix64(keys[n] + c(call) +
    stride(0) * (i // 2) + stride(1) * j + ...))`.

    Source: the splitmix64 finaliser (Steele, Lea and Flood, OOPSLA 2014), on 64-bit numbers that wrap around. Each
    output serves two neighbours, 32 bits each. Not cryptographic.
    """
    state = keys + _signed(_mix(_CALL, call, 0, 0) << 1)
    lengths = (*shape[:-1], (shape[-1] + 1) // 2)
    for axis, length in enumerate(lengths):
        # Odd, hence one-to-one modulo 2**64: different indices of an axis get different states.
        stride = _signed(_mix(_AXIS, len(lengths) - 1 - axis, 0, 0) << 1 | 1)
        state = state.unsqueeze(-1) + torch.arange(length, device=keys.device).mul_(stride)
    # Each 64-bit number gives two; an odd length drops one.
    return _finalise(state).view(torch.int32)[..., : shape[-1]]


def _finalise(state: Tensor) -> Tensor:
    """Mix 64-bit numbers in place. Shifts fill with the sign, which is masked away."""
    for shift, factor in _ROUNDS:
        state.bitwise_xor_((state >> shift).bitwise_and_(_MASK >> shift)).mul_(_signed(factor))
    return state.bitwise_xor_((state >> 31).bitwise_and_(_MASK >> 31))


def _signed(word: int) -> int:
    """Return the signed 64-bit number with the same bits."""
    return word - (1 << 64) if word >> 63 else word


def _mix(purpose: int, first: int, second: int, third: int) -> int:
    """Fold four integers into 63 bits; close keys give unrelated seeds.

    Source: the splitmix64 finaliser (Steele, Lea and Flood, OOPSLA 2014), one round per word. Not cryptographic.
    63 bits, because `Generator.manual_seed` takes a signed 64-bit integer.
    """
    return _folded(_folded(_folded(purpose, first), second), third) >> 1


def _folded(state: int, word: int) -> int:
    """Fold one more word into a 64-bit state."""
    state = (state + word + _GOLDEN) & _MASK
    # Without a loop, because it runs for each sample.
    state = ((state ^ (state >> _SHIFT)) * _FACTOR) & _MASK
    state = ((state ^ (state >> _SECOND_SHIFT)) * _SECOND_FACTOR) & _MASK
    return state ^ (state >> 31)
