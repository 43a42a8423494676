"""The fork server: a process that imports torch once and is forked for every rank.

Importing torch takes seconds, forking takes milliseconds. The server starts before this process imports torch, so that
both import it in parallel.
"""

import atexit
import multiprocessing
import os
import shutil
import signal
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.util import get_temp_dir

_FOLDER = "ANYBATCH_FORK_SERVER_FOLDER"


def start_fork_server() -> ForkServerContext | SpawnContext:
    """Start the fork server if it is not running, and return the context that starts ranks.

    The server ends after this process and all ranks. On systems other than Linux, forking a process that has imported
    torch is not safe, so each rank imports torch.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Import torch._dynamo once in the server; otherwise the first optimizer of every rank imports it in 1 to 2 seconds.
    context.set_forkserver_preload([__name__, "anybatch.cli.local_ranks", "torch._dynamo"])
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by ranks: only the launcher handles Ctrl-C
    os.environ[_FOLDER] = get_temp_dir()
    try:
        forkserver.ensure_running()
    finally:
        del os.environ[_FOLDER]
        signal.signal(signal.SIGINT, former)
    return context


# In the server: remove the launcher's temporary folder at exit, in case the launcher was killed.
if (_folder := os.environ.pop(_FOLDER, None)) is not None:
    atexit.register(shutil.rmtree, _folder, ignore_errors=True)
