"""Every lost or changed byte of a checkpoint is detected."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from anybatch.checkpoints import load, load_latest, save
from anybatch.errors import (
    CheckpointAccessError,
    CheckpointError,
    DamagedCheckpointError,
    MissingCheckpointError,
    NewerCheckpointError,
    NotACheckpointError,
    TruncatedCheckpointError,
)
from tests.checkpoints.exactly import exactly
from tests.checkpoints.faulty_disk import FaultyDisk, state_of
from tests.faults import sees

STATE, TENSORS, DIGESTS = FILES = ("state.json", "tensors.safetensors", "digests.json")
EACH_FILE = pytest.mark.parametrize("name", FILES)


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    """Return the newer of two checkpoints in `tmp_path`."""
    save(tmp_path, 1, state_of(1), disk=FaultyDisk())
    return save(tmp_path, 2, state_of(2), disk=FaultyDisk()).path


def refused(path: Path) -> CheckpointError:
    """Return the reason why a checkpoint is not loaded, after checking that the older one is loaded instead."""
    with pytest.raises(CheckpointError) as caught:
        load(path)
    loaded = load_latest(path.parent)
    assert exactly(loaded.state) == exactly(state_of(1))
    assert [(skipped.path, skipped.reason) for skipped in loaded.skipped] == [(path, str(caught.value))]
    return caught.value


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the state file of a checkpoint and update its digest, as a user with an editor would."""
    body = json.loads((path / STATE).read_bytes())
    change(body)
    content = json.dumps(body, separators=(",", ":")).encode() + b"\n"
    (path / STATE).write_bytes(content)
    digests = json.loads((path / DIGESTS).read_bytes())
    digests["version"] = body["version"]
    digests["files"][STATE] = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / DIGESTS).write_text(json.dumps(digests, separators=(",", ":")) + "\n")


