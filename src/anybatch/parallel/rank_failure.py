"""Why a rank failed, as a value for other ranks: sent through the store, or with the votes of a step."""

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from anybatch.errors import CannotRedoError, RankFailedError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """A rank's own error, for the ranks that only see a broken connection.

    Attributes:
        rank: the rank that failed.
        step: number of the step in which it failed, from 0 on; None between steps.
        error_type: class name of its error; None if it ended without an error.
        reason: the text of its error, and the engine's notes on it.
        smaller_micro_batch_size: the size to resume with from a checkpoint, as in `CannotRedoError`; None otherwise.
    """

    rank: int
    step: int | None
    error_type: str | None
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

    @classmethod
    def of_ended(cls, rank: int, step: int | None) -> Self:
        """Return the failure of a rank that has ended without an error, in a step of the rank that noticed."""
        return cls(rank=rank, step=step, error_type=None, reason="")

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse a text from `to_json`."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return the failure as text for a store."""
        return json.dumps(asdict(self))

    def error(self, message: str) -> RankFailedError:
        """Return the error that other ranks raise, with this failure in its fields."""
        return RankFailedError(message, **asdict(self))

    def __str__(self) -> str:
        """Return it as the beginning of a sentence, without a full stop."""
        if self.error_type is None:
            return (
                f"rank {self.rank} has ended without an error: it was killed, or its program ended before the others' "
                "(loaders of different lengths: wrap them in ab.shares)"
            )
        place = "between steps" if self.step is None else f"in step {self.step}"
        return f"rank {self.rank} failed {place}: {self.error_type}: {self.reason}"


def _engine_notes(error: BaseException) -> list[str]:
    """Return the engine's notes on an error of the user's code, such as the samples that it ran on."""
    return [f"({note})" for note in getattr(error, "__notes__", ()) if note.startswith("anybatch: ")]


def own_host() -> list[str]:
    """Return the name of this host and its process-number namespace, which differs between containers."""
    namespace = Path("/proc/self/ns/pid")
    return [socket.gethostname(), str(namespace.readlink()) if namespace.is_symlink() else ""]


def has_ended(process: str) -> bool:
    """Whether a process on this host, as published by its rank, has ended; False on other hosts."""
    *host, number = json.loads(process or "[0]")
    if host != own_host() or os.name != "posix":  # on Windows, os.kill(..., 0) sends Ctrl-C
        return False
    try:
        os.kill(number, 0)  # sends nothing
        state = Path(f"/proc/{number}/stat").read_text(encoding="utf-8").rpartition(")")[2]
    except OSError as error:
        return isinstance(error, ProcessLookupError)  # False for another user's process, or without /proc
    return state.split()[0] == "Z"  # its parent has not read its exit status yet
