"""The folder of a checkpoint and its files: state, tensors, and the digests of both, which are written last.

```text
step-00000120            a checkpoint
step-00000120.replaced   also a checkpoint: the former checkpoint of that step, until its replacement has the name
step-00000120.saving     being written, or left by a killed run; never read
step-00000120.deleting   being removed, or left by a killed run; never read
```

A folder is renamed to the name of a checkpoint when all of it is on the disk, and renamed to ".deleting" before any of
its files is removed. So a folder with the name of a checkpoint is always complete.

Tensors are in one file, `tensors.safetensors`, or in one file of parts for each process that saved:
`tensors-00001-of-00004.safetensors`. All files are readable without anybatch: two are JSON, all others safetensors.
They contain no code, and a file is parsed only after its digest is checked. Every version of the format keeps
`digests.json` and `state.json` as JSON objects with the keys "format" and "version".
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, Final

from anybatch.errors import (
    CheckpointAccessError,
    DamagedCheckpointError,
    MissingCheckpointError,
    NewerCheckpointError,
    NotACheckpointError,
    TruncatedCheckpointError,
)

STATE, TENSORS, DIGESTS = "state.json", "tensors.safetensors", "digests.json"
VERSION: Final = 1
_PART: Final = re.compile(r"tensors-(\d{5,})-of-(\d{5,})\.safetensors")
_HEAD: Final = {"format": "anybatch checkpoint", "version": VERSION}
_NOT_A_FOLDER: Final = frozenset({errno.ENOTDIR, errno.ELOOP, errno.EIO})
"""Errors that concern one path: it is a file, a circular link, or on a bad sector."""
_REMEDY = "Load an older checkpoint (load_latest does so automatically), and remove this one."


class Disk:
    """The file operations that save a checkpoint; each method is one operation, and may raise OSError.

    If a process dies between any two operations, or during a `write`, earlier checkpoints must remain readable.
    """

    def make_folder(self, path: Path, /) -> None:
        """Make a new folder in an existing one."""
        path.mkdir()

    def create(self, path: Path, /) -> FileIO:
        """Open a new file, to be written without a buffer."""
        # Unbuffered, so that each error comes from the write that caused it, and a sync leaves nothing unwritten.
        return path.open("xb", buffering=0)

    def write(self, file: FileIO, block: bytes | memoryview, /) -> None:
        """Append all of `block`, repeating partial writes."""
        unwritten = memoryview(block)
        while unwritten:
            unwritten = unwritten[file.write(unwritten) :]

    def sync(self, file: FileIO, /) -> None:
        """Return once the bytes of `file` would survive a power failure."""
        os.fsync(file.fileno())

    def sync_folder(self, path: Path, /) -> None:
        """Return once the names in a folder would survive a power failure."""
        if os.name == "nt":  # Windows cannot open a folder, and syncs its names automatically
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, new: Path, /) -> None:
        """Rename within a folder, in one indivisible operation; `new` does not exist."""
        path.rename(new)

    def remove_file(self, path: Path, /) -> None:
        """Remove a file, or a link."""
        path.unlink()

    def remove_folder(self, path: Path, /) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def free_bytes(self, path: Path, /) -> int:
        """Return how many bytes an ordinary user can write where the folder `path` is, or will be."""
        existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        return shutil.disk_usage(existing).free


LOCAL_DISK: Final = Disk()


@dataclass(frozen=True, slots=True)
class Digest:
    """The length of a file, and its SHA-256 in hexadecimal."""

    num_bytes: int
    sha256: str


def part_name(process: int, num_processes: int) -> str:
    """Return the name of the tensor file that a process, counted from 0, writes."""
    if num_processes == 1:
        return TENSORS
    return f"tensors-{process + 1:05d}-of-{num_processes:05d}.safetensors"


def tensor_files(digests: Mapping[str, Digest]) -> tuple[str, ...]:
    """Return the sorted names of the tensor files among all files of a checkpoint."""
    return tuple(sorted(name for name in digests if name != STATE))


def _are_of_one_checkpoint(names: Iterable[str]) -> bool:
    files = set(names) - {STATE}
    return STATE in names and bool(files) and files == {part_name(n, len(files)) for n in range(len(files))}


def json_bytes(body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a JSON file that starts with its format and version, then `body`."""
    # NaN is not JSON; `pack` encodes it.
    text = json.dumps({**_HEAD, **body}, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode() + b"\n"


def digests_bytes(digests: Mapping[str, Digest]) -> bytes:
    """Return the content of the digests file, which has the digests of all other files."""
    return json_bytes({"files": {name: asdict(digest) for name, digest in digests.items()}})


def write_file(path: Path, blocks: Iterable[bytes | memoryview], *, disk: Disk) -> Digest:
    """Write and sync a new file, and return its digest; remove the file after an OSError."""
    sha256, num_bytes = hashlib.sha256(), 0
    with disk.create(path) as file:
        try:
            for block in blocks:
                disk.write(file, block)
                sha256.update(block)
                num_bytes += len(block)
            disk.sync(file)
        except OSError:
            # So that the message about a full disk reports the bytes that are free without this file.
            with suppress(OSError):
                disk.remove_file(path)
            raise
    return Digest(num_bytes, sha256.hexdigest())


def has_digests(path: Path) -> bool:
    """Return whether `path` is a checkpoint; a folder of checkpoints has no digests."""
    try:
        return (path / DIGESTS).exists()
    except PermissionError as error:
        raise access_error(path, error) from error


def read_digests(path: Path) -> dict[str, Digest]:
    """Return the digests of the checkpoint `path`."""
    _check_is_checkpoint(path)
    with open_explained(path / DIGESTS) as file:
        content = file.read()
    body = parsed(content)
    if body is None or body.get("format") != _HEAD["format"]:
        message = f"{path / DIGESTS} is damaged: its {len(content)} bytes are not a file of digests. {_REMEDY}"
        raise DamagedCheckpointError(message, path=path / DIGESTS)
    # Checked first, because a newer version may write other keys.
    _check_version(path, body.get("version"))
    try:
        digests = {name: Digest(**entry) for name, entry in body["files"].items()}
    except (AttributeError, KeyError, TypeError):
        digests = {}
    # Encoding it again must give the same bytes; this detects any changed byte.
    if not _are_of_one_checkpoint(digests.keys()) or digests_bytes(digests) != content:
        message = f"{path / DIGESTS} is damaged: its {len(content)} bytes are not what this version writes. {_REMEDY}"
        raise DamagedCheckpointError(message, path=path / DIGESTS)
    return digests


@contextmanager
def open_intact(path: Path, digest: Digest) -> Iterator[BufferedReader]:
    """Open a file after comparing its length and SHA-256 with `digest`."""
    with open_explained(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes < digest.num_bytes:
            message = (
                f"{path} is truncated: it has {num_bytes} of the {digest.num_bytes} bytes that were written. {_REMEDY}"
            )
            raise TruncatedCheckpointError(message, path=path)
        if num_bytes > digest.num_bytes:
            message = f"{path} is damaged: it has {num_bytes} bytes, and {digest.num_bytes} were written. {_REMEDY}"
            raise DamagedCheckpointError(message, path=path)
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != digest.sha256:
            message = f"{path} is damaged: its SHA-256 is {sha256}, and {digest.sha256} was written. {_REMEDY}"
            raise DamagedCheckpointError(message, path=path)
        # Read once for the digest and once to parse, so that only verified bytes are parsed.
        file.seek(0)
        yield file


@contextmanager
def open_explained(path: Path) -> Iterator[BufferedReader]:
    """Open a file of a checkpoint; raise an error with an explanation if that fails."""
    try:
        # Links are followed. Opening a FIFO would block.
        if not path.is_file():
            message = f"{path} is missing from the checkpoint: no such file. {_REMEDY}"
            raise DamagedCheckpointError(message, path=path)
        with path.open("rb") as file:
            yield file
    except PermissionError as error:
        raise access_error(path, error) from error
    except OSError as error:
        # A bad sector gives EIO; other errors do not show damage.
        if error.errno != errno.EIO:
            raise
        message = f"{path} is damaged: it cannot be read from the disk ({error}). {_REMEDY}"
        raise DamagedCheckpointError(message, path=path) from error


def access_error(path: Path, error: OSError) -> CheckpointAccessError:
    """Return the error to raise if the system denies access to `path`."""
    user = f" (user {os.geteuid()})" if hasattr(os, "geteuid") else ""
    message = f"this process{user} may not access {error.filename or path}: {error.strerror}. Correct its permissions."
    return CheckpointAccessError(message, path=Path(error.filename or path))


def _names_in(path: Path, remedy: str) -> set[str]:
    """Return the names in a folder; raise an error with an explanation and `remedy` if that fails."""
    try:
        return {entry.name for entry in path.iterdir()}
    except FileNotFoundError as error:
        message = f"no checkpoint at {path}: no such folder. See list_checkpoints(folder)."
        raise MissingCheckpointError(message, path=path) from error
    except PermissionError as error:
        raise access_error(path, error) from error
    except OSError as error:
        if error.errno not in _NOT_A_FOLDER:
            raise
        message = f"{path} cannot be read as a folder ({error.strerror}). {remedy}"
        raise NotACheckpointError(message, path=path) from error


def _check_is_checkpoint(path: Path) -> None:
    names = _names_in(path, _REMEDY)
    if not names & {STATE, TENSORS, DIGESTS} and not any(map(_PART.fullmatch, names)):
        message = (
            f"{path} is not a checkpoint: it contains {', '.join(sorted(names)[:4]) or 'nothing'}, and none of "
            f"{STATE}, {TENSORS} and {DIGESTS}. Give a folder returned by list_checkpoints(folder)."
        )
        raise NotACheckpointError(message, path=path)


def _check_version(path: Path, version: object) -> None:
    if not isinstance(version, int) or version <= VERSION:
        return
    with open_explained(path / STATE) as file:
        body = parsed(file.read())
    if body is None or body.get("version") != version:  # a newer anybatch writes it to both files
        message = f"{path / DIGESTS} is damaged: its format version is {version}, but {STATE} has another. {_REMEDY}"
        raise DamagedCheckpointError(message, path=path / DIGESTS)
    message = (
        f"{path} has format version {version}, but this anybatch reads versions up to {VERSION}. Use the version of "
        "anybatch that wrote it, or a newer one."
    )
    raise NewerCheckpointError(message, path=path)


def parsed(content: bytes) -> dict[str, Any] | None:
    """Return the JSON object in `content`; None for anything else."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


SAVING, REPLACED, DELETING = ".saving", ".replaced", ".deleting"
_CHECKPOINT: Final = re.compile(r"step-(\d{8,})(\.replaced)?")
_HALF_WRITTEN: Final = re.compile(r"step-\d{8,}\.saving")
_HALF_REMOVED: Final = re.compile(r"step-\d{8,}(\.replaced)?\.deleting")


def folder_name(step: int) -> str:
    """Return the name of the checkpoint of `step`."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    step = step_in_name(path)
    assert step is not None, f"{path.name} is not the name of a checkpoint"
    return step


def step_in_name(path: Path) -> int | None:
    """Return the step in a folder's name; None if it is not the name of a checkpoint."""
    match = _CHECKPOINT.fullmatch(path.name)
    return None if match is None else int(match[1])


def list_checkpoints(folder: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Return the checkpoints in `folder` by name, oldest step first; empty if the folder does not exist.

    A name that ends in ".replaced" is the former checkpoint of its step, left by a killed run.

    Raises:
        NotACheckpointError: `folder` is not a folder.
        CheckpointAccessError: no permission to read it.
    """
    folder = Path(folder)
    try:
        names = _names_in(folder, "Pass the folder that was passed to save.")
        paths = [folder / name for name in names if _CHECKPOINT.fullmatch(name)]
    except MissingCheckpointError:
        return ()
    # The former checkpoint of a step comes before its replacement, so that the newest is last.
    return tuple(sorted(paths, key=lambda path: (step_of(path), not path.suffix)))


def make_folders(folder: Path, *, disk: Disk) -> None:
    """Create a folder and its missing parents, synced to survive a power failure."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    # From the top down; each name is synced before the folder is used.
    for path in reversed(missing):
        disk.make_folder(path)
        disk.sync_folder(path.parent)


def tidy(folder: Path, *, disk: Disk) -> list[str]:
    """Remove incomplete folders of killed runs, and undo an interrupted replacement; return messages about failures."""
    failures = []
    for path in sorted(folder.iterdir()):
        if _HALF_WRITTEN.fullmatch(path.name):
            remove(path, disk=disk)
        elif _HALF_REMOVED.fullmatch(path.name):
            try:
                remove(path, disk=disk)
            except OSError as error:
                failures.append(f"could not remove {path}: {error}.")
        # If a run was killed between the two renames of `put_in_place`, only the former checkpoint exists.
        elif _CHECKPOINT.fullmatch(path.name) and path.suffix and not os.path.lexists(path.with_suffix("")):
            disk.rename(path, path.with_suffix(""))
    return failures


def put_in_place(partial: Path, target: Path, *, disk: Disk) -> None:
    """Rename `partial` to `target`, after renaming an existing `target`; at any moment one of them can be read."""
    former = target.with_suffix(REPLACED)
    # `target` may also be a broken link.
    if not os.path.lexists(target):
        disk.rename(partial, target)
    else:
        if os.path.lexists(former):
            discard(former, disk=disk)
        # POSIX cannot swap two folders atomically. Between these renames the former checkpoint is `former`.
        disk.rename(target, former)
        try:
            disk.rename(partial, target)
        except OSError:
            with suppress(OSError):
                disk.rename(former, target)
            raise
    disk.sync_folder(target.parent)


def prune(folder: Path, *, step: int, keep_last: int, disk: Disk) -> list[str]:
    """Remove all but the `keep_last` newest checkpoints up to `step` (itself included); return messages about failures.

    Checkpoints of later steps belong to another branch of the run; they are neither counted nor removed.
    """
    earlier = [path for path in list_checkpoints(folder) if step_of(path) <= step]
    # A ".replaced" folder without its replacement is the only checkpoint of its step, and counts.
    former = [path for path in earlier if path.suffix and path.with_suffix("") in earlier]
    current = [path for path in earlier if path not in former]
    failures = []
    for path in former + current[:-keep_last]:
        try:
            discard(path, disk=disk)
        except OSError as error:
            failures.append(f"could not remove {path}, which is not needed any more: {error}.")
    return failures


def discard(path: Path, *, disk: Disk) -> None:
    """Remove a checkpoint: rename it first, then remove its files."""
    renamed = path.with_name(path.name + DELETING)
    # After the rename, the remaining files of a killed process no longer look like a complete checkpoint.
    disk.rename(path, renamed)
    disk.sync_folder(path.parent)
    remove(renamed, disk=disk)


def remove(path: Path, *, disk: Disk) -> None:
    """Remove a folder with its contents, or a file or link."""
    if path.is_symlink() or not path.is_dir():
        disk.remove_file(path)
        return
    for entry in sorted(path.iterdir()):
        remove(entry, disk=disk)
    disk.remove_folder(path)
