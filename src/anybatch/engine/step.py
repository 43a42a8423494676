"""Plan and run a step; after out of memory, plan and run it again in smaller micro-batches."""

import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anybatch.core.loss import Loss, without_graph
from anybatch.core.records import PhaseName
from anybatch.core.splitting import BatchPlan
from anybatch.core.tensors import accumulation_dtype, widest_dtype
from anybatch.engine.accumulate import LateDivision, LoopContext, Sums, accumulate
from anybatch.engine.batch_norm import BatchNormRunner, Execute
from anybatch.engine.data_progress import DataProgress
from anybatch.engine.first_steps import FirstSteps, MaskedParameters, refuse_disagreement
from anybatch.engine.forward_state import BufferUpdates
from anybatch.engine.gradient_noise import NoiseMeter, NoiseOfStep
from anybatch.engine.loss_check.check import UncountedSums
from anybatch.engine.micro_batch_size.oom_retry import InputVersions, OomRetry, OutOfMemory, release_frames
from anybatch.engine.micro_batch_size.sizes import RunSizes
from anybatch.engine.micro_batches import (
    BatchCounter,
    CountedBatch,
    PlannedBatch,
    plan_effective_batch,
    report_failed_count,
)
from anybatch.engine.notifier import Notifier
from anybatch.engine.rank_comparison import StepMeaning
from anybatch.engine.step_guard import StepGuard
from anybatch.engine.torch_internals import refused_in_backward
from anybatch.errors import AnyBatchError, WorldError
from anybatch.parallel.agreement import StepAbortedError, StepFailedError, StepsDifferError
from anybatch.parallel.strategy import Abort
from anybatch.parallel.world import World

_NOTHING = nullcontext()


@dataclass(kw_only=True, eq=False)
class StepPlanner:
    """Plans steps with the current sizes."""

    world: World
    loss: Loss
    sizes: RunSizes
    sums: UncountedSums
    notifier: Notifier
    seed: int | None
    make_seed: Callable[[], int]
    own_seed: int | None = field(default=None, init=False)
    _smaller_in: int | None = field(default=None, init=False)  # the last step below the effective batch size

    def __post_init__(self) -> None:
        self._counter = BatchCounter(self.loss, self.world, self.sizes.constraints, self.sums)
        self._others_wait = self.world.roll_call is not None and self.loss.needs_data_to_count

    def plan(
        self,
        batch: Any,  # noqa: ANN401 (what `Engine.step` takes)
        step: int,
        progress: DataProgress,
        first: FirstSteps | None,
        *,
        check_loss: bool,
    ) -> CountedBatch:
        """Return the batch with this rank's micro-batches and the divisors of the loss.

        `check_loss` is False if a step is repeated, since its samples were checked before.
        """
        if self._others_wait:
            planned = self._plan_or_leave(batch, step, progress, first, check_loss=check_loss)
        else:
            planned = self._plan(batch, step, progress, first, check_loss=check_loss)
        return self._counter.count(planned, step)

    def _plan_or_leave(
        self,
        batch: Any,  # noqa: ANN401 (what `Engine.step` takes)
        step: int,
        progress: DataProgress,
        first: FirstSteps | None,
        *,
        check_loss: bool,
    ) -> PlannedBatch:
        """Plan a batch; after an error, report it to the other ranks, which wait for this rank's counts."""
        roll_call = self.world.roll_call
        assert roll_call is not None
        num_told, is_steady = roll_call.num_told, is_steady_step(first, step, progress)
        try:
            return self._plan(batch, step, progress, first, check_loss=check_loss)
        except BaseException as error:
            is_known = isinstance(error, WorldError) or roll_call.num_told != num_told
            if is_steady and not is_known:
                report_failed_count(error, self.loss, self.world)
            raise

    def _plan(
        self,
        batch: Any,  # noqa: ANN401 (what `Engine.step` takes)
        step: int,
        progress: DataProgress,
        first: FirstSteps | None,
        *,
        check_loss: bool,
    ) -> PlannedBatch:
        planned = plan_effective_batch(batch, self.sizes.placement, self.world, progress.position)
        # The engine's seed takes precedence over the data's, also on resume.
        if self.seed is not None:
            planned = planned._replace(seed=self.seed)
        elif not planned.picks_any:  # not from ab.batches
            planned = planned._replace(seed=self._user_seed())
        num_samples, limit = planned.plan.num_samples, self.sizes.sizes.effective_batch_size
        named: tuple[int, ...] = getattr(batch, "sizes", ())
        if num_samples != (limit or num_samples) or named not in ((), (num_samples,)):
            self.sizes.refuse_larger(num_samples)
            self._warn_of_smaller(batch, num_samples, step)
        if not progress.is_stepped and self.world.roll_call is not None:
            with self.world.roll_call.comparing("the first samples of a data set"):
                refuse_disagreement(batch, planned, self.world)
        if first is not None:
            first.check_batch(batch, planned, step, check_loss=check_loss)
        return planned

    def _user_seed(self) -> int:
        """Return the seed for batches of the user, from torch's generator and the weights of rank 0."""
        if self.own_seed is None:
            self.own_seed = int(self.world.gather_objects(self.make_seed())[0])
        return self.own_seed

    def _warn_of_smaller(self, batch: Any, num_samples: int, step: int) -> None:  # noqa: ANN401 (any nested batch)
        """Warn if steps are smaller than the effective batch size; a single one, such as an epoch's last, is fine."""
        sizes: tuple[int, ...] = getattr(batch, "sizes", ())
        if len(sizes) == 1 and num_samples < sizes[0] and getattr(batch, "is_whole_epoch", False):
            message = (
                f"the data set has {num_samples:,} samples, fewer than effective_batch_size={sizes[0]:,}: each step "
                f"has {num_samples:,}, since batches do not cross epochs. Choose an effective batch size of at most "
                f"{num_samples:,}."
            )
            self.notifier.warn("smaller_batches", message)
            return
        limit = self.sizes.sizes.effective_batch_size
        is_smaller = limit is not None and num_samples < limit and limit not in sizes
        if is_smaller and self._smaller_in == step - 1:
            message = (
                f"steps have {num_samples} samples over all ranks, fewer than effective_batch_size={limit}. To "
                f"accumulate a loader's batches, use `for batch in ab.shares(loader, effective_batch_size={limit})`; "
                f"otherwise set effective_batch_size={num_samples}."
            )
            self.notifier.warn("smaller_batches", message)
        if is_smaller:
            self._smaller_in = step


