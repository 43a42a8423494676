"""The files of a checkpoint: the state, its tensors, and their digests, which are written last.

Tensors are in one file, `tensors.safetensors`, or in one file of parts for each process that saved:
`tensors-00001-of-00004.safetensors`.

All files are readable without anybatch: two are JSON, the others safetensors. They contain no code, and nothing is
parsed before its digest is checked. Every version of the format keeps `digests.json` and `state.json` as JSON objects
with the keys "format" and "version".
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from anybatch.checkpoints.disk import Disk
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
_UNREADABLE: Final = frozenset({errno.ELOOP, errno.EIO})
"""Errors of one path alone: a link in a circle, a bad sector."""
_CURE = "Load an older checkpoint (load_latest does so automatically), and remove this one."


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
    """Return the names of the tensor files among the files of a checkpoint, in order."""
    return tuple(sorted(name for name in digests if name != STATE))


def _are_of_one_checkpoint(names: Iterable[str]) -> bool:
    found = set(names) - {STATE}
    return STATE in names and bool(found) and found == {part_name(one, len(found)) for one in range(len(found))}


def json_bytes(body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a JSON file that starts with its format and version, then `body`."""
    # NaN is not JSON; `pack` encodes it.
    text = json.dumps({**_HEAD, **body}, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode() + b"\n"


def digests_bytes(digests: Mapping[str, Digest]) -> bytes:
    """Return the file with the digests of the others."""
    return json_bytes({"files": {name: asdict(digest) for name, digest in digests.items()}})


def write_file(path: Path, blocks: Iterable[bytes | memoryview], *, disk: Disk) -> Digest:
    """Write and sync a new file, and return its digest; remove the file after an error of the disk."""
    sha256, num_bytes = hashlib.sha256(), 0
    with disk.create(path) as file:
        try:
            for block in blocks:
                disk.write(file, block)
                sha256.update(block)
                num_bytes += len(block)
            disk.sync(file)
        except OSError:
            # The message about a full disk counts the free bytes afterwards.
            with suppress(OSError):
                disk.remove_file(path)
            raise
    return Digest(num_bytes, sha256.hexdigest())


def has_digests(path: Path) -> bool:
    """Return whether `path` is one checkpoint; a folder of checkpoints has no digests."""
    try:
        return (path / DIGESTS).exists()
    except PermissionError as error:
        raise access_error(path, error) from error


def read_digests(path: Path) -> dict[str, Digest]:
    """Return the digests of the checkpoint `path`."""
    _refuse_foreign(path)
    with opened(path / DIGESTS) as file:
        content = file.read()
    body = parsed(content)
    if body is None or body.get("format") != _HEAD["format"]:
        message = f"{path / DIGESTS} is damaged: its {len(content)} bytes are not a file of digests. {_CURE}"
        raise DamagedCheckpointError(message, path=path / DIGESTS)
    # Checked first, because a newer version may write other keys.
    _refuse_newer(path, body.get("version"))
    try:
        digests = {name: Digest(**entry) for name, entry in body["files"].items()}
    except (AttributeError, KeyError, TypeError):
        digests = {}
    # Encoding it again must give the same bytes; this detects any changed byte.
    if not _are_of_one_checkpoint(digests.keys()) or digests_bytes(digests) != content:
        message = f"{path / DIGESTS} is damaged: its {len(content)} bytes are not what this version writes. {_CURE}"
        raise DamagedCheckpointError(message, path=path / DIGESTS)
    return digests


@contextmanager
def intact(path: Path, digest: Digest) -> Iterator[BufferedReader]:
    """Open a file after comparing its length and SHA-256 with `digest`."""
    with opened(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes < digest.num_bytes:
            message = (
                f"{path} is truncated: it has {num_bytes} of the {digest.num_bytes} bytes that were written. {_CURE}"
            )
            raise TruncatedCheckpointError(message, path=path)
        if num_bytes > digest.num_bytes:
            message = f"{path} is damaged: it has {num_bytes} bytes, and {digest.num_bytes} were written. {_CURE}"
            raise DamagedCheckpointError(message, path=path)
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != digest.sha256:
            message = f"{path} is damaged: its SHA-256 is {sha256}, and {digest.sha256} was written. {_CURE}"
            raise DamagedCheckpointError(message, path=path)
        # Read once for the digest and once to parse, so that only verified bytes are parsed.
        file.seek(0)
        yield file


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a file of a checkpoint, with an explanation if that fails."""
    try:
        # Links are followed. Opening a FIFO would block.
        if not path.is_file():
            message = f"{path} is missing from the checkpoint: no such file. {_CURE}"
            raise DamagedCheckpointError(message, path=path)
        with path.open("rb") as file:
            yield file
    except PermissionError as error:
        raise access_error(path, error) from error
    except OSError as error:
        # A bad sector gives EIO; other errors say nothing about the checkpoint.
        if error.errno != errno.EIO:
            raise
        message = f"{path} is damaged: the disk does not give its bytes ({error}). {_CURE}"
        raise DamagedCheckpointError(message, path=path) from error


def access_error(path: Path, error: OSError) -> CheckpointAccessError:
    """Return the error to raise where the system refuses `path`."""
    user = f" (user {os.geteuid()})" if hasattr(os, "geteuid") else ""
    message = (
        f"{error.filename or path} is not permitted to this process{user}: {error.strerror}. Correct its permissions."
    )
    return CheckpointAccessError(message, path=Path(error.filename or path))


def _refuse_foreign(path: Path) -> None:
    try:
        names = {entry.name for entry in path.iterdir()}
    except FileNotFoundError as error:
        message = f"no checkpoint at {path}: no such folder. See list_checkpoints(folder)."
        raise MissingCheckpointError(message, path=path) from error
    except NotADirectoryError as error:
        message = f"{path} is not a checkpoint: it is not a folder. Give the folder that contains {DIGESTS}."
        raise NotACheckpointError(message, path=path) from error
    except PermissionError as error:
        raise access_error(path, error) from error
    except OSError as error:
        if error.errno not in _UNREADABLE:
            raise
        message = f"{path} cannot be read as a folder ({error.strerror}). {_CURE}"
        raise NotACheckpointError(message, path=path) from error
    if not names & {STATE, TENSORS, DIGESTS} and not any(map(_PART.fullmatch, names)):
        message = (
            f"{path} is not a checkpoint: it contains {', '.join(sorted(names)[:4]) or 'nothing'}, and none of "
            f"{STATE}, {TENSORS} and {DIGESTS}. Give a folder returned by list_checkpoints(folder)."
        )
        raise NotACheckpointError(message, path=path)


def _refuse_newer(path: Path, version: object) -> None:
    if not isinstance(version, int) or version <= VERSION:
        return
    with opened(path / STATE) as file:
        body = parsed(file.read())
    if body is None or body.get("version") != version:  # both files say it, or one of them is damaged
        message = f"{path / DIGESTS} is damaged: it is of version {version}, and {STATE} is not. {_CURE}"
        raise DamagedCheckpointError(message, path=path / DIGESTS)
    message = (
        f"{path} is of format version {version}, and this anybatch knows versions up to {VERSION}. "
        "Load it with the anybatch that wrote it, or a newer one."
    )
    raise NewerCheckpointError(message, path=path)


def parsed(content: bytes) -> dict[str, Any] | None:
    """Return a JSON object; None for anything else."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None
