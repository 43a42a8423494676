"""Chapter 10: the composition table, feature by feature, which is checked before anything is changed.

A cell describes two features together, or a single feature on the diagonal. Only exceptions are stated. By default, two
values of one axis are exclusive, and any other pair is as good as the worse of its two features. So a new row begins as
one untested feature, and its author adds the tested combinations.
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


@dataclass(frozen=True, slots=True)
class Axis:
    """One question about a run, with the features as its answers.

    Attributes:
        name: the question in a word or two.
        known: when the engine can answer: "built" (with the engine), "first batch", or "running" (not before).
        exclusive: a run has exactly one of the features; otherwise it may have any number of them.
    """

    name: str
    known: str = "built"
    exclusive: bool = True


_STRATEGY = Axis("strategy")
_RANKS = Axis("ranks")
_MESSAGES = Axis("messages", exclusive=False)
_PRECISION = Axis("precision")
_PARAMETERS = Axis("parameters")
_UPDATE = Axis("update")
_DEAL = Axis("deal")
_CUT = Axis("cut")
_BATCH = Axis("batch", known="first batch")
_LOSS = Axis("loss")
_LOSS_MODULE = Axis("loss module", exclusive=False)
_GRADIENTS = Axis("gradients")
_ROLES = Axis("roles of parameters", exclusive=False)
_IDLE = Axis("idle parameters", known="running", exclusive=False)
_CLIP = Axis("clip")
_COMPILATION = Axis("compilation", exclusive=False)
_CHECKPOINTING = Axis("checkpointing", known="running")
_BATCH_NORM = Axis("normalization", exclusive=False)
_DROPOUT = Axis("dropout")
_NORMS = Axis("norms")


class Feature(Enum):
    """A row and column of the table: a value of an axis, and its name in a sentence."""

    SINGLE = (_STRATEGY, "strategy='single'")
    ALL_REDUCE = (_STRATEGY, "strategy='all_reduce'")
    DDP = (_STRATEGY, "strategy='ddp'")
    ZERO1 = (_STRATEGY, "strategy='zero1'")
    FSDP = (_STRATEGY, "strategy='fsdp'")
    DATA_PARALLEL = (_STRATEGY, "strategy='data_parallel'")
    ALONE = (_RANKS, "one rank without torch.distributed")
    ONE_RANK = (_RANKS, "one rank under torch.distributed")
    SEVERAL_RANKS = (_RANKS, "several ranks")
    COMPRESSED = (_MESSAGES, "gradients compressed for communication (compression='bf16')")
    FP32 = (_PRECISION, "precision='fp32'")
    BF16 = (_PRECISION, "precision='bf16'")
    FP16 = (_PRECISION, "precision='fp16'")
    WIDE_PARAMETERS = (_PARAMETERS, "float32 or float64 parameters")
    LOW_PARAMETERS = (_PARAMETERS, "bf16 or fp16 parameters")
    DIRECT = (_UPDATE, "an update without float32 copies")
    MASTER_WEIGHTS = (_UPDATE, "float32 master weights (an optimizer given as a function)")
    CAST = (_UPDATE, "gradients cast to bf16 or fp16 (an optimizer instance over such parameters)")
    SPLIT_WEIGHTS = (_UPDATE, "bf16_weights='split'")
    ROUNDED_WEIGHTS = (_UPDATE, "bf16_weights='stochastic'")
    BALANCED = (_DEAL, "deal='balanced'")
    FIXED = (_DEAL, "deal='fixed'")
    MICRO_BATCH_SIZE = (_CUT, "a fixed micro_batch_size")
    ACCUMULATION_STEPS = (_CUT, "fixed accumulation_steps")
    AUTO_SIZE = (_CUT, "micro_batch_size='auto'")
    TOKEN_BUDGET = (_CUT, "micro_batch_size=token_budget(...)")
    DEALT = (_BATCH, "batches of ab.batches")
    RANK_SHARES = (_BATCH, "rank shares from the user's loader")
    COUNT_BEFORE = (_LOSS, "a loss with its count known before the forward")
    COUNT_LATE = (_LOSS, "a loss that returns its count")
    SEVERAL_TERMS = (_LOSS, "a loss of several terms (ab.sum_of)")
    JOINT = (_LOSS, "a loss across samples (ab.joint)")
    LOSS_PARAMETERS = (_LOSS_MODULE, "a loss module with parameters")
    DENSE = (_GRADIENTS, "dense gradients")
    SPARSE = (_GRADIENTS, "sparse gradients")
    TIED = (_ROLES, "tied parameters")
    FROZEN = (_ROLES, "frozen parameters")
    UNUSED = (_IDLE, "parameters that some micro-batches or all of them leave unused")
    CLIP_NORM = (_CLIP, "clipping by norm")
    CLIP_VALUE = (_CLIP, "clipping by value")
    CLIP_GROUPS = (_CLIP, "clipping by parameter group")
    COMPILED = (_COMPILATION, "a model under torch.compile")
    NON_REENTRANT = (_CHECKPOINTING, "activation checkpointing with use_reentrant=False")
    REENTRANT = (_CHECKPOINTING, "activation checkpointing with use_reentrant=True")
    BATCH_NORM = (_BATCH_NORM, "BatchNorm in train mode")
    DROPOUT_KEYED = (_DROPOUT, "dropout with rng='micro_batch'")
    DROPOUT_PER_SAMPLE = (_DROPOUT, "dropout with rng='per_sample'")
    DROPOUT_UNKEYED = (_DROPOUT, "dropout with rng=None")
    NORMS_SYNC = (_NORMS, "norms='sync'")
    NORMS_FREEZE = (_NORMS, "norms='freeze'")
    NORMS_GHOST = (_NORMS, "norms=Ghost(group_size)")
    NORMS_EXACT = (_NORMS, "norms='exact'")
    NORMS_CHECKPOINT = (_NORMS, "norms=Exact(method='checkpoint')")

    # Enum calls this with the two parts of each member's value.
    def __init__(self, axis: Axis, says: str) -> None:
        self.axis = axis
        self.says = says


@dataclass(frozen=True, slots=True)
class Cell:
    """The table's entry for two features, or for a single feature.

    Attributes:
        verdict: the outcome.
        reason: why it is not exact; a clause.
        instead: the alternative; a sentence.
    """

    verdict: Verdict
    reason: str = ""
    instead: str = ""


_EXACT = Cell(Verdict.EXACT)
_ONE_AXIS = Cell(Verdict.EXCLUSIVE, "they are two answers to one question")
_NO_MASTERS = Cell(Verdict.EXCLUSIVE, "only bf16 and fp16 parameters get master weights or cast gradients")
_NOT_STARTED = Cell(
    Verdict.REFUSED,
    "it reduces over torch.distributed, which has not been started",
    "Start with torchrun (one rank is enough), or use strategy='auto', which takes 'single' on one rank.",
)
_DENSE_BUCKETS = Cell(
    Verdict.REFUSED,
    "strategies for several ranks sum gradients in dense buckets",
    "Build the module with sparse=False, or run on one rank with strategy='auto'.",
)
_NARROW_DDP = Cell(
    Verdict.REFUSED,
    "DDP accumulates gradients in the type of the parameters, and sums in bf16 or fp16 lose small gradients",
    "Use strategy='all_reduce', or float32 parameters with precision='bf16'.",
)
_NARROW_FSDP = Cell(
    Verdict.REFUSED,
    "FSDP2 rounds the summed gradient to the type of its shards",
    "Use float32 parameters with strategy=FSDP(Sharding(param_dtype=torch.bfloat16)), which gathers and computes in "
    "bf16, or strategy='all_reduce'.",
)

_WHOLE_WEIGHTS = Cell(
    Verdict.REFUSED,
    "the update of split or rounded weights needs the model's own, complete parameters on each rank, which this "
    "strategy shards or copies",
    "Use strategy='all_reduce', or leave bf16_weights out.",
)
_WIDE_WEIGHTS = Cell(
    Verdict.REFUSED,
    "no trainable parameter is in bf16, so the option does not apply",
    "Call model.to(torch.bfloat16), or leave bf16_weights out.",
)
_SKIPPED_PIECES = Cell(
    Verdict.REFUSED,
    "its scaler may skip an update, which is several calls of optimizer.step() here",
    "Use precision='bf16' or 'fp32'.",
)
_ONE_PROCESS = Cell(
    Verdict.REFUSED,
    "its replicas are in one process, and each rank would train a separate model",
    "Use strategy='ddp', which has a process for each device, or start one process only.",
)
_NOT_SENT = Cell(Verdict.EXCLUSIVE, "compression is an option of DDP")
_REPLICAS_NORMALISE = Cell(
    Verdict.REFUSED,
    "the policy works in the layers of the model itself, but replicas run copies of them",
    "Use norms='keep' or 'freeze', or strategy='all_reduce' (torchrun).",
)

_OWN_NORMALISATION = Cell(
    Verdict.REFUSED,
    "compiled code contains the normalisation, so nothing can replace BatchNorm",
    "Leave the model uncompiled, or use norms='keep' or 'freeze'.",
)
_JOINS_RANKS = Cell(
    Verdict.DIFFERS,
    "it normalises the k-th micro-batches of all ranks together, so the gradient still depends on the cut",
    "Use norms='exact', or norms=Ghost(group_size=...) for the same function at any cut.",
)

_ONE_CUT = "Use deal='fixed' with a fixed micro_batch_size, so that the cut does not depend on the number of ranks."

_BY_ITSELF: Mapping[Feature, Cell] = {
    Feature.REENTRANT: Cell(
        Verdict.REFUSED,
        "torch cannot run it in a backward that is limited to the engine's own parameters",
        "Use checkpoint(..., use_reentrant=False), which gives the same gradients for the same memory.",
    ),
    Feature.BATCH_NORM: Cell(
        Verdict.DIFFERS,
        "it normalises each micro-batch by that micro-batch's own statistics, so the gradient depends on the cut",
        "Use norms='exact', norms=Ghost(group_size=...), norms='freeze', or another layer (anybatch.norms.replaced).",
    ),
    Feature.DROPOUT_KEYED: Cell(
        Verdict.SAME_CUT,
        "its random numbers depend on the micro-batch, so another cut draws others from the same distribution",
        _ONE_CUT,
    ),
    Feature.DROPOUT_UNKEYED: Cell(
        Verdict.DIFFERS,
        "its random numbers come from the caller's generators, in the order in which each rank happens to draw",
        "Use rng='micro_batch'.",
    ),
    Feature.NORMS_SYNC: _JOINS_RANKS,
}
_DISTRIBUTED = (Feature.ALL_REDUCE, Feature.DDP, Feature.ZERO1, Feature.FSDP)
_OTHER_STRATEGIES = (Feature.SINGLE, Feature.ALL_REDUCE, Feature.ZERO1, Feature.FSDP, Feature.DATA_PARALLEL)
_IN_PIECES = (Feature.SPLIT_WEIGHTS, Feature.ROUNDED_WEIGHTS)
_NARROW = (Feature.LOW_PARAMETERS, Feature.MASTER_WEIGHTS, Feature.CAST, *_IN_PIECES)
# Keyed by sets, so that a pair is found in either order.
_TOGETHER: Mapping[frozenset[Feature], Cell] = {
    frozenset((Feature.SINGLE, Feature.SEVERAL_RANKS)): Cell(
        Verdict.REFUSED, "every rank would train a separate model", "Use strategy='auto' (all_reduce) or 'ddp'."
    ),
    **{frozenset((strategy, Feature.ALONE)): _NOT_STARTED for strategy in _DISTRIBUTED},
    **{frozenset((several, Feature.SPARSE)): _DENSE_BUCKETS for several in (*_DISTRIBUTED, Feature.SEVERAL_RANKS)},
    **{frozenset((Feature.DDP, narrow)): _NARROW_DDP for narrow in _NARROW},
    **{frozenset((Feature.FSDP, narrow)): _NARROW_FSDP for narrow in _NARROW},
    frozenset((Feature.FSDP, Feature.NORMS_EXACT)): Cell(
        Verdict.REFUSED,
        "it switches between micro-batches in the middle of a forward, where FSDP gathers weights in lockstep",
        "Use norms=Exact(method='checkpoint'), or strategy='all_reduce'.",
    ),
    frozenset((Feature.DATA_PARALLEL, Feature.SEVERAL_RANKS)): _ONE_PROCESS,
    **{frozenset((Feature.COMPRESSED, other)): _NOT_SENT for other in (*_OTHER_STRATEGIES, Feature.ALONE)},
    frozenset((Feature.COMPRESSED, Feature.SPARSE)): _DENSE_BUCKETS,
    **{frozenset((Feature.COMPRESSED, narrow)): _NARROW_DDP for narrow in _NARROW},
    frozenset((Feature.DATA_PARALLEL, Feature.COMPILED)): Cell(
        Verdict.REFUSED,
        "compiled code uses the parameters of the model itself, but replicas have copies of them",
        "Leave torch.compile out, or use strategy='all_reduce' (torchrun).",
    ),
    frozenset((Feature.DATA_PARALLEL, Feature.DROPOUT_KEYED)): Cell(
        Verdict.SAME_CUT,
        "the replicas of a micro-batch draw from its random numbers one after another, so another cut or number of "
        "replicas draws different numbers",
        "Keep micro_batch_size and replicas unchanged.",
    ),
    frozenset((Feature.DATA_PARALLEL, Feature.DROPOUT_PER_SAMPLE)): Cell(
        Verdict.REFUSED,
        "masks are drawn in one forward over all samples of a micro-batch, but each replica runs only some of them",
        "Use rng='micro_batch', or strategy='all_reduce' (torchrun).",
    ),
    **{
        frozenset((Feature.DATA_PARALLEL, policy)): _REPLICAS_NORMALISE
        for policy in (Feature.NORMS_SYNC, Feature.NORMS_GHOST, Feature.NORMS_EXACT, Feature.NORMS_CHECKPOINT)
    },
    frozenset((Feature.FSDP, Feature.REENTRANT)): _EXACT,  # its backward is not limited to parameters
    frozenset((Feature.FP16, Feature.CAST)): Cell(
        Verdict.REFUSED,
        "gradients would be unscaled in their low precision",
        "Pass the optimizer as a function (lambda named: AdamW(named, ...)), which gets float32 master weights, or "
        "keep the parameters in float32.",
    ),
    frozenset((Feature.FIXED, Feature.RANK_SHARES)): Cell(
        Verdict.REFUSED,
        "fixed units need a batch whose samples can go to any rank",
        "Feed the engine from ab.batches, or use deal='balanced'.",
    ),
    frozenset((Feature.TOKEN_BUDGET, Feature.RANK_SHARES)): Cell(
        Verdict.REFUSED,
        "the user's loader has already padded the samples to one length before they are cut",
        "Feed the engine from ab.batches(dataset, lengths=..., collate=anybatch.data.Padded()), or give a number of "
        "samples.",
    ),
    **{
        frozenset((Feature.TOKEN_BUDGET, policy)): Cell(
            Verdict.REFUSED,
            "the policy also normalises over padding, and each cut has different padding",
            "Use norms='freeze' or a layer that normalises each sample alone, or pass a number of samples.",
        )
        for policy in (Feature.NORMS_SYNC, Feature.NORMS_GHOST, Feature.NORMS_EXACT, Feature.NORMS_CHECKPOINT)
    },
    frozenset((Feature.JOINT, Feature.DROPOUT_UNKEYED)): Cell(
        Verdict.REFUSED,
        "micro-batches are run twice, and have to draw the same random numbers both times",
        "Use rng='micro_batch'.",
    ),
    **{
        frozenset((Feature.JOINT, policy)): Cell(
            Verdict.REFUSED,
            "its micro-batches are run twice, and the policy supports a single run only",
            "Use norms='keep' or 'freeze', or a layer that normalises each sample alone (anybatch.norms.replaced).",
        )
        for policy in (Feature.NORMS_SYNC, Feature.NORMS_GHOST, Feature.NORMS_EXACT, Feature.NORMS_CHECKPOINT)
    },
    frozenset((Feature.COMPILED, Feature.DROPOUT_KEYED)): Cell(
        Verdict.SAME_CUT,
        "another cut draws different random numbers, and so does compiled code from the same seed",
        _ONE_CUT,
    ),
    **{
        frozenset((Feature.BATCH_NORM, cure)): _EXACT
        for cure in (Feature.NORMS_FREEZE, Feature.NORMS_GHOST, Feature.NORMS_EXACT, Feature.NORMS_CHECKPOINT)
    },
    frozenset((Feature.BATCH_NORM, Feature.NORMS_SYNC)): _JOINS_RANKS,
    **{
        frozenset((Feature.COMPILED, policy)): _OWN_NORMALISATION
        for policy in (Feature.NORMS_SYNC, Feature.NORMS_GHOST, Feature.NORMS_EXACT, Feature.NORMS_CHECKPOINT)
    },
    frozenset((Feature.DROPOUT_PER_SAMPLE, Feature.NORMS_EXACT)): Cell(
        Verdict.REFUSED,
        "it switches between micro-batches in the middle of a forward, but masks are drawn for one forward at a time",
        "Use norms=Exact(method='checkpoint'), or rng='micro_batch'.",
    ),
    frozenset((Feature.NON_REENTRANT, Feature.NORMS_EXACT)): Cell(
        Verdict.REFUSED,
        "recomputing a block in the backward would wait there for all other micro-batches",
        "Leave checkpointing to norms=Exact(method='checkpoint'), or checkpoint blocks without BatchNorm only.",
    ),
    frozenset((Feature.COMPILED, Feature.DROPOUT_PER_SAMPLE)): Cell(
        Verdict.REFUSED,
        "compiled code draws its own random numbers, so masks cannot be set by sample",
        "Leave torch.compile out, or use rng='micro_batch'.",
    ),
    frozenset((Feature.COMPILED, Feature.REENTRANT)): _EXACT,  # torch.compile replaces the checkpoint with its own
    **{
        frozenset((way, strategy)): _WHOLE_WEIGHTS
        for way in _IN_PIECES
        for strategy in (Feature.ZERO1, Feature.DATA_PARALLEL)
    },
    **{frozenset((way, Feature.WIDE_PARAMETERS)): _WIDE_WEIGHTS for way in _IN_PIECES},
    **{frozenset((way, Feature.FP16)): _SKIPPED_PIECES for way in _IN_PIECES},
    frozenset((Feature.WIDE_PARAMETERS, Feature.MASTER_WEIGHTS)): _NO_MASTERS,
    frozenset((Feature.WIDE_PARAMETERS, Feature.CAST)): _NO_MASTERS,
    frozenset((Feature.LOW_PARAMETERS, Feature.DIRECT)): _NO_MASTERS,
}
# An Enum keeps its members in definition order.
_GOOD_TO_BAD = tuple(Verdict)


def cell(one: Feature, other: Feature) -> Cell:
    """Return the table's cell of two features, in either order; of a single feature if both are the same."""
    if one is other:
        return _BY_ITSELF.get(one, _EXACT)
    stated = _TOGETHER.get(frozenset((one, other)))
    if stated is not None:
        return stated
    if one.axis is other.axis and one.axis.exclusive:
        return _ONE_AXIS
    # In table order, so that the first of two equally bad features gives the reason.
    owns = [cell(feature, feature) for feature in Feature if feature in (one, other)]
    return max(owns, key=lambda own: _GOOD_TO_BAD.index(own.verdict))


