"""Every exception of anybatch, and its warning.

```text
AnyBatchError
├── UserError (ValueError)            what was passed in cannot be run as asked
│   ├── BatchSizeError                effective size, micro-batch size and accumulation steps contradict
│   ├── DataError                     a data set, loader or batch that cannot be split or trusted
│   ├── LossError                     a loss that breaks its declaration
│   ├── LoopError                     a training loop that cannot be checked
│   ├── ParameterError                model and optimizer do not belong together
│   ├── PlanError                     memory or time cannot be planned; says why
│   │   └── CannotPlanError           a step cannot be traced without its device: sizes have to be tried there
│   └── CompositionError              two features that do not compose; says why and what to use
├── UnsupportedTorchError (RuntimeError)  this version of torch lacks something that is needed; says what
├── NonFiniteError (ArithmeticError)  a loss or gradient is NaN or infinite
├── MemoryExhaustedError (RuntimeError)  memory has run out, and smaller micro-batches cannot help
│   ├── DoesNotFitError               the smallest micro-batches do not fit, or what stays beside them
│   ├── CannotRedoError               the step cannot be repeated: its collectives cannot be taken back
│   └── HalfUpdatedError              it ran out inside the update: parameters may be half updated
├── UpdateFailedError (RuntimeError)  an update broke off: parameters and optimizer may be half updated
├── CheckpointError (RuntimeError)    a checkpoint cannot be written or read
│   ├── MissingCheckpointError        there is none where one was looked for
│   ├── NotACheckpointError           something else is there
│   ├── DamagedCheckpointError        it is not what was written
│   │   └── TruncatedCheckpointError  a file of it is shorter than what was written
│   ├── NewerCheckpointError          a newer version of anybatch wrote it
│   ├── CheckpointAccessError         the file system does not permit it
│   └── DiskFullError                 there is no room for it
└── WorldError (RuntimeError)         something went wrong between ranks
    ├── ReplicaError                  ranks hold different parameters where they must be equal
    ├── RanksDifferError              ranks called different things, or mean different steps by one
    └── RankFailedError               another rank failed first; carries its error
```

`AnyBatchWarning` (UserWarning) is the class of what runs all the same, and might not be what was meant.

Every message says what is wrong, shows both values, and says what to do. What a program would want to know of it is in
fields beside the text: rank, step, phase, sizes, paths. A field is None where the place that raised does not know it.
Fields survive pickling, which is how an error of one rank reaches another.
"""

import inspect
import warnings
from pathlib import Path
from typing import Any


class AnyBatchWarning(UserWarning):
    """What runs, and might not be what was meant: it could not be checked, or differs from the un-split batch.

    Given once, on rank 0, with what to do. The same text is a diagnosis record for observers. To stop at it:
    `warnings.simplefilter("error", anybatch.errors.AnyBatchWarning)`.
    """


class AnyBatchError(Exception):
    """The root: catch this to catch everything anybatch raises on purpose."""


class UserError(AnyBatchError, ValueError):
    """An argument, option or file cannot be used as given."""


