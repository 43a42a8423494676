"""Smaller micro-batches after out of memory, and later retries of the former size."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from anybatch.core.geometry import Sizes, ceil_div
from anybatch.core.splitting import BatchPlan
from anybatch.engine.micro_batch_size.sizes import RunSizes
from anybatch.engine.telemetry.decisions import Decisions
from anybatch.engine.telemetry.notifier import Notifier

FIRST_WAIT = 100
"""Steps until a former size is tried again; doubled after each failed retry."""


class SizeBackoff:
    """Reduces the sizes of a run after out of memory. All ranks decide alike, from step counts only.

    A size given by the user stays reduced, so the run equals, bit for bit, a run with the smaller size. Under "auto"
    the engine chooses the size, and tries the former one again later.
    """

    def __init__(self, sizes: RunSizes, decisions: Decisions, notifier: Notifier) -> None:
        self._sizes = sizes
        self._decisions = decisions
        self._notifier = notifier
        self.former_sizes: list[Sizes] = []
        self._steps_to_wait = FIRST_WAIT
        self._next_try = 0
        self._reduced: Sizes | None = None
        self.why_not_smaller = ""

    @property
    def named(self) -> Sizes:
        """The sizes before the first reduction."""
        return self.former_sizes[0] if self.former_sizes else self._sizes.sizes

    def begin_step(self, step: int) -> None:
        """End a successful retry, and start a retry of a former size if it is due; requires a former size."""
        if self._reduced is not None and step > self._next_try:  # the retry succeeded
            self._reduced = None
            self.former_sizes.pop()
            self._next_try = step - 1 + self._steps_to_wait
        # Another process may have used the memory only temporarily, so "auto" does not stay reduced forever.
        if self._sizes.is_auto and self.former_sizes and self._reduced is None and step >= self._next_try:
            self._reduced, self._next_try = self._sizes.sizes, step
            self._sizes.sizes = self.former_sizes[-1]
            retry = (
                f"the larger size again from step {step} on, after {self._steps_to_wait} steps with "
                f"{_in_words(self._reduced)}"
            )
            self._decisions.add("micro_batch_size", retry)
            self._notifier.diagnosis("micro_batch_size_grows", f"trying {retry}")

    def shrink(self, plan: BatchPlan, step: int) -> tuple[int, int | None]:
        """Reduce the sizes from now on."""
        before = max(unit.num_samples for unit in plan.units)
        if self._reduced is not None:  # the retry failed
            smaller: Sizes | None = self._reduced
            self._reduced = None
            self._steps_to_wait *= 2
        else:
            smaller = self._smaller(plan, before)
            if smaller is not None:
                self.former_sizes.append(self._sizes.sizes)
        if smaller is None:
            return before, None
        self._sizes.sizes = smaller
        self._next_try = step + self._steps_to_wait
        reason = f"{_in_words(smaller)}, because {before} ran out of memory in step {step}"
        self._decisions.add("micro_batch_size", reason)
        return before, _largest(smaller, plan)

    def smaller(self, plan: BatchPlan) -> int | None:
        """Return the micro-batch size to use after a cut that did not fit; None if it cannot be smaller."""
        smaller = self._smaller(plan, max(unit.num_samples for unit in plan.units))
        return None if smaller is None else _largest(smaller, plan)

    def state(self) -> dict[str, Any] | None:
        """Return the state for a resumed run; None if no size was reduced."""
        if not self.former_sizes:
            return None
        return {
            "sizes": dataclasses.asdict(self._reduced or self._sizes.sizes),
            "formers": [dataclasses.asdict(sizes) for sizes in self.former_sizes],
            "wait": self._steps_to_wait,
            "next_try": self._next_try,
            "is_trying": self._reduced is not None,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore sizes that the saved run found by a search or reduced, and report other changes.

        Warns:
            UserWarning: the effective batch size has changed.
        """
        saved: Mapping[str, int | None] = state["sizes"]
        for name, taken in self._sizes.take(saved, state["decisions"]).items():
            self._decisions.add(name, taken)
        changed = self._sizes.changes(saved)
        if changed:
            self._decisions.add("resumed with changes", changed)
            self._notifier.diagnosis("resumed_with_changes", f"resumed with changes: {changed}")
        if self._sizes.sizes.effective_batch_size != saved["effective_batch_size"]:
            warnings.warn(f"resumed with changes: {changed}", stacklevel=3)
        if (restored := self._restore(state.get("resized"))) is not None:
            self._decisions.add("micro_batch_size", restored)

    def _restore(self, saved: Mapping[str, Any] | None) -> str | None:
        """Restore reduced sizes if the initial sizes are the same, and return the decision in words."""
        if saved is None or Sizes(**saved["formers"][0]) != self.named:
            return None
        self.former_sizes = [Sizes(**sizes) for sizes in saved["formers"]]
        self._steps_to_wait, self._next_try = saved["wait"], saved["next_try"]
        sizes = Sizes(**saved["sizes"])
        self._reduced = sizes if saved["is_trying"] else None
        self._sizes.sizes = self.former_sizes[-1] if saved["is_trying"] else sizes
        return f"{_in_words(self._sizes.sizes)}, as in the checkpoint, because more ran out of memory"

    def _smaller(self, plan: BatchPlan, before: int) -> Sizes | None:
        """Return sizes that double the number of micro-batches, in nearly equal parts."""
        smallest = min(plan.cut.group or 1, before)
        if self._sizes.constraints.whole:
            self.why_not_smaller = "norms=Exact(method='checkpoint') runs each rank share as one micro-batch"
            return None
        if before <= smallest + (plan.cut.group is not None):  # a group may hold one sample more
            self.why_not_smaller = (
                "they cannot be smaller than one sample"
                if plan.cut.group is None
                else f"they cannot be smaller than a group of {plan.cut.group}"
            )
            return None
        # All ranks use the same size, so the rank with most micro-batches determines it.
        share = max(plan.shares, key=lambda units: sum(unit.weight for unit in units))
        counting = [unit for unit in share if unit.weight]
        sizes = self._sizes.sizes
        if sizes.micro_batch_tokens is not None:
            # A sample with more tokens is run alone.
            return dataclasses.replace(sizes, micro_batch_tokens=ceil_div(sizes.micro_batch_tokens, 2))
        if sizes.micro_batch_size is None and sizes.accumulation_steps is not None:
            return dataclasses.replace(sizes, accumulation_steps=2 * sizes.accumulation_steps)
        after = ceil_div(sum(unit.num_samples for unit in counting), 2 * len(counting))
        if plan.cut.group is not None:
            after = max(plan.cut.group, after // plan.cut.group * plan.cut.group)
        # At most `before - 1`: rounding up, or to whole groups, may return the size that did not fit.
        return dataclasses.replace(sizes, micro_batch_size=min(after, before - 1), accumulation_steps=None)


def _in_words(sizes: Sizes) -> str:
    if sizes.micro_batch_tokens is not None:
        return f"at most {sizes.micro_batch_tokens:,} tokens"
    if sizes.micro_batch_size is not None:
        return f"at most {sizes.micro_batch_size} samples"
    return f"{sizes.accumulation_steps} accumulation steps"


def _largest(sizes: Sizes, plan: BatchPlan) -> int:
    if sizes.micro_batch_size is not None:
        return sizes.micro_batch_size
    if sizes.micro_batch_tokens is not None:  # the number of samples depends on their lengths: about half
        return ceil_div(max(unit.num_samples for unit in plan.units), 2)
    assert sizes.accumulation_steps is not None
    share = max(sum(unit.num_samples for unit in units if unit.weight) for units in plan.shares)
    return ceil_div(share, sizes.accumulation_steps)
