"""What Linux itself refuses a process and its children: files outside of one folder, and any network but loopback.

Both are one-way, take no privileges, and hold for C++, Rust and other programs too. They act on the calling thread and
what it starts, so they are asked for before there is another one.

Sources: the manual pages landlock(7), user_namespaces(7), network_namespaces(7) and netdevice(7).
"""

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION = 1
_PATH_BENEATH = 1
_NO_NEW_PRIVILEGES = 38
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_SET_FLAGS = 0x8914
_UP = 1
# Bits of access: write 1, remove folder 4 and file 5, make 6 to 12, move between folders 13, truncate 14.
_WRITES = sum(1 << bit for bit in (1, *range(4, 13)))
_MOVES, _TRUNCATES = 1 << 13, 1 << 14
_TRUNCATES_SINCE = 3


def refuse_writes_outside(folders: Sequence[Path]) -> bool:
    """Refuse this process every change of a file that is not beneath these folders; return whether the system can."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _GET_VERSION)
    if version < _TRUNCATES_SINCE:  # before that a file could be emptied all the same
        return False
    access = _WRITES | _MOVES | _TRUNCATES
    wanted = struct.pack("=Q", access)
    rules = libc.syscall(_CREATE_RULESET, wanted, ctypes.c_size_t(len(wanted)), 0)
    if rules < 0:
        return False
    try:
        for folder in folders:
            opened = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            try:
                beneath = struct.pack("=Qi", access, opened)
                if libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, beneath, 0):
                    return False
            finally:
                os.close(opened)
        if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
            return False
        return not libc.syscall(_RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


def leave_the_network() -> bool:
    """Move this process to a network that has nothing but its own loopback; return whether the system lets it."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    # Root may leave the network as it is; anybody else within a namespace of users, which some systems refuse.
    if libc.unshare(_NEW_NETWORK):
        if libc.unshare(_NEW_USER | _NEW_NETWORK):
            return False
        own = Path("/proc/self")
        # Who it is stays the same within the new namespace.
        with contextlib.suppress(OSError):
            (own / "setgroups").write_text("deny", encoding="ascii")
            (own / "uid_map").write_text(f"{user} {user} 1", encoding="ascii")
            (own / "gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    import fcntl  # noqa: PLC0415 (there is none on Windows)

    # A loopback that stays down keeps ranks from meeting, and is said by their error; the network is gone in any case.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
    return True
