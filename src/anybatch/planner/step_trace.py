"""Trace one engine step on fake tensors and record every allocation."""

import dataclasses
import gc
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core.batch import LaterUnits, Position, Positions
from anybatch.core.loss import declared
from anybatch.core.records import MicroBatchRecord, PhaseRecord, Record
from anybatch.core.tree import Batch, slice_samples, tensors_of
from anybatch.engine.arguments import Hardware
from anybatch.engine.engine import Engine
from anybatch.engine.loss_check.check import UndeclaredLoss
from anybatch.engine.user_code import Model, collect_modules, trial_run
from anybatch.errors import CannotPlanError
from anybatch.memory.ledger import MemoryLedger
from anybatch.memory.torch_internals import FakeTensorMode, tree_leaves
from anybatch.memory.trace import MemoryTrace, Phase
from anybatch.parallel.dtensors import is_dtensor, local_part
from anybatch.parallel.world import World
from anybatch.planner.cuda_emulation import allocating_as, choose_foreach
from anybatch.planner.fake_ranks import AllRows, StreamPools, fake_ranks, recorded_resizes, with_gradients
from anybatch.planner.fake_tensor_cache import FakeLedger, fake_mode
from anybatch.planner.refusals import (
    HostReads,
    as_planning_errors,
    check_loop_length,
    check_strategy,
    untraced_features,
)
from anybatch.planner.step_spec import StepSpec, as_module, built, fake_batch, fake_twin, repeated
from anybatch.planner.step_time import CostTrace, OperationRecorder
from anybatch.planner.torch_internals import allocated_sizes

