"""A connection from each rank to the next, over which nothing is sent, to notice when that one's host is gone.

A process that dies is noticed by its neighbours, since the system closes its connections. A host that loses its power
or its network closes nothing, and a rank that waits for it cannot tell it from a slow one. The systems of two hosts
can: they ask each other by TCP's keep-alive, whatever the processes are doing meanwhile.
"""

import socket
from contextlib import suppress
from datetime import timedelta

from anybatch.parallel.torch_internals import Store, store_address

_PREFIX = "anybatch/keep_alive"
_GOODBYE = b"x"
_IDLE_SECONDS, _INTERVAL_SECONDS, _NUM_UNANSWERED = 10, 5, 3
"""A host is gone that has been silent for the first, and has left the last of these questions unanswered."""
_SOCKET_OPTIONS = {
    "TCP_KEEPIDLE": _IDLE_SECONDS,
    "TCP_KEEPALIVE": _IDLE_SECONDS,  # its name on macOS
    "TCP_KEEPINTVL": _INTERVAL_SECONDS,
    "TCP_KEEPCNT": _NUM_UNANSWERED,
}


class KeepAlive:
    """The connection from this rank to the next one, the last one's being to the first. All ranks make theirs together.

    Where none can be made (a store without an address, a firewall) there is none, and hosts that vanish are noticed at
    the time-out of collectives only.

    Args:
        name: the same on all ranks, and another for each time that they make one.
        rank: this rank.
        size: the number of ranks.
        store: by which they have met.
        timeout: how long to wait for the others.

    Attributes:
        next_rank: whose host is watched.
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
            # Whether it has come off is known to both ends before one of them waits for the other.
            store.set(f"{_PREFIX}/{name}/{rank}/connected", "1" if self._to_next else "0")
            if _get(store, f"{_PREFIX}/{name}/{(rank - 1) % size}/connected", timeout) == b"1":
                self._from_former, _ = listener.accept()

    @property
    def is_broken(self) -> bool:
        """Whether the next rank has ended, or its host is gone, and it has not said goodbye."""
        if self._to_next is None:
            return False
        try:
            return self._to_next.recv(1, socket.MSG_PEEK) != _GOODBYE
        except BlockingIOError:  # nothing has come, as it should be
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Say goodbye to the rank before, which may wait for others still."""
        if self._from_former is not None:
            with suppress(OSError):
                self._from_former.send(_GOODBYE)
        for one in (self._from_former, self._to_next):
            if one is not None:
                one.close()
        self._from_former = self._to_next = None


def _get(store: Store, key: str, timeout: timedelta) -> bytes:
    store.wait([key], timeout)  # `get` alone would wait as long as the store does
    return store.get(key)


def _own_address(host: str, port: int) -> str | None:
    """Return the address by which other hosts reach this one: that of its connection to the store."""
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
