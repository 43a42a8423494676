"""Plans of published models for the page: traced once, then planned for any device by the library's own functions.

What is traced does not depend on the device, on the effective batch, or on how many ranks there are beyond one.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from anybatch.core.splitting import Cut, plan_batch
from anybatch.engine.spec import TrainSpec
from anybatch.engine.update.precision import PrecisionName
from anybatch.planner.budget import budget_of
from anybatch.planner.envelopes import Envelopes, find_envelopes
from anybatch.planner.proposals.changes import changed, named_change
from anybatch.planner.proposals.fit import PlanTarget, fit_of
from anybatch.planner.report import Plan
from anybatch.planner.trace.checkpointing import as_module
from anybatch.planner.trace.step_spec import StepSpec, built
from anybatch.recipes.planning.subjects import load_subject

OptimizerName = Literal["AdamW", "fused AdamW"]
# More than any device has, so that what is traced does not depend on one.
_PLENTY_BYTES = 1 << 50
# Two stand for any number above one: the memory of a rank is the same.
_MULTIPLE_RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The properties of a step on which its memory depends.

    Attributes:
        model: name of a published model.
        sequence_length: tokens of a sample.
        precision: number formats of forward and backward.
        optimizer: AdamW as it is by default, or in one kernel.
        checkpointing: whether blocks are run again in the backward.
        multi_rank: whether it runs on more than one rank.
    """

    model: str
    sequence_length: int
    precision: PrecisionName
    optimizer: OptimizerName
    checkpointing: bool
    multi_rank: bool

    def task(self, world_size: int | None = None) -> StepSpec:
        """Return the step, as `ab.plan` plans it and its table of changes changes it."""
        subject = load_subject(self.model, sequence_length=self.sequence_length)

        def train() -> TrainSpec:
            return dataclasses.replace(subject.train(), precision=self.precision)

        ranks = world_size or (_MULTIPLE_RANKS if self.multi_rank else 1)
        task = StepSpec(train=train, sample=subject.sample, world_size=ranks)
        if self.checkpointing:
            task = _changed(task, "checkpointing")
        if self.optimizer == "fused AdamW":
            task = _changed(task, "fused optimizer")
        return task


def _changed(task: StepSpec, name: str) -> StepSpec:
    return changed(task, [named_change(task, name)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A model with what can be chosen for it: every combination is traced.

    Attributes:
        name: of the model, as `anybatch plan` takes it.
        sequence_lengths: tokens of a sample.
        precisions: number formats.
        with_ranks: whether it is offered on more than one rank too. A copy of a large model on each rank is seldom
            what is wanted, and to check that the copies start equal takes hundreds of thousands of digests.
    """

    name: str
    sequence_lengths: tuple[int, ...]
    precisions: tuple[PrecisionName, ...]
    with_ranks: bool = True

    def variants(self) -> Iterator[Variant]:
        """Yield every combination."""
        optimizers: tuple[OptimizerName, ...] = ("AdamW", "fused AdamW")
        for length, precision, optimizer, checkpointing, multi_rank in itertools.product(
            self.sequence_lengths, self.precisions, optimizers, (False, True), (False, True)[: 1 + self.with_ranks]
        ):
            yield Variant(
                model=self.name,
                sequence_length=length,
                precision=precision,
                optimizer=optimizer,
                checkpointing=checkpointing,
                multi_rank=multi_rank,
            )


OFFERED = (
    Offered(name="gpt2", sequence_lengths=(256, 1024), precisions=("fp32", "bf16")),
    Offered(name="llama-3.2-1b", sequence_lengths=(2048,), precisions=("bf16",)),
    Offered(name="llama-3.1-8b", sequence_lengths=(4096,), precisions=("bf16",), with_ranks=False),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traced:
    """A step that has been traced.

    Attributes:
        variant: its properties.
        task: the step for the library's own functions.
        envelopes: its memory at any micro-batch size.
        num_parameters: of the model.
    """

    variant: Variant
    task: StepSpec
    envelopes: Envelopes
    num_parameters: int


def trace(variant: Variant) -> Traced:
    """Return a step with its memory at any micro-batch size, which a third traced size has confirmed."""
    task = variant.task()
    ready, _ = built(task)
    return Traced(
        variant=variant,
        task=task,
        envelopes=find_envelopes(task, _PLENTY_BYTES, most_samples=8),
        num_parameters=sum(one.numel() for one in as_module(ready.trained.model).parameters()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The device, batch and ranks that a step is planned for.

    Attributes:
        device: a name or a size, as `anybatch plan` takes it.
        effective_batch_size: samples of one step, over all ranks.
        world_size: number of ranks.
    """

    device: str
    effective_batch_size: int
    world_size: int = 1


def planned(traced: Traced, request: PlanRequest) -> Plan:
    """Return the plan of a step that has been traced: that of `make_plan`, without times and changes."""
    variant, envelopes = traced.variant, traced.envelopes
    assert variant.multi_rank == (request.world_size > 1), "it was traced for another number of ranks"
    task = dataclasses.replace(traced.task, world_size=request.world_size)
    budget = budget_of(request.device, world_size=request.world_size)
    target = PlanTarget(budget=budget, effective_batch_size=request.effective_batch_size)
    fit = fit_of(task, envelopes, target)
    return Plan(
        name=variant.model,
        spec=task,
        num_parameters=traced.num_parameters,
        optimizer="AdamW",
        precision=variant.precision,
        target=target,
        batch=plan_batch(request.effective_batch_size, request.world_size, Cut(micro_batch_size=fit.micro_batch_size)),
        baseline=fit,
        costs=envelopes.costs,
        changes=(),
        exact=envelopes.verdict == "exact",
        notes=envelopes.notes,
        seconds=0.0,
    )
