"""Random numbers from keys (seed, step, sample id) instead of generator state: equal keys give equal numbers."""

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
_GOLDEN = 0x9E3779B97F4A7C15


class BatchKey(NamedTuple):
    """The key of an effective batch's random numbers. A tuple for speed, since each step makes one."""

    seed: int
    step: int
    sample_ids: Sequence[int]


def micro_batch_seed(seed: int, step: int, first_sample_id: int) -> int:
    """Return the 63-bit seed of a micro-batch, which depends on (seed, step, first global sample id) only."""
    return _folded(_MICRO_BATCH, seed, step, first_sample_id) >> 1


def joint_seed(seed: int, step: int) -> int:
    """Return a step's 63-bit seed for a loss that compares samples (`ab.joint`); it is the same on every rank."""
    return _folded(_JOINT, seed, step, 0) >> 1


def sample_seed(seed: int, epoch: int, sample_id: int) -> int:
    """Return the 63-bit seed for loading and augmenting a sample in an epoch."""
    return _folded(_AUGMENTATION, seed, epoch, sample_id) >> 1


def order_seed(seed: int, epoch: int) -> int:
    """Return the 63-bit seed of the global sample order of an epoch."""
    return _folded(_ORDER, seed, epoch, 0) >> 1


def step_seed(seed: int, step: int) -> int:
    """Return the 62-bit seed of a step; callers may add small numbers to it without exceeding 63 bits."""
    return _folded(_STEP, seed, step, 0) >> 2


def rounding_seed(seed: int, step: int, parameter: int) -> int:
    """Return the 63-bit seed for rounding the update of one parameter in a step; it is the same on every rank."""
    return _folded(_ROUNDING, seed, step, parameter) >> 1


def sample_keys(key: BatchKey, start: int, stop: int) -> Int64[Tensor, " sample"]:
    """Return the int64 keys, on the CPU, of the samples at positions `start` to `stop` (exclusive) of a batch.

    A key depends on (seed, step, global sample id) only.
    """
    ids = torch.tensor([int(sample) for sample in key.sample_ids[start:stop]], dtype=torch.int64)
    return _finalise(ids.add_(1).mul_(_signed(_GOLDEN)).add_(_folded(_STEP, key.seed, key.step, 1) >> 1))


def sample_bits(keys: Int64[Tensor, " sample"], call: int, shape: Sequence[int]) -> Int32[Tensor, "sample ..."]:
    """Return 32 uniform random bits, as a signed number, for every element of every sample.

    The bits depend only on the sample's key, the number of the call (from 0) and the element's indices (axes are
    counted from the last). Other samples, axis lengths and the device do not matter. `shape` is the shape of one
    sample's numbers, with at least one axis. As a formula: `bits[n, ..., j, i] = half(i % 2, splitmix64(keys[n] +
    c(call) + stride(0) * (i // 2) + stride(1) * j + ...))`, where half(0, x) and half(1, x) are the lower and upper 32
    bits of x, c(call) is an offset for each call, and stride(k) an odd number for each axis.

    Source: the splitmix64 finaliser (Steele, Lea and Flood, OOPSLA 2014), on 64-bit numbers that wrap around. Each
    64-bit output gives 32 bits to each of two neighbouring elements. Not cryptographic.
    """
    state = keys + _signed(_folded(_CALL, call, 0, 0) & ~1)
    lengths = (*shape[:-1], (shape[-1] + 1) // 2)
    for axis, length in enumerate(lengths):
        # Odd, hence one-to-one modulo 2**64: different indices of an axis get different states.
        stride = _signed(_folded(_AXIS, len(lengths) - 1 - axis, 0, 0) | 1)
        state = state.unsqueeze(-1) + torch.arange(length, device=keys.device).mul_(stride)
    # Each 64-bit number gives two 32-bit numbers; for an odd length the last one is dropped.
    return _finalise(state).view(torch.int32)[..., : shape[-1]]


def _finalise(state: Tensor) -> Tensor:
    """Mix the bits of 64-bit numbers in place. Right shifts copy the sign bit, so the result is masked."""
    for shift, factor in _ROUNDS:
        state.bitwise_xor_((state >> shift).bitwise_and_(_MASK >> shift)).mul_(_signed(factor))
    return state.bitwise_xor_((state >> 31).bitwise_and_(_MASK >> 31))


def _signed(word: int) -> int:
    """Return the signed 64-bit number with the same bits."""
    return word - (1 << 64) if word >> 63 else word


def _folded(state: int, *words: int) -> int:
    """Hash integers to 64 bits, so that similar keys give unrelated seeds.

    Source: the splitmix64 finaliser (Steele, Lea and Flood, OOPSLA 2014), one round per integer. Not cryptographic.
    Callers drop the last bit, because `Generator.manual_seed` takes a signed 64-bit integer.
    """
    for word in words:
        state = (state + word + _GOLDEN) & _MASK
        for shift, factor in _ROUNDS:
            state = ((state ^ (state >> shift)) * factor) & _MASK
        state ^= state >> 31
    return state
