"""The exceptions of anybatch, and its warning.

Every exception is an `AnyBatchError`, and also an instance of the builtin error that it resembles: a `UserError` (an
argument, option or file cannot be used as given) is a `ValueError`. `help(anybatch.errors)` shows the class hierarchy.
`AnyBatchWarning` (a UserWarning) marks code that runs but may not do what was intended.

Every message names the problem, shows both values, and gives the fix. The attributes of an error hold the same facts
for programs: rank, step, phase, sizes, paths. An attribute is None if its value was unknown where the error was raised.
Attributes survive pickling, so that an error can be sent from one rank to another.

Messages may change between versions; the attribute `code` of errors and warnings names the cause and does not change.
"""

import inspect
import warnings
from pathlib import Path
from typing import Any


class AnyBatchWarning(UserWarning):
    """Code that runs but may not do what was intended, or that trains differently from training without a split.

    Each warning is issued once, on rank 0, with the fix; observers receive the same text as a `DiagnosisRecord`. To
    turn warnings into errors: `warnings.simplefilter("error", anybatch.errors.AnyBatchWarning)`.

    Attributes:
        code: short name of the cause, such as "smaller_batches"; empty if the warning has none.
    """

    def __init__(self, message: str = "", *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class AnyBatchError(Exception):
    """The base class of every exception that anybatch raises on purpose.

    Attributes:
        code: short name of the cause, such as "unequal_lengths"; empty if the class already identifies the cause.
    """

    code: str = ""

    # `BaseException.__reduce__` pickles an error as (class, args, __dict__), so the message is the only positional
    # argument, and fields are optional keywords. The default of a field is a class attribute.
    def __init__(self, message: str = "", **fields: Any) -> None:  # noqa: ANN401 (each field has its own type)
        super().__init__(message)
        known = {name for kind in type(self).__mro__ for name in inspect.get_annotations(kind)}
        if not fields.keys() <= known:
            unknown = f"{type(self).__name__} has the fields {sorted(known)}, not {sorted(fields.keys() - known)}"
            raise TypeError(unknown)
        for name, value in fields.items():
            setattr(self, name, value)


class UserError(AnyBatchError, ValueError):
    """An argument, option or file cannot be used as given."""


class BatchSizeError(UserError):
    """Effective batch size, micro-batch size and accumulation steps contradict each other, or one of them is invalid.

    Attributes:
        effective_batch_size: requested samples per step, over all ranks.
        micro_batch_size: requested maximum of samples per forward and backward.
        accumulation_steps: requested micro-batches per rank and step.
        world_size: number of ranks.
    """

    effective_batch_size: int | None = None
    micro_batch_size: int | None = None
    accumulation_steps: int | None = None
    world_size: int | None = None


class DataError(UserError):
    """A data set, loader or batch that cannot be split into samples, or whose samples would be lost or repeated."""


class LossError(UserError):
    """A loss that contradicts its declaration (`ab.mean_over_samples` and others).

    Attributes:
        term: name of the term of the loss; "loss" if the loss has only one term.
        unit: the items of the declared mean, such as "samples".
        cause: the result of the check in the first step, such as "sum", "mean", "joint" or "module"; None if another
            check raised the error.
    """

    term: str | None = None
    unit: str | None = None
    cause: str | None = None


class LoopError(UserError):
    """A training loop that `anybatch check --loop` cannot run.

    Attributes:
        parameters: the loop's parameters that anybatch does not recognise; all of them if a required one is missing.
        cause: class name of the error that the loop raised.
    """

    parameters: tuple[str, ...] = ()
    cause: str | None = None


class ParameterError(UserError):
    """The parameters of the model and of the optimizer do not match."""


class PlanError(UserError):
    """Memory or time cannot be planned from the available information."""


class CannotPlanError(PlanError):
    """A step cannot be traced without its device; let the engine try sizes on the device instead."""


class CompositionError(UserError):
    """Two features that cannot be combined."""


class UnsupportedTorchError(AnyBatchError, RuntimeError):
    """This version of torch lacks a required feature; the message names it and the versions that have it."""


class NonFiniteError(AnyBatchError, ArithmeticError):
    """A loss or gradient of the effective batch is NaN or infinite; every rank raises this error.

    Attributes:
        step: number of the step, from 0 on.
        updated: whether the optimizer had already applied this step; if so, resume from a checkpoint.
    """

    step: int | None = None
    updated: bool | None = None


class MemoryExhaustedError(AnyBatchError, RuntimeError):
    """Out of memory, and the step cannot be retried with smaller micro-batches. The message quotes torch's error.

    After a forward or backward of a step, `__cause__` is not set: torch's traceback would keep the tensors alive that
    filled the memory.

    Attributes:
        rank: the rank that ran out of memory.
        step: number of the step, from 0 on.
        phase: the phase of the step, one of `anybatch.records.PhaseName`.
        micro_batch_size: maximum samples of a micro-batch in this step.
    """

    rank: int | None = None
    step: int | None = None
    phase: str | None = None
    micro_batch_size: int | None = None


class DoesNotFitError(MemoryExhaustedError):
    """The smallest micro-batches, or weights and optimizer state alone, do not fit in memory. Weights are unchanged."""


class CannotRedoError(MemoryExhaustedError):
    """Out of memory in a step that cannot be retried: other ranks wait in a collective, or its inputs have changed.

    Attributes:
        smaller_micro_batch_size: the size to resume with from a checkpoint; None if micro-batches cannot get smaller.
    """

    smaller_micro_batch_size: int | None = None


class HalfUpdatedError(MemoryExhaustedError):
    """Out of memory during the update: parameters and optimizer may be half updated. Resume from a checkpoint."""


class UpdateFailedError(AnyBatchError, RuntimeError):
    """An update failed: parameters and optimizer may be half updated. Resume from a checkpoint.

    Attributes:
        step: number of the step, from 0 on.
    """

    step: int | None = None


class CheckpointError(AnyBatchError, RuntimeError):
    """A checkpoint cannot be written or read.

    Attributes:
        path: the checkpoint, or the file or folder in it that caused the error.
    """

    path: Path | None = None


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

    needed_bytes: int | None = None
    free_bytes: int | None = None


class WorldError(AnyBatchError, RuntimeError):
    """Ranks cannot connect, contradict each other, or one of them failed."""


class ReplicaError(WorldError):
    """Parameters differ between ranks although they must be equal.

    Attributes:
        ranks: the ranks that differ from rank 0.
        names: differing parameters and buffers; not always all of them, because the search may stop early.
    """

    ranks: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


class RanksDifferError(WorldError):
    """Ranks made different calls, or run different steps. Raised on all ranks, before the update.

    Attributes:
        step: number of this rank's step, from 0 on.
        names: the parts of the step that differ, such as "batch" or "settings"; empty if the calls themselves differ.
        meant: each rank's own description of the step, in rank order, if available.
    """

    step: int | None = None
    names: tuple[str, ...] = ()
    meant: tuple[str, ...] = ()


class RankFailedError(WorldError):
    """Another rank failed first; the message contains the error of that rank.

    Attributes:
        rank: the rank that failed; None if the process died without an error message (killed, for example).
        step: number of the step in which it failed, from 0 on; None between steps, or if unknown.
        error_type: class name of that rank's error, such as "NonFiniteError"; None if its process died without one.
        reason: text of that rank's error; empty if its process died without one.
        smaller_micro_batch_size: the size to resume with from a checkpoint, as in `CannotRedoError`; None otherwise.
    """

    rank: int | None = None
    step: int | None = None
    error_type: str | None = None
    reason: str = ""
    smaller_micro_batch_size: int | None = None


def warn_user(message: str, code: str = "") -> None:
    """Issue an `AnyBatchWarning` at the innermost line of the call stack that is outside anybatch and torch.

    Python shows a warning once per line and text, so a warning that is issued in every step appears once.

    Args:
        message: the problem, both values, and the fix.
        code: short name of the cause, for programs.
    """
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(AnyBatchWarning(message, code=code), stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("anybatch", "torch", "contextlib")
