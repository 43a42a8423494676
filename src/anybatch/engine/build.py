"""Build the parts of an engine in the order of their dependencies, with one function for each."""

import dataclasses
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from anybatch.core.compatibility import Feature, remarks
from anybatch.core.loss import declared
from anybatch.core.records import Observer
from anybatch.core.tensors import BufferKeeper
from anybatch.engine.accumulate import LoopContext
from anybatch.engine.arguments import (
    CheckedArguments,
    Hardware,
    TrainSpec,
    check_arguments,
    features_of_ranks,
    refuse_wrong_types,
)
from anybatch.engine.batch_norm import BatchNormRunner, ranks_of
from anybatch.engine.checkpoint_saver import CheckpointSaver
from anybatch.engine.decisions import Decisions, first_decisions
from anybatch.engine.first_steps import CutNotice, FirstSteps, MaskedParameters
from anybatch.engine.forward_state import StateWatch
from anybatch.engine.gradient_noise import NoiseMeter, refuse_preconditioner
from anybatch.engine.loss_check.check import LossCheck, UncountedSums
from anybatch.engine.micro_batch_size.oom_retry import OomRetry, SizeBackoff, why_impossible
from anybatch.engine.micro_batch_size.search import TrialParts
from anybatch.engine.micro_batches import PlannedBatch
from anybatch.engine.notifier import Notifier, start_record
from anybatch.engine.optimizer_memory import (
    OptimizerStateMemory,
    ResidentMemory,
    prepare_for_training,
    resident_tensors,
)
from anybatch.engine.parts import Parts, failures_reported
from anybatch.engine.precision import LossScaler, Target, make_target
from anybatch.engine.rank_comparison import ReplicaCheck, StepMeaning, refuse_other_builds
from anybatch.engine.rng import advancing_generators, seed_of_state
from anybatch.engine.schedule import Scheduler, WeightAverage, scheduler_of
from anybatch.engine.spike_watch import KeptState, SpikeGuard
from anybatch.engine.step import StepPlanner, StepRunner, choose_executor
from anybatch.engine.step_guard import StepGuard
from anybatch.engine.updater import ClipByNorm, FiniteCheck, StepState, Updater, refuse_groups
from anybatch.engine.user_code import captured_parameters, collect_modules, move_modules, world_of
from anybatch.norms.layers import batch_norms
from anybatch.parallel.local_parts import local_part
from anybatch.parallel.replicas import refuse_joined_kernels, refuse_whole_updates
from anybatch.parallel.strategy import Prepared, UpdateSharding
from anybatch.parallel.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainedModel:
    """The model as the strategy has prepared it, with optimizer, scheduler and averages."""

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
    """Inputs of the parts that plan and run steps."""

    arguments: CheckedArguments
    model: _TrainedModel
    updater: Updater
    decisions: Decisions
    notifier: Notifier


def build(spec: TrainSpec, hardware: Hardware, observer: Observer | None = None) -> Parts:
    """Build the parts of an engine.

    Args:
        spec: the arguments for the training.
        hardware: the arguments for devices and cuts.
        observer: receives a record of every micro-batch, reduction, phase and step.

    Raises:
        UserError: invalid arguments, with both values and the fix; the model has not changed then.
        RanksDifferError: arguments differ between ranks, or only some ranks build an engine.
        RankFailedError: another rank failed to build its engine.
    """
    refuse_wrong_types(spec, hardware, observer)
    loss = declared(spec.loss)
    modules = collect_modules(spec.model, loss)
    # After the modules, since a single rank uses the model's device.
    world = hardware.world or world_of(modules)
    if world.roll_call is None:
        return _build(check_arguments(spec, hardware, loss, modules, world), observer)
    with failures_reported(world, "ab.Engine", None, undo=lambda: None, barrier=True):
        refuse_other_builds(spec, hardware, loss, modules, world)
        parts = _build(check_arguments(spec, hardware, loss, modules, world), observer)
        # No rank may begin to train if another one could not build.
        world.gather_numbers((0.0,))
    return parts


