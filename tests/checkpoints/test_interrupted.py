"""If a save is interrupted at any point, the newest loadable checkpoint is the old or the new one, complete."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anybatch.checkpoints import list_checkpoints, load, load_latest, save
from anybatch.errors import CheckpointError, DiskFullError, MissingCheckpointError
from tests.checkpoints.exactly import exactly
from tests.checkpoints.faulty_disk import Crash, FaultyDisk, crash, failing, state_of
from tests.faults import sees


def save_two(folder: Path, *, disk: FaultyDisk) -> None:
    """Save a checkpoint, and a later one."""
    save(folder, 7, state_of(2), disk=disk)


def replace(folder: Path, *, disk: FaultyDisk) -> None:
    """Save another checkpoint of the same step."""
    save(folder, 5, state_of(2), disk=disk)


def save_and_remove(folder: Path, *, disk: FaultyDisk) -> None:
    """Save a checkpoint that causes the old one's removal."""
    save(folder, 7, state_of(2), keep_last=1, disk=disk)


CASES = pytest.mark.parametrize("act", [save_two, replace, save_and_remove], ids=lambda act: act.__name__)
Act = Callable[..., None]


def prepared(folder: Path) -> Path:
    """Create a folder with state 1 at step 5, and leftovers of a run killed while it saved and removed."""
    save(folder, 5, state_of(1), disk=FaultyDisk())
    for leftover in ("step-00000007.saving", "step-00000003.deleting"):
        (folder / leftover).mkdir()
        (folder / leftover / "state.json").write_text("half of a st")
    return folder


def operations_of(act: Act) -> list[str]:
    """Return the operations of the file system without a fault."""
    with TemporaryDirectory() as folder:
        disk = FaultyDisk()
        act(prepared(Path(folder)), disk=disk)
        return disk.operations


def faults(act: Act, fault: Callable[[], object]) -> Iterator[tuple[Path, FaultyDisk]]:
    """Yield for each operation a prepared folder, and a disk on which that operation fails."""
    for number in range(len(operations_of(act))):
        with TemporaryDirectory() as folder:
            yield prepared(Path(folder)), FaultyDisk(number, fault)


def newest(folder: Path) -> object:
    """Return the newest loadable state, after checking that everything called a checkpoint is one."""
    for path in list_checkpoints(folder)[:-1]:
        load(path)
    loaded = load_latest(folder)
    assert loaded.skipped == ()
    return exactly(loaded.state)


OLD, NEW, NEXT = (exactly(state_of(number)) for number in (1, 2, 3))


@sees(
    "the former checkpoint goes before the new one is in place",
    "src/anybatch/checkpoints/files.py",
    """
        disk.rename(target, former)
        try:
""",
    """
        discard(target, disk=disk)
        try:
""",
)
@sees(
    "a checkpoint is removed under its name",
    "src/anybatch/checkpoints/files.py",
    """
    disk.rename(path, doomed)
    disk.sync_folder(path.parent)
    remove(doomed, disk=disk)
""",
    """
    remove(path, disk=disk)
""",
    cases=["save_and_remove"],
)
@CASES
def test_killed_at_any_operation(act: Act) -> None:
    """Killed before any operation, or half-way in a write, the old state or the new one is loaded, bit for bit."""
    seen = []
    for folder, disk in faults(act, crash):
        with pytest.raises(Crash):
            act(folder, disk=disk)
        seen.append(newest(folder))

    assert len(seen) > 15
    assert sorted(seen, key=[OLD, NEW].index) == seen  # the old one up to some operation, then the new one
    assert seen[0] == OLD
    assert seen[-1] == NEW


