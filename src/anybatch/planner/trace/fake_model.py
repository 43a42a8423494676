"""Fake twins: models, optimizers and batches whose tensors have shapes and types, but no data.

A twin is a deep copy in which every tensor is fake. Tensors that share memory share it in the twin too, so tied weights
stay tied. No data is copied and no user code runs.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from anybatch.core.torch_internals import storage_key
from anybatch.core.tree import Batch, resize_samples
from anybatch.errors import CannotPlanError
from anybatch.planner.torch_internals import without_subclasses

ValueT = TypeVar("ValueT")
Mode = AbstractContextManager[object]
"""A `FakeTensorMode`."""


def build(factory: Callable[[], ValueT]) -> tuple[ValueT, str | None]:
    """Call a factory on the meta device, or normally if that fails; restore the random state.

    Args:
        factory: function () -> model.

    Returns:
        The model, and the error if it needed real memory; otherwise None.
    """
    # Initialisation draws random numbers, and a plan must not advance the user's generators.
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return factory(), None
        except Exception as error:  # noqa: BLE001 (the factory is called again and may raise its own error then)
            reason = f"{type(error).__name__}: {error}"
        return factory(), reason


def fake_twin(value: ValueT, mode: Mode) -> ValueT:
    """Return a deep copy of modules, optimizers or containers in which all tensors are fake CPU tensors.

    Objects passed in one call stay connected: the optimizer in `fake_twin((model, optimizer), mode)` updates the twin's
    parameters.

    Args:
        value: any object that can be deep-copied, with tensors on any device, including meta.
        mode: the fake mode of the twin.

    Raises:
        CannotPlanError: a tensor cannot be fake, or an object cannot be copied.
    """
    replacement = _Replacement(mode)
    try:
        with replacement:
            return copy.deepcopy(value, replacement.known_parameters(value))
    except CannotPlanError:
        raise
    except Exception as error:
        message = f"cannot plan, will probe: the model cannot be copied ({type(error).__name__}: {error})."
        raise CannotPlanError(message) from error


def fake_batch(sample: Batch, num_samples: int, mode: Mode) -> Batch:
    """Return a batch of `num_samples` fake samples, each shaped like those of `sample`; no data is read.

    Args:
        sample: any nested batch of at least one sample.
        num_samples: samples in the new batch.
        mode: the fake mode of the new batch.
    """

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        shape = (num_samples, *tensor.shape[1:]) if tensor.dim() else ()
        last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)  # noqa: PLR2004 (NCHW)
        # With one channel a tensor has both layouts; treat it as contiguous.
        layout = torch.channels_last if last and not tensor.is_contiguous() else torch.contiguous_format
        with mode:
            return torch.empty(shape, dtype=tensor.dtype, device="cpu", memory_format=layout)

    return resize_samples(sample, num_samples, resize)


class _Replacement(TorchFunctionMode):
    """While entered, deep copies of tensors are fake twins."""

    def __init__(self, mode: Mode) -> None:
        super().__init__()
        self._mode = mode
        # Keep each storage alive, so that its key is not reused.
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401 (torch's type has no name in public)
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (any result)
        """Replace the functions that copy tensors and parameters."""
        del types
        if func is torch.Tensor.__deepcopy__:
            return self.twin(args[0])
        if func is torch.Tensor.clone:  # a parameter outside of any module clones its data
            return self.twin(args[0])
        return func(*args, **(kwargs or {}))

    def known_parameters(self, value: object) -> dict[int, Any]:
        """Return the twins of all module parameters in a structure, with their attributes, by id."""
        memo: dict[int, Any] = {}
        for module in _modules_in(value):
            for parameter in module.parameters():
                if id(parameter) not in memo:
                    twin = nn.Parameter(self.twin(parameter), requires_grad=parameter.requires_grad)
                    # `nn.Parameter` does not copy attributes set by the user.
                    twin.__dict__.update(parameter.__dict__)
                    memo[id(parameter)] = twin
        return memo

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the twin of a tensor, in new memory or in the twin of shared memory."""
        plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
        if not plain or tensor.is_quantized:
            message = (
                f"cannot plan, will probe: tensors of type {type(tensor).__name__} with layout {tensor.layout} are not "
                "supported."
            )
            raise CannotPlanError(message)
        size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype
        storage = tensor.untyped_storage()
        with without_subclasses(), self._mode, torch.no_grad():
            known = self._storages.get(storage_key(storage))
            if known is None:
                made = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
                # The usual case: the tensor fills its storage. A view of a larger storage needs that storage first.
                if made.untyped_storage().nbytes() == storage.nbytes() and not tensor.storage_offset():
                    self._storages[storage_key(storage)] = storage, made
                    return made
                made = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
                self._storages[storage_key(storage)] = known = storage, made
            shared = known[1].untyped_storage()
            empty = torch.empty(0, dtype=dtype, device="cpu")
            return empty.set_(shared, tensor.storage_offset(), size, stride)


def _modules_in(value: object) -> list[nn.Module]:
    """Return the modules in nested tuples, lists and mappings, and in attributes of other objects."""
    if isinstance(value, nn.Module):
        return [value]
    if isinstance(value, Mapping):
        return [module for item in value.values() for module in _modules_in(item)]
    if isinstance(value, tuple | list):
        return [module for item in value for module in _modules_in(item)]
    return [item for item in getattr(value, "__dict__", {}).values() if isinstance(item, nn.Module)]
