"""One process that imports torch, to be forked for every rank: importing it takes seconds, forking milliseconds.

Started before this process imports torch itself, so that both do so at the same time.
"""

import multiprocessing
import signal
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, SpawnContext


def start_fork_server() -> ForkServerContext | SpawnContext:
    """Start it, unless it runs already, and return the context that starts ranks. It ends with this process.

    Only on Linux: elsewhere forking a process that has imported torch is not safe, so each rank imports it.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # The first optimizer of a process imports torch's compiler, for a second or two: once here, and not on every rank.
    context.set_forkserver_preload(["anybatch.cli.local_ranks", "torch._dynamo"])
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by ranks: a Ctrl-C is for the launcher alone
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, former)
    return context
