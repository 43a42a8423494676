"""Flat buckets in which gradients accumulate."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from anybatch.core.tensors import accumulation_dtype
from anybatch.parallel.gradient_buckets import GradientBuffers
from tests.faults import sees

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@sees(
    "a full bucket is lost",
    "src/anybatch/parallel/gradient_buckets.py",
    "return closed + [tuple(members)",
    "return closed[1:] + [tuple(members)",
)
@given(
    kinds=st.lists(st.tuples(st.integers(1, 40), DTYPES), min_size=1, max_size=12),
    bucket_bytes=st.none() | st.integers(1, 400),
)
@pytest.mark.slow
def test_buckets_are_a_partition(kinds: list[tuple[int, torch.dtype]], bucket_bytes: int | None) -> None:
    """Every parameter is in exactly one bucket of its dtype; buckets run from the last parameter to the first."""
    parameters = [nn.Parameter(torch.ones(size, dtype=dtype)) for size, dtype in kinds]
    buffers = GradientBuffers(parameters, bucket_bytes=bucket_bytes)
    members = [number for bucket in buffers.buckets for number in bucket.members]

    assert sorted(members) == list(range(len(parameters)))
    for bucket in buffers.buckets:
        sizes = [parameters[number].numel() * bucket.flat.itemsize for number in bucket.members]
        assert {accumulation_dtype(parameters[number]) for number in bucket.members} == {bucket.flat.dtype}
        assert sum(sizes) == bucket.flat.numel() * bucket.flat.itemsize
        assert list(bucket.members) == sorted(bucket.members, reverse=True)
        if bucket_bytes is not None:  # the member that filled the bucket closed it
            assert sum(sizes[:-1]) < bucket_bytes
    buffers.close()


@sees(
    "bf16 gradients accumulate in bf16",
    "src/anybatch/core/tensors.py",
    "return torch.float32 if is_low_precision(tensor) else tensor.dtype",
    "return tensor.dtype",
    also=["tests/engine/test_precision.py::test_bf16_gradients_add_up_in_float32"],
)
def test_autograd_adds_into_the_buckets() -> None:
    """Two backward passes accumulate in the bucket without copies; a bf16 gradient is widened, then freed."""
    wide, narrow = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    buffers = GradientBuffers([wide, narrow])
    buffers.place()
    for _ in range(2):
        (wide.sum() * 2 + narrow.float().sum() * 3).backward()
    gradients = buffers.gradients(buffers.used)

    assert [None if gradient is None else gradient.tolist() for gradient in gradients] == [[4.0] * 3, [6.0] * 2]
    assert [gradient.dtype for gradient in gradients if gradient is not None] == [torch.float32] * 2
    (bucket,) = buffers.buckets
    assert bucket.flat.tolist() == [6.0, 6.0, 4.0, 4.0, 4.0]
    assert wide.grad is not None
    assert wide.grad.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()
    assert narrow.grad is None


@sees(
    "an unused parameter keeps the last step's gradient",
    "src/anybatch/parallel/gradient_buckets.py",
    """
            bucket.flat.zero_()
""",
    """
            pass
""",
    also=["tests/engine/test_parameters.py::test_every_parameter_gets_the_plain_gradient[2-ranks-frozen]"],
)
@sees(
    "a parameter used in one step counts as used in all later ones",
    "src/anybatch/parallel/gradient_buckets.py",
    """
        self.used[:] = [False] * len(self.used)
""",
    "",
)
@sees(
    "a backward between two steps counts",
    "src/anybatch/parallel/gradient_buckets.py",
    "if not self._is_placed or parameter.grad is None:",
    "if parameter.grad is None:",
)
def test_only_backwards_of_a_step_count() -> None:
    """Only gradients between `place` and `clear` count, of the parameters that a backward has reached since."""
    used, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    narrow = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    buffers = GradientBuffers([used, idle, narrow])
    (used.sum() + narrow.float().sum()).backward()
    assert buffers.used == [False] * 3
    assert not any(flat.any() for flat in buffers.flats)

    expected: list[list[list[float] | None]] = [[[1, 1], None, None], [[1, 1], [1, 1], None]]
    for loss, gradients in zip((used.sum(), used.sum() + idle.sum()), expected, strict=True):
        buffers.place()
        assert narrow.grad is None
        loss.backward()
        assert buffers.used == [gradient is not None for gradient in gradients]
        found = buffers.gradients(buffers.used)
        assert [None if gradient is None else gradient.tolist() for gradient in found] == gradients
        assert (idle.grad is None) == (gradients[1] is None)
        buffers.clear()
        assert buffers.used == [False] * 3
        assert used.grad is None
    buffers.close()
    narrow.float().sum().backward()
    assert narrow.grad is not None, "closed, the buffers take nothing any more"
