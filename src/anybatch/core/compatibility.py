"""The composition table, which is checked before anything is changed.

`TABLE` states everything that is refused, is inexact, or cannot occur, and the pairs that cure a feature.
Any other pair of two values of one axis is exclusive, and any other pair is as good as the worse of its two features.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from anybatch.errors import CompositionError


class Verdict(Enum):
    """The verdict on two features together, from good to bad; the value is the mark in the printed table.

    EXACT: the gradient equals that of the unsplit batch: to 1e-12 in float64, in bf16 and fp16 up to their rounding.
    SAME_CUT: the gradient equals that of the same micro-batches on any ranks; another cut draws other random numbers.
    DIFFERS: it runs, but cannot equal the unsplit batch; the reason explains why.
    UNTESTED: it runs, and has not been compared with the unsplit batch.
    EXCLUSIVE: the two never occur together: values of one axis, or one implies the absence of the other.
    REFUSED: an error before the model is changed; if only a backward can show it, before the first update.
    """

    EXACT = "="
    SAME_CUT = "c"
    DIFFERS = "~"
    UNTESTED = "?"
    EXCLUSIVE = "."
    REFUSED = "x"


class Feature(Enum):
    """A row and column of the table: its axis (one question about a run, to which it is an answer), and its name."""

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
    MICRO_BATCH_SIZE = ("cut", "a fixed micro_batch_size")
    ACCUMULATION_STEPS = ("cut", "fixed accumulation_steps")
    AUTO_SIZE = ("cut", "micro_batch_size='auto'")
    TOKEN_BUDGET = ("cut", "micro_batch_size=token_budget(...)")
    DEALT = ("batch", "batches of ab.batches")
    RANK_SHARES = ("batch", "rank shares from the user's loader")
    COUNT_BEFORE = ("loss", "a loss with its count known before the forward")
    COUNT_LATE = ("loss", "a loss that returns its count")
    SEVERAL_TERMS = ("loss", "a loss of several terms (ab.sum_of)")
    JOINT = ("loss", "a loss across samples (ab.joint)")
    LOSS_PARAMETERS = ("loss module", "a loss module with parameters")
    DENSE = ("gradients", "dense gradients")
    SPARSE = ("gradients", "sparse gradients")
    TIED = ("roles of parameters", "tied parameters")
    FROZEN = ("roles of parameters", "frozen parameters")
    UNUSED = ("idle parameters", "parameters that some micro-batches or all of them leave unused")
    CLIP_NORM = ("clip", "clipping by norm")
    CLIP_VALUE = ("clip", "clipping by value")
    CLIP_GROUPS = ("clip", "clipping by parameter group")
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
    def __init__(self, axis: str, says: str) -> None:
        self.axis = axis
        self.says = says


COMBINABLE = frozenset(
    {"messages", "loss module", "roles of parameters", "idle parameters", "compilation", "normalization"}
)
"""The axes of which a run may have any number of features; of the other axes it has one."""


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
# Derived, so that another strategy is refused what other strategies are, until its rows say otherwise.
_STRATEGIES = tuple(feature for feature in Feature if feature.axis == "strategy")
_DISTRIBUTED = tuple(one for one in _STRATEGIES if one not in {Feature.SINGLE, Feature.DATA_PARALLEL})
_NOT_DDP = tuple(one for one in _STRATEGIES if one is not Feature.DDP)
_IN_PIECES = (Feature.SPLIT_WEIGHTS, Feature.ROUNDED_WEIGHTS)
_NARROW = (Feature.LOW_PARAMETERS, Feature.MASTER_WEIGHTS, Feature.CAST, *_IN_PIECES)
_EXACT_NORMS = (Feature.NORMS_GHOST, Feature.NORMS_EXACT, Feature.NORMS_CHECKPOINT)
_REPLACING_NORMS = (Feature.NORMS_SYNC, *_EXACT_NORMS)
_ONE_CUT = "Use deal='fixed' with a fixed micro_batch_size, so that the cut does not depend on the number of ranks."

TABLE: Mapping[Combinations, Cell] = {
    _each(Feature.REENTRANT): _refused(
        "torch cannot run it in a backward that is limited to the engine's own parameters",
        "Use checkpoint(..., use_reentrant=False), which gives the same gradients for the same memory.",
    ),
    _each(Feature.SINGLE, Feature.SEVERAL_RANKS): _refused(
        "every rank would train a separate model",
        "Use strategy='auto' (all_reduce) or 'ddp'.",
    ),
    _each(_DISTRIBUTED, Feature.ALONE): _refused(
        "it reduces over torch.distributed, which has not been started",
        "Start with torchrun (one rank is enough), or use strategy='auto', which takes 'single' on one rank.",
    ),
    _each((*_DISTRIBUTED, Feature.SEVERAL_RANKS, Feature.COMPRESSED), Feature.SPARSE): _refused(
        "strategies for several ranks sum gradients in dense buckets",
        "Build the module with sparse=False, or run on one rank with strategy='auto'.",
    ),
    _each((Feature.DDP, Feature.COMPRESSED), _NARROW): _refused(
        "DDP accumulates gradients in the type of the parameters, and sums in bf16 or fp16 lose small gradients",
        "Use strategy='all_reduce', or float32 parameters with precision='bf16'.",
    ),
    _each((Feature.ZERO1, Feature.DATA_PARALLEL), _IN_PIECES): _refused(
        "the update of split or rounded weights needs the model's own, complete parameters on each rank, which this "
        "strategy shards or copies",
        "Use strategy='all_reduce', or leave bf16_weights out.",
    ),
    _each(Feature.FSDP, _NARROW): _refused(
        "FSDP2 rounds the summed gradient to the type of its shards",
        "Use float32 parameters with strategy=FSDP(Sharding(param_dtype=torch.bfloat16)), which gathers and computes "
        "in bf16, or strategy='all_reduce'.",
    ),
    _each(Feature.FSDP, Feature.NORMS_EXACT): _refused(
        "it switches between micro-batches in the middle of a forward, where FSDP gathers weights in lockstep",
        "Use norms=Exact(method='checkpoint'), or strategy='all_reduce'.",
    ),
    _each(Feature.DATA_PARALLEL, Feature.SEVERAL_RANKS): _refused(
        "its replicas are in one process, and each rank would train a separate model",
        "Use strategy='ddp', which has a process for each device, or start one process only.",
    ),
    _each(Feature.DATA_PARALLEL, Feature.COMPILED): _refused(
        "compiled code uses the parameters of the model itself, but replicas have copies of them",
        "Leave torch.compile out, or use strategy='all_reduce' (torchrun).",
    ),
    _each(Feature.DATA_PARALLEL, Feature.DROPOUT_PER_SAMPLE): _refused(
        "masks are drawn in one forward over all samples of a micro-batch, but each replica runs only some of them",
        "Use rng='micro_batch', or strategy='all_reduce' (torchrun).",
    ),
    _each(Feature.DATA_PARALLEL, _REPLACING_NORMS): _refused(
        "the policy works in the layers of the model itself, but replicas run copies of them",
        "Use norms='keep' or 'freeze', or strategy='all_reduce' (torchrun).",
    ),
    _each(Feature.FP16, Feature.CAST): _refused(
        "gradients would be unscaled in their low precision",
        "Pass the optimizer as a function (lambda named: AdamW(named, ...)), which gets float32 master weights, or "
        "keep the parameters in float32.",
    ),
    _each(Feature.FP16, _IN_PIECES): _refused(
        "its scaler may skip an update, which is several calls of optimizer.step() here",
        "Use precision='bf16' or 'fp32'.",
    ),
    _each(Feature.WIDE_PARAMETERS, _IN_PIECES): _refused(
        "no trainable parameter is in bf16, so the option does not apply",
        "Call model.to(torch.bfloat16), or leave bf16_weights out.",
    ),
    _each(Feature.FIXED, Feature.RANK_SHARES): _refused(
        "fixed units need a batch whose samples can go to any rank",
        "Feed the engine from ab.batches, or use deal='balanced'.",
    ),
    _each(Feature.TOKEN_BUDGET, Feature.RANK_SHARES): _refused(
        "the user's loader has already padded the samples to one length before they are cut",
        "Feed the engine from ab.batches(dataset, lengths=..., collate=anybatch.data.Padded()), or give a number of "
        "samples.",
    ),
    _each(Feature.TOKEN_BUDGET, _REPLACING_NORMS): _refused(
        "the policy also normalises over padding, and each cut has different padding",
        "Use norms='freeze' or a layer that normalises each sample alone, or pass a number of samples.",
    ),
    _each(Feature.JOINT, Feature.DROPOUT_UNKEYED): _refused(
        "micro-batches are run twice, and have to draw the same random numbers both times",
        "Use rng='micro_batch'.",
    ),
    _each(Feature.JOINT, _REPLACING_NORMS): _refused(
        "its micro-batches are run twice, and the policy supports a single run only",
        "Use norms='keep' or 'freeze', or a layer that normalises each sample alone (anybatch.norms.replaced).",
    ),
    _each(Feature.COMPILED, Feature.DROPOUT_PER_SAMPLE): _refused(
        "compiled code draws its own random numbers, so masks cannot be set by sample",
        "Leave torch.compile out, or use rng='micro_batch'.",
    ),
    _each(Feature.COMPILED, _REPLACING_NORMS): _refused(
        "compiled code contains the normalisation, so nothing can replace BatchNorm",
        "Leave the model uncompiled, or use norms='keep' or 'freeze'.",
    ),
    _each(Feature.NON_REENTRANT, Feature.NORMS_EXACT): _refused(
        "recomputing a block in the backward would wait there for all other micro-batches",
        "Leave checkpointing to norms=Exact(method='checkpoint'), or checkpoint blocks without BatchNorm only.",
    ),
    _each(Feature.DROPOUT_PER_SAMPLE, Feature.NORMS_EXACT): _refused(
        "it switches between micro-batches in the middle of a forward, but masks are drawn for one forward at a time",
        "Use norms=Exact(method='checkpoint'), or rng='micro_batch'.",
    ),
    _each(Feature.BATCH_NORM): Cell(
        Verdict.DIFFERS,
        "it normalises each micro-batch by that micro-batch's own statistics, so the gradient depends on the cut",
        "Use norms='exact', norms=Ghost(group_size=...), norms='freeze', or another layer (anybatch.norms.replaced).",
    ),
    _each(Feature.DROPOUT_UNKEYED): Cell(
        Verdict.DIFFERS,
        "its random numbers come from the caller's generators, in the order in which each rank happens to draw",
        "Use rng='micro_batch'.",
    ),
    ((Feature.NORMS_SYNC,), (Feature.BATCH_NORM, Feature.NORMS_SYNC)): Cell(
        Verdict.DIFFERS,
        "it normalises the k-th micro-batches of all ranks together, so the gradient still depends on the cut",
        "Use norms='exact', or norms=Ghost(group_size=...) for the same function at any cut.",
    ),
    _each(Feature.DROPOUT_KEYED): Cell(
        Verdict.SAME_CUT,
        "its random numbers depend on the micro-batch, so another cut draws others from the same distribution",
        _ONE_CUT,
    ),
    _each(Feature.DATA_PARALLEL, Feature.DROPOUT_KEYED): Cell(
        Verdict.SAME_CUT,
        "the replicas of a micro-batch draw from its random numbers one after another, so another cut or number of "
        "replicas draws different numbers",
        "Keep micro_batch_size and replicas unchanged.",
    ),
    _each(Feature.COMPILED, Feature.DROPOUT_KEYED): Cell(
        Verdict.SAME_CUT,
        "another cut draws different random numbers, and so does compiled code from the same seed",
        _ONE_CUT,
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
_STATED = {frozenset(features): found for combinations, found in TABLE.items() for features in combinations}
_ONE_AXIS = Cell(Verdict.EXCLUSIVE, "they are two answers to one question")
# An Enum keeps its members in definition order.
_GOOD_TO_BAD = tuple(Verdict)


def cell(one: Feature, other: Feature) -> Cell:
    """Return the table's cell of two features, in either order; of a single feature if both are the same."""
    stated = _STATED.get(frozenset((one, other)))
    if stated is not None or one is other:
        return stated or _EXACT
    if one.axis == other.axis and one.axis not in COMBINABLE:
        return _ONE_AXIS
    # In table order, so that the first of two equally bad features gives the reason.
    own = [cell(feature, feature) for feature in Feature if feature in (one, other)]
    return max(own, key=lambda found: _GOOD_TO_BAD.index(found.verdict))


