"""What the observers of this folder share: a `with`, and numbers read from their device."""

import contextlib
from abc import ABC, abstractmethod
from typing import Self

import torch

from anybatch.core.records import Flag, Record, Scalar


class ClosingObserver(ABC):
    """An observer that is closed at the end of a `with`, also after an error."""

    @abstractmethod
    def observe(self, record: Record, /) -> None:
        """Process a record."""

    @abstractmethod
    def close(self) -> None:
        """Write the rest, and release what is held. Closing twice is allowed."""

    def __enter__(self) -> Self:
        """Return the observer itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def read_number(value: Scalar | Flag) -> float | None:
    """Return a number, waiting for its device; None if the device failed (the error is reported elsewhere)."""
    with contextlib.suppress(RuntimeError):
        return float(value.item() if isinstance(value, torch.Tensor) else value)
    return None
