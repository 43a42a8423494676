"""How torch's threads wait for each other: settled before torch is imported, so by the program, never by the library.

The only file that writes to the environment.
"""

import os
import sys


def let_threads_sleep() -> None:
    """Let torch's threads sleep while they wait for each other, unless the user has said how they should wait.

    By default they spin, and each operator then waits for a thread that another program keeps from its core: see
    docs/decisions/0008-command-line.md. It is read when torch is imported, and changes nothing afterwards.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def hide_logs_of_torch() -> None:
    """Let torch's C++ code print errors only, here and in processes that are started from here.

    Its reducer warns of what a comparison does on purpose. It is read when torch is imported.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
