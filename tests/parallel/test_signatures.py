"""Only what ranks of the same run have signed is unpickled."""

import pytest

from anybatch.errors import WorldError
from anybatch.parallel.signatures import signed, unsigned
from tests.faults import sees


@sees(
    "signatures: any message is taken",
    "src/anybatch/parallel/signatures.py",
    "if not hmac.compare_digest(",
    "if None is hmac.compare_digest(",
)
def test_foreign_messages_are_refused() -> None:
    """A message that was signed with the secret comes back; with another one, changed or cut off, it is refused."""
    message = signed(b"weights", b"secret")
    assert unsigned(message, b"secret") == b"weights"
    for foreign in (signed(b"weights", b"guess"), message[:-1] + b"S", message[:8], b""):
        with pytest.raises(WorldError):
            unsigned(foreign, b"secret")
