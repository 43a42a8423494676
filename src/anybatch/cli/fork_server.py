"""One process that imports torch, to be forked for every rank: importing it takes seconds, forking milliseconds.

Started before this process imports torch itself, so that both do so at the same time.
"""

import multiprocessing
import signal
import sys
from multiprocessing import forkserver
from typing import Final, Literal

START_METHOD: Final[Literal["forkserver", "spawn"]] = "forkserver" if sys.platform == "linux" else "spawn"
"""How ranks are started. Elsewhere forking a process that has imported torch is not safe, so each rank imports it."""


def start_fork_server() -> None:
    """Start it, unless it runs, or ranks are not forked here. It ends with this process."""
    if START_METHOD != "forkserver":
        return
    # The first optimizer of a process imports torch's compiler, for a second or two: once here, and not on every rank.
    multiprocessing.get_context(START_METHOD).set_forkserver_preload(["anybatch.cli.local_ranks", "torch._dynamo"])
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by ranks: a Ctrl-C is for the launcher alone
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, former)
