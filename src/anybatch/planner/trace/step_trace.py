"""Trace one engine step on fake tensors and record every allocation."""

import dataclasses
import gc
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch.optim import Optimizer

from anybatch.core.batch import LaterUnits, Position, Positions
from anybatch.core.loss import declared
from anybatch.core.records import MicroBatchRecord, PhaseRecord, Record
from anybatch.core.tree import Batch, slice_samples, tensors_of
from anybatch.engine.arguments import Hardware
from anybatch.engine.engine import Engine
from anybatch.engine.loss_check.check import BareLoss
from anybatch.engine.user_code import Model, collect_modules, trial_run
from anybatch.errors import PlanError
from anybatch.memory.torch_internals import FakeTensorMode, tree_leaves
from anybatch.memory.trace import Allocation, MemoryTrace, Phase
from anybatch.parallel.local_parts import is_dtensor, local_part
from anybatch.parallel.world import World
from anybatch.planner.operations import OperationRecorder
from anybatch.planner.torch_internals import saves_on_host
from anybatch.planner.trace.cuda_emulation import allocating_as, choose_foreach
from anybatch.planner.trace.fake_ranks import AllRows, StreamPools, fake_ranks, resizes_booked, with_gradients
from anybatch.planner.trace.fake_tensor_cache import FakeLedger, fake_mode
from anybatch.planner.trace.refusals import (
    HostReads,
    as_planning_errors,
    not_followed,
    refuse_long_loop,
    refuse_strategy,
    refuse_undescribed,
)
from anybatch.planner.trace.step_spec import StepSpec, as_module, built, fake_batch, fake_twin

