"""Every exception of anybatch, and its warning.

```text
AnyBatchError
├── UserError (ValueError)            an argument, option or file cannot be used as given
│   ├── BatchSizeError                effective size, micro-batch size and accumulation steps contradict
│   ├── DataError                     a data set, loader or batch that cannot be split or trusted
│   ├── LossError                     a loss that breaks its declaration
│   ├── LoopError                     a training loop that cannot be checked
│   ├── ParameterError                model and optimizer do not match
│   ├── PlanError                     memory or time cannot be planned; gives the reason
│   │   └── CannotPlanError           a step cannot be traced without its device: try sizes there
│   └── CompositionError              two features that do not compose; gives the reason and an alternative
├── UnsupportedTorchError (RuntimeError)  this version of torch lacks a required feature
├── NonFiniteError (ArithmeticError)  a loss or gradient is NaN or infinite
├── MemoryExhaustedError (RuntimeError)  out of memory, and smaller micro-batches cannot help
│   ├── DoesNotFitError               the smallest micro-batches or the resident tensors do not fit
│   ├── CannotRedoError               the step cannot be retried: its collectives cannot be undone
│   └── HalfUpdatedError              out of memory during the update: parameters may be half updated
├── UpdateFailedError (RuntimeError)  an update failed: parameters and optimizer may be half updated
├── CheckpointError (RuntimeError)    a checkpoint cannot be written or read
│   ├── MissingCheckpointError        no checkpoint at this path
│   ├── NotACheckpointError           the path holds something else
│   ├── DamagedCheckpointError        a file is missing, or its bytes have changed
│   │   └── TruncatedCheckpointError  a file is shorter than when it was written
│   ├── NewerCheckpointError          a newer version of anybatch wrote it
│   ├── CheckpointAccessError         the file system denies access
│   └── DiskFullError                 not enough free disk space
└── WorldError (RuntimeError)         a failure between ranks
    ├── ReplicaError                  parameters differ between ranks although they must be equal
    ├── RanksDifferError              ranks made different calls, or disagree about the step
    └── RankFailedError               another rank failed first; carries its error
```

`AnyBatchWarning` (UserWarning) marks code that runs but may not do what was intended.

Every message names the problem, shows both values, and gives the fix. Fields hold the same facts for programs: rank,
step, phase, sizes, paths. A field is None if it was not available where the error was raised. Fields survive pickling,
so that an error can travel from one rank to another.

Messages may change between versions; the field `code` of errors and warnings names the cause and does not change.
"""

import inspect
import warnings
from pathlib import Path
from typing import Any


