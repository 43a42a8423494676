"""The folder of a run's checkpoints: names, atomic replacement and removal.

```text
step-00000120            a checkpoint
step-00000120.replaced   also a checkpoint: the former one of that step, until the new one is in place
step-00000120.saving     being written, or left by a killed run; never read
step-00000120.deleting   being removed, or left by a killed run; never read
```

A folder gets a readable name by one rename, after all of it is on the disk, and loses it by one rename before any file
is removed. So a folder with such a name is always complete.
"""

import errno
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from anybatch.checkpoints.disk import Disk
from anybatch.checkpoints.files import access_error
from anybatch.errors import NotACheckpointError

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
    try:
        paths = [path for path in Path(folder).iterdir() if _CHECKPOINT.fullmatch(path.name)]
    except FileNotFoundError:
        return ()
    except NotADirectoryError as error:
        message = f"{folder} is not a folder of checkpoints but a file. Give the folder that save was given."
        raise NotACheckpointError(message, path=Path(folder)) from error
    except PermissionError as error:
        raise access_error(Path(folder), error) from error
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        message = f"{folder} is a symbolic link to itself. Give the folder that save was given."
        raise NotACheckpointError(message, path=Path(folder)) from error
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
    """Remove half-written and half-removed folders of killed runs, and undo half a replacement; return failures."""
    failures = []
    for path in sorted(folder.iterdir()):
        if _HALF_WRITTEN.fullmatch(path.name):
            remove(path, disk=disk)
        elif _HALF_REMOVED.fullmatch(path.name):
            try:
                remove(path, disk=disk)
            except OSError as error:
                failures.append(f"{path} was to be removed, and could not be: {error}.")
        # A run killed between the two renames of `put_in_place` left only the former checkpoint.
        elif _CHECKPOINT.fullmatch(path.name) and path.suffix and not os.path.lexists(path.with_suffix("")):
            disk.rename(path, path.with_suffix(""))
    return failures


def put_in_place(partial: Path, target: Path, *, disk: Disk) -> None:
    """Rename a written folder; an existing folder of that name stays readable under another name until then."""
    former = target.with_suffix(REPLACED)
    # A broken link is in the way, too.
    if not os.path.lexists(target):
        disk.rename(partial, target)
    else:
        if os.path.lexists(former):
            discard(former, disk=disk)
        # POSIX cannot swap two folders atomically. Between these renames the former one is readable by its name.
        disk.rename(target, former)
        try:
            disk.rename(partial, target)
        except OSError:
            with suppress(OSError):
                disk.rename(former, target)
            raise
    disk.sync_folder(target.parent)


def prune(folder: Path, *, step: int, keep_last: int, disk: Disk) -> list[str]:
    """Remove the oldest checkpoints up to `step`, except `keep_last` and the new one; return failures.

    Checkpoints of later steps belong to another branch of the run; they are neither counted nor removed.
    """
    upto = [path for path in list_checkpoints(folder) if step_of(path) <= step]
    # A former checkpoint without its successor is the only one of its step, and counts.
    former = [path for path in upto if path.suffix and path.with_suffix("") in upto]
    current = [path for path in upto if path not in former]
    failures = []
    for path in former + current[:-keep_last]:
        try:
            discard(path, disk=disk)
        except OSError as error:
            failures.append(f"could not remove {path}, which is not needed any more: {error}.")
    return failures


def discard(path: Path, *, disk: Disk) -> None:
    """Remove a checkpoint: rename it first, then remove its files."""
    doomed = path.with_name(path.name + DELETING)
    # After the rename, a killed process leaves nothing that looks complete.
    disk.rename(path, doomed)
    disk.sync_folder(path.parent)
    remove(doomed, disk=disk)


def remove(path: Path, *, disk: Disk) -> None:
    """Remove a folder with its contents, or a file or link."""
    if path.is_symlink() or not path.is_dir():
        disk.remove_file(path)
        return
    for entry in sorted(path.iterdir()):
        remove(entry, disk=disk)
    disk.remove_folder(path)
