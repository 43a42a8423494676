"""The arguments of an engine and their checks: `TrainSpec` for training, `Hardware` for devices and micro-batches."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core.compatibility import Feature, PrecisionName, check_combinations
from anybatch.core.geometry import Sizes, checked_int, require
from anybatch.core.gradient_noise import GradientNoise
from anybatch.core.loss import Loss
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.records import Observer
from anybatch.core.spikes import SpikeAction, SpikeWatch, spike_watch
from anybatch.core.splitting import Deal, SplitConstraints
from anybatch.core.tensors import is_low_precision
from anybatch.core.torch_internals import BatchNormBase, DropoutBase, is_compiled
from anybatch.engine.accumulate import KeyedRandomness, Randomness, Rng
from anybatch.engine.batch_norm import check_policy, policy_for
from anybatch.engine.bf16_weights import Bf16Weights, check_bf16_weights
from anybatch.engine.forward_state import BufferUpdate, BufferUpdates
from anybatch.engine.micro_batch_size.sizes import MicroBatchSize, RunSizes
from anybatch.engine.precision import OptimizerFunction, autocast
from anybatch.engine.schedule import Scheduler, SchedulerFunction
from anybatch.engine.step_guard import check_accumulation_hooks, check_hooks_on_shards
from anybatch.engine.strategy_choice import choose, with_device_bytes
from anybatch.engine.updater import check_clip
from anybatch.engine.user_code import Model, captured_parameters
from anybatch.errors import CompositionError, ParameterError, UserError
from anybatch.norms import Policy, PolicyName
from anybatch.norms.layers import batch_norms
from anybatch.norms.policies import constraints_of
from anybatch.parallel.replicas import already_sharded, check_placement
from anybatch.parallel.strategy import Capabilities, Strategy, trainable
from anybatch.parallel.world import World


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainSpec:
    """The arguments of `Engine` that determine the numerical result, with the same defaults; none depends on hardware.

    Some functions train several times (in float64, on the meta device, once per strategy). They take a function
    () -> TrainSpec, which creates a new model and optimizer in each call.
    """

    model: Model
    optimizer: Optimizer | OptimizerFunction
    loss: Loss | LossFunction
    effective_batch_size: int | None = None
    precision: PrecisionName = "fp32"
    bf16_weights: Bf16Weights = "copied"
    scheduler: Scheduler | SchedulerFunction | None = None
    clip: float | None = None
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
    """The arguments of `Engine` for devices and micro-batches, with the same defaults; none changes the gradient."""

    micro_batch_size: MicroBatchSize = "auto"
    accumulation_steps: int | None = None
    deal: Deal = "balanced"  # how samples or micro-batches are distributed over the ranks
    strategy: str | Strategy = "auto"
    world: World | None = None


Features = Mapping[Feature, str]
"""The features of a run, each with a text about its origin, such as the module's name; the text may be empty."""

_BF16_UPDATES = {"split": Feature.SPLIT_WEIGHTS, "stochastic": Feature.ROUNDED_WEIGHTS}
_DROPOUTS = {
    "micro_batch": Feature.DROPOUT_KEYED,
    "per_sample": Feature.DROPOUT_PER_SAMPLE,
    None: Feature.DROPOUT_UNKEYED,
}
_OPTIMIZER = "a torch optimizer, or a function such as lambda named_parameters: torch.optim.AdamW(named_parameters)"
_OBSERVER = "an object with a method observe(record), such as ab.JsonlLog(path); for several: Observers(first, second)"


