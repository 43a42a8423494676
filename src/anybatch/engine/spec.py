"""`TrainSpec` says what is trained, `Hardware` where and in what pieces: `build` makes an engine of the two."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch.optim import Optimizer

from anybatch.core.loss import Loss
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.splitting import Deal
from anybatch.engine.checkpoint_state import Scheduler
from anybatch.engine.forward_state.buffer_updates import BufferUpdate
from anybatch.engine.gradient_noise import GradientNoise
from anybatch.engine.inputs import Model
from anybatch.engine.micro_batch_size.sizes import MicroBatchSize
from anybatch.engine.rng.generators import Rng
from anybatch.engine.spike_watch.watch import SpikeAction, SpikeWatch
from anybatch.engine.update.bf16_weights import Bf16Weights
from anybatch.engine.update.clipping import ClipArgument
from anybatch.engine.update.precision import OptimizerFunction, PrecisionName
from anybatch.engine.update.schedule import SchedulerFunction
from anybatch.norms import Policy, PolicyName
from anybatch.parallel.strategy import Strategy
from anybatch.parallel.world import World


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainSpec:
    """Everything that decides which numbers come out, and nothing that is only hardware.

    A verb that has to build what is trained more than once (in float64, on tensors without data, once per strategy)
    takes a function () -> TrainSpec, which makes a new model and optimizer each time.

    Args:
        model: the module to train, or a dict of named modules.
        optimizer: a torch optimizer over its parameters, or a function `named_parameters -> optimizer`.
        loss: a declared loss, or a function of (model, batch).
        effective_batch_size: samples of one optimizer step over all ranks; None: as the batches come.
        precision: "fp32" (as the model is), "bf16" or "fp16" autocast.
        bf16_weights: what is kept beside weights in bf16, where the optimizer is a function: "copied" float32 weights,
            "split": the lower 16 bits of these, or "stochastic": nothing, since an update is rounded to the weight.
        scheduler: a torch scheduler, or a function `optimizer -> scheduler` for an optimizer that is yet to be made.
        clip: largest gradient norm, a clipping policy, or one per parameter group of the optimizer.
        measure_gradient_norm: measure the gradient's norm in every step.
        noise: measure the noise of the gradient; None does not.
        average_decay: of an exponential moving average of the weights; None for none.
        norms: what to do about BatchNorm in train mode; None: "keep", which is said where it makes a difference.
        buffers: by name or pattern, what becomes of buffers that a forward updates; None: one update after the other.
        rng: what the model's random numbers belong to.
        check_loss: compare the loss with its declaration in the first step.
        seed: first word of every random key; None takes the data's seed.
        spikes: what is done where loss or gradient norm leave their course; None looks at neither.
    """

    model: Model
    optimizer: Optimizer | OptimizerFunction
    loss: Loss | LossFunction
    effective_batch_size: int | None = None
    precision: PrecisionName = "fp32"
    bf16_weights: Bf16Weights = "copied"
    scheduler: Scheduler | SchedulerFunction | None = None
    clip: ClipArgument = None
    measure_gradient_norm: bool = True
    noise: GradientNoise | None = None
    average_decay: float | None = None
    norms: Policy | PolicyName | None = None
    buffers: Mapping[str, BufferUpdate] | None = None
    rng: Rng = "micro_batch"
    check_loss: bool = True
    seed: int | None = None
    spikes: SpikeWatch | SpikeAction | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hardware:
    """Everything that decides where and in what pieces a step is run; the gradient does not depend on it.

    Args:
        micro_batch_size: most samples of one forward and backward; "auto" or an `Auto` finds it on the first batch, and
            a `TokenBudget` cuts by length.
        accumulation_steps: micro-batches per rank and step, of nearly equal size, instead of a micro-batch size.
        deal: "balanced" or "fixed".
        strategy: the name of a registered strategy, "auto", or a strategy object.
        world: the ranks; None asks the environment.
    """

    micro_batch_size: MicroBatchSize = "auto"
    accumulation_steps: int | None = None
    deal: Deal = "balanced"
    strategy: str | Strategy = "auto"
    world: World | None = None
