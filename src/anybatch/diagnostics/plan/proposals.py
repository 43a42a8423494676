"""What would fit more, or run at all: every possible change planned anew."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from anybatch.core.geometry import ceil_div
from anybatch.core.memory_model import MemoryEnvelope, Peak
from anybatch.core.size_choice import even_size
from anybatch.diagnostics.plan.budget import Budget
from anybatch.diagnostics.plan.changes import Change, possible_changes
from anybatch.diagnostics.plan.memory_plan import Envelopes, find_envelopes
from anybatch.diagnostics.plan.task import Task
from anybatch.errors import CannotPlanError, UserError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fit:
    """What fits, as it is or with a change.

    Attributes:
        name: the change; empty for none.
        how: what to write for it.
        largest: the largest micro-batch size that keeps the headroom; 0 if not even one sample fits.
        micro_batch_size: the size to take: the share in even parts no larger than that; 1 if nothing fits.
        accumulation_steps: micro-batches per rank and step.
        peak: the moment at which most is held, at that size.
        reserved_bytes: what the allocator takes from the device at that size.
        envelope: memory at any other size, of the step that holds most.
        task: the step.
    """

    name: str
    how: str
    largest: int
    micro_batch_size: int
    accumulation_steps: int
    peak: Peak
    reserved_bytes: int
    envelope: MemoryEnvelope
    task: Task

    @property
    def fits(self) -> bool:
        """Return whether at least one sample fits."""
        return self.largest > 0


def fit_of(task: Task, envelopes: Envelopes, budget: Budget, share: int, *, name: str = "", how: str = "") -> Fit:
    """Return what fits of a rank share."""
    usable = budget.usable_bytes
    found = envelopes.largest_allocated(usable) if usable > 0 else 0
    largest = share if found is None else min(share, found)
    size = even_size(share, max(1, largest))
    steps = ceil_div(share, size)
    envelope = max((envelopes.steady, envelopes.first), key=lambda one: one.peak_bytes(size))
    reserved = envelopes.reserved_bytes(size)
    if largest:  # it makes do with what there is, by giving back what it does not use
        reserved = min(reserved, usable)
    return Fit(
        name=name,
        how=how,
        largest=largest,
        micro_batch_size=size,
        accumulation_steps=steps,
        peak=envelope.at_peak(size),
        reserved_bytes=max(envelopes.peak_bytes(size), reserved),
        envelope=envelope,
        task=task,
    )


def propose(task: Task, envelopes: Envelopes, budget: Budget, share: int) -> list[Fit]:
    """Return what would fit with each possible change; changes that cannot be planned are left out."""
    found = []
    for change in possible_changes(task):
        try:
            changed = _changed(change, envelopes, budget, share)
        except (CannotPlanError, UserError):
            continue
        found.append(fit_of(change.task, changed, budget, share, name=change.name, how=change.how))
    return found


def _changed(change: Change, envelopes: Envelopes, budget: Budget, share: int) -> Envelopes:
    if change.reshape is None:
        return find_envelopes(change.task, budget.usable_bytes, most_samples=share)
    steady, first = change.reshape(envelopes.steady), change.reshape(envelopes.first)
    return dataclasses.replace(envelopes, steady=steady, first=first)


def best_first(fits: Iterable[Fit]) -> list[Fit]:
    """Return the fits, those with fewer and larger micro-batches first, then those that take less."""
    return sorted(fits, key=lambda one: (not one.fits, one.accumulation_steps, -one.largest, one.reserved_bytes))
