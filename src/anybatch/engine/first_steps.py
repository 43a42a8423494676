"""The work of an engine's first steps: determine sizes, check the loss, and warn about likely mistakes."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from anybatch.core.batch import Position, lengths_of
from anybatch.core.loss import Loss
from anybatch.core.splitting import BatchPlan
from anybatch.core.torch_internals import BatchNormBase
from anybatch.engine.accumulation.planned_batch import PlannedBatch
from anybatch.engine.decisions import Decisions
from anybatch.engine.forward_state import StateWatch
from anybatch.engine.loss_check.check import LossCheck
from anybatch.engine.micro_batch_size.search import TrialParts
from anybatch.engine.micro_batch_size.sizes import RunSizes
from anybatch.engine.notifier import Notifier
from anybatch.errors import LossError


class CutNotice:
    """Warns once, in the first step with several micro-batches, that each is normalised by its own statistics.

    Args:
        layers: the BatchNorm layers, by name.
        is_chosen: the user has chosen a policy; disables the warning.
        notifier: sends the warning.
    """

    def __init__(self, layers: Mapping[str, BatchNormBase], notifier: Notifier, *, is_chosen: bool) -> None:
        self._layers = {} if is_chosen else dict(layers)
        self._notifier = notifier

    @property
    def is_waiting(self) -> bool:
        """Whether the warning is still possible."""
        return bool(self._layers)

    def after_step(self, plan: BatchPlan) -> None:
        """Check a step that was run with this plan."""
        if not self._layers or (num_micro_batches := len(plan.units)) == 1:
            return
        training = [name for name, layer in self._layers.items() if layer.training]
        if not training:  # a frozen layer may train later
            return
        self._layers = {}
        which = f"{len(training)} BatchNorm layer{'s' * (len(training) > 1)} (first {training[0]!r})"
        self._notifier.warn(
            "batch_norm_by_micro_batch",
            f"{which} normalised each of {num_micro_batches} micro-batches by its own statistics. So the gradient "
            "differs from the gradient of the un-split batch and depends on the cut. Use norms='exact' (statistics of "
            "the effective batch), norms=anybatch.norms.Ghost(group_size=32) (of fixed groups), norms='freeze' "
            "(running statistics) or norms='sync' (over ranks); norms='keep' accepts this and silences the warning.",
        )


class FirstSteps:
    """Determines sizes, checks the loss and watches the model in the first steps; `StepRunner` drops it afterwards."""

    def __init__(
        self,
        *,
        check: LossCheck,
        sizes: RunSizes,
        cut_notice: CutNotice,
        watch: StateWatch,
        autocast: Callable[..., AbstractContextManager[object]],
        on_first_batch: Callable[[PlannedBatch, int], None],
        trial_parts: Callable[[], TrialParts],
        decisions: Decisions,
        notifier: Notifier,
    ) -> None:
        self._check = check
        self._loss: Loss = check.loss
        self._sizes = sizes
        self._cut_notice = cut_notice
        self._watch = watch
        self._autocast = autocast
        self._on_first_batch = on_first_batch
        self._trial_parts = trial_parts
        self._decisions = decisions
        self._notifier = notifier
        self._has_begun = False

    def sends_nothing(self, step: int) -> bool:
        """Whether a step sends only messages that later steps send too."""
        return self._has_begun and not self._check.is_due(step) and not self._sizes.searches

    def settle_sizes(self, batch: Any, position: Position) -> None:  # noqa: ANN401 (any nested batch)
        """Determine the micro-batch size if it is "auto" and still unknown."""
        if not self._sizes.searches:
            return
        found = self._sizes.settle(batch, self._trial_parts(), position)
        self._decisions.add("micro_batch_size", found.words)
        self._decisions.add("layout", found.layout)
        if found.rate is not None:
            self._notifier.diagnosis("micro_batch_size", f"micro_batch_size: {found.words}")

    def check_batch(self, batch: Any, planned: PlannedBatch, step: int, *, check_loss: bool) -> None:  # noqa: ANN401
        """Check a planned batch: send the header of the run once, and compare the loss with its declaration."""
        if not self._has_begun:
            self._refuse_other_rows(batch)
            # All stages of a ramp: one that cannot be cut would end the run later.
            self._sizes.refuse_uncuttable(getattr(batch, "sizes", ()))
            self._has_begun = True
            self._on_first_batch(planned, step)
        if check_loss and self._check.is_due(step):
            self._check.check_declaration(planned, self._autocast, step)

    def watched(self, plan: BatchPlan) -> AbstractContextManager[None]:
        """Return the context for the micro-batches, which detects state that a forward changes."""
        return self._watch.effective_batch(plan)

    def finish_step(self, plan: BatchPlan) -> None:
        """Send the warnings that are due after a step with this plan."""
        self._check.warn_if_undecided()
        self._cut_notice.after_step(plan)

    def is_done(self, step: int, *, is_cut: bool) -> bool:
        """Whether all work is done after a step; without a cut, the work of `waits_for_cut` may remain."""
        return (
            not self._sizes.searches
            and self._check.is_over(step)
            and not self._watch.draws_left
            and not (is_cut and self.waits_for_cut)
        )

    @property
    def waits_for_cut(self) -> bool:
        """Whether the first step with several micro-batches must still be watched."""
        return self._watch.is_looking or self._cut_notice.is_waiting

    def _refuse_other_rows(self, batch: Any) -> None:  # noqa: ANN401 (any nested batch)
        """Refuse a loss over samples if the number of rows in a micro-batch differs."""
        lengths = lengths_of(batch)
        if lengths is None or not (lengths.packed or lengths.shapes):
            return
        if not self._loss.allows_other_rows:
            layout = "packed into one row" if lengths.packed else "padded with additional rows"
            message = (
                f"micro-batches are {layout}, but the loss is a mean over samples. Declare the items of the mean: "
                "ab.mean_over_tokens(loss, labels='labels') or ab.mean_over(loss, count=...); or return "
                "ab.LossSum(total, count)."
            )
            raise LossError(message)
