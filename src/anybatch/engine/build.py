"""Makes the parts of an engine, in the order in which they depend on each other. Every refusal of arguments is here."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, reduce

from torch import nn
from torch.optim import Optimizer

from anybatch.core.buffers import BufferKeeper
from anybatch.core.compatibility import Feature, remarks
from anybatch.core.loss import Loss, declared
from anybatch.core.records import Observer
from anybatch.core.splitting import CutConstraints
from anybatch.engine.accumulation.accumulate import LoopContext, Randomness
from anybatch.engine.accumulation.planned_batch import PlannedBatch
from anybatch.engine.accumulation.step_guard import StepGuard
from anybatch.engine.batch_norm.cut_notice import CutNotice
from anybatch.engine.batch_norm.runner import BatchNormRunner, policy_for, ranks_of, refuse_policy
from anybatch.engine.checkpoint_saver import CheckpointSaver
from anybatch.engine.compatibility import Features, features_of, features_of_ranks, refuse_features
from anybatch.engine.executors import choose_executor
from anybatch.engine.forward_state.buffer_updates import BufferUpdates
from anybatch.engine.forward_state.state_watch import StateWatch
from anybatch.engine.gradient_noise import NoiseMeter, refuse_noise, refuse_preconditioner
from anybatch.engine.inputs import collect_modules, move_modules, world_of
from anybatch.engine.loss_check.check import LossCheck
from anybatch.engine.loss_check.uncounted import UncountedSums
from anybatch.engine.meaning import StepMeaning
from anybatch.engine.micro_batch_size.backoff import SizeBackoff
from anybatch.engine.micro_batch_size.oom_retry import OomRetry, why_impossible
from anybatch.engine.micro_batch_size.sizes import RunSizes, TrialParts
from anybatch.engine.parts import Parts
from anybatch.engine.replica_check import ReplicaCheck
from anybatch.engine.rng.generators import choose_randomness
from anybatch.engine.spec import Hardware, TrainSpec
from anybatch.engine.spike_watch.kept_state import KeptState
from anybatch.engine.spike_watch.watch import SpikeGuard, SpikeWatch, spike_watch
from anybatch.engine.step_planner import StepPlanner
from anybatch.engine.step_runner import StepRunner
from anybatch.engine.strategy_choice import choose, with_device_bytes
from anybatch.engine.telemetry.decisions import Decisions, first_decisions
from anybatch.engine.telemetry.notifier import Notifier, start_record
from anybatch.engine.update.clipping import ClipPolicy, clip_policy, refuse_groups
from anybatch.engine.update.finite_check import FiniteCheck
from anybatch.engine.update.optimizer_mode import prepare_for_training
from anybatch.engine.update.optimizer_state import OptimizerStateMemory
from anybatch.engine.update.precision import LossScaler, OptimizerFunction, autocast, make_target
from anybatch.engine.update.resident_tensors import ResidentMemory, resident_tensors
from anybatch.engine.update.schedule import scheduler_of
from anybatch.engine.update.updater import Updater
from anybatch.engine.update.weight_average import WeightAverage
from anybatch.errors import CompositionError
from anybatch.norms import Policy
from anybatch.norms.layers import batch_norms
from anybatch.parallel.model_groups import comes_sharded, refuse_joined_kernels, refuse_misplaced
from anybatch.parallel.strategy import Capabilities, Prepared, Strategy
from anybatch.parallel.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arguments:
    """Arguments that have been checked, and values that follow from them alone."""

    spec: TrainSpec
    loss: Loss
    modules: nn.Module
    world: World
    strategy: Strategy
    clip: ClipPolicy | None
    autocast: Callable[[], AbstractContextManager[object]]
    randomness: Randomness
    policy: Policy
    policy_constraints: CutConstraints
    buffers: BufferUpdates
    sizes: RunSizes
    features: Features
    chosen: str
    spikes: SpikeWatch | None


def build(spec: TrainSpec, hardware: Hardware, observer: Observer | None = None) -> Parts:
    """Make the parts of an engine.

    Args:
        spec: what is trained.
        hardware: where, and in what pieces.
        observer: looks in on micro-batches, reductions, phases and steps.

    Raises:
        UserError: with what was wrong, both values and what to do; nothing of the model has changed then.
    """
    given = _check_arguments(spec, hardware)
    modules, world, strategy = given.modules, given.world, given.strategy
    decisions = Decisions()
    notifier = Notifier(observer, world.rank, given.loss, given.clip, speaks=world.speaks)
    if not strategy.capabilities.moves_modules:
        # Before the strategy, which allocates its buckets where the parameters are.
        move_modules(modules, world.device)
    # From here on something of the model may have changed: hooks, buckets, for some strategies the parameters.
    prepared = strategy.prepare(modules, spec.model, world, notifier.reduction)
    try:
        guard = StepGuard(
            spec.model, modules, prepared, notifier, replaces_parameters=strategy.capabilities.replaces_parameters
        )
        prepared = dataclasses.replace(prepared, call=guard.call)
        # An optimizer that is given as a function is made over what the strategy has made of the parameters.
        target = make_target(spec.optimizer, prepared.parameters)
        # Not with the other checks: an optimizer that is given as a function has no groups before it is made.
        refuse_groups(given.clip, target.optimizer)
        refuse_joined_kernels(target.optimizer, target.updated)
        refuse_preconditioner(spec.noise, target, prepared)
        prepare_for_training(target.optimizer)
        scheduler = scheduler_of(spec.scheduler, target.optimizer)
        shard_update = prepared.shard_update
        sharding = None if shard_update is None else shard_update(target.optimizer, target.updated)
        average = None if spec.average_decay is None else WeightAverage(prepared.parameters, spec.average_decay)
        batch_norm = BatchNormRunner(
            given.policy,
            modules,
            given.policy_constraints,
            ranks_of(strategy, world),
            autocast=given.autocast,
            device=world.device,
        )
    except Exception:
        strategy.close()  # no hook stays on a model that is not going to be trained
        raise
    # Not a method of anything: what asks for these tensors must not keep the engine alive.
    tensors = partial(resident_tensors, modules, prepared, target, average)
    resident = ResidentMemory(tensors, target, spec.precision)
    notifier.measure_memory(world, target.parameters, tensors)
    buffers = BufferKeeper(modules)
    updater = Updater(
        target=target,
        scaler=LossScaler(spec.precision, target, world.device),
        clip=given.clip,
        measures_norm=spec.measure_gradient_norm,
        layout=prepared.layout,
        finite=FiniteCheck(world.device),
        average=average,
        scheduler=scheduler,
        optimizer_memory=OptimizerStateMemory(target, world, resident, sharding),
        sharding=sharding,
        update_statistics=batch_norm.update
        if given.buffers.is_idle
        else _both(batch_norm.update, given.buffers.update),
        run_hooks=guard.run_hooks,
        clear=strategy.clear_gradients,
        buffers=buffers,
        resident=resident,
        notifier=notifier,
    )
    return _runnable(
        given, prepared, guard, updater, batch_norm, decisions=decisions, notifier=notifier, buffers=buffers
    )


def _check_arguments(spec: TrainSpec, hardware: Hardware) -> _Arguments:
    """Refuse all that is known to fail, before anything of the model is touched."""
    loss = declared(spec.loss)
    modules = collect_modules(spec.model, loss)
    # After the modules, since a single rank computes where the model is.
    world = hardware.world or world_of(modules)
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
    composes = partial(_composes, features, spec.optimizer, world)
    choice = choose(hardware.strategy, spec.optimizer, modules, world, composes)
    strategy, needs = choice.strategy, choice.strategy.capabilities
    refuse_misplaced(modules, needs, world, spec.precision)
    refuse_features(features, spec.optimizer, needs, world, comes_sharded=comes_sharded(modules))
    # A cut has to satisfy the strategy as well; BatchNorm layers are run by the policy's constraints alone.
    sizes = make_sizes(constraints=constraints | needs.constraints)
    refuse_policy(policy, modules, constraints, needs, searches=_must_search(sizes, hardware))
    buffers = BufferUpdates(spec.buffers or {}, modules, strategy, world)
    buffers.refuse_with(loss, constraints, needs)
    refuse_noise(spec.noise, loss, features, world)
    return _Arguments(
        spec=spec,
        loss=loss,
        modules=modules,
        world=world,
        strategy=strategy,
        clip=clip,
        autocast=make_autocast,
        randomness=randomness,
        policy=policy,
        policy_constraints=constraints,
        buffers=buffers,
        sizes=sizes,
        features=features,
        chosen=choice.reason,
        spikes=spike_watch(spec.spikes),
    )


def _composes(
    features: Features, optimizer: Optimizer | OptimizerFunction, world: World, capabilities: Capabilities
) -> bool:
    try:
        refuse_features(features, optimizer, capabilities, world)
    except CompositionError:
        return False
    return True


def _runnable(
    given: _Arguments,
    prepared: Prepared,
    guard: StepGuard,
    updater: Updater,
    batch_norm: BatchNormRunner,
    *,
    decisions: Decisions,
    notifier: Notifier,
    buffers: BufferKeeper,
) -> Parts:
    """Make what plans and runs steps on a prepared model."""
    spec, modules, world, strategy, sizes = given.spec, given.modules, given.world, given.strategy, given.sizes
    buffers_chosen = given.buffers
    # A bare loss may turn out to be a mean in the first step, so the loop calls the check's loss, not the user's.
    check = LossCheck(
        given.loss,
        spec.model,
        modules,
        world,
        decisions=decisions,
        notifier=notifier,
        enabled=spec.check_loss,
        lockstep=strategy.capabilities.lockstep,
    )
    noise = None
    if spec.noise is not None:
        noise = NoiseMeter(spec.noise, prepared, updater.target, updater.scaler, loss=given.loss, world=world)
    after = [one for one in (None if buffers_chosen.is_idle else buffers_chosen.after, noise and noise.after) if one]
    context = LoopContext(
        loss=check.loss,
        strategy=strategy,
        prepared=prepared,
        scaler=updater.scaler,
        autocast=given.autocast,
        forward=(lambda _: given.autocast()) if batch_norm.is_idle else batch_norm.forward,
        randomness=given.randomness,
        before=notifier.before if buffers_chosen.is_idle else _both(buffers_chosen.before, notifier.before),
        after=reduce(_both, [*after, notifier.after]),
    )
    planner = StepPlanner(
        world=world,
        loss=check.loss,
        sizes=sizes,
        check=check,
        sums=UncountedSums(
            given.loss,
            spec.model,
            modules,
            world,
            autocast=given.autocast,
            lockstep=strategy.capabilities.lockstep,
        ),
        cut_notice=CutNotice(batch_norms(modules), notifier, is_chosen=spec.norms is not None),
        autocast=given.autocast,
        on_first_batch=partial(_send_header, context, world, notifier, precision=spec.precision, decisions=decisions),
        trial_parts=partial(_trial_parts, given, check, context, updater, batch_norm),
        decisions=decisions,
        notifier=notifier,
        seed=spec.seed,
    )
    num_further = 0 if noise is None else noise.num_numbers
    executor = choose_executor(context, modules, world, notifier, batch_norm, num_further=num_further)
    replicas = _replica_check(prepared, updater, strategy, world)
    backoff = SizeBackoff(sizes, decisions, notifier)
    impossible = why_impossible(prepared, strategy.capabilities, given.policy_constraints, world)
    retry = OomRetry(
        buffers=buffers,
        randomness=given.randomness,
        world=world,
        backoff=backoff,
        notifier=notifier,
        resident=updater.resident,
        clear=strategy.clear_gradients,
        executor=executor,
        impossible=impossible,
    )
    for decision in first_decisions(
        update=updater.target.update,
        strategy=given.chosen,
        world_size=world.size,
        num_processes=world.num_processes,
        differed=prepared.differed,
        remarks=remarks({**features_of_ranks(strategy.capabilities, world), **given.features}),
        norms=batch_norm.description,
        not_repeated=impossible,
        draws=not given.features.keys().isdisjoint((Feature.DROPOUT_KEYED, Feature.DROPOUT_PER_SAMPLE)),
        seed=spec.seed,
    ):
        decisions.add(decision.name, decision.text)
    for name, text in prepared.decisions.items():
        decisions.add(name, text)
    # Gradients of the user's from before would be added to those of the first effective batch.
    strategy.clear_gradients()
    return Parts(
        world=world,
        modules=modules,
        context=context,
        sizes=sizes,
        backoff=backoff,
        check=check,
        planner=planner,
        guard=guard,
        runner=StepRunner(
            planner,
            executor,
            context,
            guard,
            buffers=buffers_chosen,
            watch=StateWatch(modules, buffers_chosen.names, notifier, world.size, keyed=spec.rng is not None),
            world=world,
            retry=retry,
            notifier=notifier,
            meaning=_step_meaning(given, updater, replicas),
            noise=noise,
            can_leave=not impossible,
        ),
        updater=updater,
        noise=noise,
        replicas=replicas,
        batch_norm=batch_norm,
        decisions=decisions,
        notifier=notifier,
        saver=CheckpointSaver(world),
        spikes=_spike_guard(given, updater, notifier),
        further_state={},
    )


def _replica_check(prepared: Prepared, updater: Updater, strategy: Strategy, world: World) -> ReplicaCheck:
    weights = dict(zip(prepared.parameters, updater.target.updated, strict=True))
    return ReplicaCheck(world, weights, enabled=strategy.capabilities.replicas)


def _step_meaning(given: _Arguments, updater: Updater, replicas: ReplicaCheck) -> StepMeaning:
    spec, optimizer = given.spec, updater.target.optimizer
    fixed = {
        "optimizer": type(optimizer).__name__,
        "clip": str(given.clip),
        "precision": spec.precision,
        "average_decay": str(spec.average_decay),
    }
    return StepMeaning(
        given.world,
        optimizer,
        lambda: updater.scheduler,
        rate_factor=lambda: updater.rate_factor,
        fixed=fixed,
        replicas=replicas,
    )


def _spike_guard(given: _Arguments, updater: Updater, notifier: Notifier) -> SpikeGuard | None:
    watch = given.spikes
    if watch is None:
        return None
    keep = partial(
        KeptState, modules=given.modules, target=updater.target, average=updater.average, keep_on=watch.keep_on
    )
    return SpikeGuard(watch, updater=updater, keep=keep, device=given.world.device, notifier=notifier)


def _trial_parts(
    given: _Arguments, check: LossCheck, context: LoopContext, updater: Updater, batch_norm: BatchNormRunner
) -> TrialParts:
    return TrialParts(
        context=check.provisional(context),
        modules=given.modules,
        execute=batch_norm.accumulate_alone,
        clear=given.strategy.clear_gradients,
        optimizer_is_new=not updater.target.optimizer.state,
        precision=given.spec.precision,
    )


def _send_header(
    context: LoopContext,
    world: World,
    notifier: Notifier,
    planned: PlannedBatch,
    step: int,
    *,
    precision: str,
    decisions: Decisions,
) -> None:
    """Send the header of a run, once its first batch has been planned."""
    if notifier.has_observer:
        record = start_record(
            world=world,
            planned=planned,
            parameters=list(context.prepared.parameters.values()),
            strategy=context.strategy.capabilities.name,
            precision=precision,
            first_step=step,
            decisions=decisions,
        )
        notifier.start(record)


def _must_search(sizes: RunSizes, hardware: Hardware) -> bool:
    return sizes.is_auto and hardware.accumulation_steps is None and sizes.may_run_out


def _both(one: Callable[..., None], other: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls both, in this order, with the same arguments."""

    def call(*args: object) -> None:
        one(*args)
        other(*args)

    return call
