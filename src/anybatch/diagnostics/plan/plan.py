"""`plan`: what micro-batch size fits, what holds the memory, and what would change it; told without the device."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core.geometry import ceil_div
from anybatch.core.memory_timeline import ORDER
from anybatch.core.splitting import BatchPlan, Cut, plan_batch
from anybatch.diagnostics.plan.blocks import as_module
from anybatch.diagnostics.plan.budget import Budget
from anybatch.diagnostics.plan.memory_plan import Envelopes, find_envelopes
from anybatch.diagnostics.plan.proposals import Fit, best_first, fit_of, propose
from anybatch.diagnostics.plan.task import Task, built
from anybatch.diagnostics.plan.words import words_of
from anybatch.engine.modules import Model


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What fits into a device, and why; printed, it says so.

    Attributes:
        name: what is trained.
        num_parameters: of the model, frozen ones included.
        optimizer: its class.
        precision: number formats of forward and backward.
        budget: the device's memory.
        batch: how the effective batch is cut and dealt at the size that is proposed.
        as_it_is: what fits without a change.
        changes: what would fit with each change, the best first.
        exact: whether every allocation was seen to follow its line; False if some follow a quadratic.
        notes: what the user should know of how the plan was made.
        seconds: how long planning took.
    """

    name: str
    num_parameters: int
    optimizer: str
    precision: str
    budget: Budget
    batch: BatchPlan
    as_it_is: Fit
    changes: tuple[Fit, ...]
    exact: bool
    notes: tuple[str, ...]
    seconds: float

    @property
    def micro_batch_size(self) -> int:
        """Return the size to take; 0 if nothing fits."""
        return self.as_it_is.micro_batch_size if self.as_it_is.fits else 0

    @property
    def accumulation_steps(self) -> int:
        """Return the micro-batches per rank and step at that size."""
        return self.as_it_is.accumulation_steps

    def bytes_by_purpose(self) -> Mapping[str, int]:
        """Return what the device's memory is held for at the peak: tensors by category, and what is beside them."""
        fit = self.as_it_is
        held: dict[str, int] = {name: fit.peak.by_category[name] for name in ORDER}
        held["allocator"] = fit.reserved_bytes - fit.peak.num_bytes
        held["libraries"] = self.budget.outside_bytes + self.budget.workspace_bytes
        return {name: size for name, size in held.items() if size}

    def __str__(self) -> str:
        """Return the plan in words."""
        return words_of(self)


def make_plan(task: Task, budget: Budget, effective_batch_size: int, *, name: str = "", proposals: bool = True) -> Plan:
    """Plan a training step for a device.

    Args:
        task: what is trained.
        budget: the device's memory.
        effective_batch_size: samples of one step, over all ranks.
        name: what it is called.
        proposals: also plan every possible change, which takes as long for each.

    Raises:
        CannotPlanError: the step cannot be traced; says why.
        UserError: the engine refuses what it is asked to run.
    """
    start = time.perf_counter()
    share = ceil_div(effective_batch_size, task.world_size)
    ready, _ = built(task)
    envelopes: Envelopes = find_envelopes(ready, budget.usable_bytes, most_samples=share)
    as_it_is = fit_of(task, envelopes, budget, share)
    changes = propose(task, envelopes, budget, share) if proposals else []
    modules = as_module(cast("Model", ready.model))
    optimizer = ready.optimizer
    cut = Cut(micro_batch_size=as_it_is.micro_batch_size)
    return Plan(
        name=name,
        num_parameters=sum(parameter.numel() for parameter in modules.parameters()),
        optimizer=type(optimizer if isinstance(optimizer, Optimizer) else optimizer(_one_parameter())).__name__,
        precision=task.precision,
        budget=budget,
        batch=plan_batch(effective_batch_size, task.world_size, cut),
        as_it_is=as_it_is,
        changes=tuple(best_first(changes)),
        exact=envelopes.verdict == "exact",
        notes=envelopes.notes,
        seconds=time.perf_counter() - start,
    )


def _one_parameter() -> list[tuple[str, nn.Parameter]]:
    return [("weight", nn.Parameter(torch.zeros(1)))]