def is_steady_step(first: FirstSteps | None, step: int, progress: DataProgress) -> bool:
    """Return whether planning a step sends none of the additional messages of a run's or data set's first batches."""
    return progress.is_stepped and (first is None or first.sends_nothing(step))


class Executor(Protocol):
    """Adds up the gradient of one effective batch, and can leave the step early."""

    def __call__(self, counted: CountedBatch) -> Sums:
        """Run all micro-batches of this rank."""
        ...

    @property
    def begin_step(self) -> Callable[[], None] | None:
        """Function that resets the executor for a new effective batch; None if it has no state."""
        ...

    def abort(self, *, failed: bool) -> None:
        """Join the collectives that other ranks wait in, and report the abort to them; see `Prepared.abort`."""
        ...


def choose_executor(
    context: LoopContext,
    modules: nn.Module,
    world: World,
    notifier: Notifier,
    batch_norm: BatchNormRunner,
    *,
    num_further: int = 0,
) -> Executor:
    """Return the executor for a loss: one pass, or two for a loss across samples."""
    abort: Abort = _no_abort
    if context.prepared.abort is not None:
        # Allocated now: a rank that is out of memory cannot allocate its last message.
        abort = context.prepared.abort(
            torch.cat([totals := Sums().totals(context.loss, world.device), totals.new_zeros(num_further)])
        )
    if context.loss.kind.encode is None:
        execute = accumulate if batch_norm.is_idle else batch_norm.accumulate
        return _OnePass(context, notifier, execute, abort)
    from anybatch.engine.two_pass import TwoPasses  # noqa: PLC0415 (few runs need it)

    return TwoPasses(context, modules, world, notifier, batch_norm, abort=abort)


class _OnePass:
    def __init__(self, context: LoopContext, notifier: Notifier, execute: Execute, abort: Abort) -> None:
        self._context = context
        self._notifier = notifier
        self._execute = execute
        self.abort = abort
        self.begin_step = None

    def __call__(self, counted: CountedBatch) -> Sums:
        """Run forward and backward of each micro-batch."""
        is_observed = bool(self._notifier.observers)
        return self._execute(
            self._context, self._notifier.timed(counted.micro_batches) if is_observed else counted.micro_batches
        )


def _no_abort(*, failed: bool) -> None:
    """Do nothing: the engine never calls this for a strategy that cannot abort."""


class SummedBatch(NamedTuple):
    """The result of an effective batch: its gradient, summed over micro-batches and ranks, and divided."""

    planned: PlannedBatch
    gradients: Sequence[torch.Tensor | None]
    contributions: Float[Tensor, " terms"]
    counts: Float[Tensor, " terms"]
    too_large: tuple[int, ...]
    noise: NoiseOfStep | None


