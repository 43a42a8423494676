"""Set before torch is imported: how its threads wait, what it logs, and no garbage collection of its modules.

These are the variables that the program sets, and the library never does. Only `parallel/launchers.py` writes to the
environment besides: it passes a folder to its server.
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def let_threads_sleep() -> None:
    """Let torch's threads sleep while they wait for each other, unless the user has set how they wait.

    By default they spin, and each operator then waits for a thread whose core another program uses: see
    docs/decisions/0008-command-line.md. Without effect once torch is imported.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def hide_logs_of_torch() -> None:
    """Make torch's C++ code print errors only, in this process and its children.

    A comparison triggers warnings of DDP's reducer on purpose. Without effect once torch is imported.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


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
