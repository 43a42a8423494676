"""The colour of what memory is held for: the same in figures and on terminals, and told apart by colour-blind readers.

Shades of the palette of Okabe and Ito. What stays from step to step is cool, what comes and goes is warm.
"""

import itertools
from collections.abc import Iterable, Mapping
from types import MappingProxyType

_KNOWN: Mapping[str, str] = MappingProxyType(
    {
        "weights": "#00507F",
        "buffers": "#7F6BB3",
        "optimizer": "#009E73",
        "gradients": "#56B4E9",
        "inputs": "#F0DC57",
        "activations": "#E69F00",
        "temporaries": "#D55E00",
    }
)
_OTHERS = ("#CC79A7", "#8C5A3C", "#5C7A29", "#8C8C8C", "#3B3B3B", "#B9A6D9")


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each name; names that are no category get one of some others, in order."""
    others = itertools.cycle(_OTHERS)
    return {name: _KNOWN.get(name) or next(others) for name in names}
