"""Environment variables that torch reads when it is imported: set by the program, never by the library.

Only `fork_server.py` writes to the environment besides: it passes a folder to its server.
"""

import os
import sys


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
