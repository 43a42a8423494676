"""Runs a user's code in a subprocess, in a temporary copy of the working folder, so that it changes no files of theirs.

Relative paths lead to the copy. An audit hook of Python refuses writes to other folders, programs, and connections to
other machines. It does not see writes by C code (C++ and Rust too) to absolute paths, except those of `torch.save`.

The copy leaves out what is large: see `MAX_FILE_BYTES`, `MAX_BYTES` and `MAX_ENTRIES`.
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
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from anybatch.errors import LoopError, UserError
from anybatch.testing.ranks import rank_context

ResultT = TypeVar("ResultT")
MAX_FILE_BYTES, MAX_BYTES, MAX_ENTRIES = 2**20, 2**25, 2_000
"""Largest file that is copied, and limits for all files together; files near the top of the folder come first."""
_LEFT_OUT = frozenset({"__pycache__", "node_modules", "site-packages"})
_DEVICES = Path("/dev")
_SAFE_HOSTS = frozenset({"localhost", "127.0.0.1", "::1", "", "0.0.0.0"})  # noqa: S104 (names are compared)
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_CHANGES = {
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown", "os.utime"), (0,)),
    **dict.fromkeys(("shutil.rmtree", "sqlite3.connect"), (0,)),
    **dict.fromkeys(("os.rename", "os.link"), (0, 1)),
    "os.symlink": (1,),
}
"""Audit events that change files or folders, with the positions of their paths."""
_PROGRAMS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile"})


@dataclass(frozen=True, slots=True)
class SandboxResult(Generic[ResultT]):
    """The result of a function in a sandbox.

    Attributes:
        value: its return value.
        written: files that it wrote in the copy of the working folder.
        not_copied: files and folders that the copy left out.
    """

    value: ResultT
    written: tuple[str, ...]
    not_copied: tuple[str, ...]


def run_in_sandbox(work: Callable[[], ResultT], *, timeout_seconds: float) -> SandboxResult[ResultT]:
    """Run a function in a subprocess, in a temporary copy of the working folder.

    On Linux without an accelerator the process is forked, so that `work` can use functions of a notebook. Otherwise
    `work` is pickled.

    Raises:
        UserError: raised by `work`; or the process died, took too long, or cannot import `work`.
    """
    can_fork = sys.platform == "linux" and not torch.accelerator.is_available()
    context: Any = multiprocessing.get_context("fork") if can_fork else rank_context()
    torch.optim.SGD([torch.zeros(1)], lr=0.0)  # the first optimizer imports torch's compiler: once, not in every fork
    with tempfile.TemporaryDirectory(prefix="anybatch-loop-", ignore_cleanup_errors=True) as root:
        folder = Path(root).resolve() / (Path.cwd().name or "folder")
        not_copied = copy_folder(Path.cwd(), folder)
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(theirs, work, folder))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # about forks of a process with threads
                process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as unpicklable:
            message = f"the loop cannot be sent to a subprocess ({unpicklable}): put it into a file."
            raise LoopError(message) from None
        theirs.close()
        try:
            value, written, error = _receive(ours, process, timeout_seconds)
        finally:
            ours.close()
            process.kill()
            process.join()
    if error is not None:
        if not_copied:
            error.add_note(f"Not copied into its folder, because they are large: {', '.join(not_copied[:5])}.")
        raise error
    return SandboxResult(value, written, not_copied)


def _receive(pipe: Connection, process: Any, timeout_seconds: float) -> Any:  # noqa: ANN401 (what `_serve` sends)
    if not pipe.poll(timeout_seconds):
        message = f"checking the loop took more than {timeout_seconds:g} seconds and was stopped."
        raise LoopError(message)
    try:
        return pipe.recv()
    except EOFError:
        process.join()
        message = f"the subprocess of the loop died with exit code {process.exitcode}."
        raise LoopError(message) from None


def _serve(pipe: Connection, work: Callable[[], Any], folder: Path) -> None:
    """Run `work`, and send its value, the files written, and the error."""
    silent = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(silent, number)
    sys.stdout = sys.stderr = os.fdopen(silent, "w", encoding="utf-8")
    torch.set_num_threads(1)
    os.chdir(folder)
    tempfile.tempdir = str(folder.parent)
    sys.dont_write_bytecode = True
    torch.save = _audited(torch.save)
    before = _file_states(folder)
    sys.addaudithook(partial(_refuse_changes, folder.parent))
    value, error = None, None
    try:
        value = work()
    except UserError as raised:
        error = raised
    except (Exception, SystemExit) as raised:  # noqa: BLE001 (the caller gets it)
        error = LoopError(f"{type(raised).__name__}: {raised}", cause=type(raised).__name__)
    after = _file_states(folder)
    pipe.send((value, tuple(name for name in sorted(after) if after[name] != before.get(name)), error))
    pipe.close()


def _refuse_changes(root: Path, event: str, args: tuple[Any, ...]) -> None:
    """Refuse changes outside of a folder, programs, and connections to other machines: an audit hook."""
    paths: list[Any] = []
    if event == "open":
        path, mode, flags = args
        writes = set(mode) & set("wax+") if isinstance(mode, str) else (flags or 0) & _WRITE_FLAGS
        paths = [path] if writes else []
    elif event in _CHANGES:
        paths = [args[position] for position in _CHANGES[event]]
    elif event in _PROGRAMS:
        _refuse(f"start a program ({args[0]})")
    elif event == "socket.connect" and isinstance(args[1], tuple) and args[1][0] not in _SAFE_HOSTS:
        _refuse(f"connect to {args[1][0]}")
    elif event == "socket.getaddrinfo" and (args[0] or "") not in _SAFE_HOSTS:
        _refuse(f"connect to {args[0]}")
    for path in paths:
        if not isinstance(path, int):
            resolved = Path(os.fsdecode(path)).resolve()
            if not resolved.is_relative_to(root) and not resolved.is_relative_to(_DEVICES):
                _refuse(f"change {resolved}")


def _refuse(action: str) -> None:
    message = f"refused to {action}, outside of the temporary copy of the folder that the loop is checked in"
    raise PermissionError(errno.EACCES, message)


def _audited(save: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.save` with an audit event; it opens files in C++."""

    def audited(content: Any, file: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (as torch.save)
        if isinstance(file, str | os.PathLike):
            sys.audit("open", os.fspath(file), "wb", _WRITE_FLAGS)
        return save(content, file, *args, **kwargs)

    return audited


def copy_folder(source: Path, target: Path) -> tuple[str, ...]:
    """Copy a folder without large files, hidden files and caches; return the relative paths of those too large."""
    bytes_left, entries_left = MAX_BYTES, MAX_ENTRIES
    left_out: list[str] = []
    waiting = [Path()]
    while waiting:
        folder = waiting.pop(0)
        (target / folder).mkdir(parents=True, exist_ok=True)
        for path in _entries(source / folder):
            relative = path.relative_to(source)
            entries_left -= 1
            if path.is_dir() and not path.is_symlink() and entries_left > 0:
                waiting.append(relative)
            elif path.is_file() and entries_left > 0 and path.stat().st_size <= min(MAX_FILE_BYTES, bytes_left):
                bytes_left -= path.stat().st_size
                shutil.copy2(path, target / relative)
            else:
                left_out.append(relative.as_posix())
    return tuple(left_out)


def _entries(folder: Path) -> list[Path]:
    paths = sorted(folder.iterdir()) if os.access(folder, os.R_OK | os.X_OK) else []
    return [path for path in paths if not path.name.startswith(".") and path.name not in _LEFT_OUT]


def _file_states(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the files below a folder, with numbers that change when they are written."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}
