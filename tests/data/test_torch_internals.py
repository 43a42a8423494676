"""Private torch interfaces that data loading uses: their behaviour, and the fallback if torch lacks them."""

from types import SimpleNamespace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from anybatch.core.torch_internals import hides_worker


class Answers(IterableDataset[bool]):
    """Yields whether the worker info is hidden before and after hiding, and whether hiding worked."""

    def __init__(self, *, knows: bool) -> None:
        self.knows = knows

    def __iter__(self) -> Any:
        yield get_worker_info() is None
        yield hides_worker() if self.knows else hides_worker(SimpleNamespace())
        yield get_worker_info() is None


def test_a_worker_hides() -> None:
    """`hides_worker` makes `get_worker_info` return None; if torch's private interface is missing, it returns False."""
    found, without = (list(DataLoader(Answers(knows=knows), batch_size=None, num_workers=1)) for knows in (True, False))

    assert found == [False, True, True]
    assert without == [False, False, False]
