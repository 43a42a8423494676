"""What is planned: everything of a training step but its micro-batch size and the device's memory."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.optim import Optimizer

from anybatch.core.loss import Loss, LossFunction
from anybatch.core.tree import Batch
from anybatch.engine.inputs import Model
from anybatch.engine.rng.generators import Rng
from anybatch.engine.update.clipping import ClipArgument
from anybatch.engine.update.precision import OptimizerFunction, PrecisionName
from anybatch.norms import Policy, PolicyName
from anybatch.parallel.strategy import Strategy
from anybatch.planner.trace.cpu_workspaces import KernelMemory
from anybatch.planner.trace.cuda_emulation import Profile
from anybatch.planner.trace.fake_model import build
from anybatch.planner.trace.fake_tensor_cache import Answers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSpec:
    """A training step to plan. What has no description here is as in `Engine`.

    Args:
        model: a module or dict of named modules, with data or without, or a function () -> model.
        optimizer: an optimizer over that module's parameters, or a function `named_parameters -> optimizer`.
        loss: as the engine takes it; a function that returns one number is taken as a mean over samples.
        sample: a batch of one sample or more, as the model gets it; only its shapes and types are used.
        precision: number formats of forward and backward.
        clip: largest gradient norm, or a policy.
        measure_gradient_norm: whether the norm is reported.
        average_decay: of an average of the weights.
        norms: what is done about BatchNorm.
        rng: what random numbers belong to.
        effective_batch_size: samples of one step over all ranks; only a loss across samples (`ab.joint`) needs it.
        strategy: "single", "all_reduce", "ddp", or a function () -> strategy; "auto" goes by the number of ranks.
        world_size: number of ranks.
        profile: whose allocations are planned: those of "cuda", or those of the "cpu" the plan is made on.
        kernels: what the kernels of this CPU take for themselves, as far as they were asked; None to ask none. Plans
            for CUDA ask none.
        answers: what operations on tensors without data have returned, in all traces of this spec and of its variants.
    """

    model: Model | Callable[[], Model]
    optimizer: Optimizer | OptimizerFunction
    loss: Loss | LossFunction
    sample: Batch
    precision: PrecisionName = "fp32"
    clip: ClipArgument = None
    measure_gradient_norm: bool = True
    average_decay: float | None = None
    norms: Policy | PolicyName = "keep"
    rng: Rng = "micro_batch"
    effective_batch_size: int | None = None
    strategy: str | Callable[[], Strategy] = "auto"
    world_size: int = 1
    profile: Profile = "cuda"
    kernels: KernelMemory | None = field(default_factory=KernelMemory)
    answers: Answers = field(default_factory=Answers)


def built(spec: StepSpec) -> tuple[StepSpec, str | None]:
    """Return the spec with its model made, without memory where that is possible; and why not, where it is not."""
    if isinstance(spec.model, (nn.Module, Mapping)):
        return spec, None
    model, reason = build(spec.model)
    return dataclasses.replace(spec, model=model), reason
