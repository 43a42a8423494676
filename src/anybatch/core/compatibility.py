"""Which features of a run can be combined. The engine checks this table before it changes a model or an optimizer.

`TABLE` lists the pairs of features that raise an error, are inexact, or cannot occur, and pairs in which one feature
makes the other one exact, such as BatchNorm with norms='exact'. A pair that is not in the table is exclusive if both
features are values of one axis (unless it is in `COMBINABLE`); otherwise it has the worse verdict of the two features.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from anybatch.errors import CompositionError

PrecisionName = Literal["fp32", "bf16", "fp16"]


class Verdict(Enum):
    """The verdict on two features together, from good to bad; the value is the mark in the printed table.

    EXACT: the gradient equals the unsplit batch's: to 1e-12 in float64, in bf16 and fp16 up to their rounding.
    SAME_SPLIT: the gradient depends on the split into micro-batches, since random numbers do, but not on the number of
        ranks that run the micro-batches.
    DIFFERS: the run works, but its gradient differs from the gradient of the unsplit batch; `reason` explains why.
    EXCLUSIVE: the two never occur together: they are values of one axis, or one implies the absence of the other.
    REFUSED: raises an error before the model is changed, or before the first update if only a backward can detect it.
    """

    EXACT = "="
    SAME_SPLIT = "s"
    DIFFERS = "~"
    EXCLUSIVE = "."
    REFUSED = "x"


class Feature(Enum):
    """A feature of a run, as a value of an axis, such as "precision". Each feature is a row and column of the table."""

    SINGLE = ("strategy", "strategy='single'")
    ALL_REDUCE = ("strategy", "strategy='all_reduce'")
    DDP = ("strategy", "strategy='ddp'")
    ZERO1 = ("strategy", "strategy='zero1'")
    FSDP = ("strategy", "strategy='fsdp'")
    DATA_PARALLEL = ("strategy", "strategy='data_parallel'")
    ALONE = ("ranks", "one rank without torch.distributed")
    ONE_RANK = ("ranks", "one rank under torch.distributed")
    SEVERAL_RANKS = ("ranks", "several ranks")
    COMPRESSED = ("messages", "gradients compressed for communication (compression='bf16')")
    FP32 = ("precision", "precision='fp32'")
    BF16 = ("precision", "precision='bf16'")
    FP16 = ("precision", "precision='fp16'")
    WIDE_PARAMETERS = ("parameters", "float32 or float64 parameters")
    LOW_PARAMETERS = ("parameters", "bf16 or fp16 parameters")
    DIRECT = ("update", "an update without float32 copies")
    MASTER_WEIGHTS = ("update", "float32 master weights (an optimizer given as a function)")
    CAST = ("update", "gradients cast to bf16 or fp16 (an optimizer instance over such parameters)")
    SPLIT_WEIGHTS = ("update", "bf16_weights='split'")
    ROUNDED_WEIGHTS = ("update", "bf16_weights='stochastic'")
    BALANCED = ("deal", "deal='balanced'")
    FIXED = ("deal", "deal='fixed'")
    MICRO_BATCH_SIZE = ("split", "a fixed micro_batch_size")
    ACCUMULATION_STEPS = ("split", "fixed accumulation_steps")
    AUTO_SIZE = ("split", "micro_batch_size='auto'")
    TOKEN_BUDGET = ("split", "micro_batch_size=token_budget(...)")
    DEALT = ("batch", "batches of ab.batches")
    RANK_SHARES = ("batch", "rank shares from the user's loader")
    COUNT_BEFORE = ("loss", "a loss whose items are counted before the forward")
    COUNT_LATE = ("loss", "a loss that returns its count of items")
    SEVERAL_TERMS = ("loss", "a loss of several terms (ab.sum_of)")
    JOINT = ("loss", "a loss across samples (ab.joint)")
    LOSS_PARAMETERS = ("loss module", "a loss module with parameters")
    DENSE = ("gradients", "dense gradients")
    SPARSE = ("gradients", "sparse gradients")
    TIED = ("roles of parameters", "tied parameters")
    FROZEN = ("roles of parameters", "frozen parameters")
    UNUSED = ("idle parameters", "parameters that some or all micro-batches do not use")
    CLIP_NORM = ("clip", "clipping by norm")
    COMPILED = ("compilation", "a model under torch.compile")
    NON_REENTRANT = ("checkpointing", "activation checkpointing with use_reentrant=False")
    REENTRANT = ("checkpointing", "activation checkpointing with use_reentrant=True")
    BATCH_NORM = ("normalization", "BatchNorm in train mode")
    DROPOUT_KEYED = ("dropout", "dropout with rng='micro_batch'")
    DROPOUT_PER_SAMPLE = ("dropout", "dropout with rng='per_sample'")
    DROPOUT_UNKEYED = ("dropout", "dropout with rng=None")
    NORMS_SYNC = ("norms", "norms='sync'")
    NORMS_FREEZE = ("norms", "norms='freeze'")
    NORMS_GHOST = ("norms", "norms=Ghost(group_size)")
    NORMS_EXACT = ("norms", "norms='exact'")
    NORMS_CHECKPOINT = ("norms", "norms=Exact(method='checkpoint')")

    # Enum calls this with the two parts of each member's value.
    def __init__(self, axis: str, label: str) -> None:
        self.axis = axis
        self.label = label


COMBINABLE = frozenset(
    {"messages", "loss module", "roles of parameters", "idle parameters", "compilation", "normalization"}
)
"""Axes from which a run can have any number of features; it has one feature of every other axis."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The verdict on two features, or on a single feature."""

    verdict: Verdict
    reason: str = ""
    remedy: str = ""


