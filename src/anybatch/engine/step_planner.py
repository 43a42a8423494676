"""Plans a step: from a batch to micro-batches that are cut, dealt and counted. Every refusal of a batch is in here."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from anybatch.core.batch import Position, lengths_of
from anybatch.core.loss import Loss
from anybatch.core.splitting import BatchPlan
from anybatch.engine.accumulation.planned_batch import (
    BatchCounter,
    CountedBatch,
    PlannedBatch,
    is_effective_batch,
    plan_effective_batch,
    report_failed_count,
)
from anybatch.engine.accumulation.rank_data import refuse_disagreement
from anybatch.engine.batch_norm.cut_notice import CutNotice
from anybatch.engine.data_progress import DataProgress
from anybatch.engine.loss_check.check import LossCheck
from anybatch.engine.loss_check.uncounted import UncountedSums
from anybatch.engine.micro_batch_size.budget_trials import TrialParts
from anybatch.engine.micro_batch_size.sizes import RunSizes
from anybatch.engine.telemetry.decisions import Decisions
from anybatch.engine.telemetry.notifier import Notifier
from anybatch.errors import LossError, WorldError
from anybatch.parallel.world import World


class StepPlanner:
    """Plans steps with the sizes of the moment.

    Args:
        world: the ranks.
        loss: the declared loss, as the loop calls it.
        sizes: how batches are cut.
        check: compares the loss with its declaration on the first batches.
        cut_notice: tells the user where BatchNorm depends on the cut.
        sums: finds out which terms have something to add where a micro-batch counts nothing.
        autocast: makes the autocast context of a forward, for the check.
        on_first_batch: called with the first planned batch and the number of its step.
        trial_parts: function () -> what trial runs of "auto" need.
        decisions: what is found is added to them.
        notifier: reports what is found.
        seed: first word of every random key; None takes the data's seed.
        make_seed: function () -> a seed for batches that do not come from `ab.batches`, called before the first.

    Attributes:
        own_seed: that seed; None before the first such batch.
    """

    def __init__(
        self,
        *,
        world: World,
        loss: Loss,
        sizes: RunSizes,
        check: LossCheck,
        sums: UncountedSums,
        cut_notice: CutNotice,
        autocast: Callable[[], AbstractContextManager[object]],
        on_first_batch: Callable[[PlannedBatch, int], None],
        trial_parts: Callable[[], TrialParts],
        decisions: Decisions,
        notifier: Notifier,
        seed: int | None,
        make_seed: Callable[[], int],
    ) -> None:
        self.seed = seed
        self.own_seed: int | None = None
        self._make_seed = make_seed
        self._world = world
        self._loss = loss
        self._sizes = sizes
        self._check = check
        self._counter = BatchCounter(loss, world, sizes.constraints, sums)
        self._cut_notice = cut_notice
        self._autocast = autocast
        self._on_first_batch = on_first_batch
        self._trial_parts = trial_parts
        self._decisions = decisions
        self._notifier = notifier
        self._has_begun = False
        self._smaller_in: int | None = None  # the newest step that was smaller than named

    def is_steady(self, step: int, progress: DataProgress) -> bool:
        """Whether planning the batch of a step sends nothing that a few batches alone send, the first above all."""
        return self._has_begun and progress.is_stepped and not self._check.is_due(step) and not self._sizes.searches

    def settle_sizes(self, batch: Any, position: Position) -> None:  # noqa: ANN401 (any nested batch)
        """Find the micro-batch size, if it is "auto" and has not been found yet.

        Raises:
            BatchSizeError: not even one sample fits.
            CompositionError: sizes cannot be tried on this strategy.
        """
        if not self._sizes.searches:
            return
        found = self._sizes.settle(batch, self._trial_parts(), position)
        self._decisions.add("micro_batch_size", found.words)
        self._decisions.add("layout", found.layout)
        if found.rate is not None:
            self._notifier.diagnosis("micro_batch_size", f"micro_batch_size: {found.words}")

    def after_step(self, plan: BatchPlan) -> None:
        """Say what is to be said once a step has run by this plan."""
        self._check.warn_if_undecided()
        self._cut_notice.after_step(plan)

    def plan(self, batch: Any, step: int, progress: DataProgress, *, check_loss: bool) -> CountedBatch:  # noqa: ANN401
        """Return the batch with this rank's micro-batches lined up and the divisors of the loss.

        Args:
            batch: what `Engine.step` takes.
            step: its number.
            progress: in its data set.
            check_loss: whether to compare the loss with its declaration, if that is still to be done. False where a
                step is repeated: its samples have been checked already.

        Raises:
            DataError, BatchSizeError, LossError: the batch cannot be run; nothing has changed.
        """
        planned = self._plan_or_leave(batch, step, progress, check_loss=check_loss)
        return self._counter.count(planned, step)

    def _plan_or_leave(self, batch: Any, step: int, progress: DataProgress, *, check_loss: bool) -> PlannedBatch:  # noqa: ANN401
        roll_call = self._world.roll_call
        if roll_call is None:
            return self._plan_and_check(batch, step, progress, check_loss=check_loss)
        num_told, is_steady = roll_call.num_told, self.is_steady(step, progress)
        try:
            return self._plan_and_check(batch, step, progress, check_loss=check_loss)
        except BaseException as error:
            is_known = isinstance(error, WorldError) or roll_call.num_told != num_told
            if is_steady and not is_known and self._loss.needs_data_to_count:
                report_failed_count(error, self._loss, self._world)
            raise

    def _plan_and_check(self, batch: Any, step: int, progress: DataProgress, *, check_loss: bool) -> PlannedBatch:  # noqa: ANN401
        planned = plan_effective_batch(batch, self._sizes.placement, self._world, progress.position)
        # A seed of the engine's takes precedence over the data's, also on resume.
        if self.seed is not None:
            planned = planned._replace(seed=self.seed)
        elif not is_effective_batch(batch):
            planned = planned._replace(seed=self._seed_of_own())
        self._sizes.refuse_larger(planned.plan.num_samples)
        self._warn_of_smaller(batch, planned.plan.num_samples, step)
        if not progress.is_stepped:
            refuse_disagreement(batch, planned, self._world)
        if not self._has_begun:
            self._refuse_other_rows(batch)
            # All stages of a ramp: one that cannot be cut would end the run when it is reached.
            self._sizes.refuse_uncuttable(getattr(batch, "sizes", ()))
            self._has_begun = True
            self._on_first_batch(planned, step)
        if check_loss and self._check.is_due(step):
            self._check.check_declaration(planned, self._autocast, step)
        return planned

    def _seed_of_own(self) -> int:
        """Return the seed of the user's own batches: it follows from torch's generator and the weights of rank 0."""
        if self.own_seed is None:
            self.own_seed = int(self._world.gather_objects(self._make_seed())[0])
        return self.own_seed

    def _refuse_other_rows(self, batch: Any) -> None:  # noqa: ANN401 (any nested batch)
        """Refuse a loss that counts samples where a micro-batch has another number of rows.

        Raises:
            LossError: with the declarations that are right.
        """
        lengths = lengths_of(batch)
        if lengths is None or not (lengths.packed or lengths.shapes):
            return
        if not self._loss.allows_other_rows:
            layout = "packed into one row" if lengths.packed else "filled up with rows of padding"
            message = (
                f"micro-batches are {layout}, and the loss is a mean over samples, of which they have another number. "
                "Declare what it is a mean over: ab.mean_over_tokens(loss, labels='labels'), or ab.mean_over(loss, "
                "count=...); or return ab.LossSum(total, count)."
            )
            raise LossError(message)

    def _warn_of_smaller(self, batch: Any, num_samples: int, step: int) -> None:  # noqa: ANN401 (any nested batch)
        """Say that steps are smaller than the effective batch size that was named.

        The last one of an epoch may be: it is followed by a whole one.
        """
        sizes: tuple[int, ...] = getattr(batch, "sizes", ())
        if len(sizes) == 1 and num_samples < sizes[0] and getattr(batch, "is_whole_epoch", False):
            message = (
                f"the data set has {num_samples:,} samples, fewer than effective_batch_size={sizes[0]:,}: each step "
                f"has {num_samples:,}, since batches do not cross epochs. Choose an effective batch size of at most "
                f"{num_samples:,}."
            )
            self._notifier.warn("smaller_batches", message)
            return
        limit = self._sizes.sizes.effective_batch_size
        is_smaller = limit is not None and num_samples < limit and limit not in sizes
        if is_smaller and self._smaller_in == step - 1:
            message = (
                f"batches of {num_samples} samples over all ranks make steps of {num_samples}, and the engine was "
                f"told effective_batch_size={limit}. To accumulate a loader's batches up to it, write `for batch in "
                f"ab.shares(loader, effective_batch_size={limit})`; if {num_samples} is what you mean, name that."
            )
            self._notifier.warn("smaller_batches", message)
        if is_smaller:
            self._smaller_in = step
