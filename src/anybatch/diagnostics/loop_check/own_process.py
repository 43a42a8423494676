"""Runs what a user wrote in a process and a folder of its own, where nothing of the user's can be changed.

The folder looks like the working folder, so that relative paths lead to what they always do: its entries are links, and
each becomes a copy when it is written to. What would be written elsewhere is refused: by Linux itself where it can
(`kernel_guards`), which C++, Rust and other programs obey too, and in any case by Python's audit hooks, which see what
Python opens, moves and removes. So are programs, and any network but the machine's own.

Not seen where the kernel has no guard: files that C++ or Rust opens, `torch.save` excepted, and connections of theirs.
Entries are copies from the start there, up to some size, and what is larger is left out.
"""

import errno
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from anybatch.diagnostics.loop_check.kernel_guards import leave_the_network, refuse_writes_outside
from anybatch.errors import UserError
from anybatch.testing.ranks import rank_context

ResultT = TypeVar("ResultT")
COPIED_FILE_BYTES, COPIED_BYTES, MAX_ENTRIES = 2**20, 2**25, 5_000
"""What is copied where links are not safe: files up to the first, and so many bytes and entries of all."""
_LEFT_OUT = frozenset({"__pycache__", "node_modules", "site-packages"})
_DEVICES = Path("/dev")
_SAFE_HOSTS = frozenset({"localhost", "127.0.0.1", "::1", "", "0.0.0.0"})  # noqa: S104 (nothing is bound, names are compared)
_ENTRY_CHANGES = {"os.remove": (0,), "os.rename": (0, 1), "os.mkdir": (0,), "os.rmdir": (0,), "os.symlink": (1,)}
_FILE_CHANGES = {"os.truncate": (0,), "os.chmod": (0,), "os.chown": (0,), "os.utime": (0,), "os.link": (0, 1)}
_FILE_CHANGES |= {"sqlite3.connect": (0,), "shutil.rmtree": (0,)}
"""Audit events with the places of their arguments that are paths: what changes a folder, and what changes a file."""
_PROGRAMS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile"})
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC


class CaughtError(PermissionError):
    """What is judged would have changed something outside of its own folder, or left the machine."""


