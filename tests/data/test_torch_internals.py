"""What data loading asks of torch in private: what it does, and that its absence is noticed."""

from types import SimpleNamespace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from anybatch.data.torch_internals import hides_worker


class Answers(IterableDataset[bool]):
    """Yields what a worker is told when it hides, and whether it shows afterwards."""

    def __init__(self, *, knows: bool) -> None:
        self.knows = knows

    def __iter__(self) -> Any:
        yield get_worker_info() is None
        yield hides_worker() if self.knows else hides_worker(SimpleNamespace())
        yield get_worker_info() is None


def test_a_worker_hides() -> None:
    """In a worker `get_worker_info` says nothing after it; where torch keeps that elsewhere, the answer is no."""
    found, without = (list(DataLoader(Answers(knows=knows), batch_size=None, num_workers=1)) for knows in (True, False))

    assert found == [False, True, True]
    assert without == [False, False, False]
