"""Signs what ranks unpickle, so that nobody else can have them run code: gloo does not check who has connected."""

import hmac

from anybatch.errors import WorldError

_ALGORITHM, _DIGEST_BYTES = "sha256", 32


def signed(content: bytes, secret: bytes) -> bytes:
    """Return bytes behind their signature.

    Args:
        content: what to sign.
        secret: known to all ranks, and to nobody else.
    """
    return hmac.digest(secret, content, _ALGORITHM) + content


def unsigned(content: bytes, secret: bytes) -> bytes:
    """Return what `signed` was given.

    Raises:
        WorldError: it comes from a process that does not know the secret.
    """
    signature, inner = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if not hmac.compare_digest(signature, hmac.digest(secret, inner, _ALGORITHM)):
        message = (
            "a message between ranks has a wrong signature: another process has connected to this rank, or the "
            "connection is damaged. Let only hosts and users that you trust reach the ports of the ranks."
        )
        raise WorldError(message)
    return inner