def _build(arguments: CheckedArguments, observer: Observer | None) -> Parts:
    spec, modules, world, strategy = arguments.spec, arguments.modules, arguments.world, arguments.strategy
    decisions = Decisions()
    max_norm = arguments.clip.max_norm if isinstance(arguments.clip, ClipByNorm) else None
    notifier = Notifier(observer, world.rank, arguments.loss, max_norm, speaks=world.speaks)
    if not strategy.capabilities.moves_modules:
        # Before the strategy, which allocates its buckets where the parameters are.
        move_modules(modules, world.device)
    # From here on the model may have changed: hooks, buckets, and with some strategies its parameters.
    prepared = strategy.prepare(modules, spec.model, world, notifier.reduction)
    try:
        model = _trained_model(arguments, prepared, notifier)
    except Exception:
        strategy.close()  # remove the hooks from the model
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
    """Build the parts that need the prepared parameters; run the checks that need the optimizer."""
    spec, modules, world, strategy = arguments.spec, arguments.modules, arguments.world, arguments.strategy
    guard = StepGuard(
        spec.model, modules, prepared, notifier, world, replaces_parameters=strategy.capabilities.replaces_parameters
    )
    prepared = dataclasses.replace(prepared, call=guard.call)
    # An optimizer function receives the parameters of the strategy.
    target = make_target(spec.optimizer, prepared.parameters, spec.bf16_weights, spec.seed or 0)
    # Not with the other checks: an optimizer function has no groups before it is called.
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
    # Not a bound method, so that holders of this function do not keep the engine alive.
    tensors = partial(resident_tensors, modules, model.prepared, target, model.average)
    resident = ResidentMemory(tensors, target, spec.precision)
    notifier.measure_memory(world, target.parameters, tensors)
    after_update = [] if model.batch_norm.is_idle else [model.batch_norm.update]
    if not arguments.buffer_updates.is_idle:
        after_update.append(arguments.buffer_updates.update)
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
        after_update=tuple(after_update),
        hooks=model.guard,
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
    """Build the parts that plan and run steps on a prepared model."""
    arguments, model, updater = shared.arguments, shared.model, shared.updater
    decisions, notifier = shared.decisions, shared.notifier
    check, noise = _loss_check(shared), _noise_meter(shared)
    context = _loop_context(shared, check, noise)
    planner, first_steps = _step_planner(shared, check), _first_steps(shared, check, context)
    replicas = _replica_check(arguments, model.prepared, updater)
    backoff = SizeBackoff(arguments.sizes, decisions, notifier)
    impossible = why_impossible(
        model.prepared, arguments.strategy.capabilities, arguments.norm_constraints, arguments.world
    )
    _add_decisions(shared, impossible)
    _warn_of_captured(arguments, notifier)
    # Existing gradients would be added to the gradient of the first effective batch.
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
        runner=_step_runner(
            shared,
            context,
            planner=planner,
            first_steps=first_steps,
            backoff=backoff,
            replicas=replicas,
            noise=noise,
            impossible=impossible,
        ),
        updater=updater,
        noise=noise,
        replicas=replicas,
        batch_norm=model.batch_norm,
        decisions=decisions,
        notifier=notifier,
        saver=CheckpointSaver(arguments.world),
        spikes=_spike_guard(arguments, updater, notifier),
        further_state={},
        loss_weights=context.loss.weights,
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
    """Build the context of the hot loop, without calls of disabled parts."""
    arguments, notifier, batch_norm = shared.arguments, shared.notifier, shared.model.batch_norm
    before = () if arguments.buffer_updates.is_idle else (arguments.buffer_updates.before,)
    after = () if arguments.buffer_updates.is_idle else (arguments.buffer_updates.after,)
    if noise is not None:
        after = (*after, noise.after)
    return LoopContext(
        # The first step may find that a bare loss is a mean, so the loop uses the check's loss, not the user's.
        loss=check.loss,
        strategy=arguments.strategy,
        prepared=shared.model.prepared,
        scaler=shared.updater.scaler,
        autocast=arguments.autocast,
        forward=arguments.autocast if batch_norm.is_idle else batch_norm.forward,
        randomness=arguments.randomness,
        before=before,
        after=after,
        audience=notifier,
    )