class AnyBatchWarning(UserWarning):
    """Code that runs but may not do what was intended: it could not be checked, or differs from the unsplit batch.

    Issued once, on rank 0, with the fix; observers receive the same text as a diagnosis record. To turn it into an
    error: `warnings.simplefilter("error", anybatch.errors.AnyBatchWarning)`.

    Attributes:
        code: short name of the cause, such as "smaller_batches"; empty if it has none.
    """

    def __init__(self, message: str = "", *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class AnyBatchError(Exception):
    """The base class of every exception that anybatch raises on purpose.

    Attributes:
        code: short name of the cause, such as "unequal_lengths"; empty if the class and its fields say it all.
    """

    # The message is the only positional argument and fields are optional keywords, so that `BaseException.__reduce__`
    # can pickle them as (class, args, __dict__).
    def __init__(self, message: str = "", *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class UserError(AnyBatchError, ValueError):
    """An argument, option or file cannot be used as given."""


class BatchSizeError(UserError):
    """Effective size, micro-batch size and accumulation steps contradict each other, or one of them is not a size.

    Attributes:
        effective_batch_size: requested samples per step, over all ranks.
        micro_batch_size: requested maximum of samples per forward and backward.
        accumulation_steps: requested micro-batches per rank and step.
        world_size: number of ranks.
    """

    def __init__(
        self,
        message: str = "",
        *,
        effective_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        accumulation_steps: int | None = None,
        world_size: int | None = None,
        code: str = "",
    ) -> None:
        super().__init__(message, code=code)
        self.effective_batch_size = effective_batch_size
        self.micro_batch_size = micro_batch_size
        self.accumulation_steps = accumulation_steps
        self.world_size = world_size


class DataError(UserError):
    """A data set, loader or batch that cannot be split or trusted."""


class LossError(UserError):
    """A loss that breaks its declaration.

    Attributes:
        term: name of the term that breaks it.
        unit: the items of the declared mean, such as "samples".
        cause: the finding of the first-step check, such as "sum", "mean", "joint" or "module"; None if another check
            raised the error.
    """

    def __init__(
        self,
        message: str = "",
        *,
        term: str | None = None,
        unit: str | None = None,
        cause: str | None = None,
        code: str = "",
    ) -> None:
        super().__init__(message, code=code)
        self.term = term
        self.unit = unit
        self.cause = cause


class LoopError(UserError):
    """A training loop that cannot be checked.

    Attributes:
        parameters: names of the unknown or insufficient parameters.
        cause: class name of the error that the loop raised.
    """

    def __init__(
        self, message: str = "", *, parameters: tuple[str, ...] = (), cause: str | None = None, code: str = ""
    ) -> None:
        super().__init__(message, code=code)
        self.parameters = parameters
        self.cause = cause


class ParameterError(UserError):
    """Model and optimizer do not match."""


class PlanError(UserError):
    """Memory or time cannot be planned from the available information."""


class CannotPlanError(PlanError):
    """A step cannot be traced without its device; find the size that fits by trying sizes on it."""


class CompositionError(UserError):
    """Two features that do not compose."""


class UnsupportedTorchError(AnyBatchError, RuntimeError):
    """This version of torch lacks a required feature; the message names it and the versions that have it."""


class NonFiniteError(AnyBatchError, ArithmeticError):
    """A loss or gradient of the effective batch is NaN or infinite; every rank raises this error.

    Attributes:
        step: number of the step, from 0 on.
        updated: whether the optimizer had already applied this step; if so, return to a checkpoint.
    """

    def __init__(
        self, message: str = "", *, step: int | None = None, updated: bool | None = None, code: str = ""
    ) -> None:
        super().__init__(message, code=code)
        self.step = step
        self.updated = updated


class MemoryExhaustedError(AnyBatchError, RuntimeError):
    """Out of memory, and smaller micro-batches cannot help. The message quotes torch's error and the line that raised.

    `__cause__` is not set: torch's traceback would keep the exhausted memory alive.

    Attributes:
        rank: the rank that ran out of memory.
        step: number of the step, from 0 on.
        phase: the phase of the step, one of `anybatch.records.PhaseName`.
        micro_batch_size: maximum samples of a micro-batch in this step.
    """

    def __init__(
        self,
        message: str = "",
        *,
        rank: int | None = None,
        step: int | None = None,
        phase: str | None = None,
        micro_batch_size: int | None = None,
        code: str = "",
    ) -> None:
        super().__init__(message, code=code)
        self.rank = rank
        self.step = step
        self.phase = phase
        self.micro_batch_size = micro_batch_size


class DoesNotFitError(MemoryExhaustedError):
    """The smallest micro-batches or the resident tensors do not fit in memory. Parameters are unchanged."""


class CannotRedoError(MemoryExhaustedError):
    """The step cannot be retried: other ranks wait in a collective it cannot serve, or its inputs have changed.

    Attributes:
        smaller_micro_batch_size: the size to resume with from a checkpoint; None if the cut cannot get smaller.
    """

    def __init__(self, message: str = "", *, smaller_micro_batch_size: int | None = None, **fields: Any) -> None:  # noqa: ANN401 (the fields of `MemoryExhaustedError`)
        super().__init__(message, **fields)
        self.smaller_micro_batch_size = smaller_micro_batch_size


class HalfUpdatedError(MemoryExhaustedError):
    """Out of memory during the update: parameters and optimizer may be half updated. Return to a checkpoint."""


class UpdateFailedError(AnyBatchError, RuntimeError):
    """An update failed: parameters and optimizer may be half updated. Return to a checkpoint.

    Attributes:
        step: number of the step, from 0 on.
    """

    def __init__(self, message: str = "", *, step: int | None = None, code: str = "") -> None:
        super().__init__(message, code=code)
        self.step = step


class CheckpointError(AnyBatchError, RuntimeError):
    """A checkpoint cannot be written or read.

    Attributes:
        path: the checkpoint, or the file or folder in it that caused the error.
    """

    def __init__(self, message: str = "", *, path: Path | None = None, code: str = "") -> None:
        super().__init__(message, code=code)
        self.path = path


class MissingCheckpointError(CheckpointError):
    """No checkpoint exists at this path; a run may start from the beginning."""


class NotACheckpointError(CheckpointError):
    """The path holds something other than a checkpoint."""


class DamagedCheckpointError(CheckpointError):
    """A file of the checkpoint is missing, or its bytes differ from the saved checksum."""


class TruncatedCheckpointError(DamagedCheckpointError):
    """A file of the checkpoint is shorter than when it was written."""


class NewerCheckpointError(CheckpointError):
    """A newer version of anybatch, or of torch, wrote this checkpoint."""


class CheckpointAccessError(CheckpointError):
    """The file system denies reading or writing a checkpoint at this path."""


class DiskFullError(CheckpointError):
    """Not enough free disk space for a checkpoint.

    Attributes:
        needed_bytes: size of the checkpoint.
        free_bytes: free bytes on the file system.
    """

    def __init__(
        self,
        message: str = "",
        *,
        path: Path | None = None,
        needed_bytes: int | None = None,
        free_bytes: int | None = None,
        code: str = "",
    ) -> None:
        super().__init__(message, path=path, code=code)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class WorldError(AnyBatchError, RuntimeError):
    """Ranks failed to connect, or stopped agreeing."""


class ReplicaError(WorldError):
    """Parameters differ between ranks although they must be equal.

    Attributes:
        ranks: the ranks that differ from rank 0.
        names: the differing parameters and buffers that were found; the search may stop early.
    """

    def __init__(
        self, message: str = "", *, ranks: tuple[int, ...] = (), names: tuple[str, ...] = (), code: str = ""
    ) -> None:
        super().__init__(message, code=code)
        self.ranks = ranks
        self.names = names


class RanksDifferError(WorldError):
    """Ranks made different calls, or disagree about the step. Raised on all ranks, before the update.

    Attributes:
        step: number of this rank's step, from 0 on.
        names: the parts of the step that differ, such as "batch" or "settings"; empty if the calls themselves differ.
        meant: each rank's own description of the step, in rank order, if available.
    """

    def __init__(
        self,
        message: str = "",
        *,
        step: int | None = None,
        names: tuple[str, ...] = (),
        meant: tuple[str, ...] = (),
        code: str = "",
    ) -> None:
        super().__init__(message, code=code)
        self.step = step
        self.names = names
        self.meant = meant


class RankFailedError(WorldError):
    """Another rank failed first; the message carries its error.

    Attributes:
        rank: the rank that failed; None if the process died without an error message (killed, for example).
        step: number of the step in which it failed, from 0 on; None between steps, or if unknown.
        error_type: class name of its error, such as "NonFiniteError"; None if the process died without one.
        reason: text of its error; empty if the process died without one.
        smaller_micro_batch_size: the size to resume with from a checkpoint, as in `CannotRedoError`; None otherwise.
    """

    def __init__(
        self,
        message: str = "",
        *,
        rank: int | None = None,
        step: int | None = None,
        error_type: str | None = None,
        reason: str = "",
        smaller_micro_batch_size: int | None = None,
        code: str = "",
    ) -> None:
        super().__init__(message, code=code)
        self.rank = rank
        self.step = step
        self.error_type = error_type
        self.reason = reason
        self.smaller_micro_batch_size = smaller_micro_batch_size


def warn_user(message: str, code: str = "") -> None:
    """Issue an `AnyBatchWarning` at the innermost line of the caller's code, outside anybatch and torch.

    Python shows a warning once per line and text, so a warning in every step appears once.

    Args:
        message: what was found, both values, and the fix.
        code: short name of the cause, for programs.
    """
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(AnyBatchWarning(message, code=code), stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("anybatch", "torch", "contextlib")
