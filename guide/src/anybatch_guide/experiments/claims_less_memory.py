"""The claim "less_memory", measured and judged; see guide/claims/catalogue.py."""

from anybatch_guide.claims.catalogue import CLAIMS
from anybatch_guide.claims.claim import experiment_of

EXPERIMENT = experiment_of(CLAIMS["less_memory"])
