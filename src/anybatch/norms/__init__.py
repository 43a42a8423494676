"""Find layers whose output for one sample depends on other samples, such as BatchNorm, and make them exact."""

from anybatch.norms.layers import Replaced, replaced
from anybatch.norms.policies import Exact, Freeze, Ghost, Keep, Policy, PolicyName, Sync, policy_of

__all__ = [
    "Exact",
    "Freeze",
    "Ghost",
    "Keep",
    "Policy",
    "PolicyName",
    "Replaced",
    "Sync",
    "policy_of",
    "replaced",
]
