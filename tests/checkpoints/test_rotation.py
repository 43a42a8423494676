"""Which checkpoints are kept, their names, and messages about other files."""

from pathlib import Path

import pytest

from anybatch.checkpoints import list_checkpoints, load, load_latest, save
from anybatch.errors import CheckpointError, NotACheckpointError
from tests.checkpoints.exactly import exactly
from tests.checkpoints.faulty_disk import FaultyDisk, state_of
from tests.faults import sees


def names(folder: Path) -> list[str]:
    """Return all entries of a folder."""
    return sorted(path.name for path in folder.iterdir())


@sees(
    "the oldest checkpoints are not removed",
    "src/anybatch/checkpoints/files.py",
    "for path in former + current[:-keep_last]:",
    "for path in former:",
)
@pytest.mark.parametrize("keep_last", [1, 2, 5])
def test_the_newest_are_kept(keep_last: int, tmp_path: Path) -> None:
    """After each save, `keep_last` checkpoints exist, or all saved ones, and each is intact."""
    for step in range(0, 70, 10):
        saved = save(tmp_path, step, state_of(step), keep_last=keep_last, disk=FaultyDisk())
        kept = range(step, -1, -10)[:keep_last]

        assert names(tmp_path) == sorted(f"step-{each:08d}" for each in kept)
        assert {exactly(load(tmp_path / f"step-{each:08d}"))[1][0] for each in kept} == {
            exactly(state_of(each))[1][0] for each in kept
        }
        assert saved.path == tmp_path / f"step-{step:08d}"
        assert saved.num_bytes == sum(file.stat().st_size for file in saved.path.iterdir())
        assert saved.warnings == ()


def test_later_steps_are_kept_and_reported(tmp_path: Path) -> None:
    """A run resumed from an earlier step keeps its checkpoints; later ones are reported, not counted or removed."""
    for step in (10, 20, 30):
        save(tmp_path, step, state_of(step), keep_last=3, disk=FaultyDisk())
    saved = save(tmp_path, 15, state_of(15), keep_last=1, disk=FaultyDisk())

    assert names(tmp_path) == ["step-00000015", "step-00000020", "step-00000030"]
    assert [warning.partition(" is ")[0] for warning in saved.warnings] == [
        str(tmp_path / name) for name in ("step-00000020", "step-00000030")
    ]
    assert "from a later step than 15, so load_latest would load it" in saved.warnings[0]
    save(tmp_path, 30, state_of(31), keep_last=1, disk=FaultyDisk())
    assert names(tmp_path) == ["step-00000030"]


def test_new_checkpoints_replace_a_damaged_newer_one(tmp_path: Path) -> None:
    """After a fallback, the run's new checkpoints are kept, loaded, and in time replace the damaged ones."""
    for step in (10, 20):
        save(tmp_path, step, state_of(step), disk=FaultyDisk())
    (tmp_path / "step-00000020" / "state.json").write_text("")
    save(tmp_path, 15, state_of(15), keep_last=1, disk=FaultyDisk())
    fallen_back = load_latest(tmp_path)
    save(tmp_path, 20, state_of(21), keep_last=1, disk=FaultyDisk())

    assert exactly(fallen_back.state) == exactly(state_of(15))
    assert [skipped.path.name for skipped in fallen_back.skipped] == ["step-00000020"]
    assert names(tmp_path) == ["step-00000020"]
    assert exactly(load_latest(tmp_path).state) == exactly(state_of(21))


def test_a_kill_between_renames_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    """Killed between the two renames of a replacement, the old checkpoint is loaded and gets its name back."""
    save(tmp_path, 1, state_of(1))
    save(tmp_path, 2, state_of(2)).path.rename(tmp_path / "step-00000002.replaced")

    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001", "step-00000002.replaced"]
    assert exactly(load_latest(tmp_path).state) == exactly(state_of(2))
    save(tmp_path, 3, state_of(3), keep_last=3)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    assert exactly(load(tmp_path / "step-00000002")) == exactly(state_of(2))


def test_a_file_instead_of_the_folder_is_refused(tmp_path: Path) -> None:
    """A file instead of the folder of checkpoints is reported by all three functions."""
    path = tmp_path / "checkpoints"
    path.touch()

    with pytest.raises(CheckpointError):
        save(path, 0, {})
    with pytest.raises(NotACheckpointError):
        list_checkpoints(path)
    with pytest.raises(NotACheckpointError):
        load_latest(path)
