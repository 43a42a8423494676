"""Private interfaces of torch that core, data and norms use, or several folders, each with its fallback or refusal.

Each name was verified on the versions in `SEEN`; `make matrix` verifies again. If a name is missing, a function uses
public names instead or raises `UnsupportedTorchError`: it never returns a wrong number. Other folders have a
`torch_internals.py` of their own.

The last argument of each function, `of`, is the module that is searched for the name; tests pass one that lacks it.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils import _python_dispatch as dispatch
from torch.utils.data import _utils, get_worker_info

from anybatch.errors import UnsupportedTorchError

SEEN: Final = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The versions of torch on which all private names were verified."""


@contextmanager
def needed_for(purpose: str) -> Iterator[None]:
    """Convert an ImportError or AttributeError inside to an `UnsupportedTorchError` that names the purpose."""
    try:
        yield
    except (ImportError, AttributeError) as missing:
        raise lacking(purpose, missing) from missing


def lacking(purpose: str, missing: Exception) -> UnsupportedTorchError:
    """Return the error for a purpose that needs another version of torch; `missing` is the original error."""
    return UnsupportedTorchError(
        f"{purpose} needs something that torch {torch.__version__} lacks ({missing}). Install torch "
        f"{', '.join(SEEN)}, which have it, or a newer anybatch."
    )


with needed_for("Telling normalisation layers from others"):
    # The only common bases of all BatchNorm and InstanceNorm layers: lazy, synchronised and user-defined. A list of the
    # public classes would miss user-defined layers, and a missed layer makes a gradient wrong without an error.
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
    from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNormBase

__all__ = [
    "SEEN",
    "BatchNormBase",
    "InstanceNormBase",
    "add_to_each",
    "buffer_tables",
    "checkpointed_forward",
    "clamp_each",
    "copy_each",
    "dense_values",
    "hides_worker",
    "interpolate_each",
    "is_in_backward",
    "lacking",
    "multiply_each",
    "needed_for",
    "num_axes_unbatched",
    "outside_modes",
    "sparse_bytes",
    "storage_key",
    "zero_each",
]


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage for as long as it lives; tensors that share memory have the same.

    `UntypedStorage._cdata`, its address in C++; if missing, the identity of the Python object, which torch keeps for as
    long as the storage lives. `data_ptr` does not work: it is 0 for every tensor without data.
    """
    try:
        return int(storage._cdata)
    except AttributeError:
        return id(storage)


def dense_values(tensor: Tensor) -> Tensor:
    """Return the numbers that a sparse tensor stores, without a copy; a dense tensor unchanged.

    `Tensor._values`; if missing, `values()`, which a tensor with repeated indices does not allow.

    Raises:
        UnsupportedTorchError: it has repeated indices, and torch has no `_values`.
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
    """Return the bytes that a sparse tensor stores: numbers and indices, repeated ones too.

    `Tensor._values` and `_indices`; if missing, the bytes without repetition, which are fewer.
    """
    try:
        return tensor._values().nbytes + tensor._indices().nbytes
    except AttributeError:
        merged = tensor.coalesce()
        return merged.values().nbytes + merged.indices().nbytes


def is_in_backward(of: Any = torch._C) -> bool:  # noqa: ANN401 (torch)
    """Whether autograd is running a backward in this thread: `torch._C._current_graph_task_id`."""
    try:
        return int(of._current_graph_task_id()) >= 0
    except AttributeError as missing:
        purpose = "Telling a backward from a forward"
        raise lacking(purpose, missing) from missing


def buffer_tables(modules: nn.Module) -> list[dict[str, Tensor | None]]:
    """Return each module's own dict of buffers, for use in every step: `named_buffers` takes as long as a forward.

    `Module._buffers`, without a fallback: buffers are restored by writing to these dicts.
    """
    with needed_for("Putting buffers back after a failed step"):
        return [module._buffers for module in modules.modules()]


# Functions that torch's optimizers use too: one kernel launch for a list of tensors. If one is missing, use a loop.


def num_changes(tensors: Iterable[Tensor | None], purpose: str) -> list[int]:
    """Return the number of writes to the memory of each tensor since it was made: `Tensor._version`; skip None."""
    try:  # not `needed_for`: this runs twice in every micro-batch
        return [tensor._version for tensor in tensors if tensor is not None]
    except AttributeError as missing:
        raise lacking(purpose, missing) from missing


