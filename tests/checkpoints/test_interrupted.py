"""If a save is interrupted at any point, the newest loadable checkpoint is the old or the new one, complete."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from anybatch.checkpoints import list_checkpoints, load, load_latest, save
from anybatch.errors import CheckpointError, DiskFullError
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
    "the old checkpoint is removed before the new one is complete",
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
    "a checkpoint is removed without renaming it first",
    "src/anybatch/checkpoints/files.py",
    """
    disk.rename(path, renamed)
    disk.sync_folder(path.parent)
    remove(renamed, disk=disk)
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
    "a file is not synced",
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
    "a new name is not synced",
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


def test_a_failed_removal_warns(tmp_path: Path) -> None:
    """If an older checkpoint cannot be removed, saving succeeds with a warning that names it."""
    last = len(operations_of(save_and_remove)) - 1
    disk = FaultyDisk(last, failing(errno.ENOTEMPTY))

    saved = save(prepared(tmp_path), 7, state_of(2), keep_last=1, disk=disk)

    (warning,) = saved.warnings
    assert "step-00000005, which is not needed any more: [Errno 39] Directory not empty" in warning


@CASES
def test_a_disk_that_gets_full(act: Act) -> None:
    """A full disk raises with the needed and free bytes, leaves no partial file, and keeps existing ones."""
    message = r"needs \d+ bytes, and \d+ are free \(No space left on device\)"
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


@pytest.mark.slow
def test_killed_processes(tmp_path: Path) -> None:
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