Combinations = tuple[tuple[Feature, ...], ...]


def _each(*choices: Feature | tuple[Feature, ...]) -> Combinations:
    """Return the combinations of one feature of each choice."""
    return tuple(itertools.product(*(choice if isinstance(choice, tuple) else (choice,) for choice in choices)))


def _refused(reason: str, remedy: str) -> Cell:
    return Cell(Verdict.REFUSED, reason, remedy)


_EXACT = Cell(Verdict.EXACT)
# Derived from Feature, so that a new strategy gets the refusals of existing ones until it has entries in the table.
_STRATEGIES = tuple(feature for feature in Feature if feature.axis == "strategy")
STRATEGY_NAMES = tuple(feature.name.lower() for feature in _STRATEGIES)
_DISTRIBUTED = tuple(name for name in _STRATEGIES if name not in {Feature.SINGLE, Feature.DATA_PARALLEL})
_NOT_DDP = tuple(name for name in _STRATEGIES if name is not Feature.DDP)
# The update runs in several calls of optimizer.step().
_BF16_UPDATES = (Feature.SPLIT_WEIGHTS, Feature.ROUNDED_WEIGHTS)
_LOW_PRECISION_UPDATES = (Feature.LOW_PARAMETERS, Feature.MASTER_WEIGHTS, Feature.CAST, *_BF16_UPDATES)
_EXACT_NORMS = (Feature.NORMS_GHOST, Feature.NORMS_EXACT, Feature.NORMS_CHECKPOINT)
_REPLACING_NORMS = (Feature.NORMS_SYNC, *_EXACT_NORMS)