@dataclass(slots=True)
class Enclosure:
    """What is around the process that something of the user's runs in.

    Attributes:
        folder: the one that it works in.
        outside: the working folder that it looks like.
        kernel_guards_files: whether the system refuses writes elsewhere to C++ and other programs too.
        kernel_guards_network: the same of the network.
    """

    folder: Path
    outside: Path
    kernel_guards_files: bool = False
    kernel_guards_network: bool = False
    _is_at_work: bool = False
    _before: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def enter(self) -> None:
        """Enclose this process, for good."""
        tempfile.tempdir = str(self.folder.parent)
        sys.dont_write_bytecode = True
        torch.save = _announcing(torch.save)
        self.kernel_guards_network = leave_the_network()
        writable = [self.folder.parent, *([_DEVICES] if _DEVICES.is_dir() else [])]
        self.kernel_guards_files = refuse_writes_outside(writable)
        if self.kernel_guards_files:
            _link_entries(self.outside, self.folder)
        else:
            copy_folder(self.outside, self.folder)
        os.chdir(self.folder)
        self._before = dict(_states(self.folder))
        sys.addaudithook(self._audit)

    def written(self) -> list[str]:
        """Return the files of the own folder that have been written."""
        now = dict(_states(self.folder))
        return sorted(
            path.as_posix() for path, state in now.items() if self._before.get(path, state) != state
        ) + sorted(
            path.as_posix() for path in now.keys() - self._before.keys() if not (self.folder / path).is_symlink()
        )

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._is_at_work:
            return
        if event == "open":
            path, mode, flags = args
            flags = flags or 0
            writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & _WRITES)
            if writes and not isinstance(path, int):
                self._make_own(path, with_end=True)
        elif event in _ENTRY_CHANGES or event in _FILE_CHANGES:
            for place in _ENTRY_CHANGES.get(event) or _FILE_CHANGES[event]:
                if not isinstance(args[place], int):
                    self._make_own(args[place], with_end=event in _FILE_CHANGES)
        elif event in _PROGRAMS:
            _refuse(f"started a program ({args[0]})")
        elif event == "socket.connect" and isinstance(args[1], tuple) and args[1][0] not in _SAFE_HOSTS:
            _refuse(f"connected to {args[1][0]}")
        elif event == "socket.getaddrinfo" and (args[0] or "") not in _SAFE_HOSTS:
            _refuse(f"asked the network for {args[0]}")

    def _make_own(self, path: Any, *, with_end: bool) -> None:  # noqa: ANN401 (whatever `open` takes)
        """Turn links on the way to a file, and the one at its end, into what they lead to; refuse a file outside."""
        own, given = self.folder.parent, Path(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100 (links are kept)
        if not given.is_relative_to(own):
            if not given.resolve().is_relative_to(_DEVICES):
                _refuse(f"changed {given}")
            return
        self._is_at_work = True
        try:
            for folder in reversed(given.relative_to(own).parents):
                _copied_up(own / folder, own)
            if with_end:
                _copied_up(given, own)
        finally:
            self._is_at_work = False


def _copied_up(path: Path, own: Path) -> None:
    """Put a copy in the place of a link that leads outside; of a folder, one whose entries are links."""
    if not path.is_symlink() or path.resolve().is_relative_to(own):
        return
    target = path.resolve()
    path.unlink()
    if target.is_dir():
        path.mkdir()
        _link_entries(target, path)
    elif target.exists():
        shutil.copy2(target, path)


def _link_entries(source: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for entry in _entries(source):
        (folder / entry.name).symlink_to(entry.path)


def _refuse(what: str) -> None:
    message = f"the loop would have {what}, outside of the folder that it is judged in; this was refused"
    raise CaughtError(errno.EACCES, message)


def _announcing(save: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.save` so that Python's hooks see it; it opens files in C++."""

    def announced(content: Any, file: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (as torch.save)
        if isinstance(file, str | os.PathLike):
            sys.audit("open", os.fspath(file), "wb", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        return save(content, file, *args, **kwargs)

    return announced


def in_own_process(work: Callable[[Enclosure], ResultT], *, most_seconds: float) -> ResultT:
    """Return what `work(enclosure)` returns in a process of its own, which is in a folder like the working one.

    The process is forked from this one where that is safe, so that functions of a notebook can be in `work`; otherwise
    it is forked from a server, or begun anew, and `work` is pickled.

    Raises:
        UserError: what `work` raised, or the process died, or was not done in time, or cannot be handed `work`.
    """
    outside = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="anybatch-loop-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch, outside.name or "folder")
        enclosure = Enclosure(Path(scratch).resolve() / folder.name, outside)
        context, task = _context_for(work)
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(theirs, task, enclosure))
        with warnings.catch_warnings():
            # Said of forks in a process with threads; there are some only where nothing else can be done.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        try:
            answer: ResultT = _answer(ours, process, most_seconds)
        finally:
            ours.close()
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
    return answer


def _context_for(work: Callable[[Enclosure], Any]) -> tuple[Any, Any]:
    """Return a way to start a process, and the work as it can be handed over."""
    # A fork has none of the threads, which may hold locks, and nothing of what an accelerator is used with.
    can_fork, is_safe = sys.platform == "linux", threading.active_count() == 1 and not torch.accelerator.is_available()
    if can_fork and is_safe:
        _make_an_optimizer()  # once here, and not in every fork
        return multiprocessing.get_context("fork"), work
    try:
        # As bytes, so that importing what they name is up to the process, once it is enclosed.
        return rank_context(), pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if can_fork:
            return multiprocessing.get_context("fork"), work
        message = f"a loop is judged in a process of its own, which cannot import it ({error}): put it into a file."
        raise UserError(message) from None


def _make_an_optimizer() -> None:
    # The first one of a process imports torch's compiler, for a second or two.
    torch.optim.SGD([torch.zeros(1)], lr=0.0)


def _answer(pipe: Connection, process: Any, most_seconds: float) -> Any:  # noqa: ANN401 (what work returns)
    try:
        if not pipe.poll(most_seconds):
            message = f"the loop was not judged after {most_seconds:g} seconds, and was ended."
            raise UserError(message)
        value, error = pipe.recv()
    except EOFError:
        process.join()
        message = f"the process that the loop is judged in ended with exit code {process.exitcode}."
        raise UserError(message) from None
    if error is not None:
        raise error
    return value


def _serve(pipe: Connection, task: Any, enclosure: Enclosure) -> None:  # noqa: ANN401 (a function, or its pickle)
    # What is printed, by C++ and at import too, is no part of the report.
    silent = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(silent, number)
    torch.set_num_threads(1)
    _make_an_optimizer()
    enclosure.enter()
    answer: tuple[Any, UserError | None]
    try:
        work = pickle.loads(task) if isinstance(task, bytes) else task  # noqa: S301 (made by `in_own_process`)
        answer = work(enclosure), None
    except UserError as error:
        answer = None, error
    except (Exception, SystemExit) as error:  # noqa: BLE001 (it is told where it can be)
        answer = None, UserError(f"{type(error).__name__}: {error}")
    pipe.send(answer)
    pipe.close()


def copy_folder(source: Path, target: Path) -> None:
    """Copy what is small in a folder; what is large or hidden, or can be made again, stays out."""
    left, entries = COPIED_BYTES, 0
    waiting = [(source, target)]
    while waiting:
        folder, copy = waiting.pop(0)
        copy.mkdir(parents=True, exist_ok=True)
        for entry in _entries(folder):
            entries += 1
            if entries > MAX_ENTRIES or entry.name.startswith(".") or entry.name in _LEFT_OUT:
                continue
            with suppress(OSError):  # a file that cannot be read: as if it were not there
                size = entry.stat().st_size
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((Path(entry.path), copy / entry.name))
                elif entry.is_file() and size <= min(left, COPIED_FILE_BYTES):
                    shutil.copy2(entry.path, copy / entry.name)
                    left -= size


def _entries(folder: Path) -> Sequence[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(folder) as found:
        return sorted(found, key=lambda entry: entry.name)
    return ()


def _states(folder: Path) -> Iterator[tuple[Path, tuple[int, int]]]:
    """Yield the files of a folder, with what changes when they are written; links are not followed."""
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            found = path.lstat()
            yield path.relative_to(folder), (found.st_mtime_ns, found.st_size)
