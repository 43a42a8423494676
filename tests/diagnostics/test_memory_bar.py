"""Bars of memory add up, and are readable as plain text in 80 columns."""

from hypothesis import given
from hypothesis import strategies as st

from anybatch.diagnostics.memory_pictures import memory_bars
from anybatch.memory.trace import ORDER

MIB = 2**20


def test_bars_have_the_share_of_their_purpose() -> None:
    """Each purpose has its bytes, its share and a bar; free memory is drawn in dots."""
    text = memory_bars({"weights": 20 * MIB, "activations": 10 * MIB, "inputs": 1, "buffers": 0}, 40 * MIB)

    assert text.splitlines() == [
        "weights       20.0 MiB  50.0%  " + "#" * 20,
        "activations   10.0 MiB  25.0%  " + "#" * 10,
        "inputs         1 bytes   0.0%",
        "free          10.0 MiB  25.0%  " + "." * 10,
    ]


@given(sizes=st.lists(st.integers(0, 2**45), max_size=7), total=st.none() | st.integers(0, 2**45))
def test_memory_that_exceeds_the_device(sizes: list[int], total: int | None) -> None:
    """Lines fit a terminal for any sizes; memory that exceeds the device leaves nothing free, and is named."""
    text = memory_bars(dict(zip(ORDER, sizes, strict=False)), total)

    assert all(len(line) <= 80 for line in text.splitlines())
    assert ("free" in text) == (total is not None and total > sum(sizes))
    assert ("available" in text) == (total is not None and total < sum(sizes))