@dataclass(kw_only=True, eq=False)
class StepRunner:
    """Plans and runs effective batches until they fit."""

    planner: StepPlanner
    executor: Executor
    context: LoopContext
    guard: StepGuard
    first_steps: FirstSteps
    buffers: BufferUpdates | None
    world: World
    retry: OomRetry
    notifier: Notifier
    meaning: StepMeaning | None
    noise: NoiseMeter | None
    masked: MaskedParameters
    can_leave: bool
    is_running: bool = field(default=False, init=False)
    _waits_for_cut: bool = field(default=False, init=False)
    _owes_step: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        # None after the first steps, so that later steps skip it.
        self._first: FirstSteps | None = self.first_steps
        self._brings_count = self.context.loss.kind.brings_count
        self._dtype = widest_dtype(self.world.device)

    def restart_first_steps(self) -> None:
        """Treat the next steps as first steps again, after a load."""
        self._first = self.first_steps

    def run(self, batch: Any, step: int, progress: DataProgress) -> SummedBatch:  # noqa: ANN401 (any nested batch)
        """Return the gradient of an effective batch, with the first cut that fits on every rank.

        Raises:
            DataError, BatchSizeError, LossError: the batch cannot be run; nothing has changed.
            ParameterError: the set of trainable parameters has changed.
            MemoryExhaustedError: no cut fits, or the ranks cannot repeat this step.
            RankFailedError: another rank failed first; all ranks have left the step.
            RanksDifferError: ranks run different steps.
            ReplicaError: weights differ between ranks.
        """
        roll_call = self.world.roll_call
        num_told = 0 if roll_call is None else roll_call.num_told
        if self.executor.begin_step is not None:
            self.executor.begin_step()
        self.is_running = True
        try:
            with self.guard.begin_step():
                summed = self._run(batch, step, progress)
            if self.guard.steps_left:
                self.guard.end_step()
        except StepFailedError:
            raise self.world.error_of_failed_rank() from None
        except StepsDifferError as error:
            assert self.meaning is not None
            self.meaning.refuse(error.differing)
        except BaseException as error:
            # Skip errors that all ranks have, and errors after the last message, when no rank waits any more.
            is_known = isinstance(error, WorldError) or (roll_call is not None and roll_call.num_told != num_told)
            if self._owes_step and roll_call is not None and not is_known and not roll_call.has_agreed:
                self._leave(error, step)
            raise
        finally:
            self.is_running = False
        return summed

    def _run(self, batch: Any, step: int, progress: DataProgress) -> SummedBatch:  # noqa: ANN401 (any nested batch)
        first = self._first
        # The first batches send further messages, which a failed rank cannot join.
        self._owes_step = self.can_leave and is_steady_step(first, step, progress)
        if first is not None:
            first.settle_sizes(batch, progress.position)
        # Every further try starts from the current buffers.
        self.retry.state.keep()
        if self.retry.backoff.former_sizes:
            self.retry.backoff.begin_step(step)
        # A batch that loads its samples in each try has no tensors that a try could change.
        inputs = None if hasattr(batch, "feed") else InputVersions(batch)
        too_large: tuple[int, ...] = ()
        while True:
            try:
                counted = self.planner.plan(batch, step, progress, first, check_loss=not too_large)
            except torch.OutOfMemoryError as error:
                raise self._too_large_to_plan(error, step) from None
            self._owes_step = self.can_leave
            plan = counted.planned.plan
            is_cut = len(plan.shares) > 1 or len(plan.shares[0]) > 1
            if self._waits_for_cut and is_cut and first is None:
                first = self._first = self.first_steps
            outcome = self._attempt(counted, step, too_large, first)
            if isinstance(outcome, SummedBatch):
                if self.buffers is not None:
                    self.buffers.pool()
                if first is not None:
                    self._finish_first(first, plan, step, is_cut=is_cut)
                return outcome
            del counted  # frees the samples that it has loaded
            too_large += (self.retry.retry_smaller_or_raise(outcome, plan, step, too_large),)
            # After the abort, when no rank waits for another one.
            if inputs is not None:
                inputs.refuse_changed(step, self.world)

    def _finish_first(self, first: FirstSteps, plan: BatchPlan, step: int, *, is_cut: bool) -> None:
        """Finish one of the first steps, and drop `FirstSteps` after the last one."""
        first.finish_step(plan)
        if first.is_done(step, is_cut=is_cut):
            self._first, self._waits_for_cut = None, first.waits_for_cut

    def _too_large_to_plan(self, error: torch.OutOfMemoryError, step: int) -> Exception:
        """Return the error for out of memory in planning, which may load samples."""
        notes = [note.removeprefix("anybatch: ").rstrip(".") for note in getattr(error, "__notes__", ())]
        cause = f"{error}{_place_of(error)}{''.join(f' ({note})' for note in notes)}"
        release_frames(error)
        return self.retry.too_large_to_plan(cause, step)

    def _leave(self, error: BaseException, step: int) -> None:
        """Join the collectives that other ranks wait in, so that all ranks leave this step and begin the next one."""
        # First, since other ranks read the error as soon as they learn of the failure.
        self.world.publish_failure(refused_in_backward(error) or error, step)
        # If aborting fails, the other ranks find the published error while they wait.
        with suppress(AnyBatchError, RuntimeError):
            self.executor.abort(failed=True)

    def _attempt(
        self, counted: CountedBatch, step: int, too_large: tuple[int, ...], first: FirstSteps | None
    ) -> SummedBatch | OutOfMemory:
        """Sum gradients over micro-batches and ranks, and divide; return `OutOfMemory` if that does not fit."""
        phase: PhaseName = "forward_backward"
        notifier, noise, strategy, plan = self.notifier, self.noise, self.context.strategy, counted.planned.plan
        is_observed = bool(notifier.observers)
        if self.meaning is not None:
            self.meaning.note(counted.planned, step)
        try:
            if is_observed:
                notifier.begin_step(step, counted)
            with self.context.randomness:
                strategy.place_gradients()
                counts = _as_tensor(counted.divisors, self._dtype)
                late = self._late_division(counted.divisors[0]) if self._brings_count else None
                with (
                    first.watched(plan) if first is not None else _NOTHING,
                    self.buffers.effective_batch() if self.buffers is not None else _NOTHING,
                    noise.effective_batch(step, plan) if noise is not None else _NOTHING,
                    notifier.phase(phase) if is_observed else _NOTHING,
                ):
                    sums = self.executor(counted)
            phase = "reduce"
            with (
                self.world.collective() if self.world.roll_call is not None else _NOTHING,
                notifier.phase(phase) if is_observed else _NOTHING,
            ):
                totals = sums.totals(self.context.loss, self.world.device)
                if noise is not None:
                    totals = torch.cat([totals, noise.numbers(sums, is_late=self._brings_count)])
                gradients, totals = strategy.finish_gradients(totals)
                if is_observed:
                    notifier.reduced()
        # Another rank ran out of memory, and reported it in the last message of the step.
        except StepAbortedError as error:
            release_frames(error)
            return OutOfMemory()
        except torch.OutOfMemoryError as error:
            failed = OutOfMemory(phase, f"{error}{_place_of(error)}")
            release_frames(error)
            return failed  # after the return, the failed frames and their tensors are freed
        if self.world.roll_call is None and all(gradient is None for gradient in gradients):
            raise without_graph()  # every loss was a constant zero
        found = None
        if late is not None or noise is not None or counted.left_out is not None:
            totals, counts, found = self._divided(counted, gradients, totals, counts, late)
        return SummedBatch(counted.planned, gradients, totals, counts, too_large, found)

    def _divided(
        self,
        counted: CountedBatch,
        gradients: Sequence[torch.Tensor | None],
        totals: Float[Tensor, " numbers"],
        counts: Float[Tensor, " terms"],
        late: LateDivision | None,
    ) -> tuple[Float[Tensor, " terms"], Float[Tensor, " terms"], NoiseOfStep | None]:
        """Return contributions, counts and noise; divide by the counts if they come with the losses."""
        if self.masked.looks_left and counted.left_out is not None:
            self.masked.look(counted.left_out, gradients)
        noise = self.noise
        totals, further = (totals, None) if noise is None else totals.tensor_split([-noise.num_numbers])
        # The count is known only now, after all losses: so far gradients are divided by a guess.
        if late is not None:
            totals, counts = late.divide([gradient for gradient in gradients if gradient is not None], totals)
        if noise is None or further is None:
            return totals, counts, None
        guess = counted.divisors[0] if self._brings_count else None
        return totals, counts, noise.finish(gradients, further, counts, counted.planned.plan, guess=guess)

    def _late_division(self, guess: float) -> LateDivision:
        parameter = next(iter(self.context.prepared.parameters.values()))
        dtype = accumulation_dtype(parameter)
        # Real, so that it divides both real and complex gradients.
        return LateDivision(guess, self.world.device, dtype.to_real())


def _as_tensor(numbers: tuple[float, ...], dtype: torch.dtype) -> Float[Tensor, " terms"]:
    if len(numbers) == 1:  # `full` is five times as fast as `tensor`
        return torch.full((1,), numbers[0], dtype=dtype)
    return torch.tensor(numbers, dtype=dtype)


def _place_of(error: BaseException) -> str:
    """Return the place in the user's code that raised, ` (in model.py, line 12, in forward)`; empty without one.

    A text, because frames would keep their tensors alive.
    """
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] not in ("anybatch", "torch"):
            place = f" (in {frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name})"
    return place
