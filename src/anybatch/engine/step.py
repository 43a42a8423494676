"""Plan and run a step; after an out-of-memory error, plan and run it again in smaller micro-batches."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anybatch.core.loss import Loss, without_graph
from anybatch.core.records import PhaseName
from anybatch.core.splitting import BatchPlan
from anybatch.core.tensors import accumulation_dtype, widest_dtype
from anybatch.core.torch_internals import change_each, dense_values
from anybatch.engine.accumulate import LoopContext, Sums, accumulate
from anybatch.engine.batch_norm import BatchNormRunner, Execute
from anybatch.engine.data_progress import DataProgress
from anybatch.engine.first_steps import FirstSteps, check_agreement
from anybatch.engine.forward_state import BufferUpdates
from anybatch.engine.loss_check.check import UncountedSums
from anybatch.engine.micro_batch_size.oom_retry import InputVersions, OomRetry, OutOfMemory, release_frames
from anybatch.engine.micro_batch_size.sizes import RunSizes
from anybatch.engine.micro_batches import (
    BatchCounter,
    CountedBatch,
    PlannedBatch,
    plan_effective_batch,
)
from anybatch.engine.notifier import Notifier
from anybatch.engine.rank_comparison import StepFingerprint
from anybatch.engine.step_guard import StepGuard
from anybatch.parallel.agreement import StepAbortedError, StepsDifferError
from anybatch.parallel.dtensors import local_part
from anybatch.parallel.world import World

if TYPE_CHECKING:
    from anybatch.engine.gradient_noise import NoiseMeter, NoiseOfStep

_NOTHING = nullcontext()
_NUM_VALUES = 8
"""Number of values of each parameter from which a seed is computed."""


@dataclass(kw_only=True, eq=False)
class StepPlanner:
    """Plans steps with the current sizes."""

    world: World
    loss: Loss
    sizes: RunSizes
    sums: UncountedSums
    notifier: Notifier
    seed: int | None
    modules: nn.Module
    user_seed: int | None = field(default=None, init=False)
    _last_smaller_step: int | None = field(default=None, init=False)  # the last step below the effective batch size

    def __post_init__(self) -> None:
        self._counter = BatchCounter(self.loss, self.world, self.sizes.constraints, self.sums)

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

        `check_loss` is False if a step is repeated, since its samples were checked in the first attempt.
        """
        planned = plan_effective_batch(batch, self.sizes.placement, self.world, progress.position)
        # The engine's seed takes precedence over the data's, also on resume.
        if self.seed is not None:
            planned = planned._replace(seed=self.seed)
        elif not planned.picks_any:  # not from ab.batches
            planned = planned._replace(seed=self._user_seed())
        num_samples, limit = planned.plan.num_samples, self.sizes.sizes.effective_batch_size
        # Set by ab.batches; the batch of a user may have a field of this name.
        data_sizes: tuple[int, ...] = getattr(batch, "sizes", ()) if planned.picks_any else ()
        if num_samples != (limit or num_samples) or data_sizes not in ((), (num_samples,)):
            self.sizes.check_batch_size(num_samples)
            self._warn_of_smaller(batch, data_sizes, num_samples, step)
        if not progress.is_stepped and self.world.call_tracker is not None:
            with self.world.call_tracker.comparing("the first samples of a data set"):
                check_agreement(batch, planned, self.world)
        if first is not None:
            first.check_batch(batch, planned, step, check_loss=check_loss)
        return self._counter.count(planned, step)

    def _user_seed(self) -> int:
        """Return the seed for batches that are not from `ab.batches`, from torch's generator and weights of rank 0."""
        if self.user_seed is None:
            self.user_seed = int(self.world.gather_objects(_seed_of_state(self.modules))[0])
        return self.user_seed

    def _warn_of_smaller(self, batch: Any, sizes: tuple[int, ...], num_samples: int, step: int) -> None:  # noqa: ANN401
        """Warn if a whole data set, or each of two steps in a row, has fewer samples than the effective batch size."""
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
        if is_smaller and self._last_smaller_step == step - 1:
            message = (
                f"steps have {num_samples} samples over all ranks, fewer than effective_batch_size={limit}. To "
                f"accumulate a loader's batches, use `for batch in ab.shares(loader, effective_batch_size={limit})`; "
                f"otherwise set effective_batch_size={num_samples}."
            )
            self.notifier.warn("smaller_batches", message)
        if is_smaller:
            self._last_smaller_step = step