def is_stated(one: Feature, other: Feature) -> bool:
    """Return whether the table itself has an entry for two features, or for one; other pairs follow from these."""
    return one is other or frozenset((one, other)) in _TOGETHER


def pairs(features: Iterable[Feature]) -> list[tuple[Feature, Feature]]:
    """Return every feature with itself, then every two features, in table order."""
    ordered = [feature for feature in Feature if feature in set(features)]
    return [(feature, feature) for feature in ordered] + list(itertools.combinations(ordered, 2))


def refuse_compositions(present: Mapping[Feature, str]) -> None:
    """Raise a `CompositionError` with each reason once, and the alternatives, if features do not compose.

    `present` maps the features of a run to the evidence for each (`"'head.weight' is torch.bfloat16"`), or "".
    """
    sentences: dict[Cell, str] = {}
    for one, other in meetings(present):
        found = cell(one, other)
        if found.verdict is Verdict.REFUSED:
            # By cell, because several pairs may share one cell and its reason.
            sentences.setdefault(found, refusal(one, other, present))
    if sentences:
        raise CompositionError("\n".join(sentences.values()))


def refusal(one: Feature, other: Feature, evidence: Mapping[Feature, str]) -> str:
    """Return the message for a refused pair of features, or a single one: the reason and the alternative."""
    found = cell(one, other)
    first, second = _named(one, evidence), _named(other, evidence)
    what = f"{first} is not supported" if one is other else f"{first} does not compose with {second}"
    return f"{what}: {found.reason}. {found.instead}"


