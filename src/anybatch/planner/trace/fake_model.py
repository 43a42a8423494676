"""Fake twins: models, optimizers and batches whose tensors have shapes and types, but no data.

A twin is a copy of a whole structure in which every tensor is replaced. Tensors that shared memory share it in the
twin too, so tied weights stay tied. No data is copied and no code of the user's runs.
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
    """Call a factory so that its tensors take no memory; where that is not possible, call it as it is.

    Random numbers are as before afterwards.

    Args:
        factory: function () -> model.

    Returns:
        What it made, and why it could not be made without memory; None if it could.
    """
    # Initialisation draws random numbers, and a plan must not move the user's generators.
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return factory(), None
        except Exception as error:  # noqa: BLE001 (whatever it is, the factory is asked again, and raises its own then)
            reason = f"{type(error).__name__}: {error}"
        return factory(), reason


def fake_twin(value: ValueT, mode: Mode) -> ValueT:
    """Return a copy of modules, optimizers or containers of these with fake CPU tensors in the place of all tensors.

    What is passed in one call keeps its ties: `fake_twin((model, optimizer), mode)` steps the twin's own parameters.

    Args:
        value: anything that can be deep-copied; its tensors may hold data, on any device, or be on the meta device.
        mode: the fake mode the twin lives in.

    Raises:
        CannotPlanError: a tensor that has no fake twin, or something that cannot be copied.
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
        mode: the fake mode it lives in.
    """

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        shape = (num_samples, *tensor.shape[1:]) if tensor.dim() else ()
        last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)  # noqa: PLR2004 (NCHW)
        # With one channel both layouts hold; such a batch counts as contiguous.
        layout = torch.channels_last if last and not tensor.is_contiguous() else torch.contiguous_format
        with mode:
            return torch.empty(shape, dtype=tensor.dtype, device="cpu", memory_format=layout)

    return resize_samples(sample, num_samples, resize)


class _Replacement(TorchFunctionMode):
    """While entered, a deep copy of a tensor is its fake twin."""

    def __init__(self, mode: Mode) -> None:
        super().__init__()
        self._mode = mode
        # Each storage is kept beside its twin, so that its key cannot pass to another storage.
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401 (torch's type has no name in public)
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (whatever the function returns)
        """Answer what deep copies of tensors and parameters call."""
        del types
        if func is torch.Tensor.__deepcopy__:
            return self.twin(args[0])
        if func is torch.Tensor.clone:  # a parameter outside of any module clones its data
            return self.twin(args[0])
        return func(*args, **(kwargs or {}))

    def known_parameters(self, value: object) -> dict[int, Any]:
        """Return the twins of all parameters of the modules in a structure, with their attributes, by id."""
        memo: dict[int, Any] = {}
        for module in _modules_in(value):
            for parameter in module.parameters():
                if id(parameter) not in memo:
                    twin = nn.Parameter(self.twin(parameter), requires_grad=parameter.requires_grad)
                    # `nn.Parameter` does not copy attributes that the user has set on a parameter.
                    twin.__dict__.update(parameter.__dict__)
                    memo[id(parameter)] = twin
        return memo

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the twin of a tensor: in its own memory, or in the twin of the memory that it shares."""
        plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
        if not plain or tensor.is_quantized:
            message = (
                f"cannot plan, will probe: a tensor of type {type(tensor).__name__} with layout {tensor.layout} has no "
                "fake twin."
            )
            raise CannotPlanError(message)
        size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype
        storage = tensor.untyped_storage()
        with without_subclasses(), self._mode, torch.no_grad():
            known = self._storages.get(storage_key(storage))
            if known is None:
                made = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
                # The usual case, a tensor that is all of its memory. A part of a larger one needs the larger one first.
                if made.untyped_storage().nbytes() == storage.nbytes() and not tensor.storage_offset():
                    self._storages[storage_key(storage)] = storage, made
                    return made
                made = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
                self._storages[storage_key(storage)] = known = storage, made
            shared = known[1].untyped_storage()
            empty = torch.empty(0, dtype=dtype, device="cpu")
            return empty.set_(shared, tensor.storage_offset(), size, stride)


def _modules_in(value: object) -> list[nn.Module]:
    """Return the modules of a structure of tuples, mappings, modules and whatever has attributes that are modules."""
    if isinstance(value, nn.Module):
        return [value]
    if isinstance(value, Mapping):
        return [module for item in value.values() for module in _modules_in(item)]
    if isinstance(value, tuple | list):
        return [module for item in value for module in _modules_in(item)]
    return [item for item in getattr(value, "__dict__", {}).values() if isinstance(item, nn.Module)]
