"""Description of a training step to plan, without its micro-batch size and the device's memory."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from anybatch.core.loss import declared
from anybatch.core.tree import Batch
from anybatch.engine.arguments import TrainSpec
from anybatch.parallel.strategy import Strategy
from anybatch.planner.trace.cuda_emulation import Profile
from anybatch.planner.trace.fake_model import build
from anybatch.planner.trace.fake_tensor_cache import ResultCache

NUM_MICRO_BATCHES = 2
"""Two are enough: from the second on, gradients are already allocated."""
MakeTrainSpec = Callable[[], TrainSpec]
"""Each call creates a new model, and a new optimizer unless that is a function."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSpec:
    """A training step to plan.

    Args:
        train: the model, loss and optimizer; or a function that creates them without allocating memory, called again
            for each change of the model. The scheduler and the check of the loss are ignored.
        sample: a batch of at least one sample, as the model receives it; only shapes and types are used.
        strategy: name of a strategy of `Engine`, or a function () -> strategy.
        world_size: number of ranks.
        device_bytes: memory of each rank's device, used by "auto" and by FSDP's reduction; None for no limit, as on a
            CPU.
        num_micro_batches: micro-batches of a rank in the traced steps; 1 for a step without accumulation.
        input_samples: number of samples whose inputs are in memory on a CPU, where the user holds the whole batch; None
            for the samples of the traced micro-batches.
        called: names of block classes and attributes in the library's model, by their names in this model; suggested
            code uses the library's names.
        profile: device type whose allocations are planned, "cuda" or "cpu".
        cache: results of operations on fake tensors, shared by all traces of this step and its variants;
            `ResultCache(enabled=False)` gives the same plan in up to five times the time.
    """

    train: TrainSpec | MakeTrainSpec
    sample: Batch
    strategy: str | Callable[[], Strategy] = "auto"
    world_size: int = 1
    device_bytes: int | None = None
    num_micro_batches: int = NUM_MICRO_BATCHES
    input_samples: int | None = None
    called: Mapping[str, str] = field(default_factory=dict)
    profile: Profile = "cuda"
    cache: ResultCache = field(default_factory=ResultCache)

    @property
    def trained(self) -> TrainSpec:
        """The `TrainSpec` of a step returned by `built`."""
        assert isinstance(self.train, TrainSpec), "the step has been built"
        return self.train

    def with_train(self, **changes: object) -> "StepSpec":
        """Return the step, which must be built, with changed fields of its `TrainSpec`.

        Args:
            changes: fields of `TrainSpec`.
        """
        return dataclasses.replace(self, train=dataclasses.replace(self.trained, **changes))  # type: ignore[arg-type]  # mypy does not know the fields


def samples_in_memory(spec: StepSpec, share: int | None) -> int | None:
    """Return the number of samples whose inputs are in memory together; None for the traced micro-batches alone.

    If a loss counts items in the data, a CPU rank loads its whole share before the first micro-batch, since the divisor
    depends on it. An accelerator still receives one micro-batch at a time.

    Args:
        spec: a built step.
        share: samples of a rank; None if unknown.
    """
    if spec.profile != "cpu":
        return None
    counts_data = declared(spec.trained.loss).needs_data_to_count
    return share if spec.input_samples is None and counts_data else spec.input_samples


def built(spec: StepSpec) -> tuple[StepSpec, str | None]:
    """Create the step's model, without memory if possible.

    Args:
        spec: the step, built or not.

    Returns:
        The built step, and the reason if its model needed real memory; otherwise None.
    """
    if isinstance(spec.train, TrainSpec):
        return spec, None
    # On the meta device a model of any size needs no memory, unless its code reads numbers.
    train, reason = build(spec.train)
    return dataclasses.replace(spec, train=train), reason
