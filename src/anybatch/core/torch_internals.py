"""Chapter 17: private interfaces of torch that several folders use, each with its fallback or refusal.

Each name was seen to hold on the versions in `SEEN`; `make matrix` looks again. Where one is missing, a function does
the same by public names, or raises `UnsupportedTorchError`: a wrong number is never the answer. The names that one
folder alone needs are in the `torch_internals.py` of that folder.

The last argument of each function is where the name is looked for, so that a test can pass something that lacks it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch as dispatch

from anybatch.errors import UnsupportedTorchError

SEEN: Final = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The versions of torch on which all private names were seen to hold."""


@contextmanager
def needed_for(purpose: str) -> Iterator[None]:
    """Refuse a version of torch that lacks what is imported or looked up inside.

    Args:
        purpose: what cannot be had without it, in a few words.

    Raises:
        UnsupportedTorchError: in the place of an ImportError or AttributeError.
    """
    try:
        yield
    except (ImportError, AttributeError) as missing:
        raise lacking(purpose, missing) from missing


def lacking(purpose: str, missing: Exception) -> UnsupportedTorchError:
    """Return the error that says for which purpose which version of torch is needed.

    Args:
        purpose: what cannot be had, in a few words.
        missing: torch's own error, or Python's; names what is missing.
    """
    return UnsupportedTorchError(
        f"{purpose} needs something that torch {torch.__version__} lacks ({missing}). It is there in torch "
        f"{', '.join(SEEN)}: install one of these, or a newer anybatch."
    )


with needed_for("Telling normalisation layers from others"):
    # The only common bases of all BatchNorm and InstanceNorm layers, lazy, synchronised and users' own ones. A list of
    # the public classes instead would miss the users' own, and a missed layer makes a gradient wrong without an error.
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
    from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNormBase

__all__ = [
    "SEEN",
    "BatchNormBase",
    "InstanceNormBase",
    "add_to_each",
    "buffer_tables",
    "clamp_each",
    "copy_each",
    "dense_values",
    "interpolate_each",
    "is_in_backward",
    "lacking",
    "multiply_each",
    "needed_for",
    "outside_modes",
    "sparse_bytes",
    "storage_key",
    "zero_each",
]


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage for as long as it lives; tensors that share memory have the same.

    `UntypedStorage._cdata`, its address in C++; where missing, the identity of the Python object, which torch keeps for
    as long as the storage lives. `data_ptr` does not do: it is 0 for every tensor without data.
    """
    try:
        return int(storage._cdata)
    except AttributeError:
        return id(storage)


def dense_values(tensor: Tensor) -> Tensor:
    """Return the numbers that a sparse tensor stores, in its own memory; a dense tensor as it is.

    `Tensor._values`; where missing, `values()`, which a tensor with repeated indices does not allow.

    Raises:
        UnsupportedTorchError: it has repeated indices, and torch no longer shows its numbers.
    """
    if not tensor.is_sparse:
        return tensor
    try:
        return tensor._values()
    except AttributeError as missing:
        if tensor.is_coalesced():
            return tensor.values()
        purpose = "Looking at a sparse tensor that is not coalesced"
        raise lacking(purpose, missing) from missing


def sparse_bytes(tensor: Tensor) -> int:
    """Return the bytes of what a sparse tensor stores: numbers and indices, repeated ones too.

    `Tensor._values` and `_indices`; where missing, those without repetition, which are fewer.
    """
    try:
        return tensor._values().nbytes + tensor._indices().nbytes
    except AttributeError:
        merged = tensor.coalesce()
        return merged.values().nbytes + merged.indices().nbytes


def is_in_backward(of: Any = torch._C) -> bool:  # noqa: ANN401 (torch)
    """Whether autograd is running a backward in this thread: `torch._C._current_graph_task_id`.

    Raises:
        UnsupportedTorchError: autograd does not say.
    """
    try:
        return int(of._current_graph_task_id()) >= 0
    except AttributeError as missing:
        purpose = "Telling a backward from a forward"
        raise lacking(purpose, missing) from missing


def buffer_tables(modules: nn.Module) -> list[dict[str, Tensor | None]]:
    """Return each module's own dict of buffers, to be read in every step: `named_buffers` takes as long as a forward.

    `Module._buffers`, and nothing instead: buffers are put back by writing to these dicts.

    Raises:
        UnsupportedTorchError: modules keep their buffers elsewhere.
    """
    with needed_for("Putting buffers back after a failed step"):
        return [module._buffers for module in modules.modules()]


# torch's own optimizers call these; they save one launch of a kernel per tensor. Where one is missing, a loop does it.


def num_changes(tensors: Iterable[Tensor | None], purpose: str) -> list[int]:
    """Return how often the memory of each tensor has been written to since it was made: `Tensor._version`.

    Args:
        tensors: those that are None have no number.
        purpose: what cannot be had without it, for the error.

    Raises:
        UnsupportedTorchError: torch does not count.
    """
    try:  # not `needed_for`: it is asked twice in every micro-batch
        return [tensor._version for tensor in tensors if tensor is not None]
    except AttributeError as missing:
        raise lacking(purpose, missing) from missing


def copy_each(targets: Sequence[Tensor], values: Sequence[Tensor], of: Any = torch) -> None:  # noqa: ANN401 (torch)
    """Copy each value into its target: `torch._foreach_copy_`.

    Args:
        targets: tensors that are written to.
        values: as many, each of the shape of its target; of another type they are converted.
        of: where torch's function is looked for.
    """
    together = getattr(of, "_foreach_copy_", None)
    if together is not None:
        together(targets, values)
        return
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def zero_each(tensors: Sequence[Tensor], of: Any = torch) -> None:  # noqa: ANN401 (torch)
    """Set each tensor to zero: `torch._foreach_zero_`.

    Args:
        tensors: changed in place.
        of: where torch's function is looked for.
    """
    together = getattr(of, "_foreach_zero_", None)
    if together is not None:
        together(tensors)
        return
    for tensor in tensors:
        tensor.zero_()


def add_to_each(tensors: Sequence[Tensor], others: Sequence[Tensor], of: Any = torch) -> None:  # noqa: ANN401 (torch)
    """Add to each tensor its other, in place: `torch._foreach_add_`.

    Args:
        tensors: changed in place.
        others: as many, each of the shape of its tensor.
        of: where torch's function is looked for.
    """
    together = getattr(of, "_foreach_add_", None)
    if together is not None:
        together(tensors, others)
        return
    for tensor, other in zip(tensors, others, strict=True):
        tensor.add_(other)


def multiply_each(tensors: Sequence[Tensor], factor: Tensor, of: Any = torch) -> None:  # noqa: ANN401 (torch)
    """Multiply each tensor by one number, in place: `torch._foreach_mul_`.

    Args:
        tensors: changed in place.
        factor: a tensor without axes, on their device; the host does not read it.
        of: where torch's function is looked for.
    """
    together = getattr(of, "_foreach_mul_", None)
    if together is not None:
        together(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def clamp_each(tensors: Sequence[Tensor], limit: float, of: Any = torch) -> None:  # noqa: ANN401 (torch)
    """Bound each number to between -limit and limit, in place: `torch._foreach_clamp_min_` and `..._max_`.

    Args:
        tensors: changed in place.
        limit: 0 or more.
        of: where torch's functions are looked for.
    """
    at_least, at_most = (getattr(of, f"_foreach_clamp_{name}_", None) for name in ("min", "max"))
    if at_least is not None and at_most is not None:
        at_least(tensors, -limit)
        at_most(tensors, limit)
        return
    for tensor in tensors:
        tensor.clamp_(-limit, limit)


def interpolate_each(
    tensors: Sequence[Tensor],
    ends: Sequence[Tensor],
    weight: float,
    of: Any = torch,  # noqa: ANN401 (torch)
) -> None:
    """Move each tensor towards its end by a part of the way, in place: `torch._foreach_lerp_`.

    Args:
        tensors: changed in place.
        ends: as many, each of the shape of its tensor.
        weight: the part, from 0 (stay) to 1 (arrive).
        of: where torch's function is looked for.
    """
    together = getattr(of, "_foreach_lerp_", None)
    if together is not None:
        together(tensors, ends, weight)
        return
    for tensor, end in zip(tensors, ends, strict=True):
        tensor.lerp_(end, weight)


def outside_modes(of: Any = dispatch) -> AbstractContextManager[object]:  # noqa: ANN401 (torch)
    """Return a context in which no mode sees operations, neither a memory budget nor the user's own.

    `torch.utils._python_dispatch._disable_current_modes`.

    Raises:
        UnsupportedTorchError: torch has no such context, so a plan would be booked as memory of the run.
    """
    with needed_for("Planning a micro-batch size within a run"):
        context: AbstractContextManager[object] = of._disable_current_modes()
    return context
