"""Several hosts on one machine: network namespaces with separate names and addresses, connected by a switch.

Each host has a link to the switch, rate-limited by `tc`. Without latency the switch is the kernel's bridge. With
latency it is a process that delays every frame, since not every kernel has netem: `python -m tests.hosts --help`.
All hosts see the same files, like hosts with a shared file system.
"""

import argparse
import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_ALL_PROTOCOLS = 3
_SIOCETHTOOL = 0x8946
_OFFLOADS = (0x17, 0x1F, 0x24)  # ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO of linux/ethtool.h
_LARGEST_FRAME = 1 << 16
_MTU = 60_000


class NoHostsError(Exception):
    """This machine does not allow network namespaces; the message says why."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host.

    Attributes:
        name: its host name.
        namespace: the name of its network namespace.
        address: its IPv4 address.
    """

    name: str
    namespace: str
    address: str

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str], out: "int | IO[Any] | None" = None
    ) -> "subprocess.Popen[str]":
        """Start a program on this host; gloo and torchrun find its network without options."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        return subprocess.Popen(  # noqa: S603 (programs of the tests)
            ["ip", "netns", "exec", self.namespace, *named, *command],  # noqa: S607 (where the system keeps it)
            env=dict(env),
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def kill(self) -> None:
        """Kill all programs on this host, as a power failure does."""
        for pid in _ip("netns", "pids", self.namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@contextlib.contextmanager
def hosts(
    num_hosts: int, *, rate: str | None = None, latency: float = 0.0, held_back: bool = False
) -> Iterator[list[Host]]:
    """Create hosts named host0, host1 and so on; all programs on them are killed at the end.

    Args:
        num_hosts: number of hosts.
        rate: of each link in each direction, such as "1gbit"; None for unlimited.
        latency: seconds from one host to another.
        held_back: whether frames pass the delaying process even without latency, to measure its cost.

    Raises:
        NoHostsError: namespaces are not allowed, or a program is missing.
    """
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            message = f"{program} is not installed (iproute2, util-linux)"
            raise NoHostsError(message)
    mark = f"ab{os.getpid()}"
    switch = f"{mark}s"
    made = [Host(f"host{number}", f"{mark}h{number}", f"10.77.0.{number + 1}") for number in range(num_hosts)]
    # `ip netns exec` mounts the files of /etc/netns/NAME over those in /etc.
    names = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in made)
    relay = None
    with contextlib.ExitStack() as ends:
        try:
            _ip("netns", "add", switch)
            ends.callback(_ip, "netns", "delete", switch)
            for number, host in enumerate(made):
                _ip("netns", "add", host.namespace)
                ends.callback(_ip, "netns", "delete", host.namespace)
                etc = Path("/etc/netns", host.namespace)
                etc.mkdir(parents=True)
                ends.callback(shutil.rmtree, etc)
                (etc / "hosts").write_text(names)
                _connect(host, switch, f"port{number}", rate)
            ports = [f"port{number}" for number in range(num_hosts)]
            if latency or held_back:
                relay = _start_relay(made, switch, ports, latency)
                ends.callback(relay.wait)
                ends.callback(relay.kill)
            else:
                _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
                _ip("-n", switch, "link", "set", "bridge", "up")
                for port in ports:
                    _ip("-n", switch, "link", "set", port, "master", "bridge")
        except (OSError, subprocess.CalledProcessError) as error:
            message = f"network namespaces are not allowed here: {getattr(error, 'stderr', '') or error}"
            raise NoHostsError(message) from error
        try:
            yield made
        finally:
            for host in made:
                host.kill()


def _connect(host: Host, switch: str, port: str, rate: str | None) -> None:
    """Create the link between a host and the switch."""
    own = ("-n", host.namespace)
    _ip(*own, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
    _ip(*own, "address", "add", f"{host.address}/24", "dev", "eth0")
    _ip(*own, "link", "set", "lo", "up")
    _ip(*own, "link", "set", "eth0", "mtu", str(_MTU), "up")
    _ip("-n", switch, "link", "set", port, "mtu", str(_MTU), "up")
    if rate is not None:
        for namespace, device in ((host.namespace, "eth0"), (switch, port)):
            tbf = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, *tbf)


def _start_relay(made: Sequence[Host], switch: str, ports: Sequence[str], latency: float) -> "subprocess.Popen[str]":
    this = [sys.executable, "-m", "tests.hosts"]
    for host in made:
        _run("ip", "netns", "exec", host.namespace, *this, "--without-offload", "eth0")
    relay = subprocess.Popen(  # noqa: S603 (this file)
        ["ip", "netns", "exec", switch, *this, "--seconds", str(latency), *ports],  # noqa: S607 (where the system keeps it)
        stdout=subprocess.PIPE,
        text=True,
    )
    assert relay.stdout is not None
    with relay.stdout as words:
        assert words.readline() == "ready\n"
    return relay


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout  # noqa: S603 (fixed programs)


def hold_back(ports: Sequence[str], seconds: float) -> None:
    """Forward every frame after a delay, as a switch. Never returns."""
    sockets = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)) for _ in ports]
    for port, each in zip(ports, sockets, strict=True):
        each.bind((port, 0))
        each.setblocking(False)
    where: dict[bytes, socket.socket] = {}
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        left = max(0.0, waiting[0][0] - time.perf_counter()) if waiting else None
        for each in select.select(sockets, [], [], left)[0]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    frame, address = each.recvfrom(_LARGEST_FRAME)
                    # Frames sent by this process are received as well.
                    if address[2] != socket.PACKET_OUTGOING:
                        where[frame[6:12]] = each
                        waiting.append((time.perf_counter() + seconds, each, frame))
        while waiting and waiting[0][0] <= time.perf_counter():
            _, came_from, frame = waiting.popleft()
            known = where.get(frame[:6])
            for each in sockets if known is None else (known,):
                if each is not came_from:
                    # A full link drops frames, as a switch does.
                    with contextlib.suppress(BlockingIOError, OSError):
                        each.send(frame)


def without_offload(device: str) -> None:
    """Complete checksums and segmentation before frames leave, as a program that copies frames does not."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in _OFFLOADS:
            held = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", device.encode(), ctypes.addressof(held)).ljust(40, b"\0")
            fcntl.ioctl(any_socket, _SIOCETHTOOL, request)


def main() -> None:
    """Run the switch, or prepare a host for it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("ports", nargs="+", help="network devices of this namespace")
    parser.add_argument("--seconds", type=float, default=0.0, help="how long to hold each frame back")
    parser.add_argument("--without-offload", action="store_true", help="only change these devices")
    given = parser.parse_args()
    if given.without_offload:
        for port in given.ports:
            without_offload(port)
    else:
        hold_back(given.ports, given.seconds)


if __name__ == "__main__":
    main()
