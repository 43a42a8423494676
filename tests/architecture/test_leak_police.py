"""The leak check detects leftovers of tests and restores settings."""

import dataclasses
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.architecture.leak_police import (
    PATIENCE_SECONDS,
    environment,
    has_no_more_groups,
    holdings,
    leaks_since,
    settled,
    take_snapshot,
)


def test_clean_test_is_let_go() -> None:
    """A test that changes nothing, or joins the thread it starts, leaks nothing."""
    before = take_snapshot()
    thread = threading.Thread(target=list)
    thread.start()
    thread.join()
    torch.rand(3)

    assert leaks_since(before) == []


@pytest.mark.parametrize(
    ("word", "leak"),
    [
        ("default dtype", lambda: torch.set_default_dtype(torch.float64)),
        ("gradient mode", lambda: torch.set_grad_enabled(False)),
        ("number of threads", lambda: torch.set_num_threads(2)),
        ("deterministic", lambda: torch.use_deterministic_algorithms(mode=True)),
        ("working directory", lambda: os.chdir("/")),
    ],
)
def test_settings_are_seen_and_put_back(word: str, leak: Callable[[], None]) -> None:
    """A changed setting is reported once and restored."""
    before = take_snapshot()
    leak()

    (found,) = leaks_since(before)
    assert word in found
    assert leaks_since(before) == []


def test_variables_are_seen_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new, changed or removed variable is reported by name only, as values may be secret."""
    monkeypatch.setenv("ANYBATCH_CHANGED", "old")
    monkeypatch.setenv("ANYBATCH_GONE", "old")
    before, expected = take_snapshot(), environment()
    os.environ["ANYBATCH_NEW"] = os.environ["ANYBATCH_CHANGED"] = "new"
    del os.environ["ANYBATCH_GONE"]

    assert leaks_since(before) == ["environment variables: ANYBATCH_CHANGED, ANYBATCH_GONE, ANYBATCH_NEW"]
    assert environment() == expected


def test_threads_are_seen() -> None:
    """A thread that keeps running is reported."""
    before, release = take_snapshot(), threading.Event()
    thread = threading.Thread(target=release.wait, name="endless")
    thread.start()
    try:
        assert leaks_since(before, patience_seconds=0.01) == ["thread 'endless' still runs"]
    finally:
        release.set()
        thread.join()


def test_processes_are_seen() -> None:
    """A child process that keeps running is reported."""
    before = take_snapshot()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=theirs.recv, name="endless")
    process.start()
    try:
        assert leaks_since(before, patience_seconds=0.01) == ["process 'endless' still runs"]
    finally:
        ours.send("end")
        process.join()
        process.close()
        ours.close()
        theirs.close()


def test_sockets_files_and_threads_are_counted(tmp_path: Path) -> None:
    """Open sockets, files and threads are counted, and no longer after they are closed."""
    before, release = holdings(), threading.Event()
    thread = threading.Thread(target=release.wait)
    with socket.socket(), Path(tmp_path, "open").open("w", encoding="utf-8"):
        thread.start()
        more = holdings()
    release.set()
    thread.join()

    assert dataclasses.astuple(more) == tuple(dataclasses.astuple(before)[k] + (1, 0, 1, 1)[k] for k in range(4))
    assert settled(before).within(before)


def test_groups_that_are_not_destroyed_are_seen(tmp_path: Path) -> None:
    """A non-default group is detected by its native threads, and waited for if it is ending."""
    dist.init_process_group("gloo", init_method=Path(tmp_path, "store").as_uri(), rank=0, world_size=1)
    try:
        before = take_snapshot()
        group = dist.new_group(backend="gloo")
        end = time.monotonic() + PATIENCE_SECONDS
        while has_no_more_groups(holdings(), before.holdings) and time.monotonic() < end:
            os.sched_yield()  # a new thread has no name yet
        (found,) = leaks_since(before, patience_seconds=0.1)
        dist.destroy_process_group(group)
        del group
        assert found.startswith("a process group")
        assert leaks_since(before) == []
    finally:
        dist.destroy_process_group()


def test_process_groups_are_seen_and_left(tmp_path: Path) -> None:
    """An initialized torch.distributed is reported and destroyed."""
    before = take_snapshot()
    dist.init_process_group("gloo", init_method=Path(tmp_path, "store").as_uri(), rank=0, world_size=1)

    assert leaks_since(before) == ["torch.distributed process group: False has become True"]
    assert not dist.is_initialized()
