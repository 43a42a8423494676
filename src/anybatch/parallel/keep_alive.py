"""An idle connection from each rank to the next, to detect that its host is gone.

Neighbours notice a process that dies, since the system closes its connections. A host that loses power or its network
closes nothing, and a waiting rank cannot distinguish it from a slow one. The operating systems can: they probe each
other with TCP keep-alive, independently of the processes.
"""

import socket
from contextlib import suppress
from datetime import timedelta

from anybatch.parallel.torch_internals import Store, store_address

_PREFIX = "anybatch/keep_alive"
_GOODBYE = b"x"
_IDLE_SECONDS, _INTERVAL_SECONDS, _NUM_UNANSWERED = 10, 5, 3
"""A host counts as gone after this silence and this number of unanswered probes at this interval."""
_SOCKET_OPTIONS = {
    "TCP_KEEPIDLE": _IDLE_SECONDS,
    "TCP_KEEPALIVE": _IDLE_SECONDS,  # the name on macOS
    "TCP_KEEPINTVL": _INTERVAL_SECONDS,
    "TCP_KEEPCNT": _NUM_UNANSWERED,
}


class KeepAlive:
    """The connection from this rank to the next one, and from the last to the first; all ranks connect together.

    If no connection can be made (a store without an address, a firewall), hosts that vanish are detected only by the
    timeout of collectives.

    Args:
        name: the same on all ranks, and unique to each connection.
        rank: this rank.
        size: the number of ranks.
        store: the store of the default group.
        timeout: how long to wait for the others.

    Attributes:
        next_rank: the rank whose host is watched.
    """

    def __init__(self, name: str, rank: int, size: int, store: Store, timeout: timedelta) -> None:
        self.next_rank = (rank + 1) % size
        self._to_next: socket.socket | None = None
        self._from_former: socket.socket | None = None
        where = store_address(store)
        if size == 1 or where is None:
            return
        own = _own_address(*where)
        with _listening(own) as listener:
            listener.settimeout(timeout.total_seconds())
            store.set(f"{_PREFIX}/{name}/{rank}", "" if own is None else f"{own} {listener.getsockname()[1]}")
            address = _get(store, f"{_PREFIX}/{name}/{self.next_rank}", timeout).decode()
            if address:
                with suppress(OSError):
                    self._to_next = _connected(*address.split())
            # Both ends know whether the connection succeeded before one of them waits for the other.
            store.set(f"{_PREFIX}/{name}/{rank}/connected", "1" if self._to_next else "0")
            if _get(store, f"{_PREFIX}/{name}/{(rank - 1) % size}/connected", timeout) == b"1":
                self._from_former, _ = listener.accept()

    @property
    def is_broken(self) -> bool:
        """Whether the next rank has ended, or its host is gone, without a goodbye."""
        if self._to_next is None:
            return False
        try:
            return self._to_next.recv(1, socket.MSG_PEEK) != _GOODBYE
        except BlockingIOError:  # no data, as expected
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Send a goodbye to the previous rank, which may still wait for others."""
        if self._from_former is not None:
            with suppress(OSError):
                self._from_former.send(_GOODBYE)
        for one in (self._from_former, self._to_next):
            if one is not None:
                one.close()
        self._from_former = self._to_next = None


def _get(store: Store, key: str, timeout: timedelta) -> bytes:
    store.wait([key], timeout)  # `get` alone would use the store's own timeout
    return store.get(key)


def _own_address(host: str, port: int) -> str | None:
    """Return the address at which other hosts reach this one, from its connection to the store."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as towards:
            towards.connect(address)  # sends nothing
            own: str = towards.getsockname()[0]
    except OSError:
        return None
    return own


def _listening(own: str | None) -> socket.socket:
    is_v6 = own is not None and ":" in own
    made = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET)
    made.bind((own or "127.0.0.1", 0))
    made.listen(1)
    return made


def _connected(host: str, port: str) -> socket.socket:
    made = socket.create_connection((host, int(port)), timeout=_IDLE_SECONDS)
    made.settimeout(0)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _SOCKET_OPTIONS.items():
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made