@sees(
    "a file is not brought to the disk",
    "src/anybatch/checkpoints/files.py",
    """
            disk.sync(file)
""",
    "",
)
@CASES
def test_power_lost_at_any_operation(act: Act) -> None:
    """The same holds if unsynced bytes, names and any number of unsynced renames are lost."""

    def lose_power(number: int, num_renames: int) -> int:
        """Lose power at an operation, check the result, and return how many renames could have been lost."""
        with TemporaryDirectory() as place:
            folder, disk = prepared(Path(place)), FaultyDisk(number)
            with pytest.raises(Crash):
                act(folder, disk=disk)
            num_unsynced = disk.num_unsynced_renames
            disk.lose_power(num_renames)
            assert newest(folder) in (OLD, NEW)
            return num_unsynced

    lost = [lose_power(number, 0) for number in range(len(operations_of(act)))]
    for number, num_unsynced in enumerate(lost):
        for num_renames in range(1, num_unsynced + 1):
            lose_power(number, num_renames)

    assert max(lost) == (2 if act is replace else 1)


@sees(
    "a new name is not brought to the disk",
    "src/anybatch/checkpoints/files.py",
    """
    disk.sync_folder(target.parent)
""",
    "",
)
@CASES
@pytest.mark.parametrize("prepare", [prepared, lambda folder: folder / "run" / "checkpoints"], ids=["second", "first"])
def test_power_lost_after_a_save(prepare: Callable[[Path], Path], act: Act, tmp_path: Path) -> None:
    """A saved checkpoint survives a power failure, including new folders."""
    folder = prepare(tmp_path)
    disk = FaultyDisk()
    act(folder, disk=disk)
    disk.lose_power(disk.num_unsynced_renames)

    assert newest(folder) == NEW


@CASES
def test_the_next_save_clears_up(act: Act) -> None:
    """After a kill at any point, the next save succeeds, removes leftovers and keeps the right checkpoints."""
    for folder, disk in faults(act, crash):
        with pytest.raises(Crash):
            act(folder, disk=disk)
        save(folder, 9, state_of(3), disk=FaultyDisk())

        assert newest(folder) == NEXT
        assert len(list(folder.iterdir())) == len(list_checkpoints(folder)) <= 2
        assert [path.suffix for path in folder.iterdir()] == [""] * len(list_checkpoints(folder))


def test_killed_in_the_first_save(tmp_path: Path) -> None:
    """A run killed in its first save has no checkpoint or that one, never one that cannot be loaded."""
    disk = FaultyDisk()
    save(tmp_path / "whole" / "checkpoints", 0, state_of(2), disk=disk)
    for number in range(len(disk.operations)):
        folder = tmp_path / str(number) / "checkpoints"
        with pytest.raises(Crash):
            save(folder, 0, state_of(2), disk=FaultyDisk(number))
        try:
            assert newest(folder) == NEW
        except MissingCheckpointError:
            assert list_checkpoints(folder) == ()


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 2), st.none() | st.integers(0, 30)), max_size=6))
@settings(max_examples=60)
def test_killed_again_and_again(saves: list[tuple[int, int, int | None]]) -> None:
    """After saves that were randomly killed, nothing older than the last completed one is loaded."""
    with TemporaryDirectory() as place:
        folder, step, possible = Path(place), 5, [OLD]
        save(folder, step, state_of(1), disk=FaultyDisk())
        for number, (ahead, keep_last, fault_at) in enumerate(saves, start=10):
            step += ahead
            state = state_of(number)
            try:
                save(folder, step, state, keep_last=keep_last, disk=FaultyDisk(fault_at))
                possible = [exactly(state)]
            except Crash:
                possible.append(exactly(state))

            assert newest(folder) in possible


