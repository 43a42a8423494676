"""Exempts imported modules from garbage collection."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Exempt the objects created inside from garbage collection.

    Torch's modules have a million objects that live until the program exits; visiting them takes up to a second.
    Without effect if torch is already imported, because the process then has objects of other code too.
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
