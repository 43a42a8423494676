"""Offloads the tensors that a forward saves for its backward to host memory, each tensor copied once."""

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from anybatch.core.torch_internals import num_changes, storage_key

_SMALL_BYTES = 1 << 14  # copying less is not worth the time
_Key = tuple[object, ...]


class HostStore:
    """Saved-tensor hooks that move tensors to the host, and back when the backward needs them.

    A tensor that several operations save is copied once, unless it changes in between; and it is copied back once for
    all operations that need it while one of them still holds it.

    Args:
        kept_on_device: tensors that stay on the device anyway, such as parameters; they and their views are not copied.

    Attributes:
        num_bytes: bytes copied to the host so far.
    """

    def __init__(self, kept_on_device: Iterable[Tensor]) -> None:
        self.num_bytes = 0
        self._kept_on_device = {storage_key(tensor.untyped_storage()) for tensor in kept_on_device}
        self._copies: dict[_Key, tuple[StorageWeakRef, weakref.ref[_HostCopy]]] = {}

    def hooks(self) -> AbstractContextManager[object]:
        """Return the context of a forward whose saved tensors go to the host."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> "Tensor | _HostCopy":
        storage = tensor.untyped_storage()
        num_bytes = tensor.numel() * tensor.itemsize
        # An expanded tensor occupies less memory than its copy would.
        owner = storage_key(storage)
        if num_bytes < _SMALL_BYTES or num_bytes > storage.nbytes() or owner in self._kept_on_device:
            return tensor
        place = (owner, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        key = (*place, tensor.dtype, *num_changes((tensor,), "Exact(offload=True)"))
        known = self._copies.get(key)
        copy = None if known is None or known[0].expired() else known[1]()
        if copy is None:
            copy = _HostCopy(tensor)
            self.num_bytes += num_bytes
            # The reference prevents reuse of the address by another storage while the key is in use.
            self._copies[key] = (StorageWeakRef(storage), weakref.ref(copy))
        return copy


class _HostCopy:
    """A tensor's values on the host, and a weak reference to its latest copy on the device."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self._back: weakref.ref[Tensor] | None = None
        # Pinned, so that the copy can overlap with computation on the device.
        self._values = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
        self._values.copy_(tensor, non_blocking=True)

    def on_device(self) -> Tensor:
        known = None if self._back is None else self._back()
        if known is None:
            known = torch.empty_like(self._values, device=self._device, pin_memory=False)
            known.copy_(self._values, non_blocking=True)
            self._back = weakref.ref(known)
        return known


def _unpack(packed: "Tensor | _HostCopy") -> Tensor:
    return packed.on_device() if isinstance(packed, _HostCopy) else packed
