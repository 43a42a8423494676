"""Flat buckets in which gradients add up."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from anybatch.core.dtypes import accumulation_dtype
from anybatch.parallel.gradient_buckets import GradientBuffers

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@given(
    kinds=st.lists(st.tuples(st.integers(1, 40), DTYPES), min_size=1, max_size=12),
    bucket_bytes=st.none() | st.integers(1, 400),
)
def test_buckets_are_a_partition(kinds: list[tuple[int, torch.dtype]], bucket_bytes: int | None) -> None:
    """Every parameter is in exactly one bucket of its own type; buckets run from the last parameter to the first."""
    parameters = [nn.Parameter(torch.ones(size, dtype=dtype)) for size, dtype in kinds]
    buffers = GradientBuffers(parameters, bucket_bytes=bucket_bytes)
    members = [number for bucket in buffers.buckets for number in bucket.members]

    assert sorted(members) == list(range(len(parameters)))
    for bucket in buffers.buckets:
        sizes = [parameters[number].numel() * bucket.flat.itemsize for number in bucket.members]
        assert {accumulation_dtype(parameters[number]) for number in bucket.members} == {bucket.flat.dtype}
        assert sum(sizes) == bucket.flat.numel() * bucket.flat.itemsize
        assert list(bucket.members) == sorted(bucket.members, reverse=True)
        if bucket_bytes is not None:  # closed by the member that filled it
            assert sum(sizes[:-1]) < bucket_bytes
    buffers.close()


def test_autograd_adds_into_the_buckets() -> None:
    """Two backward passes add up in the bucket itself: nothing is copied, and a bf16 gradient is widened and let go."""
    wide, narrow = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    buffers = GradientBuffers([wide, narrow])
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


def test_what_was_not_used_has_no_gradient() -> None:
    """Only parameters that a backward reached count as used; clearing forgets it."""
    used, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    buffers = GradientBuffers([used, idle])
    used.sum().backward()

    assert buffers.used == [True, False]
    assert buffers.gradients(buffers.used)[1] is None
    assert idle.grad is None
    buffers.clear()
    assert buffers.used == [False, False]
    assert idle.grad is not None
    (used.sum() + idle.sum()).backward()
    assert [gradient.tolist() for gradient in buffers.gradients(buffers.used) if gradient is not None] == [[1, 1]] * 2


@pytest.mark.parametrize(
    "parameter",
    [
        torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.empty(5, 3).t(),
        torch.empty(2, 3),
        torch.empty(()),
    ],
    ids=["channels last", "transposed", "contiguous", "one number"],
)
def test_views_have_their_parameters_strides(parameter: torch.Tensor) -> None:
    """A gradient is laid out as its parameter is, so that adding and updating run over memory in one order."""
    made = nn.Parameter(parameter.clone(memory_format=torch.preserve_format))
    buffers = GradientBuffers([made])
    assert made.grad is not None
    assert made.grad.stride() == parameter.stride()
    (made * made.detach()).sum().backward()
    assert torch.equal(made.grad, made.detach())
    buffers.close()


def test_a_closed_buffer_leaves_the_parameters_alone() -> None:
    """After closing, a backward no longer reaches the buffer of a bf16 parameter."""
    narrow = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    buffers = GradientBuffers([narrow])
    buffers.close()
    narrow.sum().backward()
    assert narrow.grad is not None
    assert buffers.buckets[0].flat.tolist() == [0.0, 0.0]
