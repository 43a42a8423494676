"""What a test may change and has to put back, seen from outside: compare before and after."""

import gc
import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

FOREIGN_VARIABLES = ("PYTEST_", "TORCHINDUCTOR_", "TRITON_")  # pytest's, and those torch's compiler sets for itself
FOREIGN_THREADS = ("Dummy-",)  # threads that were not started from Python: autograd's, when they run a hook
PATIENCE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Setting:
    """Something a process has one of: how to read it, and how to put it back."""

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], object]


def environment() -> dict[str, str]:
    """Return the environment variables a test has to leave alone."""
    return {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN_VARIABLES)}


def restore_environment(before: Mapping[str, str]) -> None:
    """Put those variables back."""
    for name in environment().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def process_group() -> bool:
    """Whether torch.distributed is initialised."""
    return dist.is_available() and dist.is_initialized()


def restore_process_group(before: bool) -> None:
    """Leave the process group that a test joined; one that it left stays lost."""
    if not before:
        dist.destroy_process_group()


SETTINGS = (
    Setting("environment variables", environment, restore_environment),
    Setting("working directory", os.getcwd, os.chdir),
    Setting("torch.distributed process group", process_group, restore_process_group),
    Setting("torch default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("torch gradient mode", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting("torch number of threads", torch.get_num_threads, torch.set_num_threads),
    Setting(
        "torch deterministic algorithms",
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of this process at one moment."""

    settings: tuple[Any, ...]
    threads: frozenset[threading.Thread]
    processes: frozenset[BaseProcess]


def take_snapshot() -> Snapshot:
    """Return the state of this process now."""
    return Snapshot(
        settings=tuple(setting.read() for setting in SETTINGS),
        threads=frozenset(threading.enumerate()),
        processes=frozenset(multiprocessing.active_children()),
    )


def leaks_since(before: Snapshot, *, patience_seconds: float = PATIENCE_SECONDS) -> list[str]:
    """Return what is different from `before`, in words; settings are put back, so that the next test is not blamed.

    Threads and processes that are about to end are waited for, for `patience_seconds` each.
    """
    leaks = []
    for setting, old in zip(SETTINGS, before.settings, strict=True):
        new = setting.read()
        if new != old:
            setting.restore(old)
            leaks.append(f"{setting.name}: {difference(old, new)}")
    if new_threads(before) or new_processes(before):
        gc.collect()  # a loader that nobody holds any more ends its workers only when it is collected
        ending: list[threading.Thread | BaseProcess] = [*new_threads(before), *new_processes(before)]
        for one in ending:
            one.join(patience_seconds)
    leaks += [f"thread {thread.name!r} still runs" for thread in new_threads(before)]
    leaks += [f"process {process.name!r} still runs" for process in new_processes(before)]
    return leaks


def new_threads(before: Snapshot) -> list[threading.Thread]:
    """Return threads that run now and did not before."""
    running = [thread for thread in threading.enumerate() if thread not in before.threads]
    return [thread for thread in running if thread.is_alive() and not thread.name.startswith(FOREIGN_THREADS)]


def new_processes(before: Snapshot) -> list[BaseProcess]:
    """Return child processes that run now and did not before."""
    return [process for process in multiprocessing.active_children() if process not in before.processes]


def difference(old: object, new: object) -> str:
    """Return what differs between two values of a setting; of mappings only the keys that do."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return ", ".join(sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key)))
    return f"{old} has become {new}"