class BatchSizeError(UserError):
    """Effective size, micro-batch size and accumulation steps contradict each other, or one of them is no size.

    Attributes:
        effective_batch_size: samples per step over all ranks, as asked for.
        micro_batch_size: most samples of one forward and backward, as asked for.
        accumulation_steps: micro-batches per rank and step, as asked for.
        world_size: number of ranks.
    """

    # Fields are optional keywords and the message is the only positional argument: then `BaseException.__reduce__`
    # pickles them by itself, as (class, args, __dict__).
    def __init__(
        self,
        message: str = "",
        *,
        effective_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        accumulation_steps: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(message)
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
        unit: the items that the term was declared to be a mean over, such as "samples".
        cause: the finding of the first-step check, such as "sum", "mean", "joint" or "module"; None where the
            error is not of that check.
    """

    def __init__(
        self, message: str = "", *, term: str | None = None, unit: str | None = None, cause: str | None = None
    ) -> None:
        super().__init__(message)
        self.term = term
        self.unit = unit
        self.cause = cause


class LoopError(UserError):
    """A training loop that cannot be checked.

    Attributes:
        parameters: names of its parameters that are unknown, or that are not enough.
        cause: name of the class of the error that the loop raised.
    """

    def __init__(self, message: str = "", *, parameters: tuple[str, ...] = (), cause: str | None = None) -> None:
        super().__init__(message)
        self.parameters = parameters
        self.cause = cause


class ParameterError(UserError):
    """Model and optimizer do not belong together."""


class PlanError(UserError):
    """Memory or time cannot be planned: the question does not follow from what is known."""


class CannotPlanError(PlanError):
    """A step cannot be traced without its device: which sizes fit has to be tried there."""


class CompositionError(UserError):
    """Two features that do not compose."""


class UnsupportedTorchError(AnyBatchError, RuntimeError):
    """This version of torch lacks something that is needed. The message names it, and versions that have it."""


class NonFiniteError(AnyBatchError, ArithmeticError):
    """A loss or a gradient is NaN or infinite. It is the effective batch's, so every rank raises alike.

    Attributes:
        step: number of the step, from 0 on.
        updated: whether that step's update was made before it was seen: then go back to a checkpoint.
    """

    def __init__(self, message: str = "", *, step: int | None = None, updated: bool | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.updated = updated


class MemoryExhaustedError(AnyBatchError, RuntimeError):
    """Memory has run out, and smaller micro-batches cannot help. Quotes torch's own error and the line it came from.

    That error is not its cause: its traceback would keep the memory that has run out.

    Attributes:
        rank: the rank that ran out.
        step: number of the step, from 0 on.
        phase: the phase of the step, one of `anybatch.records.PhaseName`.
        micro_batch_size: most samples of a micro-batch of that step.
    """

    def __init__(
        self,
        message: str = "",
        *,
        rank: int | None = None,
        step: int | None = None,
        phase: str | None = None,
        micro_batch_size: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.phase = phase
        self.micro_batch_size = micro_batch_size


class DoesNotFitError(MemoryExhaustedError):
    """The smallest micro-batches do not fit, or what stays in memory beside them does not. Parameters are as before."""


class CannotRedoError(MemoryExhaustedError):
    """The step cannot be repeated: other ranks wait in a collective it cannot serve, or its inputs have changed.

    Attributes:
        smaller_micro_batch_size: the size to go on with from a checkpoint; None where nothing smaller can be cut.
    """

    def __init__(self, message: str = "", *, smaller_micro_batch_size: int | None = None, **fields: Any) -> None:  # noqa: ANN401 (those of every `MemoryExhaustedError`)
        super().__init__(message, **fields)
        self.smaller_micro_batch_size = smaller_micro_batch_size


class HalfUpdatedError(MemoryExhaustedError):
    """Memory ran out inside the update: parameters and optimizer may be half updated. Go back to a checkpoint."""


class UpdateFailedError(AnyBatchError, RuntimeError):
    """An update broke off with an error: parameters and optimizer may be half updated. Go back to a checkpoint.

    Attributes:
        step: number of the step, from 0 on.
    """

    def __init__(self, message: str = "", *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class CheckpointError(AnyBatchError, RuntimeError):
    """A checkpoint cannot be written or read.

    Attributes:
        path: the checkpoint, or the file or folder in it that is concerned.
    """

    def __init__(self, message: str = "", *, path: Path | None = None) -> None:
        super().__init__(message)
        self.path = path


class MissingCheckpointError(CheckpointError):
    """There is no checkpoint where one was looked for: a run may start from the beginning."""


class NotACheckpointError(CheckpointError):
    """Something else is where a checkpoint was looked for."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not as it was written: a file is missing, or its bytes differ."""


class TruncatedCheckpointError(DamagedCheckpointError):
    """A file of a checkpoint is shorter than it was written."""


class NewerCheckpointError(CheckpointError):
    """A newer version of anybatch, or of torch, wrote this checkpoint."""


class CheckpointAccessError(CheckpointError):
    """The file system does not permit a checkpoint to be written or read there."""


class DiskFullError(CheckpointError):
    """There is no room for a checkpoint.

    Attributes:
        needed_bytes: size of the checkpoint.
        free_bytes: what the file system had left.
    """

    def __init__(
        self,
        message: str = "",
        *,
        path: Path | None = None,
        needed_bytes: int | None = None,
        free_bytes: int | None = None,
    ) -> None:
        super().__init__(message, path=path)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class WorldError(AnyBatchError, RuntimeError):
    """Ranks did not meet, or stopped agreeing."""


class ReplicaError(WorldError):
    """Ranks hold different parameters where they must be equal.

    Attributes:
        ranks: those that differ from rank 0.
        names: parameters and buffers in which they differ, as far as it was looked for.
    """

    def __init__(self, message: str = "", *, ranks: tuple[int, ...] = (), names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.names = names


class RanksDifferError(WorldError):
    """Ranks called different things, or mean different steps by one. Raised on all ranks; nothing has been updated.

    Attributes:
        step: number of this rank's step, from 0 on.
        names: what differs, as words such as "batch" or "settings"; empty where the calls do.
        meant: what each rank meant, in rank order, as far as it is known.
    """

    def __init__(
        self,
        message: str = "",
        *,
        step: int | None = None,
        names: tuple[str, ...] = (),
        meant: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.step = step
        self.names = names
        self.meant = meant


class RankFailedError(WorldError):
    """Another rank failed first; the message carries its error.

    Attributes:
        rank: the rank that failed; None if it ended without a word, killed for example.
        step: number of the step it failed in, from 0 on; None between steps, or if that is not known.
        error_type: name of the class of its error, such as "NonFiniteError"; None if it ended without a word.
        reason: the text of its error; empty if it ended without a word.
        smaller_micro_batch_size: the size to go on with from a checkpoint, as in `CannotRedoError`; None for others.
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
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.error_type = error_type
        self.reason = reason
        self.smaller_micro_batch_size = smaller_micro_batch_size


def warn_user(message: str) -> None:
    """Give an `AnyBatchWarning` at the innermost line of the caller's that is neither anybatch's nor torch's.

    Python shows a warning once per line and text, so one that comes in every step is shown once.

    Args:
        message: what might not be meant, both values, and what to do.
    """
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, AnyBatchWarning, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("anybatch", "torch", "contextlib")
