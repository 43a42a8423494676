"""Public tools for tests of training code: real ranks, comparison of gradients, out-of-memory errors on purpose."""

from anybatch.core.tensors import relative_error
from anybatch.testing.gradients import assert_same_gradients
from anybatch.testing.memory_budget import AllocationFault, MemoryBudget, memory_budget, out_of_memory_at
from anybatch.testing.ranks import RankOutcome, RankPool, run_ranks

__all__ = [
    "AllocationFault",
    "MemoryBudget",
    "RankOutcome",
    "RankPool",
    "assert_same_gradients",
    "memory_budget",
    "out_of_memory_at",
    "relative_error",
    "run_ranks",
]
