"""The arguments of an engine: `TrainSpec` for the training, `Hardware` for devices and cuts, and their checks."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import get_args

from torch import nn
from torch.optim import Optimizer

from anybatch.core.compatibility import Feature, refuse_compositions
from anybatch.core.geometry import Sizes, checked_int, is_number, refuse_unless
from anybatch.core.loss import Loss
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.records import Observer
from anybatch.core.run_config import PrecisionName
from anybatch.core.splitting import CutConstraints, Deal
from anybatch.core.tensors import is_low_precision
from anybatch.core.torch_internals import BatchNormBase
from anybatch.engine.accumulate import Randomness
from anybatch.engine.batch_norm import policy_for, refuse_policy
from anybatch.engine.bf16_weights import Bf16Weights, refuse_bf16_weights
from anybatch.engine.forward_state import BufferUpdate, BufferUpdates
from anybatch.engine.gradient_noise import GradientNoise, refuse_noise
from anybatch.engine.micro_batch_size.sizes import MicroBatchSize, RunSizes
from anybatch.engine.per_sample_dropout import PerSample
from anybatch.engine.precision import OptimizerFunction, autocast
from anybatch.engine.rng import Rng, choose_randomness
from anybatch.engine.schedule import Scheduler, SchedulerFunction
from anybatch.engine.spike_watch import SpikeAction, SpikeWatch, spike_watch
from anybatch.engine.step_guard import refuse_accumulation_hooks
from anybatch.engine.strategy_choice import choose, with_device_bytes
from anybatch.engine.torch_internals import DropoutBase, is_compiled
from anybatch.engine.updater import ClipArgument, ClipPolicy, clip_policy
from anybatch.engine.user_code import Model, captured_parameters
from anybatch.errors import CompositionError, ParameterError, UserError
from anybatch.norms import Policy, PolicyName
from anybatch.norms.layers import batch_norms
from anybatch.parallel.replicas import already_sharded, refuse_misplaced
from anybatch.parallel.strategy import Capabilities, Strategy, trainable
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


Features = Mapping[Feature, str]
"""The features of a run, each with its origin as text, which may be empty."""

_IN_PIECES = {"split": Feature.SPLIT_WEIGHTS, "stochastic": Feature.ROUNDED_WEIGHTS}
_DROPOUTS = {
    "micro_batch": Feature.DROPOUT_KEYED,
    "per_sample": Feature.DROPOUT_PER_SAMPLE,
    None: Feature.DROPOUT_UNKEYED,
}
_OPTIMIZER = "a torch optimizer, or a function such as lambda named_parameters: torch.optim.AdamW(named_parameters)"
_CLIP = "the largest gradient norm as a number, ClipByNorm, ClipByValue, a list of these for each group, or None"
_OBSERVER = "an object with a method observe(record), such as ab.JsonlLog(path); for several: Observers(first, second)"


def refuse_wrong_types(spec: TrainSpec, hardware: Hardware, observer: Observer | None) -> None:
    """Refuse arguments of a wrong type; values are checked later."""
    if spec.seed is not None:
        checked_int("seed", spec.seed, least=None)
    world, strategy = hardware.world, hardware.strategy
    observes = callable(getattr(observer, "observe", None)) and not isinstance(observer, type)
    for is_valid, name, value, expected in (
        (isinstance(spec.optimizer, Optimizer) or callable(spec.optimizer), "optimizer", spec.optimizer, _OPTIMIZER),
        (not isinstance(spec.clip, (str, bytes, bool, Mapping)), "clip", spec.clip, _CLIP),
        (_is_flag(spec.measure_gradient_norm), "measure_gradient_norm", spec.measure_gradient_norm, "True or False"),
        (_is_flag(spec.check_loss), "check_loss", spec.check_loss, "True or False"),
        (spec.noise is None or isinstance(spec.noise, GradientNoise), "noise", spec.noise, "a GradientNoise, or None"),
        (
            spec.average_decay is None or is_number(spec.average_decay),
            "average_decay",
            spec.average_decay,
            "a number between 0 and 1, or None",
        ),
        (spec.buffers is None or isinstance(spec.buffers, Mapping), "buffers", spec.buffers, "a dict, or None"),
        (_is_word(spec.precision), "precision", spec.precision, "one of 'fp32', 'bf16' and 'fp16'"),
        (_is_word(spec.bf16_weights), "bf16_weights", spec.bf16_weights, "'copied', 'split' or 'stochastic'"),
        (_is_word(hardware.deal), "deal", hardware.deal, "'balanced' or 'fixed'"),
        (
            isinstance(strategy, str) or (hasattr(strategy, "capabilities") and not isinstance(strategy, type)),
            "strategy",
            strategy,
            "a name such as 'ddp', 'auto', or a strategy object",
        ),
        (world is None or isinstance(world, World), "world", world, "an ab.World, or None"),
        (observer is None or observes, "observer", observer, _OBSERVER),
    ):
        refuse_unless(is_valid, name, value, expected)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_word(value: object) -> bool:
    return isinstance(value, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedArguments:
    """Checked arguments, and values derived from them."""

    spec: TrainSpec
    loss: Loss
    modules: nn.Module
    world: World
    strategy: Strategy
    strategy_reason: str
    clip: ClipPolicy | None
    autocast: Callable[..., AbstractContextManager[object]]
    randomness: Randomness
    norm_policy: Policy
    norm_constraints: CutConstraints
    buffer_updates: BufferUpdates
    sizes: RunSizes
    features: Features
    spikes: SpikeWatch | None


def check_arguments(
    spec: TrainSpec, hardware: Hardware, loss: Loss, modules: nn.Module, world: World
) -> CheckedArguments:
    """Refuse arguments that cannot work, and return the checked ones."""
    # Before a strategy replaces parameters, which drops their hooks.
    refuse_accumulation_hooks(trainable(modules))
    world = with_device_bytes(world)
    clip = clip_policy(spec.clip)
    make_autocast = autocast(spec.precision, world.device)
    randomness = choose_randomness(spec.rng, modules, world.device)
    policy = policy_for(spec.norms, modules, world.size)
    constraints = policy.constraints(has_layers=bool(batch_norms(modules)), world_size=world.size)
    make_sizes = partial(
        RunSizes,
        world,
        effective_batch_size=spec.effective_batch_size,
        micro_batch_size=hardware.micro_batch_size,
        accumulation_steps=hardware.accumulation_steps,
        deal=hardware.deal,
    )
    features = features_of(spec, modules, loss, sizes=make_sizes().sizes, deal=hardware.deal, policy=policy)
    composes = partial(_composes, features, spec, modules, world)
    choice = choose(hardware.strategy, spec.optimizer, modules, world, composes, bf16_weights=spec.bf16_weights)
    strategy, needs = choice.strategy, choice.strategy.capabilities
    refuse_misplaced(modules, needs, world, spec.precision)
    refuse_features(features, spec.optimizer, needs, world, already_sharded=already_sharded(modules))
    refuse_bf16_weights(spec.bf16_weights, modules, spec.optimizer, needs)
    _refuse_captured(loss, modules, needs)
    # Cuts must satisfy the policy and the strategy; BatchNorm layers use the constraints of the policy only.
    sizes = make_sizes(constraints=constraints | needs.constraints)
    refuse_policy(policy, modules, constraints, needs, searches=_must_search(sizes, hardware))
    buffers = BufferUpdates(spec.buffers or {}, modules, strategy, world)
    buffers.refuse_with(loss, constraints, needs)
    refuse_noise(spec.noise, loss, features, world)
    return CheckedArguments(
        spec=spec,
        loss=loss,
        modules=modules,
        world=world,
        strategy=strategy,
        strategy_reason=choice.reason,
        clip=clip,
        autocast=make_autocast,
        randomness=randomness,
        norm_policy=policy,
        norm_constraints=constraints,
        buffer_updates=buffers,
        sizes=sizes,
        features=features,
        spikes=spike_watch(spec.spikes),
    )


def _refuse_captured(loss: Loss, modules: nn.Module, needs: Capabilities) -> None:
    """Refuse parameters of the model in a loss function if the strategy replaces them."""
    names = {id(parameter): name for name, parameter in modules.named_parameters() if parameter.dim()}
    for held, parameter in captured_parameters(loss).items() if needs.replaces_parameters else ():
        if id(parameter) in names:
            name = names[id(parameter)]
            message = (
                f"the loss function holds parameter {name!r} (as {held!r}), but strategy {needs.name!r} replaces it "
                f"in the model. The loss would use the old weight, which is not trained. Read model.{name} inside the "
                "function, or use strategy='zero1'."
            )
            raise ParameterError(message)


def _composes(
    features: Features, spec: TrainSpec, modules: nn.Module, world: World, capabilities: Capabilities
) -> bool:
    try:
        refuse_features(features, spec.optimizer, capabilities, world)
        refuse_bf16_weights(spec.bf16_weights, modules, spec.optimizer, capabilities)
    except CompositionError:
        return False
    return True


def _must_search(sizes: RunSizes, hardware: Hardware) -> bool:
    return sizes.is_auto and hardware.accumulation_steps is None and sizes.may_run_out


def features_of(
    spec: TrainSpec, modules: nn.Module, loss: Loss, *, sizes: Sizes, deal: Deal, policy: Policy
) -> dict[Feature, str]:
    """Return the features in the composition table's entries that follow from a run's spec, modules and options.

    Features that appear only in a forward are missing: activation checkpointing, functions such as `F.dropout`.
    """
    if deal not in get_args(Deal):
        message = f"{deal=} must be one of {', '.join(map(repr, get_args(Deal)))}."
        raise UserError(message)
    found = {
        loss.kind.feature: "",
        **_features_of_parameters(spec, modules),
        **_features_of_layers(spec, modules, loss),
    }
    if spec.precision == "fp16":
        found[Feature.FP16] = ""
    if deal == "fixed":
        found[Feature.FIXED] = ""
    if sizes.micro_batch_tokens is not None:
        found[Feature.TOKEN_BUDGET] = f"{sizes.micro_batch_tokens} tokens"
    if policy.feature is not None:
        found[policy.feature] = ""
    return found


def _features_of_layers(spec: TrainSpec, modules: nn.Module, loss: Loss) -> dict[Feature, str]:
    found: dict[Feature, str] = {}
    dropout = Feature.DROPOUT_PER_SAMPLE if isinstance(spec.rng, PerSample) else _DROPOUTS[spec.rng]
    # Functions such as F.dropout cannot be detected.
    if dropout is Feature.DROPOUT_PER_SAMPLE:
        found[dropout] = ""
    elif spec.rng is None and loss.kind.feature is Feature.JOINT:
        found[dropout] = "or any other random function"
    layers = {
        Feature.BATCH_NORM: lambda module: isinstance(module, BatchNormBase) and module.training,
        dropout: lambda module: isinstance(module, DropoutBase) and module.training and module.p > 0,
        Feature.COMPILED: is_compiled,
    }
    for feature, shows in layers.items():
        first = next((name for name, module in modules.named_modules() if shows(module)), None)
        if first is not None:
            found[feature] = f"module {first!r}" if first else "the model itself"
    return found


def features_of_ranks(capabilities: Capabilities, world: World) -> dict[Feature, str]:
    """Return the features of strategy and ranks; empty if the strategy is not in the table."""
    strategy = capabilities.feature
    if strategy is None:
        return {}
    if not world.connected:
        return {strategy: "", Feature.ALONE: ""}
    messages = {Feature.COMPRESSED: ""} if capabilities.compresses else {}
    return messages | {
        strategy: "",
        Feature.ONE_RANK if world.size == 1 else Feature.SEVERAL_RANKS: f"{world.size} of them",
    }


def refuse_features(
    features: Features,
    optimizer: Optimizer | OptimizerFunction,
    needs: Capabilities,
    world: World,
    *,
    already_sharded: bool = False,
) -> None:
    """Refuse combinations that do not compose, and features that the strategy, with these `needs`, does not support.

    A model that is `already_sharded` keeps its parameters under any strategy.
    """
    refuse_compositions({**features_of_ranks(needs, world), **features})
    if needs.replaces_parameters and not already_sharded and isinstance(optimizer, Optimizer):
        message = (
            f"strategy {needs.name!r} creates new parameters, but this {type(optimizer).__name__} holds the old ones. "
            "Its steps would change nothing. Pass a function instead: "
            f"optimizer=lambda named: torch.optim.{type(optimizer).__name__}(named, lr=...)."
        )
        raise CompositionError(message)
    for able, feature, instead in (
        (needs.sparse_gradients, Feature.SPARSE, "Build the module with sparse=False"),
        (needs.float32_accumulation, Feature.LOW_PARAMETERS, "Use float32 parameters with precision='bf16'"),
    ):
        if not able and feature in features:
            message = (
                f"strategy {needs.name!r} does not support {feature.says} ({features[feature]}). {instead}, "
                "or use another strategy."
            )
            raise CompositionError(message)


def _features_of_parameters(spec: TrainSpec, modules: nn.Module) -> dict[Feature, str]:
    own = trainable(modules)
    low = next((name for name, parameter in own.items() if is_low_precision(parameter)), None)
    sparse = next((name for name, module in modules.named_modules() if _has_sparse_gradients(module)), None)
    found: dict[Feature, str] = {}
    if low is None:
        found[Feature.WIDE_PARAMETERS] = ""
    else:
        found[Feature.LOW_PARAMETERS] = f"{low!r} is {own[low].dtype}"
    if spec.bf16_weights in _IN_PIECES:
        found[_IN_PIECES[spec.bf16_weights]] = ""
    elif low is None:
        found[Feature.DIRECT] = ""
    else:
        found[Feature.CAST if isinstance(spec.optimizer, Optimizer) else Feature.MASTER_WEIGHTS] = ""
    if sparse is not None:
        found[Feature.SPARSE] = f"module {sparse!r} has sparse=True"
    return found


def _has_sparse_gradients(module: nn.Module) -> bool:
    trains = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    # `is True`, because a user's module may have another attribute of that name.
    return trains and getattr(module, "sparse", False) is True
