"""Layers whose output depends on other samples, BatchNorm above all: finding them, and what can be done about them."""

from anybatch.norms.layers import coupling_layers
from anybatch.norms.policies import Exact, Freeze, Ghost, Keep, Policy, PolicyName, Sync, policy_of
from anybatch.norms.replacement import Replaced, recompute_statistics, replaced

__all__ = [
    "Exact",
    "Freeze",
    "Ghost",
    "Keep",
    "Policy",
    "PolicyName",
    "Replaced",
    "Sync",
    "coupling_layers",
    "policy_of",
    "recompute_statistics",
    "replaced",
]
