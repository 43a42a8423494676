"""Runs the user's code in a subprocess, in a temporary copy of the working folder, so that it changes no user files.

Relative paths refer to the copy. An audit hook of Python refuses to write to other folders, to start programs, and to
connect to other machines. It misses writes by C code (C++ and Rust too) to absolute paths, except by `torch.save`.
"""

import errno
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from anybatch.errors import LoopError, UserError
from anybatch.parallel.launchers import rank_context
from anybatch.testing.ranks import PRELOADED

ResultT = TypeVar("ResultT")
MAX_FILE_BYTES, MAX_BYTES, MAX_ENTRIES = 2**20, 2**25, 2_000
"""Limits for the size of a copied file, for the total size, and for the number of files and folders."""
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})
_DEVICES = Path("/dev")
_SAFE_HOSTS = frozenset({"localhost", "127.0.0.1", "::1", "", "0.0.0.0", None})  # noqa: S104 (hosts are compared)
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_CHANGES = frozenset(
    {
        *("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown", "os.utime", "os.rename"),
        *("os.link", "os.symlink", "shutil.rmtree", "sqlite3.connect"),
    }
)
"""Audit events that change files or folders; all their paths must be in the temporary folder."""
_PROGRAMS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile"})


def run_in_sandbox(work: Callable[[], ResultT], *, timeout_seconds: float) -> ResultT:
    """Run a function in a subprocess, in a temporary copy of the working folder.

    On Linux without an accelerator the process is forked, so `work` may be defined in a notebook; else it is pickled.
    """
    can_fork = sys.platform == "linux" and not torch.accelerator.is_available()
    context: Any = multiprocessing.get_context("fork") if can_fork else rank_context(*PRELOADED)
    torch.optim.SGD([torch.zeros(1)], lr=0.0)  # imports torch's compiler once, instead of in every fork
    with tempfile.TemporaryDirectory(prefix="anybatch-loop-", ignore_cleanup_errors=True) as root:
        folder = Path(root).resolve() / (Path.cwd().name or "folder")
        left_out = copy_folder(Path.cwd(), folder)
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(theirs, work, folder))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # about forks of a process with threads
                process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as reason:
            message = f"the loop cannot be sent to a subprocess ({reason}): put it into a file."
            raise LoopError(message) from None
        theirs.close()
        try:
            if not ours.poll(timeout_seconds):
                message = (
                    f"checking the loop took more than {timeout_seconds:g} seconds and was stopped. If its file trains "
                    'on import, put the call under if __name__ == "__main__".'
                )
                raise LoopError(message)
            value, error = ours.recv()
        except EOFError:
            process.join()
            message = (
                f"the subprocess of the loop died with exit code {process.exitcode}. If the loop is defined in a "
                "notebook or in the main script, put it into a file that can be imported."
            )
            raise LoopError(message) from None
        finally:
            process.kill()
            process.join()
    if isinstance(error, LoopError) and error.cause == "FileNotFoundError" and left_out:
        message = (
            f"{error}\n\nThe loop runs in a copy of the folder without large files: {', '.join(left_out[:5])}. "
            "Use absolute paths to read them."
        )
        raise LoopError(message, code="large_files_left_out", cause=error.cause)
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]  # from a pipe


def _serve(pipe: Connection, work: Callable[[], Any], folder: Path) -> None:
    """Run `work` in `folder`, and send (value, error) through the pipe."""
    silent, save = os.open(os.devnull, os.O_WRONLY), torch.save
    for number in (1, 2):
        os.dup2(silent, number)
    sys.stdout = sys.stderr = os.fdopen(silent, "w", encoding="utf-8")
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)
    os.chdir(folder)
    tempfile.tempdir = str(folder.parent)

    def audited_save(content: Any, file: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 (as torch.save)
        sys.audit("open", file if isinstance(file, str | os.PathLike) else -1, "wb", _WRITE_FLAGS)
        save(content, file, *args, **kwargs)

    vars(torch).update(save=audited_save)  # it opens files in C++, which Python does not audit
    sys.addaudithook(partial(_block_changes, folder.parent))
    value, error = None, None
    try:
        value = work()
    except UserError as raised:
        error = raised
    except (Exception, SystemExit) as raised:  # noqa: BLE001 (sent to the caller)
        error = LoopError(f"{type(raised).__name__}: {raised}", cause=type(raised).__name__)
    pipe.send((value, error))
    pipe.close()


def _block_changes(root: Path, event: str, args: tuple[Any, ...]) -> None:
    """Audit hook: refuse changes outside of `root`, new programs, and connections to other machines."""
    # The target of a link is not changed, only the path of the link.
    changed = args[1:] if event == "os.symlink" else args
    paths, action = [arg for arg in changed if event in _CHANGES and isinstance(arg, str | bytes | os.PathLike)], ""
    if event == "open":
        path, mode, flags = args
        writes = set(mode) & set("wax+") if isinstance(mode, str) else (flags or 0) & _WRITE_FLAGS
        paths = [path] if writes else []
    elif event in _PROGRAMS:
        action = f"start the program {args[0]}"
    elif event in {"socket.connect", "socket.getaddrinfo"}:
        host = args[0] if event == "socket.getaddrinfo" else args[1][0] if isinstance(args[1], tuple) else None
        action = "" if host in _SAFE_HOSTS else f"connect to {host}"
    for path in (path for path in paths if not isinstance(path, int)):
        resolved = Path(os.fsdecode(path)).resolve()
        if not resolved.is_relative_to(root) and not resolved.is_relative_to(_DEVICES):
            action = f"change {resolved}"
    if action:
        message = f"refused to {action}: a checked loop may only change files in its temporary folder"
        raise PermissionError(errno.EACCES, message)


def copy_folder(source: Path, target: Path) -> list[str]:
    """Copy a folder without hidden files and caches; return the paths left out because they exceed a limit."""
    bytes_left, entries_left = MAX_BYTES, MAX_ENTRIES
    left_out: list[str] = []

    def skipped(folder: str, names: list[str]) -> set[str]:
        nonlocal bytes_left, entries_left
        kept = set()
        for path in (Path(folder, name) for name in sorted(names)):
            if path.name.startswith(".") or path.name in _SKIPPED or not os.access(path, os.R_OK):
                continue
            is_folder = path.is_dir() and not path.is_symlink()
            size = 0 if is_folder else path.stat().st_size
            if entries_left and (is_folder or (path.is_file() and size <= min(MAX_FILE_BYTES, bytes_left))):
                bytes_left, entries_left = bytes_left - size, entries_left - 1
                kept.add(path.name)
            else:
                left_out.append(path.relative_to(source).as_posix())
        return set(names) - kept

    shutil.copytree(source, target, ignore=skipped)
    return left_out
