"""Fingerprints of tensors: equal for equal bytes, different after any change."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from anybatch.parallel.replicas import digest
from tests.faults import sees

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])


@given(size=st.integers(1, 70), dtype=DTYPES, data=st.data())
def test_any_changed_element_changes_the_digest(size: int, dtype: torch.dtype, data: st.DataObject) -> None:
    """A copy has the same digest; a copy with one changed element has a different one."""
    original = torch.randn(size).mul(10).to(dtype)
    place = data.draw(st.integers(0, size - 1))
    changed = original.clone()
    changed[place] = 1 - original[place].to(torch.uint8) if dtype == torch.bool else original[place] * 2 + 1

    assert digest(original.clone()) == digest(original)
    assert digest(changed) != digest(original) or torch.equal(changed, original)


@sees(
    "a digest does not depend on the order",
    "src/anybatch/parallel/replicas.py",
    "_mix(words + positions * _ODD[0]).sum()",
    "_mix(words).sum()",
)
@given(size=st.integers(9, 70), data=st.data())
def test_swapped_elements_change_the_digest(size: int, data: st.DataObject) -> None:
    """The same numbers in a different order change the digest, unlike a plain sum."""
    original = torch.arange(size, dtype=torch.float64)
    one, other = data.draw(st.permutations(range(size)))[:2]
    swapped = original.clone()
    swapped[one], swapped[other] = original[other], original[one]
    assert digest(swapped) != digest(original)
