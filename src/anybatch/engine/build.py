"""Makes the parts of an engine, in the order in which they depend on each other: one function for each."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from anybatch.core.buffers import BufferKeeper
from anybatch.core.compatibility import Feature, remarks
from anybatch.core.loss import declared
from anybatch.core.records import Observer
from anybatch.engine.accumulation.accumulate import LoopContext
from anybatch.engine.accumulation.masked_parameters import MaskedParameters
from anybatch.engine.accumulation.planned_batch import PlannedBatch
from anybatch.engine.accumulation.step_guard import StepGuard
from anybatch.engine.argument_types import refuse_wrong_types
from anybatch.engine.batch_norm.cut_notice import CutNotice
from anybatch.engine.batch_norm.runner import BatchNormRunner, ranks_of
from anybatch.engine.checked_arguments import CheckedArguments, check_arguments
from anybatch.engine.checkpoint_saver import CheckpointSaver
from anybatch.engine.checkpoint_state import Scheduler
from anybatch.engine.compatibility import features_of_ranks
from anybatch.engine.executors import choose_executor
from anybatch.engine.failure import failures_reported
from anybatch.engine.fingerprint import refuse_other_builds
from anybatch.engine.forward_state.state_watch import StateWatch
from anybatch.engine.gradient_noise import NoiseMeter, refuse_preconditioner
from anybatch.engine.inputs import captured_parameters, collect_modules, move_modules, world_of
from anybatch.engine.loss_check.check import LossCheck
from anybatch.engine.loss_check.uncounted import UncountedSums
from anybatch.engine.meaning import StepMeaning
from anybatch.engine.micro_batch_size.backoff import SizeBackoff
from anybatch.engine.micro_batch_size.budget_trials import TrialParts
from anybatch.engine.micro_batch_size.oom_retry import OomRetry, why_impossible
from anybatch.engine.parts import Parts
from anybatch.engine.replica_check import ReplicaCheck
from anybatch.engine.rng.generators import advancing_generators, seed_of_state
from anybatch.engine.spec import Hardware, TrainSpec
from anybatch.engine.spike_watch.kept_state import KeptState
from anybatch.engine.spike_watch.watch import SpikeGuard
from anybatch.engine.step_planner import StepPlanner
from anybatch.engine.step_runner import StepRunner
from anybatch.engine.step_state import StepState
from anybatch.engine.telemetry.decisions import Decisions, first_decisions
from anybatch.engine.telemetry.notifier import Notifier, start_record
from anybatch.engine.update.clipping import refuse_groups
from anybatch.engine.update.finite_check import FiniteCheck
from anybatch.engine.update.optimizer_mode import prepare_for_training
from anybatch.engine.update.optimizer_state import OptimizerStateMemory
from anybatch.engine.update.precision import LossScaler, Target, make_target
from anybatch.engine.update.resident_tensors import ResidentMemory, resident_tensors
from anybatch.engine.update.schedule import scheduler_of
from anybatch.engine.update.updater import Updater
from anybatch.engine.update.weight_average import WeightAverage
from anybatch.norms.layers import batch_norms
from anybatch.parallel.local_parts import local_part
from anybatch.parallel.model_groups import refuse_joined_kernels, refuse_whole_updates
from anybatch.parallel.strategy import Prepared, UpdateSharding
from anybatch.parallel.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainedModel:
    """The model as the strategy has prepared it, and what updates it."""

    prepared: Prepared
    guard: StepGuard
    target: Target
    scheduler: Scheduler | None
    sharding: UpdateSharding | None
    average: WeightAverage | None
    batch_norm: BatchNormRunner
    state: StepState


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """What the parts that plan and run steps are made from."""

    arguments: CheckedArguments
    model: _TrainedModel
    updater: Updater
    decisions: Decisions
    notifier: Notifier


def build(spec: TrainSpec, hardware: Hardware, observer: Observer | None = None) -> Parts:
    """Make the parts of an engine.

    Args:
        spec: what is trained.
        hardware: where, and in what pieces.
        observer: looks in on micro-batches, reductions, phases and steps.

    Raises:
        UserError: with what was wrong, both values and what to do; nothing of the model has changed then.
        RanksDifferError: ranks do not build the same, or only some of them build.
        RankFailedError: another rank failed while it built.
    """
    refuse_wrong_types(spec, hardware, observer)
    loss = declared(spec.loss)
    modules = collect_modules(spec.model, loss)
    # After the modules, since a single rank computes where the model is.
    world = hardware.world or world_of(modules)
    if world.roll_call is None:
        return _build(check_arguments(spec, hardware, loss, modules, world), observer)
    with failures_reported(world, "ab.Engine", None, undo=lambda: None, barrier=True):
        refuse_other_builds(spec, hardware, loss, modules, world)
        parts = _build(check_arguments(spec, hardware, loss, modules, world), observer)
        # So that no rank begins to train where another could not build.
        world.gather_numbers((0.0,))
    return parts


def _build(arguments: CheckedArguments, observer: Observer | None) -> Parts:
    spec, modules, world, strategy = arguments.spec, arguments.modules, arguments.world, arguments.strategy
    decisions = Decisions()
    notifier = Notifier(observer, world.rank, arguments.loss, arguments.clip, speaks=world.speaks)
    if not strategy.capabilities.moves_modules:
        # Before the strategy, which allocates its buckets where the parameters are.
        move_modules(modules, world.device)
    # From here on something of the model may have changed: hooks, buckets, for some strategies the parameters.
    prepared = strategy.prepare(modules, spec.model, world, notifier.reduction)
    try:
        model = _trained_model(arguments, prepared, notifier)
    except Exception:
        strategy.close()  # no hook stays on a model that is not going to be trained
        raise
    shared = _Shared(
        arguments=arguments,
        model=model,
        updater=_updater(arguments, model, notifier),
        decisions=decisions,
        notifier=notifier,
    )
    return _parts(shared)


def _trained_model(arguments: CheckedArguments, prepared: Prepared, notifier: Notifier) -> _TrainedModel:
    """Make what needs the parameters as the strategy has left them; refuse what only an optimizer can show."""
    spec, modules, world, strategy = arguments.spec, arguments.modules, arguments.world, arguments.strategy
    guard = StepGuard(
        spec.model, modules, prepared, notifier, world, replaces_parameters=strategy.capabilities.replaces_parameters
    )
    prepared = dataclasses.replace(prepared, call=guard.call)
    # An optimizer that is given as a function is made over what the strategy has made of the parameters.
    target = make_target(spec.optimizer, prepared.parameters, spec.bf16_weights, spec.seed or 0)
    # Not with the other checks: an optimizer that is given as a function has no groups before it is made.
    refuse_groups(arguments.clip, target.optimizer)
    refuse_joined_kernels(target.optimizer, target.updated)
    refuse_whole_updates(target.optimizer, target.updated)
    refuse_preconditioner(spec.noise, target, prepared)
    prepare_for_training(target.optimizer)
    shard_update = prepared.shard_update
    return _TrainedModel(
        prepared=prepared,
        guard=guard,
        target=target,
        scheduler=scheduler_of(spec.scheduler, target.optimizer),
        sharding=None if shard_update is None else shard_update(target.optimizer, target.updated),
        average=None
        if spec.average_decay is None
        else WeightAverage(prepared.parameters, spec.average_decay, target.wide_weights),
        batch_norm=BatchNormRunner(
            arguments.norm_policy,
            modules,
            arguments.norm_constraints,
            ranks_of(strategy, world),
            autocast=arguments.autocast,
            device=world.device,
        ),
        state=StepState(BufferKeeper(modules), advancing_generators(arguments.randomness)),
    )


def _updater(arguments: CheckedArguments, model: _TrainedModel, notifier: Notifier) -> Updater:
    spec, modules, world, target = arguments.spec, arguments.modules, arguments.world, model.target
    # Not a method of anything: what asks for these tensors must not keep the engine alive.
    tensors = partial(resident_tensors, modules, model.prepared, target, model.average)
    resident = ResidentMemory(tensors, target, spec.precision)
    notifier.measure_memory(world, target.parameters, tensors)
    update_statistics: Callable[..., None] = model.batch_norm.update
    if not arguments.buffer_updates.is_idle:
        update_statistics = _both(update_statistics, arguments.buffer_updates.update)
    return Updater(
        target=target,
        scaler=LossScaler(spec.precision, target, world.device),
        clip=arguments.clip,
        measures_norm=spec.measure_gradient_norm,
        layout=model.prepared.layout,
        state=model.state,
        finite=FiniteCheck(world.device, partial(_not_finite, modules, model.state)),
        average=model.average,
        scheduler=model.scheduler,
        optimizer_memory=OptimizerStateMemory(target, world, resident, model.sharding),
        sharding=model.sharding,
        update_statistics=update_statistics,
        run_hooks=model.guard.run_hooks,
        clear=arguments.strategy.clear_gradients,
        resident=resident,
        notifier=notifier,
    )


def _not_finite(modules: nn.Module, state: StepState) -> list[str]:
    """Return the names of buffers and weights that were not finite before the step."""
    state.restore_buffers()
    named = (*modules.named_buffers(), *modules.named_parameters())
    return [name for name, tensor in named if not bool(torch.isfinite(local_part(tensor)).all())]


def _parts(shared: _Shared) -> Parts:
    """Make what plans and runs steps on a prepared model."""
    arguments, model, updater = shared.arguments, shared.model, shared.updater
    decisions, notifier = shared.decisions, shared.notifier
    check, noise = _loss_check(shared), _noise_meter(shared)
    context = _loop_context(shared, check, noise)
    planner = _step_planner(shared, check, context)
    replicas = _replica_check(arguments, model.prepared, updater)
    backoff = SizeBackoff(arguments.sizes, decisions, notifier)
    impossible = why_impossible(
        model.prepared, arguments.strategy.capabilities, arguments.norm_constraints, arguments.world
    )
    _add_decisions(shared, impossible)
    _warn_of_captured(arguments, notifier)
    # Gradients of the user's from before would be added to those of the first effective batch.
    arguments.strategy.clear_gradients()
    return Parts(
        world=arguments.world,
        modules=arguments.modules,
        context=context,
        sizes=arguments.sizes,
        backoff=backoff,
        check=check,
        planner=planner,
        guard=model.guard,
        runner=_step_runner(shared, planner, context, backoff, replicas, noise=noise, impossible=impossible),
        updater=updater,
        noise=noise,
        replicas=replicas,
        batch_norm=model.batch_norm,
        decisions=decisions,
        notifier=notifier,
        saver=CheckpointSaver(arguments.world),
        spikes=_spike_guard(arguments, updater, notifier),
        further_state={},
    )


def _loss_check(shared: _Shared) -> LossCheck:
    arguments = shared.arguments
    return LossCheck(
        arguments.loss,
        arguments.spec.model,
        arguments.modules,
        arguments.world,
        decisions=shared.decisions,
        notifier=shared.notifier,
        strategy=arguments.strategy,
        prepared=shared.model.prepared,
        enabled=arguments.spec.check_loss,
    )


def _noise_meter(shared: _Shared) -> NoiseMeter | None:
    arguments, updater = shared.arguments, shared.updater
    if arguments.spec.noise is None:
        return None
    return NoiseMeter(
        arguments.spec.noise,
        shared.model.prepared,
        updater.target,
        updater.scaler,
        loss=arguments.loss,
        world=arguments.world,
    )


def _loop_context(shared: _Shared, check: LossCheck, noise: NoiseMeter | None) -> LoopContext:
    """Make what the hot loop calls; what is off is not called at all."""
    arguments, notifier, batch_norm = shared.arguments, shared.notifier, shared.model.batch_norm
    before, after = notifier.before, notifier.after
    if noise is not None:
        after = _both(noise.after, after)
    if not arguments.buffer_updates.is_idle:
        before = _both(arguments.buffer_updates.before, before)
        after = _both(arguments.buffer_updates.after, after)
    return LoopContext(
        # A bare loss may turn out to be a mean in the first step, so the loop calls the check's loss, not the user's.
        loss=check.loss,
        strategy=arguments.strategy,
        prepared=shared.model.prepared,
        scaler=shared.updater.scaler,
        autocast=arguments.autocast,
        forward=(lambda _: arguments.autocast()) if batch_norm.is_idle else batch_norm.forward,
        randomness=arguments.randomness,
        before=before,
        after=after,
    )


def _step_planner(shared: _Shared, check: LossCheck, context: LoopContext) -> StepPlanner:
    arguments, notifier, decisions = shared.arguments, shared.notifier, shared.decisions
    spec, modules, world = arguments.spec, arguments.modules, arguments.world
    return StepPlanner(
        world=world,
        loss=check.loss,
        sizes=arguments.sizes,
        check=check,
        sums=UncountedSums(
            arguments.loss,
            spec.model,
            modules,
            world,
            autocast=arguments.autocast,
            lockstep=arguments.strategy.capabilities.lockstep,
        ),
        cut_notice=CutNotice(batch_norms(modules), notifier, is_chosen=spec.norms is not None),
        autocast=arguments.autocast,
        on_first_batch=partial(_send_header, context, world, notifier, precision=spec.precision, decisions=decisions),
        trial_parts=partial(_trial_parts, arguments, check, context, shared.updater, shared.model.batch_norm),
        decisions=decisions,
        notifier=notifier,
        seed=spec.seed,
        make_seed=partial(seed_of_state, modules),
    )


def _step_runner(
    shared: _Shared,
    planner: StepPlanner,
    context: LoopContext,
    backoff: SizeBackoff,
    replicas: ReplicaCheck,
    *,
    noise: NoiseMeter | None,
    impossible: str,
) -> StepRunner:
    arguments, model, notifier = shared.arguments, shared.model, shared.notifier
    modules, world, buffers = arguments.modules, arguments.world, arguments.buffer_updates
    num_further = 0 if noise is None else noise.num_numbers
    executor = choose_executor(context, modules, world, notifier, model.batch_norm, num_further=num_further)
    retry = OomRetry(
        state=model.state,
        world=world,
        backoff=backoff,
        notifier=notifier,
        resident=shared.updater.resident,
        clear=arguments.strategy.clear_gradients,
        executor=executor,
        impossible=impossible,
    )
    return StepRunner(
        planner,
        executor,
        context,
        model.guard,
        buffers=buffers,
        watch=StateWatch(
            modules,
            buffers.names,
            notifier,
            world.size,
            keyed=arguments.spec.rng is not None,
            # The second function of such a loss runs once per step and may keep a queue.
            watches_state=arguments.loss.kind.encode is None,
        ),
        world=world,
        retry=retry,
        notifier=notifier,
        meaning=_step_meaning(arguments, shared.updater, replicas),
        noise=noise,
        masked=MaskedParameters(context, arguments.spec.model, modules, notifier),
        can_leave=not impossible,
    )


def _add_decisions(shared: _Shared, impossible: str) -> None:
    """Note what has been decided so far, first what the engine chose, then what the strategy did."""
    arguments, prepared, decisions = shared.arguments, shared.model.prepared, shared.decisions
    world, features, capabilities = arguments.world, arguments.features, arguments.strategy.capabilities
    for decision in first_decisions(
        update=shared.updater.target.update,
        strategy=arguments.strategy_reason,
        world_size=world.size,
        num_processes=world.num_processes,
        differed=prepared.differed,
        remarks=remarks({**features_of_ranks(capabilities, world), **features}),
        norms=shared.model.batch_norm.description,
        not_repeated=impossible,
        draws=not features.keys().isdisjoint((Feature.DROPOUT_KEYED, Feature.DROPOUT_PER_SAMPLE)),
        seed=arguments.spec.seed,
    ):
        decisions.add(decision.name, decision.text)
    for name, text in prepared.decisions.items():
        decisions.add(name, text)


def _warn_of_captured(arguments: CheckedArguments, notifier: Notifier) -> None:
    """Warn of parameters that the loss function holds and no module: the engine does not train them."""
    own = set(map(id, arguments.modules.parameters()))
    names = [name for name, one in captured_parameters(arguments.loss).items() if id(one) not in own]
    if names:
        message = (
            f"the loss function holds a parameter that is in no module of the engine, so it never trains: "
            f"{', '.join(map(repr, names))}. Register it: Engine({{'model': model, 'loss': module}}, ...), or make the "
            "loss a module with the parameter; or freeze it with requires_grad_(False)."
        )
        notifier.warn("parameter_outside_model", message)


def _replica_check(arguments: CheckedArguments, prepared: Prepared, updater: Updater) -> ReplicaCheck:
    target = updater.target
    # Windows are empty between steps: replicas are compared by what the model has.
    updated = target.updated if target.windows is None else target.parameters
    weights = dict(zip(prepared.parameters, updated, strict=True))
    # A forward may change frozen weights, such as a teacher's, differently on each rank.
    frozen = {name: one for name, one in arguments.modules.named_parameters() if not one.requires_grad}
    return ReplicaCheck(arguments.world, weights | frozen, enabled=arguments.strategy.capabilities.replicas)


def _step_meaning(arguments: CheckedArguments, updater: Updater, replicas: ReplicaCheck) -> StepMeaning:
    return StepMeaning(
        arguments.world,
        updater.target.optimizer,
        lambda: updater.scheduler,
        rate_factor=lambda: updater.rate_factor,
        replicas=replicas,
    )


def _spike_guard(arguments: CheckedArguments, updater: Updater, notifier: Notifier) -> SpikeGuard | None:
    watch = arguments.spikes
    if watch is None:
        return None
    keep = partial(
        KeptState, modules=arguments.modules, target=updater.target, average=updater.average, keep_on=watch.keep_on
    )
    return SpikeGuard(watch, updater=updater, keep=keep, device=arguments.world.device, notifier=notifier)


def _trial_parts(
    arguments: CheckedArguments, check: LossCheck, context: LoopContext, updater: Updater, batch_norm: BatchNormRunner
) -> TrialParts:
    return TrialParts(
        context=check.provisional(context),
        modules=arguments.modules,
        execute=batch_norm.accumulate_alone,
        clear=arguments.strategy.clear_gradients,
        optimizer_is_new=not updater.target.optimizer.state,
        precision=arguments.spec.precision,
        loss_runs=partial(check.runs, context.autocast),
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


def _both(one: Callable[..., None], other: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls both, in this order, with the same arguments."""

    def call(*args: object) -> None:
        one(*args)
        other(*args)

    return call
