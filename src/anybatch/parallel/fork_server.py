"""The fork server: a process that imports torch once and is forked for every rank.

Importing torch takes seconds, forking takes milliseconds. Commands start the server before they import torch
themselves, so that both import it in parallel.
"""

import atexit
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.util import get_temp_dir

_FOLDER = "ANYBATCH_FORK_SERVER_FOLDER"
_LONGEST_FOLDER = 70  # multiprocessing adds 32 bytes for a Unix socket, whose path may have 107 (unix(7)), 103 on macOS


def rank_context(*preload: str) -> ForkServerContext | SpawnContext:
    """Return the context that starts ranks, if safe as forks of a server without threads that has only imported.

    On systems other than Linux, forking a process that has imported torch is not safe, so each rank imports torch.

    Args:
        preload: names of the modules that the server imports.
    """
    _choose_temporary_folder()
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


def start_fork_server(*preload: str) -> ForkServerContext | SpawnContext:
    """Start the fork server now if it is not running, and return the context that starts ranks.

    The server ends after this process and all ranks. Ctrl-C only reaches the launcher.

    Args:
        preload: names of the modules that the server imports.
    """
    if sys.platform == "linux":
        resource_tracker.ensure_running()  # first: a launcher killed before its server exists leaves the folder
    context = rank_context(__name__, *preload)
    if isinstance(context, ForkServerContext):
        former = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by ranks
        os.environ[_FOLDER] = get_temp_dir()
        try:
            forkserver.ensure_running()
        finally:
            del os.environ[_FOLDER]
            signal.signal(signal.SIGINT, former)
    return context


def _choose_temporary_folder() -> None:
    """Let multiprocessing use /tmp where TMPDIR is too long for the sockets it puts there.

    Python does so itself from 3.14 on; before, every process start fails with "AF_UNIX path too long".
    """
    if os.name == "posix" and len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER and os.access("/tmp", os.W_OK):  # noqa: S108
        chosen = tempfile.tempdir
        tempfile.tempdir = "/tmp"  # noqa: S108 (mkdtemp makes a private folder in it)
        try:
            get_temp_dir()  # multiprocessing caches this, and ranks inherit it
        finally:
            tempfile.tempdir = chosen


# In the server: remove the launcher's temporary folder at exit, in case the launcher was killed.
if (_folder := os.environ.pop(_FOLDER, None)) is not None:
    atexit.register(shutil.rmtree, _folder, ignore_errors=True)
