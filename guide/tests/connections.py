"""Record all connections and DNS requests of a process, so that tests can assert that it makes none."""

import sys
from pathlib import Path
from typing import Any

WATCHED = ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")


def watch_connections(file: Path) -> None:
    """From now on, write every such event of this process to a file."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in WATCHED:
            with file.open("a") as lines:
                lines.write(f"{event} {arguments[1:] if event.startswith('socket.connect') else arguments}\n")

    sys.addaudithook(hook)
