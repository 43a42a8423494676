"""The ways of counting memory, and their meanings, the same in all output and in docs/memory.md."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

Counted = Literal["in tensors", "allocated", "in all", "resident"]
"""Ways of counting, each wider than the one before it."""

MEANINGS: Final[Mapping[Counted, str]] = MappingProxyType(
    {
        "in tensors": "the memory of all live tensors",
        "allocated": "tensors and the workspaces of kernels, as an allocator hands them out",
        "in all": "all that the allocator reserves, the device's context and its libraries",
        "resident": "the whole process, with interpreter, libraries and data",
    }
)

_BEGINS = "counted: "


def counting_text(*ways: Counted) -> str:
    """Return the lines that explain some ways of counting, one for each: `counted: in tensors, ...`."""
    return "\n".join(f"{_BEGINS if way is ways[0] else '':{len(_BEGINS)}}{way}, {MEANINGS[way]}" for way in ways)
