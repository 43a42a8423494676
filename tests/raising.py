"""Errors and warnings by class and code, for tests that do not depend on the wording of messages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from anybatch.errors import AnyBatchError, AnyBatchWarning

E = TypeVar("E", bound=AnyBatchError)


@contextmanager
def raises(kind: type[E], code: str) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error of a class with a code, as `pytest.raises` does for a class."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code!r}, expected {code!r}: {caught.value}"


@contextmanager
def warns(code: str) -> Iterator[None]:
    """Expect exactly one warning of anybatch, and its code."""
    with pytest.warns(AnyBatchWarning) as caught:
        yield
    ours = [one.message for one in caught if isinstance(one.message, AnyBatchWarning)]
    assert [one.code for one in ours] == [code], [str(one) for one in ours]
