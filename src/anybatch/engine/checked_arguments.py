"""Checks the arguments of an engine, before anything of the model is touched. Every refusal of arguments is here."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from torch import nn

from anybatch.core.loss import Loss
from anybatch.core.splitting import CutConstraints
from anybatch.engine.accumulation.accumulate import Randomness
from anybatch.engine.accumulation.step_guard import refuse_accumulation_hooks
from anybatch.engine.batch_norm.runner import policy_for, refuse_policy
from anybatch.engine.compatibility import Features, features_of, refuse_features
from anybatch.engine.forward_state.buffer_updates import BufferUpdates
from anybatch.engine.gradient_noise import refuse_noise
from anybatch.engine.inputs import captured_parameters
from anybatch.engine.micro_batch_size.sizes import RunSizes
from anybatch.engine.rng.generators import choose_randomness
from anybatch.engine.spec import Hardware, TrainSpec
from anybatch.engine.spike_watch.watch import SpikeWatch, spike_watch
from anybatch.engine.strategy_choice import choose, with_device_bytes
from anybatch.engine.update.bf16_weights import refuse_bf16_weights
from anybatch.engine.update.clipping import ClipPolicy, clip_policy
from anybatch.engine.update.precision import autocast
from anybatch.errors import CompositionError, ParameterError
from anybatch.norms import Policy
from anybatch.norms.layers import batch_norms
from anybatch.parallel.model_groups import comes_sharded, refuse_misplaced
from anybatch.parallel.strategy import Capabilities, Strategy, trainable
from anybatch.parallel.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedArguments:
    """Arguments that have been checked, and values that follow from them alone."""

    spec: TrainSpec
    loss: Loss
    modules: nn.Module
    world: World
    strategy: Strategy
    strategy_reason: str
    clip: ClipPolicy | None
    autocast: Callable[[], AbstractContextManager[object]]
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
    """Refuse all that is known to fail, and return the rest.

    Args:
        spec: what is trained.
        hardware: where, and in what pieces.
        loss: the declared loss.
        modules: everything that trains.
        world: the ranks, which have the same spec and hardware.

    Raises:
        UserError: with what was wrong, both values and what to do.
    """
    # Before a strategy replaces parameters, whose hooks it would drop.
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
    features = features_of(spec, modules, loss, sizes=make_sizes().sizes, deal=hardware.deal, clip=clip, policy=policy)
    composes = partial(_composes, features, spec, modules, world)
    choice = choose(hardware.strategy, spec.optimizer, modules, world, composes, bf16_weights=spec.bf16_weights)
    strategy, needs = choice.strategy, choice.strategy.capabilities
    refuse_misplaced(modules, needs, world, spec.precision)
    refuse_features(features, spec.optimizer, needs, world, comes_sharded=comes_sharded(modules))
    refuse_bf16_weights(spec.bf16_weights, modules, spec.optimizer, needs)
    _refuse_captured(loss, modules, needs)
    # A cut has to satisfy the strategy as well; BatchNorm layers are run by the policy's constraints alone.
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
    """Refuse parameters of the model that a loss function holds itself, where the strategy replaces them."""
    names = {id(parameter): name for name, parameter in modules.named_parameters() if parameter.dim()}
    for held, parameter in captured_parameters(loss).items() if needs.replaces_parameters else ():
        if id(parameter) in names:
            name = names[id(parameter)]
            message = (
                f"the loss function holds parameter {name!r} itself (as {held!r}), and strategy {needs.name!r} "
                f"replaces it in the model, so the loss would use a weight that no longer trains. Read model.{name} "
                "inside the function, or use strategy='zero1'."
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
