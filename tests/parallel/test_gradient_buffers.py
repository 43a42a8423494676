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
    "bf16 gradients add up in bf16",
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
    "what was used in a step counts as used for ever",
    "src/anybatch/parallel/gradient_buckets.py",
    """
        self.used[:] = [False] * len(self.used)
""",
    "",
)
def test_what_was_not_used_has_no_gradient() -> None:
    """Only parameters reached by a backward count as used, until the buffers are cleared."""
    used, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    buffers = GradientBuffers([used, idle])
    buffers.place()
    used.sum().backward()

    assert buffers.used == [True, False]
    assert buffers.gradients(buffers.used)[1] is None
    assert idle.grad is None
    buffers.clear()
    assert buffers.used == [False, False]
    assert used.grad is None
    buffers.place()
    assert idle.grad is not None
    (used.sum() + idle.sum()).backward()
    assert [gradient.tolist() for gradient in buffers.gradients(buffers.used) if gradient is not None] == [[1, 1]] * 2


@sees(
    "gradients have other strides than their parameters",
    "src/anybatch/parallel/gradient_buckets.py",
    'torch.empty_like(part, device="meta").stride()',
    'torch.empty(part.shape, device="meta").stride()',
    cases=["channels last"],
    also=["tests/engine/test_parameters.py::test_gradients_have_their_parameters_strides[all_reduce]"],
)
@pytest.mark.parametrize(
    "parameter",
    [
        torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.ones(5, 3).t(),
        torch.ones(2, 3),
        torch.ones(()),
    ],
    ids=["channels last", "transposed", "contiguous", "one number"],
)
def test_views_have_their_parameters_strides(parameter: torch.Tensor) -> None:
    """Gradients have the strides of their parameters, so that updates access memory in one order."""
    made = nn.Parameter(parameter.clone(memory_format=torch.preserve_format))
    buffers = GradientBuffers([made])
    buffers.place()
    assert made.grad is not None
    assert made.grad.stride() == parameter.stride()
    (made * made.detach()).sum().backward()
    assert torch.equal(made.grad, made.detach())
    buffers.close()


@sees(
    "a backward between two steps counts",
    "src/anybatch/parallel/gradient_buckets.py",
    "if not self._is_placed or parameter.grad is None:",
    "if parameter.grad is None:",
)
def test_a_backward_between_steps_does_not_reach_the_buckets() -> None:
    """Gradients added before `place` stay in `.grad` for every dtype."""
    wide, narrow = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    buffers = GradientBuffers([wide, narrow])
    (wide.sum() + narrow.float().sum()).backward()

    assert buffers.used == [False, False]
    assert narrow.grad is not None
    assert not buffers.buckets[0].flat.any()
    buffers.place()
    assert narrow.grad is None
    assert wide.grad is not None
    assert not wide.grad.any()
    buffers.close()
    (wide.sum() + narrow.float().sum()).backward()
    assert narrow.grad is not None, "closed, the buffers take nothing any more"
