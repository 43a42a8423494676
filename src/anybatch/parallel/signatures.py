"""Signatures for pickled data between ranks, so that no one else can make them run code: gloo has no authentication."""

import hmac

from anybatch.errors import WorldError

_ALGORITHM, _DIGEST_BYTES = "sha256", 32


def signed(content: bytes, secret: bytes) -> bytes:
    """Return bytes after their signature; only the ranks share the secret."""
    return hmac.digest(secret, content, _ALGORITHM) + content


def unsigned(content: bytes, secret: bytes) -> bytes:
    """Return the content passed to `signed`; raise a `WorldError` for a sender without the secret."""
    signature, inner = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if not hmac.compare_digest(signature, hmac.digest(secret, inner, _ALGORITHM)):
        message = (
            "a message between ranks has a wrong signature: another process has connected to this rank, or the "
            "connection is damaged. Let only hosts and users that you trust reach the ports of the ranks."
        )
        raise WorldError(message)
    return inner
