"""The error of a rank as a value for other ranks, and access to the store in which ranks publish it."""

import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from anybatch.errors import CannotRedoError, RankFailedError
from anybatch.parallel.torch_internals import default_store


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The error of a rank, for ranks that only see a broken connection; it has the fields of `RankFailedError`."""

    rank: int
    step: int | None
    error_type: str
    reason: str
    smaller_micro_batch_size: int | None = None

    @classmethod
    def of(cls, error: BaseException, rank: int, step: int | None) -> Self:
        """Return the failure of a rank that raised `error`."""
        return cls(
            rank=rank,
            step=step,
            error_type=type(error).__name__,
            reason=" ".join([str(error), *_engine_notes(error)]),
            smaller_micro_batch_size=error.smaller_micro_batch_size if isinstance(error, CannotRedoError) else None,
        )

    def error(self, message: str) -> RankFailedError:
        """Return the error that other ranks raise, with this failure in its fields."""
        return RankFailedError(message, **asdict(self))

    def __str__(self) -> str:
        """Return the failure as the beginning of a sentence, without a full stop."""
        where = "between steps" if self.step is None else f"in step {self.step}"
        return f"rank {self.rank} failed {where}: {self.error_type}: {self.reason}"


def _engine_notes(error: BaseException) -> list[str]:
    """Return the engine's notes on an error of the user's code, such as the samples that it ran on."""
    return [f"({note})" for note in getattr(error, "__notes__", ()) if note.startswith("anybatch: ")]


def host_id() -> list[str]:
    """Return the name of this host and its PID namespace, which differs between containers."""
    namespace = Path("/proc/self/ns/pid")
    return [socket.gethostname(), str(namespace.readlink()) if namespace.is_symlink() else ""]


def has_ended(process: str) -> bool:
    """Whether the process that a rank has published (host and PID) has ended; False on another host."""
    *host, pid = json.loads(process or "[0]")
    if host != host_id() or os.name != "posix":  # on Windows, os.kill(..., 0) sends Ctrl-C
        return False
    try:
        os.kill(pid, 0)  # sends nothing
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2]
    except OSError as error:
        return isinstance(error, ProcessLookupError)  # False for another user's process, or without /proc
    return state.split()[0] == "Z"  # a zombie: its parent has not read its exit status yet


def write_store(key: str, text: str) -> None:
    """Write a text to the default group's store; do nothing if the store is gone."""
    # The rank that hosts the store may have ended; then the connections will break soon.
    with suppress(RuntimeError, ValueError):
        default_store().set(key, text)


def read_store(key: str) -> str:
    """Return the text under a key of the default group's store; empty if there is none, or no store."""
    with suppress(RuntimeError, ValueError):
        store = default_store()
        return store.get(key).decode() if store.check([key]) else ""
    return ""