class Executor(Protocol):
    """Adds up the gradient of one effective batch, and can abort the step on all ranks."""

    has_exchanged: bool
    """Whether ranks have exchanged outputs for an `ab.joint` loss; set to False before each attempt of a step."""

    def __call__(self, counted: CountedBatch) -> Sums:
        """Run all micro-batches of this rank."""
        ...

    def abort(self) -> None:
        """Join the collectives in which other ranks wait, and report the abort to them; see `Prepared.abort`."""
        ...


def choose_executor(
    context: LoopContext,
    modules: nn.Module,
    world: World,
    notifier: Notifier,
    batch_norm: BatchNormRunner,
    *,
    num_noise_sums: int = 0,
) -> Executor:
    """Return the executor for a loss: one pass, or two for `ab.joint`."""
    abort: Callable[[], None] = _no_abort
    if context.prepared.abort is not None:
        # Allocated now: a rank that is out of memory cannot allocate the message with which it aborts a step.
        abort = context.prepared.abort(
            torch.cat([totals := Sums().totals(context.loss, world.device), totals.new_zeros(num_noise_sums)])
        )
    if context.loss.kind.encode is None:
        execute = accumulate if batch_norm.is_idle else batch_norm.accumulate
        return _OnePass(context, notifier, execute, abort)
    from anybatch.engine.two_pass import TwoPasses  # noqa: PLC0415 (few runs need it)

    return TwoPasses(context, modules, world, notifier, batch_norm, abort)


@dataclass(eq=False)
class _OnePass:
    context: LoopContext
    notifier: Notifier
    execute: Execute
    abort: Callable[[], None]
    has_exchanged: bool = False

    def __call__(self, counted: CountedBatch) -> Sums:
        """Run forward and backward of each micro-batch."""
        micro_batches = counted.micro_batches
        return self.execute(
            self.context, self.notifier.timed(micro_batches) if self.notifier.observers else micro_batches
        )


def _no_abort() -> None:
    """Do nothing: the engine never calls this for a strategy that cannot abort."""


class SummedBatch(NamedTuple):
    """The gradient of an effective batch, summed over micro-batches and ranks, and divided by the number of items."""

    planned: PlannedBatch
    gradients: Sequence[torch.Tensor | None]
    contributions: Float[Tensor, " terms"]
    counts: Float[Tensor, " terms"]
    too_large: tuple[int, ...]
    noise: "NoiseOfStep | None"


class LateDivision:
    """Divides gradients by the number of items that the loss function returned, known only after all micro-batches.

    By then, ranks have agreed on the step and cannot repeat it after an out-of-memory error. So the constructor
    allocates the memory, before the first micro-batch.
    """

    def __init__(self, guess: float, device: torch.device, dtype: torch.dtype) -> None:
        self._guess = guess
        self._factor = torch.empty(1, dtype=widest_dtype(device), device=device)
        self._factor_of_gradients = torch.empty((), dtype=dtype, device=device)

    @torch.no_grad()
    def divide(
        self, gradients: Sequence[torch.Tensor], totals: Float[Tensor, "2"]
    ) -> tuple[Float[Tensor, "1"], Float[Tensor, "1"]]:
        """Divide gradients and the contribution in place; return (contributions, counts), views of `totals`."""
        contribution, count = totals[:1], totals[1:]
        # The gradients were already divided by a guess of the count.
        torch.reciprocal(count, out=self._factor).mul_(self._guess)
        if gradients:
            self._factor_of_gradients.copy_(self._factor[0])
            change_each("mul", [dense_values(local_part(g)) for g in gradients], self._factor_of_gradients)
        return contribution.mul_(self._factor), count


