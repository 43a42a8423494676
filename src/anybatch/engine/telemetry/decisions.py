"""What an engine decided by itself, in words, by name: kept in the run's header and in its checkpoints."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

_UPDATES: Mapping[str, str] = MappingProxyType(
    {
        "direct": "the optimizer updates the parameters themselves",
        "master_weights": "the optimizer updates float32 master weights, which are copied into the parameters",
        "cast": "float32 gradients are cast to the parameters' type for the optimizer",
    }
)


def first_decisions(
    *, update: str, strategy: str | None, world_size: int, differed: Sequence[str], remarks: Sequence[str]
) -> dict[str, str]:
    """Return what was decided while an engine was built, and what keeps it from equality.

    Args:
        update: how the optimizer's update reaches the parameters.
        strategy: name of the strategy, if the engine chose it.
        world_size: number of ranks.
        differed: parameters and buffers that were not equal on all ranks and are now.
        remarks: a sentence for everything that keeps the run from equality with the un-split batch.
    """
    decisions = {"update": _UPDATES[update]}
    if remarks:
        decisions["equality"] = " ".join(remarks)
    if strategy is not None:
        ranks = "is 1 rank" if world_size == 1 else f"are {world_size} ranks"
        decisions["strategy"] = f"{strategy}, because there {ranks}"
    if differed:
        decisions["replicas"] = (
            f"{len(differed)} parameters and buffers differed between ranks and took rank 0's values, "
            f"first {differed[0]!r}"
        )
    return decisions
