"""The local part of a tensor on this rank: all of it, unless it is a `DTensor`.

The `DTensor` class is not imported: the import takes a second, which users without such tensors should not pay.
"""

from typing import Any, cast

from torch import Tensor


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a `DTensor`: a part on each rank of its mesh."""
    return hasattr(tensor, "device_mesh")


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor in this rank's memory, detached; shares its memory."""
    if not is_dtensor(tensor):
        return tensor
    part: Tensor = cast("Any", tensor.detach()).to_local()
    return part


def with_local_part(part: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with the layout of another one and this local part, whose memory it shares."""
    if not is_dtensor(like):
        return part
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 (imported already if there is a DTensor)

    known = cast("DTensor", like)
    made: Tensor = DTensor.from_local(
        part, known.device_mesh, known.placements, run_check=False, shape=known.shape, stride=known.stride()
    )
    return made


def is_whole(tensor: Tensor) -> bool:
    """Return whether this rank holds all of a tensor: a plain one, or a `DTensor` that is replicated."""
    return not is_dtensor(tensor) or all(placement.is_replicate() for placement in cast("Any", tensor).placements)