def _first_steps(shared: _Shared, check: LossCheck, context: LoopContext) -> FirstSteps:
    arguments, notifier, decisions = shared.arguments, shared.notifier, shared.decisions
    spec, modules, world = arguments.spec, arguments.modules, arguments.world
    return FirstSteps(
        check=check,
        sizes=arguments.sizes,
        cut_notice=CutNotice(batch_norms(modules), notifier, is_chosen=spec.norms is not None),
        watch=StateWatch(
            modules,
            arguments.buffer_updates.names,
            notifier,
            world.size,
            keyed=spec.rng is not None,
            # The second function of such a loss runs once per step and may keep a queue.
            watches_state=arguments.loss.kind.encode is None,
        ),
        autocast=arguments.autocast,
        on_first_batch=partial(_send_header, context, world, notifier, precision=spec.precision, decisions=decisions),
        trial_parts=partial(_trial_parts, arguments, check, context, shared.updater, shared.model.batch_norm),
        decisions=decisions,
        notifier=notifier,
    )


def _step_planner(shared: _Shared, check: LossCheck) -> StepPlanner:
    arguments, spec = shared.arguments, shared.arguments.spec
    modules, world = arguments.modules, arguments.world
    return StepPlanner(
        world=world,
        loss=check.loss,
        sizes=arguments.sizes,
        sums=UncountedSums(check, arguments.autocast),
        notifier=shared.notifier,
        seed=spec.seed,
        make_seed=partial(seed_of_state, modules),
    )


def _step_runner(
    shared: _Shared,
    context: LoopContext,
    *,
    planner: StepPlanner,
    first_steps: FirstSteps,
    backoff: SizeBackoff,
    replicas: ReplicaCheck,
    noise: NoiseMeter | None,
    impossible: str,
) -> StepRunner:
    arguments, model, notifier = shared.arguments, shared.model, shared.notifier
    modules, world = arguments.modules, arguments.world
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
        planner=planner,
        executor=executor,
        context=context,
        guard=model.guard,
        first_steps=first_steps,
        buffers=None if arguments.buffer_updates.is_idle else arguments.buffer_updates,
        world=world,
        retry=retry,
        notifier=notifier,
        meaning=None
        if world.roll_call is None
        else StepMeaning(world=world, updater=shared.updater, replicas=replicas),
        noise=noise,
        masked=MaskedParameters(context, arguments.spec.model, modules, notifier),
        can_leave=not impossible and world.roll_call is not None,
    )


def _add_decisions(shared: _Shared, impossible: str) -> None:
    """Record the automatic choices so far: first of the engine, then of the strategy."""
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
    """Warn about parameters that are in the loss function but in no module, so they are not trained."""
    own = set(map(id, arguments.modules.parameters()))
    names = [name for name, one in captured_parameters(arguments.loss).items() if id(one) not in own]
    if names:
        message = (
            f"the loss function holds parameters that are in no module of the engine and never train: "
            f"{', '.join(map(repr, names))}. Register them: Engine({{'model': model, 'loss': module}}, ...), or make "
            "the loss a module with these parameters; or freeze them with requires_grad_(False)."
        )
        notifier.warn("parameter_outside_model", message)


def _replica_check(arguments: CheckedArguments, prepared: Prepared, updater: Updater) -> ReplicaCheck:
    target = updater.target
    # Windows are empty between steps, so the model's parameters are compared.
    updated = target.updated if target.windows is None else target.parameters
    weights = dict(zip(prepared.parameters, updated, strict=True))
    # A forward may change frozen weights, such as a teacher's, differently on each rank.
    frozen = {name: one for name, one in arguments.modules.named_parameters() if not one.requires_grad}
    return ReplicaCheck(arguments.world, weights | frozen, enabled=arguments.strategy.capabilities.replicas)


def _spike_guard(arguments: CheckedArguments, updater: Updater, notifier: Notifier) -> SpikeGuard | None:
    watch = arguments.spikes
    if watch is None:
        return None
    copied = partial(
        KeptState, modules=arguments.modules, target=updater.target, average=updater.average, keep_on=watch.keep_on
    )
    return SpikeGuard(watch, updater=updater, copied=copied, device=arguments.world.device, notifier=notifier)


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
    """Send the header of a run after its first batch has been planned."""
    if notifier.observers:
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
