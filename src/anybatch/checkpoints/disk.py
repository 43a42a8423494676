"""The seam to the file system: everything that saving a checkpoint does to it, one operation per method.

Saving is correct if the process may die between any two of these operations, and in the middle of a `write`.
"""

import os
import shutil
from io import FileIO
from pathlib import Path
from typing import Final, Protocol, final


class Disk(Protocol):
    """The operations of a file system that saving needs. Each may raise OSError."""

    def make_folder(self, path: Path, /) -> None:
        """Make a folder that does not exist yet; its parent does."""

    def create(self, path: Path, /) -> FileIO:
        """Open a file that does not exist yet, to be written without a buffer."""

    def write(self, file: FileIO, block: bytes | memoryview, /) -> None:
        """Append all of `block`."""

    def sync(self, file: FileIO, /) -> None:
        """Return once the bytes of `file` would survive a power failure."""

    def sync_folder(self, path: Path, /) -> None:
        """Return once the names in a folder would survive a power failure."""

    def rename(self, path: Path, new: Path, /) -> None:
        """Rename within a folder, in one indivisible operation; `new` does not exist."""

    def remove_file(self, path: Path, /) -> None:
        """Remove a file, or a link."""

    def remove_folder(self, path: Path, /) -> None:
        """Remove an empty folder."""

    def free_bytes(self, path: Path, /) -> int:
        """Return how many bytes can be written where the folder `path` is, or will be."""


@final
class LocalDisk:
    """The file system as the operating system gives it."""

    __slots__ = ()

    def make_folder(self, path: Path, /) -> None:
        """Make a folder."""
        path.mkdir()

    def create(self, path: Path, /) -> FileIO:
        """Open a new file."""
        # Unbuffered, so that an error comes from the write that it belongs to, and a sync leaves nothing unwritten.
        return path.open("xb", buffering=0)

    def write(self, file: FileIO, block: bytes | memoryview, /) -> None:
        """Append a block, repeating partial writes."""
        unwritten = memoryview(block)
        while unwritten:
            unwritten = unwritten[file.write(unwritten) :]

    def sync(self, file: FileIO, /) -> None:
        """Bring a file's bytes to the disk itself."""
        os.fsync(file.fileno())

    def sync_folder(self, path: Path, /) -> None:
        """Bring a folder's names to the disk itself."""
        if os.name == "nt":  # Windows cannot open a folder, and syncs its names automatically
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, new: Path, /) -> None:
        """Rename a file or folder."""
        path.rename(new)

    def remove_file(self, path: Path, /) -> None:
        """Remove a file or link."""
        path.unlink()

    def remove_folder(self, path: Path, /) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def free_bytes(self, path: Path, /) -> int:
        """Return the room that an ordinary user has on the file system of `path`."""
        # The folder itself may not have been made yet.
        existing = next(place for place in (path, *path.absolute().parents) if place.exists())
        return shutil.disk_usage(existing).free


LOCAL_DISK: Final = LocalDisk()
