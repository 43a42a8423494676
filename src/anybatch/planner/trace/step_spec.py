"""The step that is planned: everything of it but its micro-batch size and the device's memory."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from anybatch.core.loss import declared
from anybatch.core.tree import Batch
from anybatch.engine.spec import TrainSpec
from anybatch.parallel.strategy import Strategy
from anybatch.planner.trace.cpu_workspaces import KernelMemory
from anybatch.planner.trace.cuda_emulation import Profile
from anybatch.planner.trace.fake_model import build
from anybatch.planner.trace.fake_tensor_cache import ResultCache

NUM_MICRO_BATCHES = 2
"""The second one runs with gradients there, as all later ones do."""
MakeTrainSpec = Callable[[], TrainSpec]
"""Makes a new model, and a new optimizer where that is no function, each time it is called."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSpec:
    """A training step to plan.

    Args:
        train: what is trained, with data or without; or a function that makes it, which is called without taking
            memory, and again for changes of the model. Its scheduler and its check of the loss are left out.
        sample: a batch of one sample or more, as the model gets it; only its shapes and types are used.
        strategy: as `Engine` takes it by name, or a function () -> strategy.
        world_size: number of ranks.
        device_bytes: memory of each rank's device, which "auto" and FSDP's reduction go by; None where no device limits
            it, as on a CPU.
        num_micro_batches: of a rank in the steps that are traced; 1 for a step in which no gradients are added up.
        input_samples: samples of which the inputs are there at once on a CPU, where the user has the whole batch; None
            for those of the micro-batches that are traced.
        called: what classes and places of its blocks are called in the library's model that it stands for, by what they
            are here; lines to write name those.
        profile: whose allocations are planned: those of "cuda", or those of the "cpu" the plan is made on.
        kernels: workspaces of this CPU's kernels, as far as they were measured; None to leave them out. Plans for CUDA
            leave them out.
        cache: results of operations on tensors without data, shared by all traces of this step and of its variants;
            `ResultCache(enabled=False)` plans the same without it, in four times the time.
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
    kernels: KernelMemory | None = field(default_factory=KernelMemory)
    cache: ResultCache = field(default_factory=ResultCache)

    @property
    def trained(self) -> TrainSpec:
        """The `TrainSpec` of a step that `built` has returned."""
        assert isinstance(self.train, TrainSpec), "the step has been built"
        return self.train

    def with_train(self, **changes: object) -> "StepSpec":
        """Return the step with other values in some fields of what is trained.

        Args:
            changes: fields of `TrainSpec`. The step must have been built.
        """
        return dataclasses.replace(self, train=dataclasses.replace(self.trained, **changes))  # type: ignore[arg-type]  # mypy does not know the fields


def samples_there(spec: StepSpec, share: int | None) -> int | None:
    """Return of how many samples a step has the inputs at once; None for those of the micro-batches that are traced.

    Where a loss counts items in the data, a rank's share is loaded before its first micro-batch runs: its divisor has
    to be known. An accelerator gets it piece by piece all the same.

    Args:
        spec: the step, which has been built.
        share: samples of a rank; None where that is not known.
    """
    if spec.profile != "cpu":
        return None
    counts_data = declared(spec.trained.loss).needs_data_to_count
    return share if spec.input_samples is None and counts_data else spec.input_samples


def built(spec: StepSpec) -> tuple[StepSpec, str | None]:
    """Return the step with its model made, without memory where that is possible.

    Args:
        spec: the step; what it trains may be made already.

    Returns:
        The step, and why its model could not be made without memory; None if it could, or was there already.
    """
    if isinstance(spec.train, TrainSpec):
        return spec, None
    # On the meta device, where a model of any size is made in no memory, unless its code reads numbers.
    train, reason = build(spec.train)
    return dataclasses.replace(spec, train=train), reason