def _seed_of_state(modules: nn.Module) -> int:
    """Return a seed computed from the state of torch's generator and from weights, without changing them.

    So `torch.manual_seed` has an effect, and two models, such as a generator and a critic, get different seeds.
    """
    digest = blake2b(bytes(torch.default_generator.get_state().tolist()), digest_size=7)
    for name, parameter in modules.named_parameters():
        values = local_part(parameter).detach().reshape(-1)[:_NUM_VALUES].tolist()
        digest.update(repr((name, tuple(parameter.shape), values)).encode())
    return int.from_bytes(digest.digest())


@dataclass(kw_only=True, eq=False)
class StepRunner:
    """Plans and runs effective batches, with smaller micro-batches after each out-of-memory error."""

    planner: StepPlanner
    executor: Executor
    context: LoopContext
    guard: StepGuard
    first_steps: FirstSteps
    buffers: BufferUpdates | None
    world: World
    retry: OomRetry
    notifier: Notifier
    fingerprint: StepFingerprint | None
    noise: "NoiseMeter | None"
    is_running: bool = field(default=False, init=False)
    _waits_for_split: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        # None after the first steps: later steps skip their additional work.
        self._first: FirstSteps | None = self.first_steps
        self._returns_count = self.context.loss.kind.returns_count
        self._dtype = widest_dtype(self.world.device)

    def restart_first_steps(self) -> None:
        """Treat the next steps as first steps again, after a load."""
        self._first = self.first_steps

    def run(self, batch: Any, step: int, progress: DataProgress) -> SummedBatch:  # noqa: ANN401 (any nested batch)
        """Return the gradient of an effective batch, split into micro-batches that fit on every rank.

        Raises:
            DataError, BatchSizeError, LossError: the batch cannot be run; nothing has changed.
            ParameterError: the set of trainable parameters has changed.
            MemoryExhaustedError: no split fits, or the ranks cannot repeat this step.
            RankFailedError: another rank failed first.
            RanksDifferError: ranks run different steps.
            ReplicaError: weights differ between ranks.
        """
        self.is_running = True
        try:
            with self.guard.begin_step():
                summed = self._run(batch, step, progress)
            if self.guard.steps_left:
                self.guard.end_step()
        except StepsDifferError as error:
            assert self.fingerprint is not None
            self.fingerprint.refuse(error.differing)
        finally:
            self.is_running = False
        return summed

    def _run(self, batch: Any, step: int, progress: DataProgress) -> SummedBatch:  # noqa: ANN401 (any nested batch)
        first = self._first
        if first is not None:
            first.settle_sizes(batch, progress.position)
        # Save the buffers: if the step is repeated, each attempt starts from them.
        self.retry.state.keep()
        # A batch that loads its samples in each attempt has no tensors that an attempt could change.
        inputs = None if hasattr(type(batch), "feed") else InputVersions(batch)
        too_large: tuple[int, ...] = ()
        while True:
            try:
                counted = self.planner.plan(batch, step, progress, first, check_loss=not too_large)
            except torch.OutOfMemoryError as error:
                release_frames(error)
                raise self.retry.too_large_to_plan(error, step) from None
            plan = counted.planned.plan
            is_split = len(plan.shares) > 1 or len(plan.shares[0]) > 1
            if self._waits_for_split and is_split and first is None:
                first = self._first = self.first_steps
            outcome = self._attempt(counted, step, too_large, first)
            if isinstance(outcome, SummedBatch):
                if self.buffers is not None:
                    self.buffers.pool()
                if first is not None:
                    self._finish_first(first, plan, step, is_split=is_split)
                return outcome
            del counted  # frees the samples that it has loaded
            too_large += (self.retry.retry_smaller_or_raise(outcome, plan, step, too_large),)
            # Check this only after the abort, when no rank waits for another rank.
            if inputs is not None:
                inputs.check_unchanged(step, self.world)

    def _finish_first(self, first: FirstSteps, plan: BatchPlan, step: int, *, is_split: bool) -> None:
        """Finish one of the first steps, and drop `FirstSteps` after the last one."""
        first.finish_step(plan)
        if first.is_done(step, is_split=is_split):
            self._first, self._waits_for_split = None, first.waits_for_split

    def _attempt(
        self, counted: CountedBatch, step: int, too_large: tuple[int, ...], first: FirstSteps | None
    ) -> SummedBatch | OutOfMemory:
        """Sum gradients over micro-batches and ranks, and divide; return `OutOfMemory` if the step does not fit."""
        phase: PhaseName = "forward_backward"
        notifier, noise, strategy, plan = self.notifier, self.noise, self.context.strategy, counted.planned.plan
        is_observed = bool(notifier.observers)
        if self.fingerprint is not None:
            self.fingerprint.record(counted.planned, step)
        self.executor.has_exchanged = False
        try:
            if is_observed:
                notifier.begin_step(step, counted)
            with self.context.randomness:
                strategy.place_gradients()
                counts = _as_tensor(counted.divisors, self._dtype)
                late = self._late_division(counted.divisors[0]) if self._returns_count else None
                with (
                    first.detecting_state_changes(plan) if first is not None else _NOTHING,
                    self.buffers.effective_batch() if self.buffers is not None else _NOTHING,
                    noise.effective_batch(step, plan) if noise is not None else _NOTHING,
                    notifier.phase(phase) if is_observed else _NOTHING,
                ):
                    sums = self.executor(counted)
            phase = "reduce"
            with (
                self.world.collective() if self.world.call_tracker is not None else _NOTHING,
                notifier.phase(phase) if is_observed else _NOTHING,
            ):
                totals = sums.totals(self.context.loss, self.world.device)
                if noise is not None:
                    totals = torch.cat([totals, noise.sums(sums, is_late=self._returns_count)])
                gradients, totals = strategy.finish_gradients(totals)
                if is_observed:
                    notifier.reduced()
        # Another rank ran out of memory, and reported this in the last message of the step.
        except StepAbortedError as error:
            release_frames(error)
            return OutOfMemory()
        except torch.OutOfMemoryError as error:
            failed = OutOfMemory(phase, str(error))
            release_frames(error)
            return failed  # after the return, the failed frames and their tensors are freed
        if self.world.call_tracker is None and all(gradient is None for gradient in gradients):
            raise without_graph()  # every loss was a constant zero
        noise_of_step = None
        if late is not None or noise is not None:
            totals, counts, noise_of_step = self._divided(counted, gradients, totals, counts, late)
        return SummedBatch(counted.planned, gradients, totals, counts, too_large, noise_of_step)

    def _divided(
        self,
        counted: CountedBatch,
        gradients: Sequence[torch.Tensor | None],
        totals: Float[Tensor, " numbers"],
        counts: Float[Tensor, " terms"],
        late: LateDivision | None,
    ) -> tuple[Float[Tensor, " terms"], Float[Tensor, " terms"], "NoiseOfStep | None"]:
        """Return contributions, counts and noise; divide by the count if the loss function returned it."""
        noise = self.noise
        totals, noise_sums = (totals, None) if noise is None else totals.tensor_split([-noise.num_sums])
        # The count is known only after the last micro-batch; until now, gradients are divided by a guess.
        if late is not None:
            totals, counts = late.divide([gradient for gradient in gradients if gradient is not None], totals)
        if noise is None or noise_sums is None:
            return totals, counts, None
        guess = counted.divisors[0] if self._returns_count else None
        return totals, counts, noise.finish(gradients, noise_sums, counts, counted.planned.plan, guess=guess)

    def _late_division(self, guess: float) -> LateDivision:
        parameter = next(iter(self.context.prepared.parameters.values()))
        dtype = accumulation_dtype(parameter)
        # A real type, because the count divides both real and complex gradients.
        return LateDivision(guess, self.world.device, dtype.to_real())


def _as_tensor(numbers: tuple[float, ...], dtype: torch.dtype) -> Float[Tensor, " terms"]:
    if len(numbers) == 1:  # `full` is five times as fast as `tensor`
        return torch.full((1,), numbers[0], dtype=dtype)
    return torch.tensor(numbers, dtype=dtype)