TABLE: Mapping[Combinations, Cell] = {
    _each(Feature.REENTRANT): _refused(
        "torch cannot recompute such blocks in a backward that is limited to the engine's own parameters",
        "Use checkpoint(..., use_reentrant=False), which gives the same gradients for the same memory.",
    ),
    _each(Feature.SINGLE, Feature.SEVERAL_RANKS): _refused(
        "every rank would train a separate model",
        "Use strategy='auto' (all_reduce) or 'ddp'.",
    ),
    _each(_DISTRIBUTED, Feature.ALONE): _refused(
        "this strategy reduces over torch.distributed, which has not been started",
        "Start with torchrun (one rank is enough), or use strategy='auto', which takes 'single' on one rank.",
    ),
    _each((*_DISTRIBUTED, Feature.SEVERAL_RANKS, Feature.COMPRESSED), Feature.SPARSE): _refused(
        "strategies for several ranks sum gradients in dense buckets",
        "Build the module with sparse=False, or run on one rank with strategy='auto'.",
    ),
    _each((Feature.DDP, Feature.COMPRESSED), _LOW_PRECISION_UPDATES): _refused(
        "DDP accumulates gradients in the type of the parameters; in bf16 or fp16, small gradients are lost in the sum",
        "Use strategy='all_reduce', or float32 parameters with precision='bf16'.",
    ),
    _each((Feature.ZERO1, Feature.DATA_PARALLEL), _BF16_UPDATES): _refused(
        "the update of split or rounded weights needs the model's own, complete parameters on each rank, which this "
        "strategy shards or copies",
        "Use strategy='all_reduce', or leave bf16_weights out.",
    ),
    _each(Feature.FSDP, _LOW_PRECISION_UPDATES): _refused(
        "FSDP2 rounds the summed gradient to the type of its shards",
        "Use float32 parameters with strategy=FSDP(Sharding(param_dtype=torch.bfloat16)), which gathers and computes "
        "in bf16, or strategy='all_reduce'.",
    ),
    _each((Feature.FSDP, Feature.NON_REENTRANT, Feature.DROPOUT_PER_SAMPLE), Feature.NORMS_EXACT): _refused(
        "norms='exact' switches between micro-batches within each forward, also within a recomputed one",
        "Use norms=Exact(method='checkpoint'), without other checkpointing of BatchNorm.",
    ),
    _each(Feature.DATA_PARALLEL, Feature.SEVERAL_RANKS): _refused(
        "all replicas are in one process, so each rank would train a separate model",
        "Use strategy='ddp', which has a process for each device, or start one process only.",
    ),
    _each(Feature.DATA_PARALLEL, (Feature.COMPILED, Feature.DROPOUT_PER_SAMPLE, *_REPLACING_NORMS)): _refused(
        "replicas are copies that run parts of micro-batches, but the other feature needs whole micro-batches",
        "Use strategy='all_reduce' (torchrun).",
    ),
    _each(Feature.FP16, Feature.CAST): _refused(
        "gradients would be unscaled in bf16 or fp16, which loses small values",
        "Pass the optimizer as a function (lambda named: AdamW(named, ...)), which gets float32 master weights, or "
        "keep the parameters in float32.",
    ),
    _each(Feature.FP16, _BF16_UPDATES): _refused(
        "the scaler may skip a call of optimizer.step(), and here an update consists of several calls",
        "Use precision='bf16' or 'fp32'.",
    ),
    _each(Feature.WIDE_PARAMETERS, _BF16_UPDATES): _refused(
        "no trainable parameter is in bf16, so the option does not apply",
        "Call model.to(torch.bfloat16), or leave bf16_weights out.",
    ),
    _each((Feature.FIXED, Feature.TOKEN_BUDGET), Feature.RANK_SHARES): _refused(
        "single samples must be assignable to any rank, but a loader yields whole batches",
        "Feed the engine from ab.batches, or use deal='balanced' and an integer micro_batch_size.",
    ),
    _each(Feature.TOKEN_BUDGET, _REPLACING_NORMS): _refused(
        "the BatchNorm policy also normalises over padding, which differs from split to split",
        "Use norms='freeze', a layer that normalises each sample alone, or an integer micro_batch_size.",
    ),
    _each(Feature.JOINT, (Feature.DROPOUT_UNKEYED, *_REPLACING_NORMS)): _refused(
        "ab.joint runs each micro-batch twice, and both runs have to give the same result",
        "Use rng='micro_batch', and norms='keep' or 'freeze', or a layer that normalises each sample alone.",
    ),
    _each(Feature.COMPILED, (Feature.DROPOUT_PER_SAMPLE, *_REPLACING_NORMS)): _refused(
        "compiled code contains dropout and normalisation, so nothing can replace them",
        "Leave the model uncompiled, or use rng='micro_batch' and norms='keep' or 'freeze'.",
    ),
    _each(Feature.BATCH_NORM): Cell(
        Verdict.DIFFERS,
        "each micro-batch is normalised by its own statistics, so the gradient depends on the split",
        "Use norms='exact', norms=Ghost(group_size=...), norms='freeze', or another layer (anybatch.norms.replaced).",
    ),
    _each(Feature.DROPOUT_UNKEYED): Cell(
        Verdict.DIFFERS,
        "random numbers come from the caller's generators, in the order in which each rank happens to draw",
        "Use rng='micro_batch'.",
    ),
    ((Feature.NORMS_SYNC,), (Feature.BATCH_NORM, Feature.NORMS_SYNC)): Cell(
        Verdict.DIFFERS,
        "the k-th micro-batches of all ranks are normalised together, so the gradient still depends on the split",
        "Use norms='exact', or norms=Ghost(group_size=...), whose groups are the same in every split.",
    ),
    _each(Feature.DROPOUT_KEYED): Cell(
        Verdict.SAME_SPLIT,
        "dropout's random numbers depend on the micro-batch, so another split draws other numbers",
        "Use deal='fixed' with a fixed micro_batch_size, so that the split does not depend on the number of ranks.",
    ),
    _each((*_NOT_DDP, Feature.ALONE), Feature.COMPRESSED): Cell(Verdict.EXCLUSIVE, "compression is an option of DDP"),
    (
        *_each(Feature.WIDE_PARAMETERS, (Feature.MASTER_WEIGHTS, Feature.CAST)),
        (Feature.LOW_PARAMETERS, Feature.DIRECT),
    ): Cell(Verdict.EXCLUSIVE, "only bf16 and fp16 parameters get master weights or cast gradients"),
    _each(Feature.BATCH_NORM, (Feature.NORMS_FREEZE, *_EXACT_NORMS)): _EXACT,
    _each((Feature.FSDP, Feature.COMPILED), Feature.REENTRANT): _EXACT,
}
# Keyed by sets, so that a pair is found in either order.
_STATED = {frozenset(features): entry for combinations, entry in TABLE.items() for features in combinations}
_ONE_AXIS = Cell(Verdict.EXCLUSIVE, "a run has one value of this axis")
# An Enum keeps its members in definition order.
_GOOD_TO_BAD = tuple(Verdict)