def pairs(features: Iterable[Feature]) -> list[tuple[Feature, Feature]]:
    """Return every feature with itself, then every two features, in table order."""
    given = set(features)
    ordered = [feature for feature in Feature if feature in given]
    return [(feature, feature) for feature in ordered] + list(itertools.combinations(ordered, 2))


def meetings(present: Iterable[Feature]) -> list[tuple[Feature, Feature]]:
    """Return the stated cells that apply to a run: pairs, and single features without a pair.

    A pair replaces the cells of its two features, so that one feature can cure another.
    """
    found = [pair for pair in pairs(present) if frozenset(pair) in _STATED]
    in_pairs = {feature for one, other in found if one is not other for feature in (one, other)}
    return [(one, other) for one, other in found if one is not other or one not in in_pairs]


def refuse_compositions(present: Mapping[Feature, str]) -> None:
    """Raise a `CompositionError` with each reason once, and the alternatives, if features do not compose.

    `present` maps the features of a run to the evidence for each (`"'head.weight' is torch.bfloat16"`), or "".
    """
    sentences: dict[Cell, str] = {}
    for one, other in meetings(present):
        found = cell(one, other)
        if found.verdict is Verdict.REFUSED:
            sentences.setdefault(found, refusal(one, other, present))
    if sentences:
        raise CompositionError("\n".join(sentences.values()))


def refusal(one: Feature, other: Feature, evidence: Mapping[Feature, str]) -> str:
    """Return the message for a refused pair of features, or a single one: the reason and the alternative."""
    found = cell(one, other)
    first, second = (f"{f.says} ({evidence[f]})" if evidence.get(f) else f.says for f in (one, other))
    what = f"{first} is not supported" if one is other else f"{first} does not compose with {second}"
    return f"{what}: {found.reason}. {found.remedy}"


def remarks(present: Iterable[Feature]) -> tuple[str, ...]:
    """Return a sentence for everything that keeps a run from equality with the unsplit batch."""
    inexact = (Verdict.SAME_CUT, Verdict.DIFFERS, Verdict.UNTESTED)
    return tuple(
        f"{one.says if one is other else f'{one.says} with {other.says}'}: {found.reason or 'not compared yet'}. "
        f"{found.remedy}".rstrip()
        for one, other in meetings(present)
        if (found := cell(one, other)).verdict in inexact
    )
