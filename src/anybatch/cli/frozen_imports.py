"""What the program imports stays to its end, so Python's garbage collector need not look at it."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Keep the garbage collector from ever looking at objects made inside.

    The million objects of torch's modules stay to the end anyway, and visiting them again and again takes up to a
    second. Where torch has been imported before, nothing is kept: this process is more than our program, and what
    others have made in it may be collected.
    """
    if "torch" in sys.modules:
        yield
        return
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if enabled:
            gc.enable()