@EACH_FILE
def test_a_truncated_file_is_detected(name: str, newest: Path) -> None:
    """A file cut at any tenth, or by its last byte, is rejected with both lengths, and the older checkpoint loaded."""
    content = (newest / name).read_bytes()
    for length in [*(len(content) * tenth // 10 for tenth in range(10)), len(content) - 1]:
        (newest / name).write_bytes(content[:length])
        error = refused(newest)

        assert f"{newest / name} is " in str(error)
        assert isinstance(error, DamagedCheckpointError if name == DIGESTS else TruncatedCheckpointError)
        assert name == DIGESTS or f"has {length} of the {len(content)} bytes" in str(error)


@sees(
    "a checkpoint's digest is not checked",
    "src/anybatch/checkpoints/files.py",
    """
        if sha256 != digest.sha256:
""",
    """
        if False:
""",
    also=["tests/checkpoints/test_damaged.py::test_files_of_two_checkpoints_do_not_mix"],
)
@EACH_FILE
def test_every_changed_byte_is_detected(name: str, newest: Path) -> None:
    """If any byte of a file is changed, the checkpoint is rejected as damaged, and the older one is loaded."""
    content = (newest / name).read_bytes()
    for position, byte in enumerate(content):
        (newest / name).write_bytes(content[:position] + bytes([byte ^ (1 << position % 7)]) + content[position + 1 :])
        with pytest.raises(DamagedCheckpointError):
            load(newest)
        if position % 20 == 0:
            refused(newest)
    (newest / name).write_bytes(content)

    assert exactly(load(newest)) == exactly(state_of(2))


@EACH_FILE
def test_a_missing_file_is_detected(name: str, newest: Path) -> None:
    """A checkpoint without one of its files is damaged, not missing, so that a run does not start over."""
    (newest / name).unlink()

    assert f"{newest / name} is missing" in str(refused(newest))
    assert isinstance(refused(newest), DamagedCheckpointError)


def test_files_of_two_checkpoints_do_not_mix(newest: Path) -> None:
    """A file of another checkpoint is rejected, although it is intact; the message has both digests."""
    written, other = ((path / TENSORS).read_bytes() for path in (newest, newest.with_name("step-00000001")))
    (newest / TENSORS).write_bytes(other)
    found, expected = (hashlib.sha256(content).hexdigest() for content in (other, written))
    error = refused(newest)

    assert isinstance(error, DamagedCheckpointError)
    assert f"its SHA-256 is {found}, and {expected} was written" in str(error)


def test_only_damaged_checkpoints_raise_their_faults(tmp_path: Path) -> None:
    """If all checkpoints are damaged, the error lists the faults; without any it says that none exists."""
    with pytest.raises(MissingCheckpointError):
        load_latest(tmp_path)
    with pytest.raises(MissingCheckpointError):
        load_latest(tmp_path / "absent")
    for step in (1, 2):
        (save(tmp_path, step, state_of(step)).path / TENSORS).write_bytes(b"")
    with pytest.raises(DamagedCheckpointError) as caught:
        load_latest(tmp_path)

    assert str(caught.value).count("is truncated: it has 0 of the 212 bytes") == 2


def test_a_newer_version_is_not_damage(newest: Path) -> None:
    """A checkpoint of a newer format raises with both versions, and no older one is loaded."""
    rewrite(newest, lambda body: body.update(version=2))

    for attempt in (lambda: load(newest), lambda: load_latest(newest.parent)):
        with pytest.raises(NewerCheckpointError):
            attempt()


def test_a_dtype_that_torch_lacks_is_not_damage(newest: Path) -> None:
    """A dtype unknown to this torch raises an error that asks for a newer one, and no older checkpoint is loaded."""
    reference = {"$tensor": "optimizer.0.step", "dtype": "float3"}
    rewrite(newest, lambda body: body.update(state=reference))

    with pytest.raises(NewerCheckpointError):
        load_latest(newest.parent)


@pytest.mark.parametrize(
    "state", [{"$tensor": "absent"}, {"$other": 1}, {"$tuple": 1}, {"$int": "one"}, {"$float": "nan"}]
)
def test_unknown_contents_are_refused(state: object, newest: Path) -> None:
    """A state file with contents that are never saved is rejected even if its digest is correct."""
    rewrite(newest, lambda body: body.update(state=state))

    assert "intact, but this version of anybatch cannot read it" in str(refused(newest))


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: (path / "model").mkdir(parents=True)])
def test_other_paths_are_refused(make: Callable[[Path], object], newest: Path) -> None:
    """A file, an empty folder and another folder are reported and skipped."""
    path = newest.with_name("step-00000003")
    make(path)
    with pytest.raises(NotACheckpointError):
        load(path)
    loaded = load_latest(newest.parent)

    assert loaded.path == newest
    assert [skipped.path for skipped in loaded.skipped] == [path]


@contextmanager
def forbidden(path: Path, mode: int) -> Iterator[None]:
    """Temporarily drop the rights of this process, possibly root's."""
    user, before = os.geteuid(), path.stat().st_mode
    path.chmod(mode)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(0)
        path.chmod(before)


@pytest.mark.parametrize("name", [".", *FILES])
def test_reading_may_be_forbidden(name: str) -> None:
    """An unreadable checkpoint raises, and no older one is loaded in its place."""
    with TemporaryDirectory() as place:  # pytest's folder is closed to the unprivileged user
        Path(place).chmod(0o755)
        save(place, 1, state_of(1))
        newest = save(place, 2, state_of(2)).path
        with forbidden(newest, 0o755):
            assert load_latest(place).path == newest
        with forbidden(newest / name, 0), pytest.raises(CheckpointAccessError):
            load_latest(place)


def test_writing_may_be_forbidden(tmp_path: Path) -> None:
    """A read-only folder raises, and its contents are unchanged."""
    folder = tmp_path / "checkpoints"
    save(folder, 1, state_of(1))
    with forbidden(folder, 0o500), pytest.raises(CheckpointAccessError):
        save(folder, 2, state_of(2))

    assert exactly(load_latest(folder).state) == exactly(state_of(1))
