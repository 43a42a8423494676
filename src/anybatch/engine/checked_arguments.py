"""Check the arguments of an engine before the model is changed. All errors about arguments are raised here."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.optim import Optimizer

from anybatch.core.loss import Loss
from anybatch.core.records import Observer
from anybatch.core.splitting import CutConstraints
from anybatch.core.whole_numbers import checked_int, is_number, refuse_unless
from anybatch.engine.accumulation.accumulate import Randomness
from anybatch.engine.batch_norm import policy_for, refuse_policy
from anybatch.engine.compatibility import Features, features_of, refuse_features
from anybatch.engine.forward_state import BufferUpdates
from anybatch.engine.gradient_noise import GradientNoise, refuse_noise
from anybatch.engine.inputs import captured_parameters
from anybatch.engine.micro_batch_size.sizes import RunSizes
from anybatch.engine.rng import choose_randomness
from anybatch.engine.spec import Hardware, TrainSpec
from anybatch.engine.spike_watch import SpikeWatch, spike_watch
from anybatch.engine.step_guard import refuse_accumulation_hooks
from anybatch.engine.strategy_choice import choose, with_device_bytes
from anybatch.engine.update.bf16_weights import refuse_bf16_weights
from anybatch.engine.update.clipping import ClipPolicy, clip_policy
from anybatch.engine.update.precision import autocast
from anybatch.errors import CompositionError, ParameterError
from anybatch.norms import Policy
from anybatch.norms.layers import batch_norms
from anybatch.parallel.replicas import already_sharded, refuse_misplaced
from anybatch.parallel.strategy import Capabilities, Strategy, trainable
from anybatch.parallel.world import World

_OPTIMIZER = "a torch optimizer, or a function such as lambda named_parameters: torch.optim.AdamW(named_parameters)"
_CLIP = "the largest gradient norm as a number, ClipByNorm, ClipByValue, a list of these for each group, or None"
_OBSERVER = "an object with a method observe(record), such as ab.JsonlLog(path); for several: Observers(first, second)"


def refuse_wrong_types(spec: TrainSpec, hardware: Hardware, observer: Observer | None) -> None:
    """Refuse arguments of a wrong type; values are checked later.

    Raises:
        UserError: with the argument, its value, and the expected type.
    """
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
    """Refuse arguments that cannot work, and return the checked ones.

    Args:
        spec: the arguments for the training.
        hardware: the arguments for devices and cuts.
        loss: the declared loss.
        modules: all trained modules.
        world: the ranks, which have the same spec and hardware.

    Raises:
        UserError: invalid arguments, with both values and the fix.
    """
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
