"""The micro-batch size after one that did not fit, and when the former one is tried again."""

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
"""Steps until a former size is tried again; twice as many after each time that it has failed again."""


class SizeBackoff:
    """Changes the sizes of a run for as long as memory asks for it. All ranks decide alike, from step counts only.

    A size that was named stays small once it has been: the run is then, bit for bit, one that was planned like that.
    "auto" leaves the size to the engine, so there the former size is tried again.

    Args:
        sizes: the sizes, which are changed in place.
        decisions: each change is added to them.
        notifier: sends it to observers.
    """

    def __init__(self, sizes: RunSizes, decisions: Decisions, notifier: Notifier) -> None:
        self._sizes = sizes
        self._decisions = decisions
        self._notifier = notifier
        self._former_sizes: list[Sizes] = []
        self._steps_to_wait = FIRST_WAIT
        self._next_try = 0
        self._reduced: Sizes | None = None
        self.why_not_smaller = ""

    @property
    def named(self) -> Sizes:
        """The sizes as they were before anything ran out of memory."""
        return self._former_sizes[0] if self._former_sizes else self._sizes.sizes

    def begin_step(self, step: int) -> None:
        """Judge the last try by its step, and try a former size again if it is time."""
        if not self._former_sizes:
            return
        if self._reduced is not None and step > self._next_try:  # the try went well
            self._reduced = None
            self._former_sizes.pop()
            self._next_try = step - 1 + self._steps_to_wait
        # Another process may have taken the memory for a while, so "auto" does not stay small for ever.
        if self._sizes.is_auto and self._former_sizes and self._reduced is None and step >= self._next_try:
            self._reduced, self._next_try = self._sizes.sizes, step
            self._sizes.sizes = self._former_sizes[-1]
            said = (
                f"the size before {_in_words(self._reduced)} again, from step {step} on, "
                f"{self._steps_to_wait} steps later"
            )
            self._decisions.add("micro_batch_size", said)
            self._notifier.diagnosis("micro_batch_size_grows", f"trying {said}")

    def shrink(self, plan: BatchPlan, step: int) -> tuple[int, int | None]:
        """Take smaller sizes from now on.

        Args:
            plan: the cut that ran out of memory.
            step: in which.

        Returns:
            The largest micro-batch of that cut, and what it will be; None if it cannot be smaller.
        """
        before = max(unit.num_samples for unit in plan.units)
        if self._reduced is not None:  # what was tried again has failed again
            smaller: Sizes | None = self._reduced
            self._reduced = None
            self._steps_to_wait *= 2
        else:
            smaller = self._smaller(plan, before)
            if smaller is not None:
                self._former_sizes.append(self._sizes.sizes)
        if smaller is None:
            return before, None
        self._sizes.sizes = smaller
        self._next_try = step + self._steps_to_wait
        reason = f"{_in_words(smaller)}, because {before} ran out of memory in step {step}"
        self._decisions.add("micro_batch_size", reason)
        return before, _largest(smaller, plan)

    def smaller(self, plan: BatchPlan) -> int | None:
        """Return how large micro-batches are to be after a cut that did not fit; None if they cannot be smaller."""
        smaller = self._smaller(plan, max(unit.num_samples for unit in plan.units))
        return None if smaller is None else _largest(smaller, plan)

    def state(self) -> dict[str, Any] | None:
        """Return what a resumed run needs to take the same sizes; None if they are as they were named."""
        if not self._former_sizes:
            return None
        return {
            "sizes": dataclasses.asdict(self._reduced or self._sizes.sizes),
            "formers": [dataclasses.asdict(sizes) for sizes in self._former_sizes],
            "wait": self._steps_to_wait,
            "next_try": self._next_try,
            "is_trying": self._reduced is not None,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take sizes that a saved run had found, by a search or by running out of memory; say what else has changed.

        Args:
            state: of the saved run: its sizes as they were named or found, its decisions, and what `state` returned.

        Warns:
            UserWarning: the effective batch is of another size.
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
        """Take the sizes of a saved run, if it was given the same ones as this; return that decision in words."""
        if saved is None or Sizes(**saved["formers"][0]) != self.named:
            return None
        self._former_sizes = [Sizes(**sizes) for sizes in saved["formers"]]
        self._steps_to_wait, self._next_try = saved["wait"], saved["next_try"]
        sizes = Sizes(**saved["sizes"])
        self._reduced = sizes if saved["is_trying"] else None
        self._sizes.sizes = self._former_sizes[-1] if saved["is_trying"] else sizes
        return f"{_in_words(self._sizes.sizes)}, as in the checkpoint, because more ran out of memory"

    def _smaller(self, plan: BatchPlan, before: int) -> Sizes | None:
        """Return sizes that make twice as many micro-batches, of as equal size as can be."""
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
        # The rank with most micro-batches decides, since all ranks take the same size.
        share = max(plan.shares, key=lambda units: sum(unit.weight for unit in units))
        counting = [unit for unit in share if unit.weight]
        sizes = self._sizes.sizes
        if sizes.micro_batch_tokens is not None:
            # A sample that has more tokens than that is run alone.
            return dataclasses.replace(sizes, micro_batch_tokens=ceil_div(sizes.micro_batch_tokens, 2))
        if sizes.micro_batch_size is None and sizes.accumulation_steps is not None:
            return dataclasses.replace(sizes, accumulation_steps=2 * sizes.accumulation_steps)
        after = ceil_div(sum(unit.num_samples for unit in counting), 2 * len(counting))
        if plan.cut.group is not None:
            after = max(plan.cut.group, after // plan.cut.group * plan.cut.group)
        # Smaller in any case: rounding up, or to whole groups, may lead back to the size that did not fit.
        return dataclasses.replace(sizes, micro_batch_size=min(after, before - 1), accumulation_steps=None)


def _in_words(sizes: Sizes) -> str:
    if sizes.micro_batch_tokens is not None:
        return f"{sizes.micro_batch_tokens:,} tokens at most"
    if sizes.micro_batch_size is not None:
        return f"{sizes.micro_batch_size} samples at most"
    return f"{sizes.accumulation_steps} accumulation steps"


def _largest(sizes: Sizes, plan: BatchPlan) -> int:
    if sizes.micro_batch_size is not None:
        return sizes.micro_batch_size
    if sizes.micro_batch_tokens is not None:  # how many samples that is depends on their lengths: about half as many
        return ceil_div(max(unit.num_samples for unit in plan.units), 2)
    assert sizes.accumulation_steps is not None
    share = max(sum(unit.num_samples for unit in units if unit.weight) for units in plan.shares)
    return ceil_div(share, sizes.accumulation_steps)