def copy_each(targets: Sequence[Tensor], values: Sequence[Tensor], of: Any = torch) -> None:  # noqa: ANN401 (torch)
    """Copy each value into its target, converting its type: `torch._foreach_copy_`."""
    together = getattr(of, "_foreach_copy_", None)
    if together is not None:
        together(targets, values)
        return
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def zero_each(tensors: Sequence[Tensor], of: Any = torch) -> None:  # noqa: ANN401 (torch)
    """Set each tensor to zero: `torch._foreach_zero_`."""
    together = getattr(of, "_foreach_zero_", None)
    if together is not None:
        together(tensors)
        return
    for tensor in tensors:
        tensor.zero_()


def add_to_each(tensors: Sequence[Tensor], others: Sequence[Tensor], of: Any = torch) -> None:  # noqa: ANN401 (torch)
    """Add to each tensor its partner, in place: `torch._foreach_add_`."""
    together = getattr(of, "_foreach_add_", None)
    if together is not None:
        together(tensors, others)
        return
    for tensor, other in zip(tensors, others, strict=True):
        tensor.add_(other)


def multiply_each(tensors: Sequence[Tensor], factor: Tensor, of: Any = torch) -> None:  # noqa: ANN401 (torch)
    """Multiply each tensor by one number, in place: `torch._foreach_mul_`.

    `factor` is a tensor without axes on their device, so that the host need not read it.
    """
    together = getattr(of, "_foreach_mul_", None)
    if together is not None:
        together(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def clamp_each(tensors: Sequence[Tensor], limit: float, of: Any = torch) -> None:  # noqa: ANN401 (torch)
    """Clamp each number to between -limit and limit, in place: `torch._foreach_clamp_min_` and `..._max_`."""
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
    """Move each tensor towards its end by a fraction, 0 to 1, in place: `torch._foreach_lerp_`."""
    together = getattr(of, "_foreach_lerp_", None)
    if together is not None:
        together(tensors, ends, weight)
        return
    for tensor, end in zip(tensors, ends, strict=True):
        tensor.lerp_(end, weight)


def outside_modes(of: Any = dispatch) -> AbstractContextManager[object]:  # noqa: ANN401 (torch)
    """Return a context in which no dispatch mode sees operations, neither a memory budget nor the user's.

    `torch.utils._python_dispatch._disable_current_modes`. Without it a plan would be counted as memory of the run.
    """
    with needed_for("Planning a micro-batch size within a run"):
        context: AbstractContextManager[object] = of._disable_current_modes()
    return context


Contexts = Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]
"""Makes the contexts of a checkpointed block: for the forward, and for the recomputation in the backward."""


def checkpointed_forward(
    module: nn.Module,
    contexts: Contexts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    of: Any = torch.utils.checkpoint,  # noqa: ANN401 (torch)
) -> Generator[None, None, None]:
    """Return a generator around a checkpointed forward: advance it once, run the forward, and advance it to its end.

    `torch.utils.checkpoint._checkpoint_without_reentrant_generator`, which `checkpoint(use_reentrant=False)` runs; with
    the random state preserved, and `checkpoint`'s defaults for the other options. `module` runs again in the backward.
    """
    # In torch's order: preserve_rng_state, context_fn, determinism_check, debug, early_stop.
    options = (True, contexts, "default", False, True)
    try:
        running: Generator[None, None, None] = of._checkpoint_without_reentrant_generator(
            module, *options, *args, **kwargs
        )
    except (AttributeError, TypeError) as missing:
        purpose = "Exact(method='checkpoint')"
        raise lacking(purpose, missing) from missing
    return running


def num_axes_unbatched(layer: nn.Module) -> int:
    """Return the number of axes of a single sample for an InstanceNorm layer: channels and positions.

    `InstanceNorm._get_no_batch_dim`; if missing, the values of the public classes, and an error for other classes.
    """
    try:
        assert isinstance(layer, InstanceNormBase)
        return int(layer._get_no_batch_dim())
    except AttributeError as missing:
        known = {nn.InstanceNorm1d: 2, nn.InstanceNorm2d: 3, nn.InstanceNorm3d: 4}
        found = next((axes for kind, axes in known.items() if isinstance(layer, kind)), None)
        if found is None:
            purpose = f"Pooling the statistics of a {type(layer).__name__}"
            raise lacking(purpose, missing) from missing
        return found


def hides_worker(of: Any = _utils) -> bool:  # noqa: ANN401 (torch)
    """Make this worker look like the calling process to data sets; return whether that worked.

    `torch.utils.data._utils.worker._worker_info`, which `get_worker_info` returns. The public function is called
    afterwards, so that False reports a torch that stores it elsewhere.
    """
    worker = getattr(of, "worker", None)
    if worker is not None:
        worker._worker_info = None
    return get_worker_info() is None
