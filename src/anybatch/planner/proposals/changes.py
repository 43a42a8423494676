"""Changes of a training step that let more fit, or run faster: each is another `StepSpec`, to be planned by itself."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core.blocks import repeated_blocks
from anybatch.core.tree import tensors_of
from anybatch.engine.spec import TrainSpec
from anybatch.engine.update.precision import OptimizerFunction
from anybatch.memory.trace import MemoryEnvelope, Polynomials
from anybatch.planner.cost.step_time import CostLine, CostTrace
from anybatch.planner.trace.checkpointing import Keeping, as_module, checkpoint_blocks
from anybatch.planner.trace.step_spec import MakeTrainSpec, StepSpec, built

CHUNK_TOKENS = 1024
"""Tokens whose logits are there at once in a loss that is computed in chunks."""
_LEAST_VOCABULARY = 8192


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """A change of a training step.

    Attributes:
        name: a few words for the table of a plan.
        how: the code to write for it.
        spec: the step with the change.
        reshape: maps the step's memory to that with the change, where the change itself is not traced.
        recost: the same for its costs; None if they stay.
    """

    name: str
    how: str
    spec: StepSpec
    reshape: Callable[[MemoryEnvelope], MemoryEnvelope] | None = None
    recost: Callable[[CostLine], CostLine] | None = None


def possible_changes(spec: StepSpec) -> list[Change]:
    """Return the changes that this spec has not made yet, one by one.

    Args:
        spec: the step as it is; its model is made if it is a function.
    """
    ready, _ = built(spec)
    return [*_of_update(ready), *_of_precision(ready), *_of_blocks(spec, ready), *_of_head(ready)]


def _of_update(spec: StepSpec) -> list[Change]:
    """Return the update in one kernel, without temporaries, where the optimizer offers one."""
    # An optimizer that is made already cannot be made again with another option.
    if isinstance(spec.trained.optimizer, Optimizer):
        return []
    fused = _fused(spec.trained.optimizer)
    if fused is None:
        return []
    how = "torch.optim.AdamW(..., fused=True)"
    return [Change(name="fused optimizer", how=how, spec=spec.with_train(optimizer=fused))]


def _fused(make: OptimizerFunction) -> OptimizerFunction | None:
    # Whether an optimizer has a fused kernel is known only of an instance, so it is made over one number.
    trial = make([("weight", nn.Parameter(torch.zeros(1)))])
    if any("fused" not in group or group["fused"] for group in trial.param_groups):
        return None

    def fused(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        optimizer = make(named)
        for group in optimizer.param_groups:
            # torch refuses an optimizer that is asked for both.
            group["fused"], group["foreach"] = True, False
        return optimizer

    return fused


def _of_precision(spec: StepSpec) -> list[Change]:
    if spec.trained.precision != "fp32" or spec.profile == "cpu":
        return []
    how = 'ab.Engine(..., precision="bf16")'
    return [Change(name="bf16 autocast", how=how, spec=spec.with_train(precision="bf16"))]


def _of_blocks(spec: StepSpec, ready: StepSpec) -> list[Change]:
    """Return the ways to checkpoint activations of repeated blocks."""
    rows = repeated_blocks(as_module(ready.trained.model))
    make = spec.train
    if not rows or isinstance(make, TrainSpec):  # blocks are wrapped in place, so each change takes a model of its own
        return []
    ways: tuple[tuple[str, Keeping, int], ...] = (
        ("checkpointing", "inputs", 1),
        ("checkpointing every 2nd block", "inputs", 2),
        ("checkpointing all but products", "products", 1),
    )
    where = ", ".join(map(str, rows))
    return [
        Change(
            name=name,
            how="torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False"
            f"{', context_fn=...' if keeping == 'products' else ''}) for {where}",
            spec=dataclasses.replace(spec, train=partial(_checkpointed, make, keeping, every)),
        )
        for name, keeping, every in ways
    ]


def _checkpointed(make: MakeTrainSpec, keeping: Keeping, every: int) -> TrainSpec:
    train = make()
    return dataclasses.replace(train, model=checkpoint_blocks(train.model, keeping, every=every))


def _of_head(spec: StepSpec) -> list[Change]:
    """Return a loss over a large vocabulary in chunks."""
    heads = [one.out_features for one in as_module(spec.trained.model).modules() if isinstance(one, nn.Linear)]
    # The head is taken to be the widest linear layer: vocabularies are larger than any hidden size in use.
    vocabulary = max(heads, default=0)
    labels = [tensor for tensor in tensors_of(spec.sample) if not tensor.is_floating_point() and tensor.dim() > 1]
    if vocabulary < _LEAST_VOCABULARY or not labels:
        return []
    # Labels have one entry per token; inputs of a model of images, say, are floating-point and are left out.
    num_tokens = max(tensor[0].numel() for tensor in labels)
    # Of short samples a chunk would hold about as many logits as the loss has at once.
    if num_tokens <= CHUNK_TOKENS // 2:
        return []
    return [
        Change(
            name=f"loss in chunks of {CHUNK_TOKENS} tokens",
            how="F.linear_cross_entropy(x, head.weight, targets, options=nn.LinearCrossEntropyOptions())",
            spec=spec,
            reshape=lambda envelope: chunked(envelope, vocabulary, num_tokens),
            recost=lambda costs: with_head_again(costs, vocabulary),
        )
    ]


def chunked(envelope: MemoryEnvelope, vocabulary: int, num_tokens: int) -> MemoryEnvelope:
    """Return the envelope of a step whose logits are there for one chunk of tokens at a time.

    Everything that grows by `num_tokens` x `vocabulary` values per sample (one token less, where labels are shifted)
    is taken to be logits, their logarithms or their gradient, and holds a chunk instead. The rest stays.
    """
    # Logits are recognised by their growth per sample, in 16 or in 32 bits.
    widths = {tokens * vocabulary * width: width for tokens in (num_tokens, num_tokens - 1) for width in (2, 4)}
    allocated = envelope.allocated
    chunk = torch.tensor(
        [CHUNK_TOKENS * vocabulary * widths.get(slope, 0) for slope in allocated.slope.tolist()], dtype=torch.int64
    )
    return envelope.with_sizes(
        Polynomials(
            torch.where(chunk > 0, chunk, allocated.constant),
            torch.where(chunk > 0, 0, allocated.slope),
            allocated.curvature,
        )
    )


def with_head_again(costs: CostLine, vocabulary: int) -> CostLine:
    """Return the costs of a step that makes its logits a second time, in the backward."""

    def twice(trace: CostTrace) -> CostTrace:
        again = (
            one
            for one in trace.operations
            if one.kind == "product" and one.phase == "forward" and vocabulary in one.dims
        )
        return CostTrace((*trace.operations, *again))

    return CostLine((twice(costs.traces[0]), twice(costs.traces[1])), costs.traced)
