"""Detect process state that a test changes and does not restore, by comparing before and after."""

import dataclasses
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

FOREIGN_VARIABLES = ("PYTEST_", "TORCHINDUCTOR_", "TRITON_")  # pytest's, and torch's compiler's
FOREIGN_THREADS = ("Dummy-",)  # threads not started from Python, such as autograd's when they run a hook
PROCESS = Path("/proc/self")
GROUP_THREADS = ("gloo", "pt_gloo", "pt_tcpstore", "pt_nccl")
PATIENCE_SECONDS = 5.0
POLL_SECONDS = 0.01


def environment() -> dict[str, str]:
    """Return the environment variables that a test must not change."""
    return {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN_VARIABLES)}


def restore_environment(before: Mapping[str, str]) -> None:
    """Restore those variables."""
    for name in environment().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def process_group() -> bool:
    """Return whether torch.distributed is initialized."""
    return dist.is_available() and dist.is_initialized()


def restore_process_group(before: bool) -> None:
    """Destroy a process group that a test left initialized; one that a test destroyed cannot be restored."""
    if not before:
        dist.destroy_process_group()


SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "environment variables": (environment, restore_environment),
    "working directory": (os.getcwd, os.chdir),
    "torch.distributed process group": (process_group, restore_process_group),
    "torch default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
}
"""Process-wide settings: how to read and how to restore each."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Threads, sockets and files of this process according to the system; empty if unknown (Linux reports them).

    Attributes:
        num_threads: all threads, including those unknown to Python.
        num_group_threads: threads of process groups and their stores; each group has two or three.
        num_sockets: connections to other processes, and listening sockets.
        num_files: open files, pipes and similar.
    """

    num_threads: int = 0
    num_group_threads: int = 0
    num_sockets: int = 0
    num_files: int = 0

    def within(self, limit: Self) -> bool:
        """Return whether no number exceeds the limit's."""
        mine, others = dataclasses.astuple(self), dataclasses.astuple(limit)
        return all(number <= most for number, most in zip(mine, others, strict=True))


def holdings() -> Holdings:
    """Return the threads, sockets and files of this process."""
    if not PROCESS.exists():
        return Holdings()
    opened, threads = [], []
    for handle in (PROCESS / "fd").iterdir():
        with suppress(OSError):  # the handle that lists the folder is closed
            opened.append(str(handle.readlink()))
    for thread in (PROCESS / "task").iterdir():
        with suppress(OSError):  # it has just ended
            threads.append((thread / "comm").read_text(encoding="utf-8"))
    num_sockets = sum(name.startswith("socket:") for name in opened)
    return Holdings(
        num_threads=len(threads),
        num_group_threads=sum(name.startswith(GROUP_THREADS) for name in threads),
        num_sockets=num_sockets,
        num_files=len(opened) - num_sockets,
    )


def settled(
    limit: Holdings, enough: Callable[[Holdings, Holdings], bool] = Holdings.within, patience: float = PATIENCE_SECONDS
) -> Holdings:
    """Return the holdings once they are within the limit, or after a timeout, because threads end slowly."""
    end = time.monotonic() + patience
    found = holdings()
    if enough(found, limit):
        return found
    gc.collect()  # garbage cycles keep resources until they are collected
    while not enough(found := holdings(), limit) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    return found


def has_no_more_groups(now: Holdings, before: Holdings) -> bool:
    """Return whether no process group was added.

    A thread gets its name only once it runs, so another named thread alone may have existed before. Other threads and
    files are not compared: fonts and profilers are opened once, and stay.
    """
    return now.num_group_threads <= before.num_group_threads or now.num_threads <= before.num_threads


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of this process at one moment."""

    settings: tuple[Any, ...]
    threads: frozenset[threading.Thread]
    processes: frozenset[BaseProcess]
    holdings: Holdings


def take_snapshot() -> Snapshot:
    """Return the state of this process now."""
    return Snapshot(
        settings=tuple(read() for read, _ in SETTINGS.values()),
        threads=frozenset(threading.enumerate()),
        processes=frozenset(multiprocessing.active_children()),
        holdings=holdings(),
    )


def leaks_since(before: Snapshot, *, patience_seconds: float = PATIENCE_SECONDS) -> list[str]:
    """Describe the differences from `before`, and restore settings, so that the next test is not blamed.

    Threads and processes that are ending are waited for, up to `patience_seconds` each.
    """
    leaks = []
    for (name, (read, restore)), old in zip(SETTINGS.items(), before.settings, strict=True):
        if (new := read()) != old:
            restore(old)
            leaks.append(f"{name}: {difference(old, new)}")
    if new_tasks(before):
        gc.collect()  # an unreferenced loader ends its workers only when collected
        for one in new_tasks(before):
            one.join(patience_seconds)
    kind_of = {True: "thread", False: "process"}
    leaks += [f"{kind_of[isinstance(one, threading.Thread)]} {one.name!r} still runs" for one in new_tasks(before)]
    return leaks + new_groups(before, patience_seconds=patience_seconds)


def new_groups(before: Snapshot, *, patience_seconds: float = PATIENCE_SECONDS) -> list[str]:
    """Describe process groups that a test leaked, after waiting for ending ones."""
    old, new = before.holdings, settled(before.holdings, has_no_more_groups, patience_seconds)
    if has_no_more_groups(new, old):
        return []
    threads = f"threads {old.num_group_threads} -> {new.num_group_threads}"
    return [f"a process group: {threads}, sockets {old.num_sockets} -> {new.num_sockets}"]


def new_tasks(before: Snapshot) -> list[threading.Thread | BaseProcess]:
    """Return threads and child processes that were started since then and still run."""
    threads = [thread for thread in threading.enumerate() if thread not in before.threads]
    alive = [thread for thread in threads if thread.is_alive() and not thread.name.startswith(FOREIGN_THREADS)]
    return [*alive, *(process for process in multiprocessing.active_children() if process not in before.processes)]


def difference(old: object, new: object) -> str:
    """Describe the difference between two values of a setting; for mappings, only the keys."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return ", ".join(sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key)))
    return f"{old} has become {new}"
