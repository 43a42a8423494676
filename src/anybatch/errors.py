"""Every exception of anybatch.

```text
AnyBatchError
├── UserError (ValueError)            what was passed in cannot be run as asked
│   ├── BatchSizeError                effective size, micro-batch size and accumulation steps contradict
│   ├── DataError                     a data set, loader or batch that cannot be split or trusted
│   ├── LossError                     a loss that breaks its declaration
│   ├── ParameterError                model and optimizer do not belong together
│   ├── PlanError                     memory or time cannot be planned; says why
│   │   └── CannotPlanError           a step cannot be traced without its device: sizes have to be tried there
│   └── CompositionError              two features that do not compose; says why and what to use
├── NonFiniteError (ArithmeticError)  a loss or gradient is NaN or infinite
├── MemoryExhaustedError (RuntimeError)  memory has run out, and smaller micro-batches cannot help
│   ├── DoesNotFitError               the smallest micro-batches do not fit, or what is held beside them
│   ├── CannotRedoError               the step cannot be begun anew: its collectives cannot be taken back
│   └── HalfUpdatedError              it ran out inside the update: parameters may be half updated
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
    └── RankFailedError               another rank failed first; carries its error
```

Every message says what is wrong, shows both values, and says what to do.
"""


class AnyBatchError(Exception):
    """The root: catch this to catch everything anybatch raises on purpose."""


class UserError(AnyBatchError, ValueError):
    """What was passed in cannot be run as asked."""


class BatchSizeError(UserError):
    """Effective size, micro-batch size and accumulation steps contradict each other."""


class DataError(UserError):
    """A data set, loader or batch that cannot be split or trusted."""


class LossError(UserError):
    """A loss that breaks its declaration."""


class ParameterError(UserError):
    """Model and optimizer do not belong together."""


class PlanError(UserError):
    """Memory or time cannot be planned: what is asked for does not follow from what is known."""


class CannotPlanError(PlanError):
    """A step cannot be traced without its device: which sizes fit has to be tried there."""


class CompositionError(UserError):
    """Two features that do not compose."""


class NonFiniteError(AnyBatchError, ArithmeticError):
    """A loss or a gradient is NaN or infinite."""


class MemoryExhaustedError(AnyBatchError, RuntimeError):
    """Memory has run out, and smaller micro-batches cannot help. Carries torch's own error as its cause."""


class DoesNotFitError(MemoryExhaustedError):
    """The smallest micro-batches do not fit, or what is held beside them does not. Parameters are as before."""


class CannotRedoError(MemoryExhaustedError):
    """The step cannot be begun anew, because other ranks wait in a collective that this one cannot serve."""


class HalfUpdatedError(MemoryExhaustedError):
    """Memory ran out inside the update: parameters and optimizer may be half updated. Go back to a checkpoint."""


class CheckpointError(AnyBatchError, RuntimeError):
    """A checkpoint cannot be written or read."""


class MissingCheckpointError(CheckpointError):
    """There is no checkpoint where one was looked for: a run may start from the beginning."""


class NotACheckpointError(CheckpointError):
    """Something else is where a checkpoint was looked for."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not what was written: a file is missing, or its bytes differ."""


class TruncatedCheckpointError(DamagedCheckpointError):
    """A file of a checkpoint is shorter than what was written."""


class NewerCheckpointError(CheckpointError):
    """A newer version of anybatch, or of torch, wrote this checkpoint."""


class CheckpointAccessError(CheckpointError):
    """The file system does not permit a checkpoint to be written or read there."""


class DiskFullError(CheckpointError):
    """There is no room for a checkpoint."""


class WorldError(AnyBatchError, RuntimeError):
    """Something went wrong between ranks."""


class ReplicaError(WorldError):
    """Ranks hold different parameters where they must be equal."""


class RankFailedError(WorldError):
    """Another rank failed first; the message carries its error."""