_PHASES: Mapping[str, Phase] = {"reduce": "reduce", "clip": "clip", "update": "update"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """Allocations of one rank in a step."""

    steady: MemoryTrace  # any step after the first, with the optimizer's state already allocated
    first: MemoryTrace  # the first step, including the engine's set-up
    costs: CostTrace  # the operations of the steady step
    read_at: str | None = None  # location of the first read of an unknown value, as text to append to a sentence
    sharded: bool = False  # the strategy shards the weights and gathers them in every micro-batch
    decisions: Mapping[str, str] = field(default_factory=dict)  # the engine's decisions while it was built, by topic
    notes: tuple[str, ...] = ()  # features of the program that the trace does not follow


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, which frees cycles at unpredictable moments and is slow with torch's many objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@without_garbage_collection()
def trace_step(spec: StepSpec, micro_batch_size: int, *, with_data: bool = False) -> StepTrace:
    """Run `Engine.step` twice on a fake twin (a copy with fake tensors) and return the allocations.

    The spec is not changed, no data is read, and almost no memory is allocated. With data, the step of `spec.make` runs
    on the sample instead.
    """
    check_strategy(spec.strategy)
    spec, _ = built(spec)
    # The user's functions are not copied; `trial_run` lets them detect that this is not a real run.
    with (
        fake_ranks(spec.world_size, spec.device_bytes) as world,
        warnings.catch_warnings(),
        trial_run(),
        torch.random.fork_rng(devices=[]),
    ):
        warnings.simplefilter("ignore")  # a real run shows the warnings
        if with_data:
            torch.manual_seed(0)
        twin = _TwinRun(spec, None if with_data else fake_mode(), world)
        try:
            reads = HostReads(lambda: twin.reading_phase, refuses=spec.make is not None)
            with_lstm = any(isinstance(each, nn.LSTM) for each in twin.modules.modules())
            if with_lstm and spec.profile == "cpu" and spec.make is not None and not with_data:
                message = (
                    "cannot plan this step: oneDNN's LSTM keeps a workspace that tensors without data do not have."
                )
                raise CannotPlanError(message)
            # Elsewhere, and without data, torch's own kernels run.
            with torch.backends.mkldnn.flags(enabled=not with_lstm or (spec.profile == "cpu" and with_data)):
                return _two_steps(twin, reads, micro_batch_size)
        finally:
            twin.ledger.forget()


@without_garbage_collection()
def allocated_bytes(spec: StepSpec, micro_batch_size: int) -> int:
    """Run two steps with data, and return the peak of torch's CPU allocator in the second, with kernels' workspaces."""
    with warnings.catch_warnings(), trial_run(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        twins: list[_TwinRun] = []

        def first_step() -> None:
            twins.append(_TwinRun(spec, None, World()))
            twins[0].make_engine()
            twins[0].step(micro_batch_size)

        try:
            before = sum(allocated_sizes(first_step))
            return before + max(itertools.accumulate(allocated_sizes(lambda: twins[0].step(micro_batch_size))))
        finally:
            for twin in twins:
                twin.ledger.forget()
                twin.close()


def _two_steps(twin: "_TwinRun", reads: HostReads, micro_batch_size: int) -> StepTrace:
    ledger, spec, recorder = twin.ledger, twin.spec, OperationRecorder()
    # The mode entered last handles an operation first: the ledger, then the fake mode, which creates the result.
    with (
        as_planning_errors(twin.modules, lambda: reads.at),
        twin.mode or nullcontext(),
        reads,
        allocating_as(spec.profile, has_data=twin.mode is None),
        recorded_resizes(ledger),
        ledger,
    ):
        try:
            twin.make_engine()
            twin.step(micro_batch_size)
            start = ledger.num_events
            # The first step creates the optimizer's state; the second is like all later ones.
            twin.step(micro_batch_size, recorder)
            steady, first = twin.trace(start), twin.trace(twin.first_event, start)
            decisions = dict(twin.engine.decisions)
        finally:
            twin.close()
    return StepTrace(
        steady=steady,
        first=first,
        costs=recorder.trace(),
        read_at=reads.at,
        sharded=twin.sharded,
        decisions=decisions,
        # Inspect the original model, since the copy is not compiled.
        notes=untraced_features(as_module(spec.trained.model)),
    )


class _TwinRun:
    """Runs the fake twin of a spec with an engine and a ledger, as the engine's observer; without a mode, with data."""

    def __init__(self, spec: StepSpec, mode: FakeTensorMode | None, world: World) -> None:
        self.ledger = (
            MemoryLedger(on_operation=self._operation, pool=StreamPools())
            if mode is None
            else FakeLedger(mode, on_operation=self._operation, pool=StreamPools(), cache=spec.cache)
        )
        self.ledger.sums_without_cast = spec.profile == "cuda"
        self._recorder: OperationRecorder | None = None
        self._num_operations = 0
        self.computing = False
        self.spec = spec
        self.mode = mode
        self._world = world
        if mode is None:
            assert spec.make is not None, "the step can be made"
            spec = self.spec = dataclasses.replace(spec, train=spec.make())
        train = spec.trained
        loss = declared(train.loss)
        instance = train.optimizer if isinstance(train.optimizer, Optimizer) else None
        model: Model = train.model
        # One call, so that the optimizer's twin updates the parameters of the model's twin.
        twin = model, instance, loss
        self._model, optimizer, self._loss = twin if mode is None else fake_twin(twin, mode)
        self._optimizer = train.optimizer if optimizer is None else optimizer
        if self._loss.kind.returns_count:
            # The engine classifies an undeclared loss by its values, which a trace lacks; assume a mean.
            self._loss = dataclasses.replace(self._loss, function=UndeclaredLoss(self._loss.function, is_mean=True))
        self._rows: AllRows | None = None
        if self._loss.kind.encode is not None:
            # The loss needs the rows of the whole effective batch, but only two micro-batches are traced.
            self._rows = AllRows(self._loss, train.effective_batch_size, world.size)
            self._loss = self._rows.as_loss()
        self.modules = collect_modules(self._model, self._loss)
        # Plan for training even if the user's model is in eval mode; this changes only the copy.
        self.modules.train()
        self._engine: Engine | None = None
        self.first_event = 0
        self.sharded = False

    def trace(self, start: int, stop: int | None = None) -> MemoryTrace:
        """Return the ledger's trace between two events."""
        found = self.ledger.trace(start, stop)
        return with_gradients(found) if self.sharded else found

    def make_engine(self) -> None:
        """Create the engine and record the memory before its first step."""
        spec, ledger = self.spec, self.ledger
        ledger.phase = "setup"
        ledger.categorize("weights", map(local_part, self.modules.parameters()))
        ledger.categorize("buffers", self.modules.buffers())
        engine = self._engine = self._new_engine()
        self.sharded = any(map(is_dtensor, self.modules.parameters()))
        if self.sharded and spec.profile != "cpu":
            # Begin here: the full model was in host memory, and moving a module needs less than gathering it later.
            self.first_event = ledger.num_events
        ledger.categorize("weights", map(local_part, self.modules.parameters()))
        # By default the optimizer would choose `foreach` for a CPU, the device of the fake parameters.
        choose_foreach(engine.optimizer, spec.profile)
        self._hold_gradients()
        ledger.categorize_rest("gradients")  # strategies allocate only gradient buffers before a run
        ledger.phase = None

    @property
    def engine(self) -> Engine:
        """The engine, after `make_engine`."""
        assert self._engine is not None, "the engine exists"
        return self._engine

    def close(self) -> None:
        """Close the engine, if it exists."""
        if self._engine is not None:
            self._engine.close()

    def step(self, micro_batch_size: int, recorder: OperationRecorder | None = None) -> None:
        """Run a step."""
        engine = self.engine
        is_first = not engine.num_steps
        self._recorder, self._num_operations = recorder, 0
        engine.step(_TracedBatch(self, micro_batch_size * self.spec.num_micro_batches * self._world.size))
        self._recorder = None
        self._hold_states()
        if is_first:
            self.ledger.categorize_rest("gradients" if self._world.size > 1 and not self.sharded else "buffers")

    def observe(self, record: Record, /) -> None:
        """Track the engine's phase, and the gradients after each micro-batch."""
        ledger = self.ledger
        if isinstance(record, PhaseRecord):
            if self._rows is not None and record.name == "reduce":
                self._rows.release()
            if record.name in _PHASES:
                ledger.phase = _PHASES[record.name] if record.event == "begin" else None
                self._hold_gradients()
            ledger.mark(f"{record.name} {record.event}s")
        elif isinstance(record, MicroBatchRecord):
            if record.event == "end":
                self._hold_gradients()
            elif self._rows is not None:
                self._rows.begin_second_pass()
            self.computing = record.event == "begin"
            ledger.mark(f"micro-batch {record.position} {record.event}s")

    @property
    def reading_phase(self) -> Phase:
        """The current phase; "setup" between micro-batches, where the engine's reads do not affect the computation."""
        return self.ledger.current_phase if self.computing else "setup"

    def _new_engine(self) -> Engine:
        spec = self.spec
        train = dataclasses.replace(
            spec.trained,
            model=self._model,
            optimizer=self._optimizer,
            loss=self._loss,
            effective_batch_size=None,  # two micro-batches represent all
            scheduler=None,  # it would step the user's optimizer, not the twin's
            check_loss=False,  # needs values of tensors
        )
        hardware = Hardware(
            accumulation_steps=spec.num_micro_batches,
            strategy=spec.strategy if isinstance(spec.strategy, str) else spec.strategy(),
            world=self._world,
        )
        # Leave warnings about norm layers to the real run.
        train = dataclasses.replace(train, norms=train.norms or "keep")
        return Engine.from_spec(train, hardware, observer=self)

    def _operation(self, *seen: Any) -> None:  # noqa: ANN401 (passed on)
        self._num_operations += 1
        check_loop_length(self._num_operations)
        if self._recorder is not None:
            self._recorder(*seen)

    def _hold_gradients(self) -> None:
        updated = [p for group in self._engine.optimizer.param_groups for p in group["params"]] if self._engine else []
        # Master weights are separate tensors with separate gradients.
        gradients = [parameter.grad for parameter in (*self.modules.parameters(), *updated)]
        self.ledger.categorize("gradients", (local_part(gradient) for gradient in gradients if gradient is not None))

    def _hold_states(self) -> None:
        """Record long-lived tensors: master weights, optimizer state, averaged weights."""
        engine = self.engine
        updated = (p for group in engine.optimizer.param_groups for p in group["params"])
        self.ledger.categorize("weights", map(local_part, updated))
        # int16 tensors are the lower halves of split bf16 weights.
        kept = engine.resident_tensors()["optimizer"]
        self.ledger.categorize("weights", (tensor for tensor in kept if tensor.dtype is torch.int16))
        self.ledger.categorize("optimizer", map(local_part, _tensors(list(engine.optimizer.state.values()))))
        if engine.average is not None:
            self.ledger.categorize("optimizer", map(local_part, engine.average.weights.values()))


@dataclass(frozen=True, slots=True)
class _TracedBatch:
    """An effective batch of fake samples; see `EffectiveBatch`."""

    run: _TwinRun
    num_samples: int
    seed: int = 0

    @property
    def end(self) -> Position:
        """A default position."""
        return Position()

    @property
    def sample_ids(self) -> Sequence[int]:
        """Consecutive ids."""
        return range(self.num_samples)

    def feed(self, units: Sequence[Positions], later_units: LaterUnits | None = None) -> Iterator[Batch]:
        """Yield this rank's micro-batches: created on demand, or on a CPU, slices of the whole batch."""
        del later_units
        if self.run.spec.profile != "cpu":
            for positions in units:
                yield self._loaded(len(positions))
            return
        whole = self._loaded(sum(map(len, units)))
        # Positions are global; this batch starts at the rank's first position.
        first = units[0][0]
        for positions in units:
            yield slice_samples(whole, positions[0] - first, positions[-1] + 1 - first)

    def _loaded(self, num_samples: int) -> Batch:
        """Return fake samples, recorded as inputs."""
        sample, mode = self.run.spec.sample, self.run.mode
        batch = repeated(sample, num_samples) if mode is None else fake_batch(sample, num_samples, mode)
        self.run.ledger.categorize("inputs", tensors_of(batch))
        return batch


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
