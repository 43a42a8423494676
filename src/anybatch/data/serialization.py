"""Samples and small units as bytes, to send small tensors between processes.

Torch sends a tensor as shared memory, with one file descriptor for as long as the tensor lives. That suits a large
unit, but not thousands of samples, nor a unit that is made faster than its files. Plain pickle sends the whole storage
of a tensor, even for a view of one row. Here a tensor is sent as its own bytes.
"""

import importlib.util
import io
import pickle
from typing import Any

import torch


def packed(value: object) -> bytes:
    """Return `value` as bytes, for `unpacked`."""
    if importlib.util.find_spec("numpy") is None:  # without numpy torch has no cheap access to the bytes of a tensor
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    buffer = io.BytesIO()
    _BatchPacker(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:  # noqa: ANN401 (any packed value)
    """Return the packed value. Use it only for bytes from the run's own workers."""
    return pickle.loads(data)  # noqa: S301 (from our own worker)


class _BatchPacker(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:  # noqa: ANN401 (a tuple or NotImplemented)
        """Reduce a plain tensor to its bytes; leave everything else, including unusual tensors, to pickle."""
        if not isinstance(value, torch.Tensor) or not is_plain(value):
            return NotImplemented
        # As bytes, since numpy lacks some of torch's dtypes, such as bfloat16.
        octets = value.reshape(-1).view(torch.uint8)
        return _tensor, (octets.numpy(), value.dtype, tuple(value.shape))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fully described by its bytes, dtype and shape."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _tensor(octets: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:  # noqa: ANN401 (a numpy array)
    return torch.from_numpy(octets).view(dtype).reshape(shape)
