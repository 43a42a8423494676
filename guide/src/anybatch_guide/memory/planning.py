"""Plans of published models for the page: each model is traced once, then planned for any device by the library.

The trace does not depend on the device, the effective batch, or the number of ranks above one.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from anybatch.core.compatibility import PrecisionName
from anybatch.core.splitting import SplitOptions, plan_batch
from anybatch.engine.arguments import TrainSpec
from anybatch.planner.budget import budget_of
from anybatch.planner.changes import changed, named_change
from anybatch.planner.envelopes import Envelopes, find_envelopes
from anybatch.planner.fit import PlanTarget, fit_of
from anybatch.planner.plan import Plan
from anybatch.planner.step_spec import StepSpec, as_module, built
from anybatch.recipes.planning.subjects import load_subject

OptimizerName = Literal["AdamW", "fused AdamW"]
# More memory than any device has, so that the trace does not depend on a budget.
_PLENTY_BYTES = 1 << 50
# Two ranks represent any number above one, because the traced memory of a rank is the same.
_MULTIPLE_RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The properties of a step that determine its memory."""

    model: str  # name of a published model
    sequence_length: int  # tokens per sample
    precision: PrecisionName  # number formats of forward and backward
    optimizer: OptimizerName  # default or fused AdamW
    checkpointing: bool  # whether blocks are recomputed in the backward
    multi_rank: bool  # whether the step runs on more than one rank

    def task(self, world_size: int | None = None) -> StepSpec:
        """Return the step as `ab.plan` gets it, with checkpointing and the fused optimizer if selected."""
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
class OfferedModel:
    """A model of the page's planner with its options; every combination is traced."""

    name: str  # name of the model for `anybatch plan`
    sequence_lengths: tuple[int, ...]  # tokens per sample
    precisions: tuple[PrecisionName, ...]  # number formats
    # whether the page offers several ranks; not for a large model, which is rarely replicated, and whose trace would
    # have hundreds of thousands of checksums that compare replicas
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


OFFERED_MODELS = (
    OfferedModel(name="gpt2", sequence_lengths=(256, 1024), precisions=("fp32", "bf16")),
    OfferedModel(name="llama-3.2-1b", sequence_lengths=(2048,), precisions=("bf16",)),
    OfferedModel(name="llama-3.1-8b", sequence_lengths=(4096,), precisions=("bf16",), with_ranks=False),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traced:
    """A traced step."""

    variant: Variant  # properties of the step
    task: StepSpec  # the step for the library's own functions
    envelopes: Envelopes  # memory of the step for any micro-batch size
    num_parameters: int  # number of parameters of the model


def trace(variant: Variant) -> Traced:
    """Trace a step at two micro-batch sizes, derive its memory for any size, and verify the result at a third size."""
    task = variant.task()
    ready, _ = built(task)
    return Traced(
        variant=variant,
        task=task,
        envelopes=find_envelopes(task, _PLENTY_BYTES, max_samples=8),
        num_parameters=sum(parameter.numel() for parameter in as_module(ready.trained.model).parameters()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The device, batch and ranks to plan for."""

    device: str  # a name or a size for `anybatch plan`
    effective_batch_size: int  # samples of one step, over all ranks
    world_size: int = 1  # number of ranks


def planned(traced: Traced, request: PlanRequest) -> Plan:
    """Return the plan of a traced step, equal to `make_plan` without times and changes."""
    variant, envelopes = traced.variant, traced.envelopes
    assert variant.multi_rank == (request.world_size > 1), "traced for a different number of ranks"
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
        batch=plan_batch(
            request.effective_batch_size, request.world_size, SplitOptions(micro_batch_size=fit.micro_batch_size)
        ),
        baseline=fit,
        changes=(),
        notes=envelopes.notes,
        seconds=0.0,
    )
