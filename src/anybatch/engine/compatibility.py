"""The arguments of an engine as features of the composition table; refuse combinations that it excludes."""

import traceback
from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointFunction

from anybatch.core.compatibility import Feature, refusal, refuse_compositions
from anybatch.core.dtypes import is_low_precision
from anybatch.core.geometry import Sizes
from anybatch.core.loss import Loss
from anybatch.core.splitting import Deal
from anybatch.core.torch_internals import BatchNormBase
from anybatch.engine.rng.per_sample_dropout import PerSample
from anybatch.engine.spec import TrainSpec
from anybatch.engine.torch_internals import DropoutBase, is_compiled
from anybatch.engine.update.clipping import ClipByNorm, ClipByValue, ClipPolicy
from anybatch.engine.update.precision import OptimizerFunction
from anybatch.errors import CompositionError, UserError
from anybatch.norms import Policy
from anybatch.parallel.strategy import Capabilities, trainable
from anybatch.parallel.world import World

Features = Mapping[Feature, str]
"""The features of a run, each with its origin as text, which may be empty."""

_PRECISIONS = {"fp32": Feature.FP32, "bf16": Feature.BF16, "fp16": Feature.FP16}
_DEALS = {"balanced": Feature.BALANCED, "fixed": Feature.FIXED}
_CLIPS = {ClipByNorm: Feature.CLIP_NORM, ClipByValue: Feature.CLIP_VALUE}
_IN_PIECES = {"split": Feature.SPLIT_WEIGHTS, "stochastic": Feature.ROUNDED_WEIGHTS}
_DROPOUTS = {
    "micro_batch": Feature.DROPOUT_KEYED,
    "per_sample": Feature.DROPOUT_PER_SAMPLE,
    None: Feature.DROPOUT_UNKEYED,
}


def features_of(
    spec: TrainSpec,
    modules: nn.Module,
    loss: Loss,
    *,
    sizes: Sizes,
    deal: Deal,
    clip: ClipPolicy | None,
    policy: Policy,
) -> dict[Feature, str]:
    """Return the features of a run that follow from its spec and sizes.

    Features that appear only in a forward are missing: unused parameters, activation checkpointing, functions such as
    `F.dropout`.

    Args:
        spec: the arguments for the training.
        modules: all trained modules.
        loss: the declared loss.
        sizes: the sizes from the user.
        deal: how units are dealt to ranks.
        clip: the clipping policy.
        policy: the BatchNorm policy.

    Raises:
        UserError: an unknown value of `deal`.
    """
    if deal not in _DEALS:
        message = f"{deal=} must be one of {', '.join(map(repr, _DEALS))}."
        raise UserError(message)
    found = {_PRECISIONS[spec.precision]: "", _DEALS[deal]: ""}
    if sizes.micro_batch_size is not None:
        found[Feature.MICRO_BATCH_SIZE] = str(sizes.micro_batch_size)
    elif sizes.accumulation_steps is not None:
        found[Feature.ACCUMULATION_STEPS] = str(sizes.accumulation_steps)
    elif sizes.micro_batch_tokens is not None:
        found[Feature.TOKEN_BUDGET] = f"{sizes.micro_batch_tokens} tokens"
    else:
        found[Feature.AUTO_SIZE] = ""
    if clip is not None:
        found[_CLIPS.get(type(clip), Feature.CLIP_GROUPS)] = ""
    if policy.feature is not None:
        found[policy.feature] = ""
    return {**_features_of_training(spec, modules, loss), **found}


def _features_of_training(spec: TrainSpec, modules: nn.Module, loss: Loss) -> dict[Feature, str]:
    rng = spec.rng
    dropout = Feature.DROPOUT_PER_SAMPLE if isinstance(rng, PerSample) else _DROPOUTS[rng]
    layers = {
        Feature.BATCH_NORM: lambda module: isinstance(module, BatchNormBase) and module.training,
        dropout: lambda module: isinstance(module, DropoutBase) and module.training and module.p > 0,
        Feature.COMPILED: is_compiled,
    }
    found = {**_features_of_parameters(spec, modules), **_features_of_loss(loss)}
    if rng is None and Feature.JOINT in found:  # functions such as F.dropout cannot be detected
        found[Feature.DROPOUT_UNKEYED] = "or any other random function"
    for feature, shows in layers.items():
        first = next((name for name, module in modules.named_modules() if shows(module)), None)
        if first is not None:
            found[feature] = f"module {first!r}" if first else "the model itself"
    if dropout is Feature.DROPOUT_PER_SAMPLE:
        found.setdefault(dropout, "")  # F.dropout cannot be detected, and some features prevent seeding it
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
    """Refuse combinations that do not compose, and features that the strategy does not support.

    Args:
        features: of the run.
        optimizer: as in `TrainSpec`.
        needs: capabilities of the strategy.
        world: the ranks.
        already_sharded: the model is sharded already, so the strategy does not replace its parameters.

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
    frozen = [name for name, parameter in modules.named_parameters() if not parameter.requires_grad]
    tied = [name for name, _ in modules.named_parameters(remove_duplicate=False)]
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
    if sparse is None:
        found[Feature.DENSE] = ""
    else:
        found[Feature.SPARSE] = f"module {sparse!r} has sparse=True"
    if frozen:
        found[Feature.FROZEN] = f"{len(frozen)} of them, first {frozen[0]!r}"
    # `tied` has a parameter once for each of its names, the others have it once.
    if len(tied) > len(own) + len(frozen):
        found[Feature.TIED] = ""
    return found


def _features_of_loss(loss: Loss) -> dict[Feature, str]:
    modules = [function for function in loss.functions.values() if isinstance(function, nn.Module)]
    training = [type(module).__name__ for module in modules if any(p.requires_grad for p in module.parameters())]
    return {loss.kind.feature: "", **({Feature.LOSS_PARAMETERS: ", ".join(training)} if training else {})}


def _has_sparse_gradients(module: nn.Module) -> bool:
    trains = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    # `is True`, because a user's module may have another attribute of that name.
    return trains and getattr(module, "sparse", False) is True
