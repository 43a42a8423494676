"""Only messages signed by ranks of the same run are unpickled."""

import pytest

from anybatch.errors import WorldError
from anybatch.parallel.control import signed, unsigned


def test_foreign_messages_are_refused() -> None:
    """A message with the right signature is accepted; one with a wrong secret, changed or truncated, is refused."""
    message = signed(b"weights", b"secret")
    assert unsigned(message, b"secret") == b"weights"
    for foreign in (signed(b"weights", b"guess"), message[:-1] + b"S", message[:8], b""):
        with pytest.raises(WorldError):
            unsigned(foreign, b"secret")