@CASES
@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.slow
def test_an_error_at_any_operation(act: Act, *, lasting: bool) -> None:
    """If a file operation fails, once or persistently, saving raises, unless only a removal fails; nothing is lost.

    The old state or the new one is loaded, and the next save succeeds and removes leftovers.
    """
    for number, name in enumerate(operations_of(act)):
        with TemporaryDirectory() as place:
            folder = prepared(Path(place))
            disk = FaultyDisk(number, failing(errno.EIO), lasting=lasting)
            failed = None
            try:
                act(folder, disk=disk)
            except CheckpointError as error:
                failed = error

            assert newest(folder) in (OLD, NEW)
            assert failed is None or "Input/output error" in str(failed)
            assert failed is not None or name in {"rename", "sync_folder", "remove_file", "remove_folder"}
            if failed is not None and not lasting and name != "sync_folder":
                assert exactly(load(folder / "step-00000005")) == newest(folder) == OLD
            save(folder, 9, state_of(3), disk=FaultyDisk())
            assert newest(folder) == NEXT
            assert sorted(folder.iterdir()) == list(list_checkpoints(folder))


def test_what_could_not_be_removed_is_said(tmp_path: Path) -> None:
    """If an older checkpoint cannot be removed, saving succeeds with a warning that names it."""
    last = len(operations_of(save_and_remove)) - 1
    disk = FaultyDisk(last, failing(errno.ENOTEMPTY))

    saved = save(prepared(tmp_path), 7, state_of(2), keep_last=1, disk=disk)

    (warning,) = saved.warnings
    assert "step-00000005, which is not needed any more: [Errno 39] Directory not empty" in warning


@CASES
def test_a_disk_that_gets_full(act: Act) -> None:
    """A full disk raises with the needed and free bytes, leaves no partial file, and keeps existing ones."""
    with TemporaryDirectory() as place:
        needed = save(place, 0, state_of(2), disk=FaultyDisk()).num_bytes
    message = rf"needs {needed} bytes, and \d+ are free \(No space left on device\)"
    num_writes = 0
    for number, name in enumerate(operations_of(act)):
        if name in {"make_folder", "create", "write", "sync"}:
            with TemporaryDirectory() as place:
                folder = prepared(Path(place))
                with pytest.raises(DiskFullError, match=message):
                    act(folder, disk=FaultyDisk(number, failing(errno.ENOSPC)))

                assert newest(folder) == OLD
                assert [path.name for path in folder.iterdir()] == ["step-00000005"]
                num_writes += name == "write"
    assert num_writes == 5


@contextmanager
def tiny_file_system(place: Path, num_bytes: int) -> Iterator[None]:
    """Mount a small file system at `place`, or skip the test."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("needs the right to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)  # noqa: S603, S607


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """On a file system of 1 MiB, a second checkpoint of 0.6 MiB raises with both numbers, and the first is kept."""
    with tiny_file_system(tmp_path, 1 << 20):
        first, second = ({"weight": torch.full((150_000,), value)} for value in (1.0, 2.0))
        saved = save(tmp_path, 1, first)
        with pytest.raises(DiskFullError, match=rf"needs {saved.num_bytes} bytes, and (\d+) are free") as caught:
            save(tmp_path, 2, second)

        free = int(str(caught.value).partition(" bytes, and ")[2].split()[0])
        assert 0 < free < saved.num_bytes
        assert newest(tmp_path) == exactly(first)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.slow
def test_processes_that_are_really_killed(tmp_path: Path) -> None:
    """Processes killed with SIGKILL at each operation leave the old state or the new one, and no obstacle."""
    folders = [prepared(tmp_path / str(number)) for number in range(len(operations_of(replace)))]
    command = [sys.executable, "-m", "tests.checkpoints.faulty_disk", str(tmp_path), "5"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

    killed = subprocess.run(command, env=environment, capture_output=True, check=False)  # noqa: S603

    assert killed.returncode == 0, killed.stderr.decode()
    assert [newest(folder) == NEW for folder in folders] == sorted(newest(folder) == NEW for folder in folders)
    assert newest(folders[0]) == OLD
    assert newest(folders[-1]) == NEW
    for folder in folders:
        save(folder, 9, state_of(3), disk=FaultyDisk())
        assert newest(folder) == NEXT
        assert sorted(folder.iterdir()) == list(list_checkpoints(folder))