def remarks(present: Iterable[Feature]) -> tuple[str, ...]:
    """Return a sentence for everything that keeps a run from equality with the unsplit batch."""
    telling = (Verdict.SAME_CUT, Verdict.DIFFERS, Verdict.UNTESTED)
    said = [(one, other, cell(one, other)) for one, other in meetings(present)]
    return tuple(
        f"{one.says if one is other else f'{one.says} with {other.says}'}: {found.reason or 'not compared yet'}. "
        f"{found.instead}".rstrip()
        for one, other, found in said
        if found.verdict in telling
    )


def meetings(present: Iterable[Feature]) -> list[tuple[Feature, Feature]]:
    """Return the cells that apply to a run: its stated pairs, and its single features without a stated pair.

    A stated pair replaces the cells of its two features, so one feature can lift the limits of another.
    """
    found = [pair for pair in pairs(present) if pair[0] is not pair[1] and frozenset(pair) in _TOGETHER]
    spoken_for = {feature for pair in found for feature in pair}
    return [(f, f) for f in Feature if f in _BY_ITSELF and f in set(present) and f not in spoken_for] + found


def _named(feature: Feature, evidence: Mapping[Feature, str]) -> str:
    shown = evidence.get(feature, "")
    return f"{feature.says} ({shown})" if shown else feature.says
