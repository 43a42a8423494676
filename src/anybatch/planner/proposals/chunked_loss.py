"""A loss that computes logits for one chunk of tokens at a time, derived from a trace with all logits."""

import torch

from anybatch.memory.trace import MemoryEnvelope, Polynomials
from anybatch.planner.cost.step_time import CostLine, CostTrace

CHUNK_TOKENS = 1024
"""Tokens per chunk."""


def chunked(envelope: MemoryEnvelope, vocabulary: int, num_tokens: int) -> MemoryEnvelope:
    """Return the envelope of a step that keeps the logits of one chunk of tokens at a time.

    Every allocation that grows by `num_tokens` x `vocabulary` values per sample (one token less if labels are shifted)
    counts as logits, their logarithms or their gradient, and is reduced to one chunk.
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
    """Return the costs of a step that recomputes its logits in the backward."""

    def twice(trace: CostTrace) -> CostTrace:
        again = (
            one
            for one in trace.operations
            if one.kind == "matmul" and one.phase == "forward" and vocabulary in one.dims
        )
        return CostTrace((*trace.operations, *again))

    return CostLine((twice(costs.traces[0]), twice(costs.traces[1])), costs.traced)
