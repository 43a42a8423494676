"""Plans of published models as tables for the page's planner."""

import dataclasses
from typing import Any, get_args

from anybatch.core.units import HEADROOM
from anybatch.memory.trace import Category, Phase
from anybatch.planner.budget import COMMUNICATOR_BYTES, CONTEXT_BYTES, WORKSPACE_BYTES, budget_of
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress
from anybatch_guide.memory.planning import OFFERED_MODELS, Variant, trace
from anybatch_guide.memory.tables import DEVICE_NAMES, EFFECTIVE_BATCH_SIZES, NUM_RANKS, tables


def run(emit: Emit) -> Data:
    """Trace every variant of every model, and tabulate its plans for every device."""
    variants = [variant for offer in OFFERED_MODELS for variant in offer.variants()]
    tabulated = []
    for done, variant in enumerate(variants):
        emit_progress(emit, done, len(variants), variant.model)
        traced = trace(variant)
        assert not traced.envelopes.notes, "the page cannot show notes of a plan"
        tabulated.append(
            {
                **properties_of(variant),
                "num_parameters": traced.num_parameters,
                **tables(traced.envelopes, multi_rank=variant.multi_rank),
            }
        )
    budgets = {name: budget_of(name) for name in DEVICE_NAMES}
    return {
        "devices": [{"name": name, "memory_bytes": offer.total_bytes} for name, offer in budgets.items()],
        "num_ranks": list(NUM_RANKS),
        "effective_batch_sizes": list(EFFECTIVE_BATCH_SIZES),
        "headroom": HEADROOM,
        "context_bytes": CONTEXT_BYTES,
        "communicator_bytes": COMMUNICATOR_BYTES,
        "workspace_bytes": WORKSPACE_BYTES,
        "categories": list(get_args(Category)),
        "phases": list(get_args(Phase)),
        "variants": tabulated,
    }


def properties_of(variant: Variant) -> dict[str, Any]:
    """Return the properties of a variant, with the names that the page uses."""
    properties = dataclasses.asdict(variant)
    properties["several"] = properties.pop("multi_rank")
    return properties


EXPERIMENT = Experiment(
    name="memory_planner",
    question="Which micro-batches of a published model fit on a device, and what uses the memory?",
    run=run,
    seconds=1500,
    runs_here=False,
)