_PHASES: Mapping[str, Phase] = {"reduce": "reduce", "clip": "clip", "update": "update"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """Allocations of one rank in a step."""

    steady: MemoryTrace  # any step after the first, with the optimizer's state already allocated
    first: MemoryTrace  # the first step, including the engine's set-up
    numbers_read: int  # how many unknown numbers the program read from tensors during forward and backward
    truths_read: int  # the same for truth values
    read_at: str = ""  # location of the first read, as text to append to a sentence
    is_drawn: bool = False  # whether the first read depends on a number drawn by `torch.rand`
    sharded: bool = False  # the strategy shards the weights and gathers them in every micro-batch
    decisions: Mapping[str, str] = field(default_factory=dict)  # the engine's decisions while it was built, by topic
    notes: tuple[str, ...] = ()  # features of the program that the trace does not follow


def trace_step(
    spec: StepSpec,
    micro_batch_size: int,
    *,
    other_answers: bool = False,
    recorder: OperationRecorder | None = None,
) -> StepTrace:
    """Run `Engine.step` twice on a fake twin and return the allocations.

    The spec is not changed, no data is read, and almost no memory is allocated.

    Raises:
        CannotPlanError: the step cannot run without data.
        UserError: the engine rejects the spec.
    """
    with StepTracer(spec, other_answers=other_answers) as tracing:
        return tracing.begin(micro_batch_size, recorder)


class StepTracer:
    """Context manager that runs the engine on a fake twin, step by step, with a fake process group."""

    def __init__(self, spec: StepSpec, *, other_answers: bool = False) -> None:
        refuse_strategy(spec.strategy)
        self._spec, _ = built(spec)
        self._mode = fake_mode()
        self._reads = HostReads(self._reading_phase, other=other_answers)
        self._entered = ExitStack()
        self._twin_run: _TwinRun | None = None
        self._stays: list[bool] = []

    def __enter__(self) -> Self:
        """Start the fake process group and create the twin."""
        # If creating the twin fails, the contexts entered so far are exited; otherwise `pop_all` keeps them open.
        with ExitStack() as stack:
            world = stack.enter_context(fake_ranks(self._spec.world_size, self._spec.device_bytes))
            stack.enter_context(warnings.catch_warnings())
            stack.enter_context(without_garbage_collection())
            warnings.simplefilter("ignore")  # the real run shows them
            # The user's functions are not copied; `trial_run` lets them detect that this is not a real run.
            stack.enter_context(trial_run())
            self._twin_run = _TwinRun(self._spec, self._mode, world)
            stack.callback(self._twin_run.ledger.forget)
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Exit all contexts."""
        self._entered.close()

    def begin(self, micro_batch_size: int, recorder: OperationRecorder | None = None) -> StepTrace:
        """Create the engine, run two steps and return their allocations.

        Raises:
            CannotPlanError: the step cannot run without data.
            UserError: the engine rejects the spec.
        """
        assert self._twin_run is not None, "it is entered"
        ledger = self._twin_run.ledger
        # Registered last, so that the engine is closed while its fake ranks still exist.
        self._entered.callback(self._close)
        with self._running():
            self._twin_run.make_engine()
            self._twin_run.step(micro_batch_size)
            start = ledger.num_events
            # The first step creates the optimizer's state; the second is like all later ones.
            self._twin_run.step(micro_batch_size, recorder)
        computing: tuple[Phase, ...] = ("forward", "backward")
        steady = self._twin_run.trace(start)
        # `next_step` uses this to renumber the pieces of later steps.
        self._stays = _which_stay(steady, len(ledger.trace(start, start).allocations))
        return StepTrace(
            steady=steady,
            first=self._twin_run.trace(self._twin_run.first_event, start),
            numbers_read=sum(self._reads.numbers[phase] for phase in computing),
            truths_read=sum(self._reads.truths[phase] for phase in computing),
            read_at=self._reads.at,
            is_drawn=self._reads.is_drawn,
            sharded=self._twin_run.sharded,
            decisions=self._twin_run.decisions,
            # Inspect the original model, since the copy is not compiled.
            notes=not_followed(as_module(self._spec.trained.model), offloads=self._twin_run.offloads),
        )

    def next_step(self, micro_batch_size: int) -> MemoryTrace:
        """Run one more step at another micro-batch size and return the allocations of a steady step of that size.

        Pieces left by the previous step, such as its last inputs, have the previous size. The returned trace replaces
        them with the pieces that this step leaves.

        Raises:
            CannotPlanError: the step cannot run without data.
            PlanError: the pieces after the step do not match the pieces before it.
        """
        assert self._twin_run is not None, "it is entered"
        ledger = self._twin_run.ledger
        start = ledger.num_events
        found = ledger.trace(start).allocations
        with self._running():
            self._twin_run.step(micro_batch_size)
        left = ledger.trace(ledger.num_events).allocations
        step = self._twin_run.trace(start)
        own = _which_stay(step, len(found))
        # Pieces are matched by order, so both steps must leave the same number.
        if not len(found) == len(left) == len(self._stays) or sum(own) != sum(self._stays):
            message = f"the step starts with {len(found)} allocations and ends with {len(left)}, which do not match."
            raise PlanError(message)
        return _as_in_a_run(step, left, own, self._stays)

    @contextmanager
    def _running(self) -> Iterator[None]:
        assert self._twin_run is not None, "it is entered"
        # The mode entered last sees an operation first: the ledger records, then the fake mode creates the result.
        ledger = self._twin_run.ledger
        with (
            as_planning_errors(self._twin_run.modules, lambda: self._reads.at),
            self._mode,
            self._reads,
            allocating_as(self._spec.profile),
            resizes_booked(ledger),
            ledger,
        ):
            yield

    def _close(self) -> None:
        assert self._twin_run is not None, "it is entered"
        with self._running():
            self._twin_run.close()

    def _reading_phase(self) -> Phase:
        assert self._twin_run is not None, "it is entered"
        return self._twin_run.reading_phase


class _TwinRun:
    """The twin of a spec, its engine and its ledger. It is the engine's observer."""

    def __init__(self, spec: StepSpec, mode: FakeTensorMode, world: World) -> None:
        self.ledger = FakeLedger(mode, on_operation=self._operation, pool=StreamPools(), cache=spec.cache)
        self._recorder: OperationRecorder | None = None
        self._num_operations = 0
        self.offloads = False
        self.computing = False
        self._spec = spec
        self._mode = mode
        self._world = world
        train = spec.trained
        loss = declared(train.loss)
        instance = train.optimizer if isinstance(train.optimizer, Optimizer) else None
        model: Model = train.model
        # One call, so that the optimizer's twin updates the parameters of the model's twin.
        self._model, optimizer, self._loss = fake_twin((model, instance, loss), mode)
        self._optimizer = train.optimizer if optimizer is None else optimizer
        if self._loss.kind.brings_count:
            # The engine classifies a bare loss by its values, which a trace lacks; assume a mean, the common case.
            self._loss = dataclasses.replace(self._loss, function=BareLoss(self._loss.function, is_mean=True))
        self._rows: AllRows | None = None
        if self._loss.kind.encode is not None:
            # The loss needs the rows of the whole effective batch, but only two micro-batches are traced.
            self._rows = AllRows(self._loss, train.effective_batch_size, world.size)
            self._loss = self._rows.as_loss()
        self.modules = collect_modules(self._model, self._loss)
        # Plan for training even if the user's model is in eval mode; this changes only the copy.
        self.modules.train()
        refuse_undescribed(self.modules, spec.profile)
        self._engine: Engine | None = None
        self.first_event = 0
        self.sharded = False

    @property
    def decisions(self) -> Mapping[str, str]:
        """The engine's decisions so far."""
        return {} if self._engine is None else dict(self._engine.decisions)

    def trace(self, start: int, stop: int | None = None) -> MemoryTrace:
        """Return the ledger's trace between two events."""
        found = self.ledger.trace(start, stop)
        return with_gradients(found) if self.sharded else found

    def make_engine(self) -> None:
        """Create the engine and record the memory before its first step."""
        spec, ledger = self._spec, self.ledger
        ledger.phase = "setup"
        ledger.hold("weights", map(local_part, self.modules.parameters()))
        ledger.hold("buffers", self.modules.buffers())
        engine = self._engine = self._made_engine()
        self.sharded = any(map(is_dtensor, self.modules.parameters()))
        if self.sharded and spec.profile != "cpu":
            # The full model was in host memory; moving a module needs less device memory than gathering it later.
            self.first_event = ledger.num_events
        ledger.hold("weights", map(local_part, self.modules.parameters()))
        # By default the optimizer would choose `foreach` for a CPU, the device of the fake parameters.
        choose_foreach(engine.optimizer, spec.profile)
        self._hold_gradients()
        ledger.hold_rest("gradients")  # strategies allocate only gradient buffers before a run
        ledger.phase = None

    def close(self) -> None:
        """Close the engine, if it was made."""
        if self._engine is not None:
            self._engine.close()

    def step(self, micro_batch_size: int, recorder: OperationRecorder | None = None) -> None:
        """Run a step."""
        engine = self._engine
        assert engine is not None, "the engine exists"
        is_first = not engine.num_steps
        self._recorder, self._num_operations = recorder, 0
        if recorder is not None:
            recorder.cached_result = lambda: self.ledger.entry
        engine.step(_TracedBatch(self, micro_batch_size * self._spec.num_micro_batches * self._world.size))
        self._recorder = None
        self._hold_states()
        if is_first:
            self.ledger.hold_rest("gradients" if self._world.size > 1 and not self.sharded else "buffers")

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

    def loaded(self, batch: Batch) -> Batch:
        """Record a micro-batch as input and return it."""
        self.ledger.hold("inputs", tensors_of(batch))
        return batch

    def sample(self, num_samples: int) -> Batch:
        """Return a fake batch of `num_samples` samples."""
        return fake_batch(self._spec.sample, num_samples, self._mode)

    @property
    def loads_lazily(self) -> bool:
        """Whether micro-batches are loaded one by one; on a CPU the whole batch is in memory."""
        return self._spec.profile != "cpu"

    def _made_engine(self) -> Engine:
        spec = self._spec
        train = dataclasses.replace(
            spec.trained,
            model=self._model,
            optimizer=self._optimizer,
            loss=self._loss,
            effective_batch_size=None,  # two micro-batches represent all
            scheduler=None,  # it would step the user's optimizer, not the twin's
            check_loss=False,  # needs numbers
        )
        hardware = Hardware(
            accumulation_steps=spec.num_micro_batches,
            strategy=spec.strategy if isinstance(spec.strategy, str) else spec.strategy(),
            world=self._world,
        )
        # Leave warnings about norm layers to the real run.
        train = dataclasses.replace(train, norms=train.norms or "keep")
        return Engine.from_spec(train, hardware, observer=self)

    def _operation(self, *seen: Any) -> None:  # noqa: ANN401 (handed on)
        if seen[-1] == "forward":  # activations are saved in the forward, or when a block is recomputed
            self.offloads = self.offloads or saves_on_host()
        self._num_operations += 1
        refuse_long_loop(self._num_operations)
        if self._recorder is not None:
            self._recorder(*seen)

    def _hold_gradients(self) -> None:
        updated = [p for group in self._engine.optimizer.param_groups for p in group["params"]] if self._engine else []
        # Master weights are separate tensors with separate gradients.
        gradients = [parameter.grad for parameter in (*self.modules.parameters(), *updated)]
        self.ledger.hold("gradients", (local_part(gradient) for gradient in gradients if gradient is not None))

    def _hold_states(self) -> None:
        """Record long-lived tensors: master weights, optimizer state, averaged weights."""
        engine = self._engine
        assert engine is not None
        updated = (p for group in engine.optimizer.param_groups for p in group["params"])
        self.ledger.hold("weights", map(local_part, updated))
        # int16 tensors are the lower halves of split bf16 weights.
        kept = engine.resident_tensors()["optimizer"]
        self.ledger.hold("weights", (one for one in kept if one.dtype is torch.int16))
        self.ledger.hold("optimizer", map(local_part, _tensors(list(engine.optimizer.state.values()))))
        if engine.average is not None:
            self.ledger.hold("optimizer", map(local_part, engine.average.weights.values()))


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
        """Yield this rank's micro-batches: created on demand, or slices of the whole batch."""
        del later_units
        if self.run.loads_lazily:
            for positions in units:
                yield self.run.loaded(self.run.sample(len(positions)))
            return
        whole = self.run.loaded(self.run.sample(sum(map(len, units))))
        # Positions are global; this batch starts at the rank's first position.
        first = units[0][0]
        for positions in units:
            yield slice_samples(whole, positions[0] - first, positions[-1] + 1 - first)


def _which_stay(step: MemoryTrace, num_found: int) -> list[bool]:
    """Return for each existing piece whether it is still allocated after the step."""
    gone = {-event for event in step.events if event < 0}
    return [number not in gone for number in range(1, num_found + 1)]


def _as_in_a_run(
    step: MemoryTrace, left: Sequence[Allocation], own: Sequence[bool], stays: Sequence[bool]
) -> MemoryTrace:
    """Return the step with the pieces it found replaced by the pieces it leaves, numbered as in `stays`.

    Pieces are numbered in the order of allocation, and the first step allocates some, such as the momentum, before
    pieces that later steps allocate again.
    """
    num_found = len(stays)
    # Pieces that stay are older than new ones, so they come first in `left`.
    places, own_places = (sorted(range(num_found), key=lambda place: not those[place]) for those in (stays, own))
    renumbered = {old + 1: new + 1 for old, new in zip(own_places, places, strict=True)}
    found = [piece for _, piece in sorted(zip(places, left, strict=True), key=lambda pair: pair[0])]
    rest = (renumbered.get(abs(event), abs(event)) * (1 if event > 0 else -1) for event in step.events[num_found:])
    return dataclasses.replace(
        step,
        allocations=(*found, *step.allocations[num_found:]),
        events=(*step.events[:num_found], *rest),
    )


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


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