def cell(first: Feature, second: Feature) -> Cell:
    """Return the verdict on two features, in either order; on a single feature if both are the same."""
    stated = _STATED.get(frozenset((first, second)))
    if stated is not None or first is second:
        return stated or _EXACT
    if first.axis == second.axis and first.axis not in COMBINABLE:
        return _ONE_AXIS
    # In table order, so that the first of two equally bad features gives the reason.
    single = [cell(feature, feature) for feature in Feature if feature in (first, second)]
    return max(single, key=lambda entry: _GOOD_TO_BAD.index(entry.verdict))


def pairs(features: Iterable[Feature]) -> list[tuple[Feature, Feature]]:
    """Return each feature paired with itself, then all pairs of different features, in table order."""
    selected = set(features)
    ordered = [feature for feature in Feature if feature in selected]
    return [(feature, feature) for feature in ordered] + list(itertools.combinations(ordered, 2))


def stated_pairs(present: Iterable[Feature]) -> list[tuple[Feature, Feature]]:
    """Return the pairs of a run's features that `TABLE` lists; a feature that is listed alone is paired with itself.

    A feature's own entry is left out if the feature is in a listed pair, so that one feature can make another exact.
    """
    listed = [pair for pair in pairs(present) if frozenset(pair) in _STATED]
    in_pairs = {feature for first, second in listed if first is not second for feature in (first, second)}
    return [(first, second) for first, second in listed if first is not second or first not in in_pairs]


def check_combinations(present: Mapping[Feature, str]) -> None:
    """Raise a `CompositionError` if features cannot be combined, with each reason once and the alternatives.

    `present` maps the features of a run to the evidence for each (`"'head.weight' is torch.bfloat16"`), or "".
    """
    sentences: dict[Cell, str] = {}
    for first, second in stated_pairs(present):
        entry = cell(first, second)
        if entry.verdict is Verdict.REFUSED:
            sentences.setdefault(entry, refusal(first, second, present))
    if sentences:
        raise CompositionError("\n".join(sentences.values()))


def refusal(first: Feature, second: Feature, evidence: Mapping[Feature, str]) -> str:
    """Return the error message for two features that cannot be combined, or for a feature that is not supported."""
    entry = cell(first, second)
    labels = [f"{f.label} ({evidence[f]})" if evidence.get(f) else f.label for f in (first, second)]
    problem = f"{labels[0]} is not supported" if first is second else " cannot be combined with ".join(labels)
    return f"{problem}: {entry.reason}. {entry.remedy}"


def remarks(present: Iterable[Feature]) -> tuple[str, ...]:
    """Return a sentence for each reason why the gradient of a run may differ from the gradient of the unsplit batch."""
    return tuple(
        f"{first.label if first is second else f'{first.label} with {second.label}'}: {entry.reason}. {entry.remedy}"
        for first, second in stated_pairs(present)
        if (entry := cell(first, second)).verdict in (Verdict.SAME_SPLIT, Verdict.DIFFERS)
    )
