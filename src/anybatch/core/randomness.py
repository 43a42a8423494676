"""Chapter 3: which random numbers belong to what. Keys, not state: the same key gives the same numbers on any rank."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

_MASK = (1 << 64) - 1
# One word per purpose, its first letters in ASCII: equal numbers give unrelated seeds for different purposes.
_AUGMENTATION, _MICRO_BATCH, _ORDER, _JOINT = 0x61756766, 0x6D696372, 0x6F726465, 0x6A6F696E
_STEP, _CALL, _AXIS, _ROUNDING = 0x73746570, 0x63616C6C, 0x61786973, 0x726F756E
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
(_SHIFT, _FACTOR), (_SECOND_SHIFT, _SECOND_FACTOR) = _ROUNDS
_GOLDEN = 0x9E3779B97F4A7C15


class BatchKey(NamedTuple):
    """The key of an effective batch's random numbers. A tuple, since each step makes one.

    Attributes:
        seed: of the run.
        step: number of the step, from 0 on.
        sample_ids: global ids of its samples, in the order in which they are cut.
    """

    seed: int
    step: int
    sample_ids: Sequence[int]


def unit_seed(seed: int, step: int, first_sample_id: int) -> int:
    """Return the seed of a micro-batch: a function of (seed, step, first global sample id) and nothing else.

    Args:
        seed: of the run, any integer.
        step: number of the step, from 0 on.
        first_sample_id: global id of the micro-batch's first sample, in the order in which samples are cut.

    Returns:
        A number from 0 to 2**63 - 1.
    """
    return _mix(_MICRO_BATCH, seed, step, first_sample_id)


def joint_seed(seed: int, step: int) -> int:
    """Return the seed of a loss across samples that draws numbers itself: once per step, equal on every rank.

    Args:
        seed: of the run, any integer.
        step: number of the step, from 0 on.

    Returns:
        A number from 0 to 2**63 - 1.
    """
    return _mix(_JOINT, seed, step, 0)


def sample_seed(seed: int, epoch: int, sample_id: int) -> int:
    """Return the seed under which a sample is loaded and augmented in an epoch.

    Args:
        seed: of the data, any integer.
        epoch: from 0 on.
        sample_id: global id of the sample.

    Returns:
        A number from 0 to 2**63 - 1.
    """
    return sample_seeds(seed, epoch, [sample_id])[0]


def sample_seeds(seed: int, epoch: int, sample_ids: Sequence[int]) -> list[int]:
    """Return what `sample_seed` does for some samples at once, which share the words they have in common.

    Args:
        seed: of the data, any integer.
        epoch: from 0 on.
        sample_ids: global ids of the samples.
    """
    state = _folded(_folded(_AUGMENTATION, seed), epoch)
    return [_folded(state, sample) >> 1 for sample in sample_ids]


def order_seed(seed: int, epoch: int) -> int:
    """Return the seed of the global sample order of an epoch.

    Args:
        seed: of the data, any integer.
        epoch: from 0 on.

    Returns:
        A number from 0 to 2**63 - 1.
    """
    return _mix(_ORDER, seed, epoch, 0)


def step_seed(seed: int, step: int) -> int:
    """Return the seed of a step.

    Args:
        seed: of the run, any integer.
        step: number of the step, from 0 on.

    Returns:
        A number from 0 to 2**62 - 1, which leaves room for counting on from it.
    """
    return _mix(_STEP, seed, step, 0) >> 1


def rounding_seed(seed: int, step: int, parameter: int) -> int:
    """Return the seed under which the update of a parameter is rounded in a step: equal on every rank.

    Args:
        seed: of the run, any integer.
        step: number of the step, from 0 on.
        parameter: its number.

    Returns:
        A number from 0 to 2**63 - 1.
    """
    return _mix(_ROUNDING, seed, step, parameter)


def sample_keys(key: BatchKey, start: int, stop: int) -> Int64[Tensor, " sample"]:
    """Return the 64-bit key of each of some samples in one step: a function of (seed, step, global sample id).

    Args:
        key: of the effective batch.
        start: position of the first sample in `key.sample_ids`.
        stop: position behind the last sample.

    Returns:
        Integers (stop - start,), on the CPU.
    """
    ids = torch.tensor([int(sample) for sample in key.sample_ids[start:stop]], dtype=torch.int64)
    return _finalise(ids.add_(1).mul_(_signed(_GOLDEN)).add_(_mix(_STEP, key.seed, key.step, 1)))


def sample_bits(keys: Int64[Tensor, " sample"], call: int, shape: Sequence[int]) -> Int32[Tensor, "sample ..."]:
    """Return 32 uniform random bits, as a signed number, for every element of every sample.

    They are a function of the sample's key, the number of the call and the element's indices, counted from the last
    axis, and of nothing else: not of the other samples, the lengths of the axes, or the device. The plain loop:
    `bits[n, ..., j, i] = half(i % 2, splitmix64(keys[n] + c(call) + stride(0) * (i // 2) + stride(1) * j + ...))`.

    Args:
        keys: what `sample_keys` returns.
        call: number of the call, from 0 on.
        shape: of one sample's numbers; at least one axis.

    Source: the splitmix64 finaliser (Steele, Lea and Flood, OOPSLA 2014), on 64-bit numbers that wrap around. One of
    its outputs serves two neighbours, 32 bits each. Not cryptographic.
    """
    state = keys + _signed(_mix(_CALL, call, 0, 0) << 1)
    lengths = (*shape[:-1], (shape[-1] + 1) // 2)
    for axis, length in enumerate(lengths):
        # Odd, hence one-to-one modulo 2**64: no two indices of an axis get the same state.
        stride = _signed(_mix(_AXIS, len(lengths) - 1 - axis, 0, 0) << 1 | 1)
        state = state.unsqueeze(-1) + torch.arange(length, device=keys.device).mul_(stride)
    # Each 64-bit number gives two; of an odd length one is left over.
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
    """Return 64 bits into which one more word has been folded."""
    state = (state + word + _GOLDEN) & _MASK
    # Without a loop: it is asked for each sample.
    state = ((state ^ (state >> _SHIFT)) * _FACTOR) & _MASK
    state = ((state ^ (state >> _SECOND_SHIFT)) * _SECOND_FACTOR) & _MASK
    return state ^ (state >> 31)
