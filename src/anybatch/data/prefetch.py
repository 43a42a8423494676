"""Workers that prefetch: one persistent loader, driven by the predicted keys.

Torch sends a tensor as shared memory, with one file descriptor for as long as the tensor lives. That suits a large
unit, but not thousands of samples, nor a unit that is made faster than its files. Plain pickle sends the whole storage
of a tensor, even for a view of one row. Here a tensor is sent as its own bytes.
"""

import importlib.util
import io
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from anybatch.core.tree import map_tensors, tensors_of
from anybatch.data.loading import pinned
from anybatch.errors import DataError


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


Key = TypeVar("Key")
Value = TypeVar("Value")


_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
SMALL_BYTES = 128 * 2**10
"""Maximum bytes of tensors sent as plain bytes: five times faster than shared memory, which is faster from 1 MB on."""


@dataclass(frozen=True, slots=True)
class LoadedUnit(Generic[Value]):
    """A batch loaded by a worker, with the hash of its key: the key itself would be sent twice."""

    key_hash: int
    value: Value
    failure: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the hash and the bytes of the value, twice as fast as a dataclass."""
        # A queue's thread calls this. It drops anything it cannot pickle, and the caller would wait forever.
        try:
            return self._packed()
        except Exception as error:  # noqa: BLE001 (raised in the caller's process)
            return LoadedUnit, (self.key_hash, None, f"{type(error).__name__}: {error}")

    def _packed(self) -> tuple[Any, ...]:
        value, tensors = self.value, list(tensors_of(self.value))
        if any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):
            # Torch sends the memory of a tensor without its conjugate or negative bit.
            value = map_tensors(value, lambda tensor: tensor.resolve_conj().resolve_neg())
            tensors = list(tensors_of(value))
        if tensors and all(map(is_plain, tensors)) and sum(tensor.nbytes for tensor in tensors) <= SMALL_BYTES:
            return _from_bytes, (self.key_hash, packed(value))
        if _is_sure_to_pickle(value):  # large arrays as bytes would be copied twice more
            return LoadedUnit, (self.key_hash, value)
        return _from_bytes, (self.key_hash, bytes(ForkingPickler.dumps(value)))

    def pin_memory(self) -> "LoadedUnit[Value]":
        """Return the unit with its tensors in pinned memory; called by the loader's pinning thread."""
        return LoadedUnit(self.key_hash, pinned(self.value), self.failure)


def _is_sure_to_pickle(value: Any) -> bool:  # noqa: ANN401 (a nested batch)
    kind = type(value)
    if kind is dict:
        return all(map(_is_sure_to_pickle, value)) and all(map(_is_sure_to_pickle, value.values()))
    if kind is list or kind is tuple:
        return all(map(_is_sure_to_pickle, value))
    if kind.__module__ == "numpy":
        return hasattr(value, "dtype") and not value.dtype.hasobject
    return kind in _PLAIN or (kind is torch.Tensor and is_plain(value))


def _from_bytes(key_hash: int, data: bytes) -> LoadedUnit[Any]:
    return LoadedUnit(key_hash, unpacked(data))


class Prefetcher(Generic[Key, Value]):
    """Values that worker processes load before they are requested.

    The caller supplies the keys it expects to request next. While it requests them in that order the workers never
    pause; a request for another key discards the prefetched values and restarts the workers there.
    """

    def __init__(
        self,
        load: Callable[[Key], Value],
        *,
        num_workers: int,
        pin_memory: bool,
        start_worker: Callable[[int], None] | None = None,
    ) -> None:
        self._load = load
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._start_worker = start_worker
        self._keys: _KeySequence[Key] = _KeySequence()
        self._loader: DataLoader[LoadedUnit[Value]] | None = None
        self._items: Iterator[LoadedUnit[Value]] = iter(())

    def take(self, key: Key, onward: Callable[[], Iterator[Key]]) -> Value:
        """Return the value of `key`.

        `onward` returns the keys expected next, in order, beginning with `key`; it is called if the workers must
        restart.
        """
        # Workers load keys in the order sent, so only the oldest can come next.
        if not self._keys.sent or self._keys.sent[0] != key:
            self._start(onward())
        try:
            self._keys.sent.popleft()
            item = next(self._items)
        except BaseException as error:  # noqa: BLE001 (raised again)
            self._keys.sent.clear()  # after an error or an interrupt the next keys are unknown: restart
            # The traceback's frames hold the error and the loader in a cycle that would keep its workers alive. The
            # message contains the worker's own traceback.
            raise error.with_traceback(None)  # noqa: B904 (the same error)
        assert item.key_hash == hash(key), key
        if item.failure:
            message = (
                f"a batch cannot be sent from its worker process: {item.failure}. Return tensors, numbers, text and "
                "objects that can be pickled from the data set and collate, or load with num_workers=0."
            )
            raise DataError(message)
        return item.value

    def close(self) -> None:
        """Shut the workers down. A later `take` starts new ones."""
        self._items = iter(())
        self._loader = None  # last reference: the destructor stops the processes and waits for them
        self._keys.sent.clear()

    def _start(self, keys: Iterator[Key]) -> None:
        self._keys.source = keys
        self._keys.sent.clear()
        if self._loader is None:
            self._loader = self._new_loader()
        self._items = iter(self._loader)  # with persistent workers: drains pending batches, keeps the processes

    def _new_loader(self) -> "DataLoader[LoadedUnit[Value]]":
        return DataLoader(
            _Keyed(self._load),
            batch_size=None,
            sampler=self._keys,
            collate_fn=_unchanged,
            num_workers=self._num_workers,
            persistent_workers=True,
            pin_memory=self._pin_memory,
            worker_init_fn=self._start_worker,
            generator=torch.Generator(),  # the loader draws a seed: not from the caller's generator
        )


class _KeySequence(Generic[Key]):
    """A sampler over keys that are computed when a worker is free, and remembered until their value is taken."""

    def __init__(self) -> None:
        self.source: Iterator[Key] = iter(())
        self.sent: deque[Key] = deque()

    def __iter__(self) -> Iterator[Key]:
        for key in self.source:
            self.sent.append(key)
            yield key


@dataclass(frozen=True, slots=True)
class _Keyed(Dataset[Any]):
    """A data set indexed by keys."""

    load: Callable[[Any], Any]

    def __getitem__(self, key: Any) -> LoadedUnit[Any]:  # noqa: ANN401 (the caller's key)
        try:
            return LoadedUnit(hash(key), self.load(key))
        except Exception as error:
            # A worker sends the class of an error too, and an unpicklable one never arrives.
            if _can_be_pickled(type(error)):
                raise
            message = f"{type(error).__qualname__}: {error}"
            raise RuntimeError(message) from error


def _can_be_pickled(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001 (a class may define how it is pickled)
        return False
    return True


def _unchanged(item: Any) -> Any:  # noqa: ANN401 (replaces torch's conversion of numbers and arrays to tensors)
    return item
