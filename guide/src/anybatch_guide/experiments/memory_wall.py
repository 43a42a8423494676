"""The memory that large models need at each batch size, planned without a GPU."""

from typing import Any

from anybatch.core.compatibility import PrecisionName
from anybatch.core.geometry import even_size
from anybatch.memory.trace import ORDER
from anybatch.planner.plan import Plan
from anybatch.recipes.planning.decoder import KNOWN_MODELS
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress
from anybatch_guide.memory.formulas import ADAM_STATE_BYTES, layer_activation_bytes, logits_bytes
from anybatch_guide.memory.planning import PlanRequest, Traced, Variant, planned, trace
from anybatch_guide.memory.timelines import in_order

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Offered batch sizes."""
LIMITS_GIB = (4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 141, 192)
"""Offered memory sizes, in GiB."""
_ROWS: tuple[tuple[str, int, PrecisionName, str], ...] = (
    ("gpt2", 1024, "fp32", "GPT-2, float32"),
    ("gpt2", 1024, "bf16", "GPT-2, bf16"),
    ("llama-3.2-1b", 2048, "bf16", "Llama 3.2 1B, bf16"),
)
MODELS = {
    Variant(
        model=model,
        sequence_length=length,
        precision=precision,
        optimizer="AdamW",
        checkpointing=False,
        multi_rank=False,
    ): title
    for model, length, precision, title in _ROWS
}
"""The planned models, and their titles on the page."""
INITIAL_REQUEST = PlanRequest(device="RTX 4090", effective_batch_size=512)
"""The initial request of the page's planner, for the second model of `MODELS`."""
_UNLIMITED_BATCH_SIZE = 1 << 20
"""An effective batch size that no device can run in one micro-batch, so that only memory limits micro-batches."""


def run(emit: Emit) -> Data:
    """Trace each model, and plan it for every size and every limit."""
    traced_models = []
    for done, (variant, title) in enumerate(MODELS.items()):
        emit_progress(emit, done, len(MODELS), title)
        traced_models.append((trace(variant), title))
    return {
        "categories": list(ORDER),
        "sizes": list(SIZES),
        "limits_gib": list(LIMITS_GIB),
        "models": [_memory_by_size(traced, title, emit) for traced, title in traced_models],
        "opening": _initial_plan(planned(traced_models[1][0], INITIAL_REQUEST)),
    }


def _memory_by_size(traced: Traced, title: str, emit: Emit) -> dict[str, Any]:
    """Return the memory of a model's step by batch size, and the largest batch size by device size."""
    variant, envelopes = traced.variant, traced.envelopes
    rows = []
    for size in SIZES:
        emit_progress(emit, size, max(SIZES), title)
        peak = envelopes.at_peak(size)
        rows.append(
            {
                "held": in_order(peak.by_category),
                "reserved": envelopes.reserved_bytes(size),
                "phase": peak.phase,
                "operation": peak.operation,
            }
        )
    return {
        "name": variant.model,
        "title": title,
        "sequence_length": variant.sequence_length,
        "precision": variant.precision,
        "num_parameters": traced.num_parameters,
        "rows": rows,
        "limits": [
            _limit(planned(traced, PlanRequest(device=f"{size}GiB", effective_batch_size=_UNLIMITED_BATCH_SIZE)))
            for size in LIMITS_GIB
        ],
    }


def _limit(plan: Plan) -> dict[str, Any]:
    """Return the number of samples that fit into a device, and the plan's reason for the limit."""
    summary = plan.summary()
    return {
        "usable_bytes": plan.budget.usable_bytes,
        "beside_bytes": plan.budget.outside_bytes + plan.budget.workspace_bytes,
        "largest": plan.baseline.largest,
        "why": summary["largest"] if plan.baseline.fits else f"{summary['fits']}; {summary['because']}",
    }


def _initial_plan(plan: Plan) -> dict[str, Any]:
    """Return the plan of the initial request, which the page shows before it can compute plans."""
    fit = plan.baseline
    assert fit.micro_batch_size == even_size(plan.batch.num_samples, fit.largest)
    return {
        "device": INITIAL_REQUEST.device,
        "effective_batch_size": INITIAL_REQUEST.effective_batch_size,
        "total_bytes": plan.budget.total_bytes,
        "headroom": plan.budget.headroom,
        "libraries_bytes": plan.budget.outside_bytes + plan.budget.workspace_bytes,
        "largest": fit.largest,
        "micro_batch_size": fit.micro_batch_size,
        "accumulation_steps": fit.accumulation_steps,
        "reserved_bytes": fit.reserved_bytes,
        "peak_bytes": fit.peak.num_bytes,
        "held": in_order(fit.peak.by_category),
        "words": str(plan).splitlines()[:7],
        "formulas": _formulas(plan),
    }


def _formulas(plan: Plan) -> dict[str, float]:
    """Return the bytes that published formulas give for the planned step: state, layers and logits."""
    config, size = KNOWN_MODELS[plan.name], plan.micro_batch_size
    (length,) = {variant.sequence_length for variant in MODELS if variant.model == plan.name}
    num_tokens = size * length
    return {
        "state": float(plan.num_parameters * ADAM_STATE_BYTES),
        "layers": float(config.num_hidden_layers * layer_activation_bytes(num_tokens, config.hidden_size)),
        "logits": float(logits_bytes(num_tokens, config.vocab_size)),
    }


EXPERIMENT = Experiment(
    name="memory_wall",
    question="How large a batch fits into the memory of a GPU, and which tensors limit it?",
    run=run,
    seconds=60,
)
