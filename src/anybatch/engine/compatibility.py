"""The arguments of an engine as features of the composition table; refuse combinations that it excludes."""

import traceback
from collections.abc import Mapping
from typing import get_args

from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointFunction

from anybatch.core.compatibility import Feature, refusal, refuse_compositions
from anybatch.core.dtypes import is_low_precision
from anybatch.core.geometry import Sizes
from anybatch.core.loss import Loss
from anybatch.core.splitting import Deal
from anybatch.core.torch_internals import BatchNormBase
from anybatch.engine.per_sample_dropout import PerSample
from anybatch.engine.spec import TrainSpec
from anybatch.engine.torch_internals import DropoutBase, is_compiled
from anybatch.engine.update.precision import OptimizerFunction
from anybatch.errors import CompositionError, UserError
from anybatch.norms import Policy
from anybatch.parallel.strategy import Capabilities, trainable
from anybatch.parallel.world import World

Features = Mapping[Feature, str]
"""The features of a run, each with its origin as text, which may be empty."""

_IN_PIECES = {"split": Feature.SPLIT_WEIGHTS, "stochastic": Feature.ROUNDED_WEIGHTS}
_DROPOUTS = {
    "micro_batch": Feature.DROPOUT_KEYED,
    "per_sample": Feature.DROPOUT_PER_SAMPLE,
    None: Feature.DROPOUT_UNKEYED,
}


def features_of(
    spec: TrainSpec, modules: nn.Module, loss: Loss, *, sizes: Sizes, deal: Deal, policy: Policy
) -> dict[Feature, str]:
    """Return the features in the composition table's entries that follow from a run's spec, modules and options.

    Features that appear only in a forward are missing: activation checkpointing, functions such as `F.dropout`.

    Raises:
        UserError: an unknown value of `deal`.
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

    Raises:
        CompositionError: with the reasons and alternatives.
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


def refused_in_backward(error: BaseException) -> CompositionError | None:
    """Return a CompositionError if an error comes from reentrant checkpointing; otherwise None.

    Reentrant checkpointing cannot be detected before, so it is recognized by the place that raised.
    """
    last = None
    # The last frame is the one that raised.
    for frame, _ in traceback.walk_tb(error.__traceback__):
        last = frame
    if last is None or last.f_code is not CheckpointFunction.backward.__code__:
        return None
    return CompositionError(refusal(Feature.REENTRANT, Feature.REENTRANT, {}))


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
