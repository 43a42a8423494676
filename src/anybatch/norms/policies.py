"""Policies for BatchNorm in train mode (`norms=`): a policy chooses the samples whose statistics a layer uses."""

from dataclasses import dataclass
from typing import Literal

from anybatch.core.compatibility import Feature
from anybatch.core.splitting import SplitConstraints
from anybatch.errors import UserError

PolicyName = Literal["keep", "sync", "freeze", "exact"]
Method = Literal["layerwise", "checkpoint"]
_OF_MICRO_BATCH = "BatchNorm's output for a sample depends on its micro-batch"
_REPLACEMENTS = ("group_norm", "layer_norm")


@dataclass(frozen=True, slots=True)
class Keep:
    """Each micro-batch is normalised by its own statistics. Running statistics cover the whole effective batch."""

    name = "keep"
    description = (
        "each micro-batch is normalised by its own statistics; running statistics are pooled over the effective batch "
        "and updated once"
    )
    feature = None  # the default policy has no row in the composition table


@dataclass(frozen=True, slots=True)
class Sync:
    """The k-th micro-batches of all ranks are normalised together, but not the micro-batches of one rank."""

    name = "sync"
    description = (
        "the k-th micro-batches of all ranks are normalised together, but not the micro-batches of one rank; running "
        "statistics are pooled over the effective batch and updated once"
    )
    feature = Feature.NORMS_SYNC


@dataclass(frozen=True, slots=True)
class Freeze:
    """Layers normalise by their running statistics, which do not change; weight and bias still train."""

    name = "freeze"
    description = "layers normalise by their running statistics, which do not change; weight and bias still train"
    feature = Feature.NORMS_FREEZE


@dataclass(frozen=True, slots=True)
class Ghost:
    """Groups of consecutive samples are normalised, each by its own statistics, at any micro-batch and world size.

    Groups begin at multiples of `group_size` in the effective batch's order; the last group may be smaller. A single
    remaining sample joins the group before it, because one value has no variance.

    Args:
        group_size: samples per group, at least 2. Micro-batches and rank shares hold whole groups.

    Raises:
        UserError: `group_size` is below 2.

    Source: Hoffer, Hubara and Soudry, "Train longer, generalize better", 2017, section 4 (ghost batch normalisation).
    """

    group_size: int
    name = "ghost"
    feature = Feature.NORMS_GHOST

    def __post_init__(self) -> None:
        """Check the size."""
        if self.group_size < 2:  # noqa: PLR2004 (one value has no variance)
            message = f"Ghost(group_size={self.group_size}) must be at least 2: one sample has no variance."
            raise UserError(message, code="group_too_small")

    @property
    def description(self) -> str:
        """The effect of the policy, as a clause."""
        return (
            f"groups of {self.group_size} consecutive samples are normalised by their own statistics; running "
            "statistics are pooled over the effective batch and updated once"
        )


@dataclass(frozen=True, slots=True)
class Exact:
    """The whole effective batch is normalised together, forward and backward, as if it had not been split.

    Args:
        method: "layerwise": each micro-batch waits in every BatchNorm layer until all micro-batches have reached it;
            then there is one backward for all of them. "checkpoint": all samples of a rank are one micro-batch, under
            activation checkpointing.
        offload: keep tensors for the backward in host memory ("layerwise" only). None: True on accelerators.
        blocks: names of the modules to checkpoint ("checkpoint" only). None: the outermost modules, other than the
            model itself, that have a BatchNorm layer as a child.

    Raises:
        UserError: an unknown method.
    """

    method: Method = "layerwise"
    offload: bool | None = None
    blocks: tuple[str, ...] | None = None
    name = "exact"

    def __post_init__(self) -> None:
        """Check the method."""
        if self.method not in ("layerwise", "checkpoint"):
            message = f"Exact(method={self.method!r}) must be 'layerwise' or 'checkpoint'."
            raise UserError(message, code="unknown_method")

    @property
    def feature(self) -> Feature:
        """The feature of the policy in the composition table."""
        return Feature.NORMS_EXACT if self.method == "layerwise" else Feature.NORMS_CHECKPOINT

    @property
    def description(self) -> str:
        """The effect of the policy, as a clause."""
        method = (
            "micro-batches wait for each other in every BatchNorm layer"
            if self.method == "layerwise"
            else "each rank share is one micro-batch with its blocks checkpointed"
        )
        return (
            f"the whole effective batch is normalised together, forward and backward: {method}; running statistics "
            "are updated once"
        )


Policy = Keep | Sync | Freeze | Ghost | Exact


def constraints_of(policy: Policy, *, has_layers: bool, world_size: int) -> SplitConstraints:
    """Return the constraints of a policy on micro-batches, for a model with or without BatchNorm layers."""
    over_ranks = has_layers and world_size > 1
    why_largest = _OF_MICRO_BATCH if has_layers else ""
    match policy:
        case Keep():
            return SplitConstraints(min_samples=2 if has_layers else 1, why_largest=why_largest)
        case Sync():
            return SplitConstraints(
                lockstep=over_ranks, allows_empty_ranks=over_ranks, syncs_in_forward=over_ranks, why_largest=why_largest
            )
        case Freeze():
            return SplitConstraints()
        case Ghost():
            return SplitConstraints(group=policy.group_size)
        case Exact(method="checkpoint"):
            return SplitConstraints(
                lockstep=over_ranks, allows_empty_ranks=over_ranks, syncs_in_forward=over_ranks, whole=True
            )
        case Exact():
            # A rank without samples runs fillers (micro-batches of weight 0), to join the collectives of every layer.
            return SplitConstraints(allows_empty_ranks=over_ranks, syncs_in_forward=over_ranks, every_unit=has_layers)


def policy_of(norms: "Policy | PolicyName | None") -> Policy:
    """Return the policy with a name, a given policy unchanged, and `Keep` for None.

    Raises:
        UserError: an unknown name, or the name of a replacement that changes the model's parameters.
    """
    if norms is None:
        return Keep()
    if isinstance(norms, Policy):
        return norms
    known: dict[str, Policy] = {"keep": Keep(), "sync": Sync(), "freeze": Freeze(), "exact": Exact()}
    if isinstance(norms, str) and norms in known:
        return known[norms]
    if isinstance(norms, str) and norms in _REPLACEMENTS:
        message = (
            f"{norms=} would create new parameters that the optimizer does not have. Replace the layers before you "
            f"build the optimizer: model = anybatch.norms.replaced(model, {norms!r}).model."
        )
        raise UserError(message, code="replaces_layers")
    message = (
        f"{norms=} must be {', '.join(map(repr, known))}, or a policy of anybatch.norms, such as Ghost(group_size=32)."
    )
    raise UserError(message, code="unknown_policy")
