"""Build the parts of an engine in the order of their dependencies, with one function for each part."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from anybatch.core.compatibility import Feature, remarks
from anybatch.core.loss import declared
from anybatch.core.records import Observer, StartRecord
from anybatch.core.torch_internals import BufferKeeper
from anybatch.engine.accumulate import LoopContext
from anybatch.engine.arguments import (
    CheckedArguments,
    Hardware,
    TrainSpec,
    check_arguments,
    check_types,
    features_of_ranks,
)
from anybatch.engine.batch_norm import BatchNormRunner, ranks_of
from anybatch.engine.checkpoint_saver import CheckpointSaver
from anybatch.engine.first_steps import FirstSteps
from anybatch.engine.forward_state import StateWatch
from anybatch.engine.loss_check.check import LossCheck, UncountedSums
from anybatch.engine.micro_batch_size.oom_retry import OomRetry, why_impossible
from anybatch.engine.micro_batch_size.search import TrialParts
from anybatch.engine.micro_batches import PlannedBatch
from anybatch.engine.notifier import Notifier, software_versions
from anybatch.engine.optimizer_memory import (
    OptimizerStateMemory,
    ResidentMemory,
    prepare_for_training,
    resident_tensors,
)
from anybatch.engine.parts import Parts, failures_reported
from anybatch.engine.precision import LossScaler, make_target
from anybatch.engine.rank_comparison import ReplicaCheck, StepFingerprint, check_same_build
from anybatch.engine.schedule import WeightAverage, scheduler_of
from anybatch.engine.step import StepPlanner, StepRunner, choose_executor
from anybatch.engine.step_guard import StepGuard
from anybatch.engine.updater import FiniteCheck, StepState, Updater
from anybatch.engine.user_code import captured_parameters, collect_modules, move_modules, world_of
from anybatch.norms.layers import batch_norms
from anybatch.parallel.dtensors import local_part
from anybatch.parallel.gradient_buckets import gradient_bytes
from anybatch.parallel.replicas import check_whole_updates
from anybatch.parallel.strategy import Prepared
from anybatch.parallel.world import World

if TYPE_CHECKING:
    from anybatch.engine.gradient_noise import NoiseMeter
    from anybatch.engine.spike_watch import SpikeGuard

_UPDATES: Mapping[str, str] = {
    "direct": "the optimizer updates the parameters directly",
    "master_weights": "the optimizer updates float32 master weights, which are copied into the parameters",
    "split": "the optimizer updates float32 weights: the model has the upper 16 bits, the engine the lower 16",
    "stochastic": "weights and optimizer state are updated in float32, with stochastic rounding to bf16",
    "cast": "float32 gradients are cast to the parameters' type for the optimizer",
}


def build(spec: TrainSpec, hardware: Hardware, observer: Observer | None = None) -> Parts:
    """Build the parts of an engine.

    Args:
        spec: the arguments for the training.
        hardware: the arguments for devices and micro-batches.
        observer: receives a record of every micro-batch, reduction, phase and step.

    Raises:
        UserError: an argument is invalid, or two contradict each other; the model is unchanged.
        RanksDifferError: arguments differ between ranks, or only some ranks build an engine.
        RankFailedError: another rank failed to build its engine.
    """
    check_types(spec, hardware, observer)
    loss = declared(spec.loss)
    modules = collect_modules(spec.model, loss)
    # The modules come first, since a single rank runs on the model's device.
    world = hardware.world or world_of(modules)
    if world.call_tracker is None:
        return _build(check_arguments(spec, hardware, loss, modules, world), observer)
    with failures_reported(world, "ab.Engine", None, undo=lambda: None, barrier=True):
        check_same_build(spec, hardware, loss, modules, world)
        parts = _build(check_arguments(spec, hardware, loss, modules, world), observer)
        # Wait for all ranks: no rank may begin to train if another one could not build its engine.
        world.gather_numbers((0.0,))
    return parts


def _build(arguments: CheckedArguments, observer: Observer | None) -> Parts:
    spec, modules, world, strategy = arguments.spec, arguments.modules, arguments.world, arguments.strategy
    notifier = Notifier(observer, world.rank, arguments.loss, spec.clip)
    if not strategy.capabilities.moves_modules:
        # Move them before `prepare`, which allocates gradient buckets on the device of the parameters.
        move_modules(modules, world.device)
    # From here on the model may have changed: hooks, buckets, and with some strategies its parameters.
    prepared = strategy.prepare(modules, spec.model, world, notifier)
    try:
        parts = _Builder(arguments, prepared, notifier).parts()
    except Exception:
        strategy.close()  # remove the hooks from the model
        raise
    _warn_of_captured(arguments, notifier)
    # Existing gradients would be added to the gradient of the first effective batch.
    strategy.clear_gradients()
    return parts


class _Builder:
    """Creates the parts that need the prepared parameters, in the order of their dependencies."""

    def __init__(self, arguments: CheckedArguments, prepared: Prepared, notifier: Notifier) -> None:
        spec, modules, world, strategy = arguments.spec, arguments.modules, arguments.world, arguments.strategy
        replaces = strategy.capabilities.replaces_parameters
        self.arguments, self.notifier = arguments, notifier
        self.decisions: dict[str, str] = {}
        self.guard = StepGuard(spec.model, modules, prepared, notifier, world, replaces_parameters=replaces)
        self.prepared = dataclasses.replace(prepared, call=self.guard.call)
        # Create the optimizer after `prepare`, since an optimizer function receives the prepared parameters.
        self.target = target = make_target(spec.optimizer, prepared.parameters, spec.bf16_weights, spec.seed or 0)
        check_whole_updates(target.optimizer, target.updated)
        prepare_for_training(target.optimizer)
        self.scheduler = scheduler_of(spec.scheduler, target.optimizer)
        shard_update = prepared.shard_update
        self.sharding = None if shard_update is None else shard_update(target.optimizer, target.updated)
        self.average = (
            None
            if spec.average_decay is None
            else WeightAverage(prepared.parameters, spec.average_decay, target.wide_weights)
        )
        self.batch_norm = BatchNormRunner(
            arguments.norm_policy,
            modules,
            arguments.norm_constraints,
            ranks_of(strategy, world),
            autocast=arguments.autocast,
            device=world.device,
        )
        self.state = StepState(
            BufferKeeper(modules), arguments.randomness.generators if arguments.randomness.advances else ()
        )
        self.updater = self._updater()
        self.check = LossCheck(
            arguments.loss,
            spec.model,
            modules,
            world,
            decisions=self.decisions,
            notifier=notifier,
            strategy=strategy,
            prepared=self.prepared,
            enabled=spec.check_loss,
        )
        self.noise = self._noise_meter()
        self.context = self._context()

    def parts(self) -> Parts:
        """Create the parts that plan and run steps, and return all parts."""
        arguments, updater, notifier = self.arguments, self.updater, self.notifier
        world, capabilities = arguments.world, arguments.strategy.capabilities
        planner = StepPlanner(
            world=world,
            loss=self.check.loss,
            sizes=arguments.sizes,
            sums=UncountedSums(self.check, arguments.autocast),
            notifier=notifier,
            seed=arguments.spec.seed,
            modules=arguments.modules,
        )
        replicas = self._replica_check()
        impossible = why_impossible(self.prepared, capabilities, arguments.norm_constraints, world)
        runner = self._runner(planner, replicas, impossible)
        self._add_decisions(impossible)
        return Parts(
            world=world,
            modules=arguments.modules,
            context=self.context,
            sizes=arguments.sizes,
            check=self.check,
            planner=planner,
            guard=self.guard,
            runner=runner,
            updater=updater,
            noise=self.noise,
            replicas=replicas,
            batch_norm=self.batch_norm,
            decisions=self.decisions,
            notifier=notifier,
            saver=CheckpointSaver(world),
            spikes=self._spike_guard(),
            also_saved={},
            loss_weights=self.context.loss.weights,
        )

    def _updater(self) -> Updater:
        arguments, target, notifier = self.arguments, self.target, self.notifier
        spec, modules, world = arguments.spec, arguments.modules, arguments.world
        # Not a bound method, since a reference to it would keep the engine alive.
        tensors = partial(resident_tensors, modules, self.prepared, target, self.average)
        resident = ResidentMemory(tensors, target, spec.precision)
        notifier.measure_memory(world.device, target.parameters, tensors)
        after_update = [] if self.batch_norm.is_idle else [self.batch_norm.update]
        if not arguments.buffer_updates.is_idle:
            after_update.append(arguments.buffer_updates.update)
        return Updater(
            target=target,
            scaler=LossScaler(spec.precision, target, world.device),
            clip=spec.clip,
            measures_norm=spec.measure_gradient_norm,
            layout=self.prepared.layout,
            state=self.state,
            finite=FiniteCheck(world.device, partial(_not_finite, modules, self.state)),
            average=self.average,
            scheduler=self.scheduler,
            optimizer_memory=OptimizerStateMemory(target, world, resident, self.sharding),
            sharding=self.sharding,
            after_update=tuple(after_update),
            hooks=self.guard,
            clear=arguments.strategy.clear_gradients,
            resident=resident,
            notifier=notifier,
        )

    def _context(self) -> LoopContext:
        """Return the context of the hot loop; it does not call parts that are disabled."""
        arguments, updates = self.arguments, self.arguments.buffer_updates
        after = () if updates.is_idle else (updates.after,)
        return LoopContext(
            # The check's loss, not the user's: the first step may find that an undeclared loss is a mean.
            loss=self.check.loss,
            strategy=arguments.strategy,
            prepared=self.prepared,
            scaler=self.updater.scaler,
            autocast=arguments.autocast,
            forward=arguments.autocast if self.batch_norm.is_idle else self.batch_norm.forward,
            randomness=arguments.randomness,
            before=() if updates.is_idle else (updates.before,),
            after=after if self.noise is None else (*after, self.noise.after),
            notifier=self.notifier,
        )

    def _runner(self, planner: StepPlanner, replicas: ReplicaCheck, impossible: str) -> StepRunner:
        arguments, notifier, world = self.arguments, self.notifier, self.arguments.world
        num_noise_sums = 0 if self.noise is None else self.noise.num_sums
        executor = choose_executor(
            self.context, arguments.modules, world, notifier, self.batch_norm, num_noise_sums=num_noise_sums
        )
        retry = OomRetry(
            state=self.state,
            world=world,
            sizes=arguments.sizes,
            decisions=self.decisions,
            notifier=notifier,
            resident=self.updater.resident,
            clear=arguments.strategy.clear_gradients,
            abort=executor.abort,
            impossible=impossible,
        )
        is_alone = world.call_tracker is None
        return StepRunner(
            planner=planner,
            executor=executor,
            context=self.context,
            guard=self.guard,
            first_steps=self._first_steps(),
            buffers=None if arguments.buffer_updates.is_idle else arguments.buffer_updates,
            world=world,
            retry=retry,
            notifier=notifier,
            fingerprint=None if is_alone else StepFingerprint(world=world, updater=self.updater, replicas=replicas),
            noise=self.noise,
        )

    def _first_steps(self) -> FirstSteps:
        arguments, check, context, notifier = self.arguments, self.check, self.context, self.notifier
        spec, modules, world = arguments.spec, arguments.modules, arguments.world
        return FirstSteps(
            check=check,
            sizes=arguments.sizes,
            unchosen_norms=batch_norms(modules) if spec.norms is None else {},
            watch=StateWatch(
                modules,
                arguments.buffer_updates.names,
                notifier,
                keyed=spec.rng is not None,
                # A loss with `encode` (across samples) runs once per step, so it may keep a queue.
                watches_state=arguments.loss.kind.encode is None,
            ),
            autocast=arguments.autocast,
            start=partial(_send_header, context, world, notifier, precision=spec.precision, decisions=self.decisions),
            trial_parts=TrialParts(
                context=check.provisional(context),
                modules=modules,
                execute=self.batch_norm.accumulate_alone,
                clear=arguments.strategy.clear_gradients,
                optimizer=self.target.optimizer,
                loss_runs=partial(check.runs, context.autocast),
            ),
            decisions=self.decisions,
            notifier=notifier,
        )

    def _replica_check(self) -> ReplicaCheck:
        arguments, target = self.arguments, self.target
        # Windows (float32 copies during an update) are empty between steps, so the model's parameters are compared.
        updated = target.updated if target.windows is None else target.parameters
        weights = dict(zip(self.prepared.parameters, updated, strict=True))
        # A forward may change frozen weights, such as a teacher's, differently on each rank.
        frozen = {name: weight for name, weight in arguments.modules.named_parameters() if not weight.requires_grad}
        return ReplicaCheck(arguments.world, weights | frozen, enabled=arguments.strategy.capabilities.replicas)

    def _noise_meter(self) -> "NoiseMeter | None":
        arguments, noise = self.arguments, self.arguments.spec.noise
        if noise is None:
            return None
        from anybatch.engine.gradient_noise import NoiseMeter  # noqa: PLC0415 (few runs measure it)

        device = arguments.world.device
        return NoiseMeter(noise, self.prepared, self.updater.scaler, loss=arguments.loss, device=device)

    def _spike_guard(self) -> "SpikeGuard | None":
        arguments, watch, target = self.arguments, self.arguments.spikes, self.target
        if watch is None:
            return None
        from anybatch.engine.spike_watch import KeptState, SpikeGuard  # noqa: PLC0415 (few runs watch for spikes)

        copy_state = partial(
            KeptState, modules=arguments.modules, target=target, average=self.average, keep_on=watch.keep_on
        )
        device = arguments.world.device
        return SpikeGuard(watch, updater=self.updater, copy_state=copy_state, device=device, notifier=self.notifier)

    def _add_decisions(self, impossible: str) -> None:
        """Record the automatic choices so far, and why the run differs from training with the unsplit batch."""
        arguments, differed = self.arguments, self.prepared.differed
        world, features, seed = arguments.world, arguments.features, arguments.spec.seed
        in_ranks = features_of_ranks(arguments.strategy.capabilities, world)
        decisions = {
            "update": _UPDATES[self.target.update],
            "equality": " ".join(remarks({**in_ranks, **features})),
            "strategy": arguments.strategy_reason,
        }
        if differed:
            decisions["replicas"] = (
                f"{len(differed)} parameters and buffers differed between ranks and were set to rank 0's values, "
                f"first {differed[0]!r}"
            )
        if not features.keys().isdisjoint((Feature.DROPOUT_KEYED, Feature.DROPOUT_PER_SAMPLE)):
            key = "the data's seed (ab.batches(seed=), 0 for other loaders)" if seed is None else f"seed={seed}"
            decisions["random_numbers"] = f"from {key}: torch.manual_seed does not change them, Engine(seed=) does"
        decisions["norms"] = self.batch_norm.description
        if impossible:
            decisions["out_of_memory"] = f"a step that runs out of memory ends the run, because {impossible}"
        decisions |= self.prepared.decisions
        self.decisions.update({name: text for name, text in decisions.items() if text})


def _not_finite(modules: nn.Module, state: StepState) -> list[str]:
    """Restore the buffers from before the step, and return the names of buffers and weights that are not finite."""
    state.restore_buffers()
    named = (*modules.named_buffers(), *modules.named_parameters())
    return [name for name, tensor in named if not bool(torch.isfinite(local_part(tensor)).all())]


def _warn_of_captured(arguments: CheckedArguments, notifier: Notifier) -> None:
    """Warn about parameters that are in the loss function but in no module, so they are not trained."""
    in_modules = set(map(id, arguments.modules.parameters()))
    names = [name for name, weight in captured_parameters(arguments.loss).items() if id(weight) not in in_modules]
    if names:
        message = (
            f"the loss function uses parameters that are in no module of the engine, so they are not trained: "
            f"{', '.join(map(repr, names))}. Register them: Engine({{'model': model, 'loss': module}}, ...), or make "
            "the loss a module with these parameters; or freeze them with requires_grad_(False)."
        )
        notifier.warn("parameter_outside_model", message)


def _send_header(
    context: LoopContext,
    world: World,
    notifier: Notifier,
    planned: PlannedBatch,
    step: int,
    *,
    precision: str,
    decisions: Mapping[str, str],
) -> None:
    """Send the header of a run, after its first batch has been planned."""
    parameters = list(context.prepared.parameters.values())
    notifier.send(
        StartRecord(
            rank=world.rank,
            world_size=world.size,
            first_step=step,
            geometry=str(planned.plan),
            effective_batch_size=planned.plan.num_samples,
            micro_batch_size=planned.plan.split.micro_batch_size,
            strategy=context.strategy.capabilities.name,
            precision=precision,
            device=str(world.device),
            dtype=str(parameters[0].dtype).removeprefix("torch."),
            seed=planned.seed,
            num_parameters=sum(parameter.numel() for parameter in parameters),
            gradient_bytes=gradient_bytes(parameters),
            versions=software_versions(),
            decisions=dict(decisions),
        )
    )
