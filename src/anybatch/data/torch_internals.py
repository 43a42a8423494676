"""Private interfaces of torch that data loading uses. Seen on the versions in `anybatch.core.torch_internals.SEEN`."""

from typing import Any

from torch.utils.data import _utils, get_worker_info


def hides_worker(of: Any = _utils) -> bool:  # noqa: ANN401 (torch)
    """Make this worker look like the calling process to data sets; return whether it does now.

    `torch.utils.data._utils.worker._worker_info`, which `get_worker_info` returns. The question in public is asked
    afterwards, so that a torch which keeps it elsewhere is noticed, by the answer False.
    """
    worker = getattr(of, "worker", None)
    if worker is not None:
        worker._worker_info = None
    return get_worker_info() is None
