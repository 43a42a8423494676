"""Why a rank failed, as a value that travels between ranks: through the store, or with the votes of a step."""

import json
from dataclasses import asdict, dataclass
from typing import Self

from anybatch.errors import CannotRedoError, RankFailedError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """A rank's own error, for the ranks that only see a broken connection.

    Attributes:
        rank: the rank that failed.
        step: number of the step it failed in, from 0 on; None between steps.
        error_type: name of the class of its error.
        reason: the text of its error, and what the engine has noted beside it.
        smaller_micro_batch_size: the size to go on with from a checkpoint, as in `CannotRedoError`; None for others.
    """

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
            reason=" ".join([str(error), *_own_notes(error)]),
            smaller_micro_batch_size=error.smaller_micro_batch_size if isinstance(error, CannotRedoError) else None,
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what `to_json` wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return the failure as text for a store."""
        return json.dumps(asdict(self))

    def error(self, message: str) -> RankFailedError:
        """Return the error that other ranks raise, with this failure in its fields."""
        return RankFailedError(message, **asdict(self))

    def __str__(self) -> str:
        """Return it as the beginning of a sentence, without a full stop."""
        place = "between steps" if self.step is None else f"in step {self.step}"
        return f"rank {self.rank} failed {place}: {self.error_type}: {self.reason}"


def _own_notes(error: BaseException) -> list[str]:
    """Return what the engine has added to an error of the user's code, such as the samples that it ran on."""
    return [f"({note})" for note in getattr(error, "__notes__", ()) if note.startswith("anybatch: ")]
