"""The claim "batch_norm", measured and judged; see guide/claims/catalogue.py."""

from anybatch_guide.claims.catalogue import CLAIMS
from anybatch_guide.claims.claim import experiment_of

EXPERIMENT = experiment_of(CLAIMS["batch_norm"])
