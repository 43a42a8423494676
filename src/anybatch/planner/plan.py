"""`plan`: what micro-batch size fits, what holds the memory, and what would change it; told without the device."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core.size_choice import even_size
from anybatch.core.splitting import BatchPlan, Cut, plan_batch
from anybatch.engine.inputs import Model
from anybatch.memory.timeline import ORDER
from anybatch.parallel.gradient_buckets import gradient_bytes
from anybatch.planner.budget import Budget
from anybatch.planner.cost.step_time import Bill, CostLine, Rates, StepSeconds, bill, rates_of
from anybatch.planner.envelopes import find_envelopes
from anybatch.planner.proposals.ranking import Fit, PlanTarget, best_first, fit_of, propose
from anybatch.planner.report import words_of
from anybatch.planner.trace.blocks import as_module
from anybatch.planner.trace.step_spec import StepSpec, built


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What fits into a device, and why; printed, it says so.

    Attributes:
        name: what is trained.
        spec: the step.
        num_parameters: of the model, frozen ones included.
        optimizer: its class.
        precision: number formats of forward and backward.
        target: what it is planned for: the device's memory and rates, and the effective batch size.
        batch: how the effective batch is cut and dealt at the size that is proposed.
        as_it_is: what fits without a change.
        costs: of its operations, at any micro-batch size.
        changes: what would fit with each change, the best first.
        exact: whether every allocation was seen to follow its line; False if some follow a quadratic.
        notes: what the user should know of how the plan was made.
        seconds: how long planning took.
    """

    name: str
    spec: StepSpec
    num_parameters: int
    optimizer: str
    precision: str
    target: PlanTarget
    batch: BatchPlan
    as_it_is: Fit
    costs: CostLine
    changes: tuple[Fit, ...]
    exact: bool
    notes: tuple[str, ...]
    seconds: float

    @property
    def budget(self) -> Budget:
        """Return the device's memory."""
        return self.target.budget

    @property
    def micro_batch_size(self) -> int:
        """Return the size to take; 0 if nothing fits."""
        return self.as_it_is.micro_batch_size if self.as_it_is.fits else 0

    @property
    def accumulation_steps(self) -> int:
        """Return the micro-batches per rank and step at that size."""
        return self.as_it_is.accumulation_steps

    def seconds_on(self, world_size: int) -> StepSeconds | None:
        """Return how long a step of the same effective batch takes on so many devices; None where that is not known.

        The micro-batch size is the largest that fits on the planned number of them, or what there is for each.
        """
        if not self.as_it_is.fits:
            return None
        size = even_size(self.target.share(world_size), self.as_it_is.largest)
        return self.target.seconds(self.costs, size, world_size)

    def bill(self, num_samples: int, world_size: int) -> Bill | None:
        """Return what training on so many samples takes, in hours and money; None where no time is known."""
        seconds, device = self.seconds_on(world_size), self.budget.device
        if seconds is None:
            return None
        return bill(
            seconds.total,
            num_samples=num_samples,
            effective_batch_size=self.batch.num_samples,
            world_size=world_size,
            usd_per_hour=None if device is None or device.price is None else device.price.usd_per_hour,
        )

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


def make_plan(
    spec: StepSpec,
    budget: Budget,
    effective_batch_size: int,
    *,
    name: str = "",
    rates: Rates | None = None,
    proposals: bool = True,
) -> Plan:
    """Plan a training step for a device.

    Args:
        spec: what is trained.
        budget: the device's memory.
        effective_batch_size: samples of one step, over all ranks.
        name: what it is called.
        rates: how fast the device is; None for what is known of it by name.
        proposals: also plan every possible change, which takes as long for each.

    Raises:
        CannotPlanError: the step cannot be traced; says why.
        UserError: the engine refuses what it is asked to run.
    """
    start = time.perf_counter()
    ready, _ = built(spec)
    parameters = list(as_module(cast("Model", ready.model)).parameters())
    target = PlanTarget(
        budget=budget,
        effective_batch_size=effective_batch_size,
        rates=rates_of(budget.device) if rates is None and budget.device is not None else rates,
        gradient_bytes=gradient_bytes(p for p in parameters if p.requires_grad),
    )
    envelopes = find_envelopes(ready, budget.usable_bytes, most_samples=target.share(spec.world_size))
    as_it_is = fit_of(spec, envelopes, target)
    changes = propose(spec, envelopes, target, fits=as_it_is.fits) if proposals else []
    optimizer = ready.optimizer
    cut = Cut(micro_batch_size=as_it_is.micro_batch_size)
    return Plan(
        name=name,
        spec=spec,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        optimizer=type(optimizer if isinstance(optimizer, Optimizer) else optimizer(_one_parameter())).__name__,
        precision=spec.precision,
        target=target,
        batch=plan_batch(effective_batch_size, spec.world_size, cut),
        as_it_is=as_it_is,
        costs=envelopes.costs,
        changes=tuple(best_first(changes)),
        exact=envelopes.verdict == "exact",
        notes=envelopes.notes,
        seconds=time.perf_counter() - start,
    )


def _one_parameter() -> list[tuple[str, nn.Parameter]]:
    return [("weight", nn.Parameter(torch.zeros(1)))]
