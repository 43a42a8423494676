"""Worker processes that prefetch micro-batches: one persistent DataLoader, indexed by their `UnitKey`s."""

import importlib.util
import io
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from anybatch.core.tree import Batch, map_tensors, tensors_of
from anybatch.data.loading import UnitKey, pinned
from anybatch.errors import DataError


def packed(value: object) -> bytes:
    """Serialize samples to bytes, for `unpacked`.

    Torch would send each tensor in shared memory, with a file descriptor while the tensor is alive. Plain `pickle`
    would send the whole storage of a tensor, even for a view of one row. Here only the bytes of the tensor are sent.
    """
    if importlib.util.find_spec("numpy") is None:  # without numpy torch has no cheap access to the bytes of a tensor
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    buffer = io.BytesIO()
    _BatchPacker(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:  # noqa: ANN401 (any packed value)
    """Return the value from the result of `packed`. Use it only for bytes from workers of this run."""
    return pickle.loads(data)  # noqa: S301 (from our own worker)


class _BatchPacker(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:  # noqa: ANN401 (a tuple or NotImplemented)
        """Reduce a plain tensor to its bytes; let pickle serialize everything else, including unusual tensors."""
        if not isinstance(value, torch.Tensor) or not _is_plain(value):
            return NotImplemented
        # As bytes, since numpy lacks some of torch's dtypes, such as bfloat16.
        octets = value.reshape(-1).view(torch.uint8)
        return _tensor, (octets.numpy(), value.dtype, tuple(value.shape))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fully described by its bytes, dtype and shape."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _tensor(octets: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:  # noqa: ANN401 (a numpy array)
    return torch.from_numpy(octets).view(dtype).reshape(shape)


_SMALL_BYTES = 128 * 2**10
"""Maximum bytes of a micro-batch to send without shared memory: five times as fast here, slower from 1 MB."""


@dataclass(frozen=True, slots=True)
class LoadedUnit:
    """A micro-batch (unit) that a worker has loaded, with only the hash of its key, since the receiver has the key."""

    key_hash: int
    unit: Any
    failure: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the micro-batch: small tensors as bytes, others in shared memory, each with a file descriptor."""
        # Return a failure instead of raising: the queue's thread, which calls this, drops objects that it cannot
        # pickle, and the receiver would wait forever.
        try:
            unit = _resolved(self.unit)
            tensors = list(tensors_of(unit))
            if all(map(_is_plain, tensors)) and sum(tensor.nbytes for tensor in tensors) <= _SMALL_BYTES:
                return _received, (self.key_hash, packed(unit))
            return _received, (self.key_hash, bytes(ForkingPickler.dumps(unit)))
        except Exception as error:  # noqa: BLE001 (raised in the caller's process)
            return LoadedUnit, (self.key_hash, None, f"{type(error).__name__}: {error}")

    def pin_memory(self) -> "LoadedUnit":
        """Return the micro-batch with its tensors in pinned memory; called by the loader's pinning thread."""
        return LoadedUnit(self.key_hash, pinned(self.unit), self.failure)


def _received(key_hash: int, data: bytes) -> LoadedUnit:
    return LoadedUnit(key_hash, unpacked(data))


def _resolved(unit: Batch) -> Batch:
    """Return a micro-batch with conjugate and negative views resolved: torch sends their memory without these bits."""
    if not any(tensor.is_conj() or tensor.is_neg() for tensor in tensors_of(unit)):
        return unit
    return map_tensors(unit, lambda tensor: tensor.resolve_conj().resolve_neg())


class Prefetcher:
    """Loads micro-batches in worker processes before they are requested.

    The caller supplies the keys that it expects to request next. While it requests them in that order, the workers
    never pause; a request for another key discards the prefetched micro-batches and continues from that key.
    """

    def __init__(self, load: Callable[[UnitKey], Batch], *, num_workers: int, pin_memory: bool) -> None:
        self._keys = _KeySequence()
        self._load = load
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._loader: DataLoader[LoadedUnit] | None = None
        self._items: Iterator[LoadedUnit] = iter(())

    def take(self, key: UnitKey, next_keys: Callable[[], Iterator[UnitKey]]) -> Batch:
        """Return the micro-batch of `key`.

        `next_keys` is called if the workers have not prefetched this micro-batch; it returns the keys that are expected
        next, in order, beginning with `key`.
        """
        # The loader returns micro-batches in the order of the sent keys, so only the oldest key can be next.
        if not self._keys.sent or self._keys.sent[0] != key:
            self._keys.source = next_keys()
            self._keys.sent.clear()
            if self._loader is None:
                self._loader = loader_of(
                    _Keyed(self._load),
                    self._num_workers,
                    sampler=self._keys,
                    persistent_workers=True,
                    pin_memory=self._pin_memory,
                )
            self._items = iter(self._loader)  # drops pending micro-batches, and keeps the persistent workers
        try:
            self._keys.sent.popleft()
            item = next(self._items)
        except BaseException as error:  # noqa: BLE001 (raised again)
            self._keys.sent.clear()  # after an error or an interrupt the next keys are unknown: restart
            # The frames of the traceback reference the error and the loader, a cycle that would keep the workers alive.
            # The message contains the traceback of the worker.
            raise error.with_traceback(None)  # noqa: B904 (the same error)
        assert item.key_hash == hash(key), key
        if item.failure:
            message = (
                f"a batch cannot be sent from its worker process: {item.failure}. Return tensors, numbers, text and "
                "objects that can be pickled from the data set and collate, or load with num_workers=0."
            )
            raise DataError(message)
        return item.unit

    def close(self) -> None:
        """Shut the workers down. A later `take` starts new ones."""
        self._items = iter(())
        self._loader = None  # last reference: the destructor stops the processes and waits for them
        self._keys.sent.clear()


class _KeySequence:
    """A sampler of keys: each is computed when a worker is free, and stored until its micro-batch is received."""

    def __init__(self) -> None:
        self.source: Iterator[UnitKey] = iter(())
        self.sent: deque[UnitKey] = deque()

    def __iter__(self) -> Iterator[UnitKey]:
        for key in self.source:
            self.sent.append(key)
            yield key


@dataclass(frozen=True, slots=True)
class _Keyed(Dataset[Any]):
    """A data set whose indices are keys of micro-batches."""

    load: Callable[[UnitKey], Batch]

    def __getitem__(self, key: UnitKey) -> LoadedUnit:
        with picklable_errors():
            return LoadedUnit(hash(key), self.load(key))


@contextmanager
def picklable_errors() -> Iterator[None]:
    """Replace an exception whose class cannot be pickled, since a worker could not send it."""
    try:
        yield
    except Exception as error:
        try:
            pickle.dumps(type(error))
        except Exception:  # noqa: BLE001 (a class may define how it is pickled)
            message = f"{type(error).__qualname__}: {error}"
            raise RuntimeError(message) from error
        raise


def loader_of(dataset: Dataset[Any], num_workers: int, **options: Any) -> DataLoader[Any]:  # noqa: ANN401 (torch's)
    """Return a loader that yields the items of a data set unchanged."""
    # The loader draws a seed: give it a generator, so that the state of the global generator does not change.
    generator = torch.Generator()
    return DataLoader(
        dataset, batch_size=None, num_workers=num_workers, collate_fn=_unchanged, generator=generator, **options
    )


def _unchanged(item: Any) -> Any:  # noqa: ANN401 (replaces torch's conversion of numbers and arrays to tensors)
    return item
