"""Plans of published models as tables for the page's planner."""

import dataclasses
from typing import Any, get_args

from anybatch.core.headroom import HEADROOM
from anybatch.memory.trace import Category, Phase
from anybatch.planner.budget import COMMUNICATOR_BYTES, CONTEXT_BYTES, WORKSPACE_BYTES, budget_of
from anybatch_guide.experiment import Data, Emit, Experiment
from anybatch_guide.memory.planning import OFFERED, Variant, trace
from anybatch_guide.memory.tables import DEVICE_NAMES, EFFECTIVE_BATCH_SIZES, NUM_RANKS, tables


def run(emit: Emit) -> Data:
    """Trace every variant of every model, and tabulate its plans for every device."""
    variants = [variant for one in OFFERED for variant in one.variants()]
    found = []
    for done, variant in enumerate(variants):
        emit({"kind": "guide.progress", "done": done, "of": len(variants), "what": variant.model})
        traced = trace(variant)
        assert (traced.envelopes.verdict, traced.envelopes.notes) == ("exact", ()), "the page cannot show more"
        found.append(
            {
                **properties_of(variant),
                "num_parameters": traced.num_parameters,
                **tables(traced.envelopes, multi_rank=variant.multi_rank),
            }
        )
    budgets = {name: budget_of(name) for name in DEVICE_NAMES}
    return {
        "devices": [{"name": name, "memory_bytes": one.total_bytes} for name, one in budgets.items()],
        "num_ranks": list(NUM_RANKS),
        "effective_batch_sizes": list(EFFECTIVE_BATCH_SIZES),
        "headroom": HEADROOM,
        "context_bytes": CONTEXT_BYTES,
        "communicator_bytes": COMMUNICATOR_BYTES,
        "workspace_bytes": WORKSPACE_BYTES,
        "categories": list(get_args(Category)),
        "phases": list(get_args(Phase)),
        "variants": found,
    }


def properties_of(variant: Variant) -> dict[str, Any]:
    """Return the properties of a variant, with the names used on the page."""
    properties = dataclasses.asdict(variant)
    properties["several"] = properties.pop("multi_rank")
    return properties


EXPERIMENT = Experiment(
    name="memory_planner",
    question="What fits of a published model into a device, and what holds the memory, for every choice?",
    run=run,
    seconds=1500,
    runs_here=False,
)
