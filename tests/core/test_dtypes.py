"""The dtypes used for accumulation."""

import pytest
import torch

from anybatch.core.tensors import accumulation_dtype, is_low_precision, widened, widest_dtype

LOW = (torch.bfloat16, torch.float16)
OTHERS = (torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", [*LOW, *OTHERS])
def test_sums_are_never_narrower_than_float32(dtype: torch.dtype) -> None:
    """Gradients and statistics of bf16 and fp16 tensors are summed in float32, others in their own dtype."""
    tensor = torch.ones(3, dtype=dtype)
    expected = torch.float32 if dtype in LOW else dtype

    assert is_low_precision(tensor) == (dtype in LOW)
    assert accumulation_dtype(tensor) == expected
    assert widened(tensor).dtype == expected
    assert (widened(tensor) is tensor) == (dtype in OTHERS)


def test_a_bf16_sum_stalls() -> None:
    """Adding 1,000 ones one by one gives 256 in bf16, and 1,000 in float32."""
    one, total = torch.ones((), dtype=torch.bfloat16), torch.zeros((), dtype=torch.bfloat16)
    wide = torch.zeros((), dtype=accumulation_dtype(one))
    for _ in range(1000):
        total += one
        wide += one

    assert float(total) == 256
    assert float(wide) == 1000


def test_reported_numbers_are_summed_in_float64_where_the_device_has_it() -> None:
    """Losses, counts and statistics are summed in float64 on every device except mps."""
    assert widest_dtype(torch.device("cpu")) == torch.float64
    assert widest_dtype(torch.device("cuda", 1)) == torch.float64
    assert widest_dtype(torch.device("mps")) == torch.float32
