"""The arguments of an engine: `TrainSpec` for the training, `Hardware` for devices and cuts."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch.optim import Optimizer

from anybatch.core.loss import Loss
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.run_config import PrecisionName
from anybatch.core.splitting import Deal
from anybatch.engine.forward_state import BufferUpdate
from anybatch.engine.gradient_noise import GradientNoise
from anybatch.engine.inputs import Model
from anybatch.engine.micro_batch_size.sizes import MicroBatchSize
from anybatch.engine.rng import Rng
from anybatch.engine.spike_watch import SpikeAction, SpikeWatch
from anybatch.engine.update.bf16_weights import Bf16Weights
from anybatch.engine.update.clipping import ClipArgument
from anybatch.engine.update.precision import OptimizerFunction
from anybatch.engine.update.schedule import Scheduler, SchedulerFunction
from anybatch.norms import Policy, PolicyName
from anybatch.parallel.strategy import Strategy
from anybatch.parallel.world import World


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainSpec:
    """All arguments that determine the numerical result, and none that depend on hardware.

    Functions that build the training several times (in float64, on the meta device, once per strategy) take a function
    () -> TrainSpec, which creates a new model and optimizer in each call.

    Args:
        model: the module to train, or a dict of named modules.
        optimizer: a torch optimizer over its parameters, or a function `named_parameters -> optimizer`.
        loss: a declared loss, or a function of (model, batch).
        effective_batch_size: samples per optimizer step over all ranks; None: the size of each batch.
        precision: "fp32" (the model's own types), "bf16" or "fp16" autocast.
        bf16_weights: how bf16 weights are updated if the optimizer is a function: float32 copies ("copied"), their
            lower 16 bits ("split"), or stochastic rounding ("stochastic").
        scheduler: a torch scheduler, or a function `optimizer -> scheduler`.
        clip: maximum gradient norm, a clipping policy, or one per parameter group of the optimizer.
        measure_gradient_norm: measure the gradient's norm in every step.
        noise: measure the noise of the gradient; None: do not measure it.
        average_decay: decay of an exponential moving average of the weights; None: no average.
        norms: policy for BatchNorm in train mode; None: "keep", with a warning if the gradient depends on the cut.
        buffers: by name or pattern, how to combine buffers that a forward updates; None: updated one after the other.
        rng: how the model's random numbers are seeded.
        check_loss: compare the loss with its declaration in the first step.
        seed: seed of all random numbers; None: the seed of the data.
        spikes: action after a spike in the loss or gradient norm; None: none.
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
    """The devices, and how a step is cut; the gradient does not depend on them.

    Args:
        micro_batch_size: maximum number of samples per forward and backward; "auto" or an `Auto` determines it on the
            first batch, and a `TokenBudget` cuts by length.
        accumulation_steps: micro-batches per rank and step, of nearly equal size, instead of a micro-batch size.
        deal: "balanced" or "fixed".
        strategy: the name of a registered strategy, "auto", or a strategy object.
        world: the ranks; None: from the environment.
    """

    micro_batch_size: MicroBatchSize = "auto"
    accumulation_steps: int | None = None
    deal: Deal = "balanced"
    strategy: str | Strategy = "auto"
    world: World | None = None
