"""How much memory a run uses, asked without waiting for its device."""

import mmap
from dataclasses import dataclass
from pathlib import Path

import torch

_PROCESS_PAGES = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in use.

    Attributes:
        num_bytes: on an accelerator the most that tensors held at once, elsewhere what the process holds.
        limit_bytes: what there is; None if that is not said.
    """

    num_bytes: int
    limit_bytes: int | None = None


def memory_in_use(device: str) -> Memory | None:
    """Return the peak of a CUDA device, or what this process holds; None where the system does not tell.

    Args:
        device: the device of the run, such as `cpu` or `cuda:0`, which is the current one then.
    """
    if device.startswith("cuda") and torch.cuda.is_initialized():
        limit = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return Memory(torch.cuda.max_memory_allocated(), limit)
    try:
        resident_pages = int(_PROCESS_PAGES.read_text(encoding="ascii").split()[1])
    except OSError:  # not Linux
        return None
    return Memory(resident_pages * mmap.PAGESIZE)
