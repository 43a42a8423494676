"""The leak check detects leftovers of tests and restores settings."""

import multiprocessing
import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.architecture.leak_police import (
    PATIENCE_SECONDS,
    has_no_more_groups,
    holdings,
    leaks_since,
    take_snapshot,
)


def test_settings_are_detected_and_restored() -> None:
    """A changed setting is reported once and restored; of variables only the names, as values may be secret."""
    before = take_snapshot()
    os.environ["ANYBATCH_TEST"] = "secret"
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)

    assert [leak.partition(":")[0] for leak in leaks_since(before)] == [
        *("environment variables", "torch default dtype", "torch number of threads")
    ]
    assert leaks_since(before) == []


def test_threads_are_detected() -> None:
    """A thread that keeps running is reported."""
    before, release = take_snapshot(), threading.Event()
    thread = threading.Thread(target=release.wait, name="endless")
    thread.start()
    try:
        assert leaks_since(before, patience_seconds=0.01) == ["thread 'endless' still runs"]
    finally:
        release.set()
        thread.join()


def test_processes_are_detected() -> None:
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


def test_leaked_groups_are_detected(tmp_path: Path) -> None:
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
