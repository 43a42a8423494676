"""Writes down whatever a process connects to, or asks a name server about: nothing, is the claim."""

import sys
from pathlib import Path
from typing import Any

WATCHED = ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")


def watch_connections(file: Path) -> None:
    """Write every such event of this process into a file, from now on and for ever."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in WATCHED:
            with file.open("a") as lines:
                lines.write(f"{event} {arguments[1:] if event.startswith('socket.connect') else arguments}\n")

    sys.addaudithook(hook)