def check_types(spec: TrainSpec, hardware: Hardware, observer: Observer | None) -> None:
    """Refuse arguments of a wrong type; values are checked later."""
    if spec.seed is not None:
        checked_int("seed", spec.seed, minimum=None)
    check_clip(spec.clip)
    optimizer, world, strategy = spec.optimizer, hardware.world, hardware.strategy
    options: tuple[tuple[str, object, tuple[str, ...]], ...] = (
        ("precision", spec.precision, get_args(PrecisionName)),
        ("bf16_weights", spec.bf16_weights, get_args(Bf16Weights)),
        ("deal", hardware.deal, get_args(Deal)),
    )
    for name, value, choices in options:
        require(isinstance(value, str), name, value, f"one of {', '.join(map(repr, choices))}")
        if value not in choices:
            message = f"{name}={value!r} must be one of {', '.join(map(repr, choices))}."
            raise UserError(message, code="unknown_word")
    is_observer = callable(getattr(observer, "observe", None)) and not isinstance(observer, type)
    is_strategy = isinstance(strategy, str) or (hasattr(strategy, "capabilities") and not isinstance(strategy, type))
    require(isinstance(optimizer, Optimizer) or callable(optimizer), "optimizer", optimizer, _OPTIMIZER)
    require(observer is None or is_observer, "observer", observer, _OBSERVER)
    require(is_strategy, "strategy", strategy, "a name such as 'ddp', 'auto', or a strategy object")
    kinds: tuple[tuple[str, object, Any, str], ...] = (
        ("measure_gradient_norm", spec.measure_gradient_norm, bool, "True or False"),
        ("check_loss", spec.check_loss, bool, "True or False"),
        ("average_decay", spec.average_decay, float | int | None, "a number between 0 and 1, or None"),
        ("buffers", spec.buffers, Mapping | None, "a dict, or None"),
        ("world", world, World | None, "an ab.World, or None"),
    )
    for name, value, kind, expected in kinds:
        require(isinstance(value, kind), name, value, expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedArguments:
    """Checked arguments, and values computed from them."""

    spec: TrainSpec
    loss: Loss
    modules: nn.Module
    world: World
    strategy: Strategy
    strategy_reason: str
    autocast: Callable[..., AbstractContextManager[object]]
    randomness: Randomness
    norm_policy: Policy
    norm_constraints: SplitConstraints
    buffer_updates: BufferUpdates
    sizes: RunSizes
    features: Features
    spikes: SpikeWatch | None


def check_arguments(
    spec: TrainSpec, hardware: Hardware, loss: Loss, modules: nn.Module, world: World
) -> CheckedArguments:
    """Refuse arguments that cannot work, and return the checked ones."""
    # Check hooks before a strategy replaces parameters, which removes the hooks.
    check_accumulation_hooks(trainable(modules))
    world = with_device_bytes(world)
    make_autocast = autocast(spec.precision, world.device)
    randomness = _randomness(spec.rng, modules, world.device)
    policy = policy_for(spec.norms, modules, world.size)
    constraints = constraints_of(policy, has_layers=bool(batch_norms(modules)), world_size=world.size)
    make_sizes = partial(
        RunSizes,
        world,
        effective_batch_size=spec.effective_batch_size,
        micro_batch_size=hardware.micro_batch_size,
        accumulation_steps=hardware.accumulation_steps,
        deal=hardware.deal,
    )
    features = features_of(spec, modules, loss, sizes=make_sizes().sizes, deal=hardware.deal, policy=policy)
    is_allowed = partial(_is_allowed, features, spec, modules, world)
    strategy, reason = choose(
        hardware.strategy, spec.optimizer, modules, world, is_allowed, bf16_weights=spec.bf16_weights
    )
    capabilities = strategy.capabilities
    check_placement(modules, capabilities)
    check_features(features, spec.optimizer, capabilities, world, already_sharded=already_sharded(modules))
    check_bf16_weights(spec.bf16_weights, modules, spec.optimizer, capabilities)
    _check_captured(loss, modules, capabilities)
    if capabilities.replaces_parameters:
        check_hooks_on_shards(trainable(modules))
    # Micro-batches must satisfy the BatchNorm policy and the strategy; BatchNorm layers only the policy.
    sizes = make_sizes(constraints=constraints | capabilities.constraints)
    check_policy(policy, modules, constraints, capabilities, searches=_must_search(sizes, hardware))
    buffers = BufferUpdates(spec.buffers or {}, modules, strategy, world)
    buffers.check_with(loss, constraints, capabilities)
    if spec.noise is not None:
        from anybatch.engine.gradient_noise import check_noise  # noqa: PLC0415 (few runs measure it)

        check_noise(spec.noise, loss, features)
    return CheckedArguments(
        spec=spec,
        loss=loss,
        modules=modules,
        world=world,
        strategy=strategy,
        strategy_reason=reason,
        autocast=make_autocast,
        randomness=randomness,
        norm_policy=policy,
        norm_constraints=constraints,
        buffer_updates=buffers,
        sizes=sizes,
        features=features,
        spikes=None if spec.spikes is None else spike_watch(spec.spikes),
    )


def _randomness(rng: Rng, modules: nn.Module, device: torch.device) -> Randomness:
    """Return the source of the micro-batches' random numbers."""
    if rng is None:
        return Randomness(device)
    if rng == "micro_batch":
        return KeyedRandomness(device)
    if rng == "per_sample":
        from anybatch.engine.per_sample_dropout import SampleRandomness  # noqa: PLC0415 (few runs need it)

        return SampleRandomness(modules, device)
    message = f"{rng=} must be 'micro_batch', 'per_sample' or None."
    raise UserError(message)


def _check_captured(loss: Loss, modules: nn.Module, capabilities: Capabilities) -> None:
    """Refuse a loss function that uses the model's parameters directly, if the strategy replaces the parameters."""
    names = {id(parameter): name for name, parameter in modules.named_parameters() if parameter.dim()}
    for variable, parameter in captured_parameters(loss).items() if capabilities.replaces_parameters else ():
        if id(parameter) in names:
            name = names[id(parameter)]
            message = (
                f"the loss function uses parameter {name!r} (as {variable!r}), but strategy {capabilities.name!r} "
                "replaces it in the model. The loss would use the old weight, which is not trained. Read "
                f"model.{name} inside the function, or use strategy='zero1'."
            )
            raise ParameterError(message)


def _is_allowed(
    features: Features, spec: TrainSpec, modules: nn.Module, world: World, capabilities: Capabilities
) -> bool:
    try:
        check_features(features, spec.optimizer, capabilities, world)
        check_bf16_weights(spec.bf16_weights, modules, spec.optimizer, capabilities)
    except CompositionError:
        return False
    return True


def _must_search(sizes: RunSizes, hardware: Hardware) -> bool:
    return sizes.is_auto and hardware.accumulation_steps is None and sizes.raises_out_of_memory


def features_of(
    spec: TrainSpec, modules: nn.Module, loss: Loss, *, sizes: Sizes, deal: Deal, policy: Policy
) -> dict[Feature, str]:
    """Return the features of a run, for the table of combinations in `core/compatibility.py`.

    Features that appear only in a forward are missing: activation checkpointing, functions such as `F.dropout`.
    """
    features = {
        loss.kind.feature: "",
        **_features_of_parameters(spec, modules),
        **_features_of_layers(spec, modules, loss),
    }
    if spec.precision == "fp16":
        features[Feature.FP16] = ""
    if deal == "fixed":
        features[Feature.FIXED] = ""
    if sizes.micro_batch_tokens is not None:
        features[Feature.TOKEN_BUDGET] = f"{sizes.micro_batch_tokens} tokens"
    if policy.feature is not None:
        features[policy.feature] = ""
    return features


def _features_of_layers(spec: TrainSpec, modules: nn.Module, loss: Loss) -> dict[Feature, str]:
    features: dict[Feature, str] = {}
    dropout = _DROPOUTS[spec.rng]
    # Regardless of the layers, because a forward may call functions such as F.dropout.
    if dropout is Feature.DROPOUT_PER_SAMPLE:
        features[dropout] = ""
    elif spec.rng is None and loss.kind.feature is Feature.JOINT:
        features[dropout] = "or any other random function"
    layers = {
        Feature.BATCH_NORM: lambda module: isinstance(module, BatchNormBase) and module.training,
        dropout: lambda module: isinstance(module, DropoutBase) and module.training and module.p > 0,
        Feature.COMPILED: is_compiled,
    }
    for feature, has_feature in layers.items():
        first = next((name for name, module in modules.named_modules() if has_feature(module)), None)
        if first is not None:
            features[feature] = f"module {first!r}" if first else "the model itself"
    return features


def features_of_ranks(capabilities: Capabilities, world: World) -> dict[Feature, str]:
    """Return the features of strategy and ranks; empty if the strategy is not in the table of combinations."""
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


def check_features(
    features: Features,
    optimizer: Optimizer | OptimizerFunction,
    capabilities: Capabilities,
    world: World,
    *,
    already_sharded: bool = False,
) -> None:
    """Refuse features that cannot be combined, and features that the strategy with these capabilities does not support.

    A model that is `already_sharded` keeps its parameters under any strategy.
    """
    check_combinations({**features_of_ranks(capabilities, world), **features})
    if capabilities.replaces_parameters and not already_sharded and isinstance(optimizer, Optimizer):
        message = (
            f"strategy {capabilities.name!r} creates new parameters, but this {type(optimizer).__name__} has the old "
            "ones, so its steps would not change the model. Pass a function instead: "
            f"optimizer=lambda named: torch.optim.{type(optimizer).__name__}(named, lr=...)."
        )
        raise CompositionError(message)
    for is_supported, feature, instead in (
        (capabilities.sparse_gradients, Feature.SPARSE, "Build the module with sparse=False"),
        (capabilities.float32_accumulation, Feature.LOW_PARAMETERS, "Use float32 parameters with precision='bf16'"),
    ):
        if not is_supported and feature in features:
            message = (
                f"strategy {capabilities.name!r} does not support {feature.label} ({features[feature]}). {instead}, "
                "or use another strategy."
            )
            raise CompositionError(message)


def _features_of_parameters(spec: TrainSpec, modules: nn.Module) -> dict[Feature, str]:
    parameters = trainable(modules)
    low = next((name for name, parameter in parameters.items() if is_low_precision(parameter)), None)
    sparse = next((name for name, module in modules.named_modules() if _has_sparse_gradients(module)), None)
    features: dict[Feature, str] = {}
    if low is None:
        features[Feature.WIDE_PARAMETERS] = ""
    else:
        features[Feature.LOW_PARAMETERS] = f"{low!r} is {parameters[low].dtype}"
    if spec.bf16_weights in _BF16_UPDATES:
        features[_BF16_UPDATES[spec.bf16_weights]] = ""
    elif low is None:
        features[Feature.DIRECT] = ""
    else:
        features[Feature.CAST if isinstance(spec.optimizer, Optimizer) else Feature.MASTER_WEIGHTS] = ""
    if sparse is not None:
        features[Feature.SPARSE] = f"module {sparse!r} has sparse=True"
    return features


def _has_sparse_gradients(module: nn.Module) -> bool:
    trains = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    # `is True`, because a user's module may have another attribute of that name.
    return trains and getattr(module, "sparse", False) is True
