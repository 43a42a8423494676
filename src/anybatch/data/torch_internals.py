"""Private interfaces of torch for data loading, verified on the versions in `anybatch.core.torch_internals.SEEN`."""

from typing import Any

from torch.utils.data import _utils, get_worker_info


def hides_worker(of: Any = _utils) -> bool:  # noqa: ANN401 (torch)
    """Make this worker look like the calling process to data sets; return whether that worked.

    `torch.utils.data._utils.worker._worker_info`, which `get_worker_info` returns. The public function is called
    afterwards, so that False reports a torch that stores it elsewhere.
    """
    worker = getattr(of, "worker", None)
    if worker is not None:
        worker._worker_info = None
    return get_worker_info() is None
