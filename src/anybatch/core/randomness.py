"""Chapter 3: which random numbers belong to what. Keys, not state: the same key gives the same numbers on any rank."""

_MASK = (1 << 64) - 1
_AUGMENTATION, _MICRO_BATCH, _ORDER, _JOINT = 0x61756766, 0x6D696372, 0x6F726465, 0x6A6F696E


def unit_seed(seed: int, step: int, first_sample_id: int) -> int:
    """Return the 64-bit seed of a micro-batch: a function of (seed, step, first global sample id) and nothing else."""
    return _mix(_MICRO_BATCH, seed, step, first_sample_id)


def joint_seed(seed: int, step: int) -> int:
    """Return the 64-bit seed of what a loss across samples draws itself, once per step and alike on every rank."""
    return _mix(_JOINT, seed, step, 0)


def sample_seed(seed: int, epoch: int, sample_id: int) -> int:
    """Return the 64-bit seed under which sample `sample_id` is loaded and augmented in `epoch`."""
    return _mix(_AUGMENTATION, seed, epoch, sample_id)


def order_seed(seed: int, epoch: int) -> int:
    """Return the 64-bit seed of the global sample order of `epoch`."""
    return _mix(_ORDER, seed, epoch, 0)


def _mix(purpose: int, first: int, second: int, third: int) -> int:
    """Fold four integers into 63 bits; close keys give unrelated seeds.

    Source: the splitmix64 finaliser (Steele, Lea and Flood, OOPSLA 2014), one round per word. Not cryptographic.
    63 bits, because `Generator.manual_seed` takes a signed 64-bit integer.
    """
    state = purpose
    for word in (first, second, third):
        state = (state + word + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1
