"""The folder of a run: its files, who may write them, and the settings asked for.

```text
runs/digits-20300131-120000/
├── run.json             the settings asked for, and from which step on; read to resume
├── run.lock             host and process id of the newest session, which holds a lock on it
├── events.jsonl         rank 0's log; events-rank-1.jsonl is rank 1's
├── losses.png           drawn at the end of a session, where matplotlib is installed; losses.svg is the same
├── tensorboard/         what TensorBoard shows, where it is installed
└── checkpoints/
    └── step-00000120
```
"""

import dataclasses
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from anybatch.errors import CheckpointAccessError, CheckpointError, MissingCheckpointError, UserError
from anybatch.recipes.run.settings import Settings

_VERSION = 1
Origin = Mapping[str, str | int]
NO_ORIGIN: Origin = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Stretch:
    """Part of a run with the same settings.

    Attributes:
        first_step: number of its first step.
        settings: those of its steps.
        schedule_steps: steps that the learning-rate schedule was made for; None if that is not known.
    """

    first_step: int
    settings: Settings
    schedule_steps: int | None


@dataclass(frozen=True, slots=True)
class RunHeader:
    """The request that began a run, and the settings of each stretch of it.

    Attributes:
        origin: how it was asked for, in the words of the command: the recipe, the number of ranks.
        stretches: its parts, in the order of their first steps; at least one.
        largest_micro_batch_size: most samples of one forward and backward since larger ones ran out of memory in a step
            that could not be repeated; None if none did.
    """

    origin: Origin
    stretches: tuple[Stretch, ...]
    largest_micro_batch_size: int | None = None

    def before(self, step: int) -> Stretch:
        """Return the part whose settings a checkpoint of `step` was made under: a change at `step` comes after it."""
        earlier = [stretch for stretch in self.stretches if stretch.first_step < step]
        return earlier[-1] if earlier else self.stretches[0]

    def with_change(self, change: Stretch) -> "RunHeader":
        """Return this header with another last part."""
        earlier = [each for each in self.stretches if each.first_step < change.first_step]
        return dataclasses.replace(self, stretches=(*earlier, change))


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    @property
    def header(self) -> Path:
        """The file with what the run was asked for."""
        return self.path / "run.json"

    @property
    def lock(self) -> Path:
        """The file that the session holds a lock on."""
        return self.path / "run.lock"

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.path / "checkpoints"

    @property
    def plots(self) -> tuple[Path, Path]:
        """The pictures of its losses."""
        return self.path / "losses.png", self.path / "losses.svg"

    @property
    def tensorboard(self) -> Path:
        """The folder of what TensorBoard shows."""
        return self.path / "tensorboard"

    def log(self, rank: int) -> Path:
        """Return the log of a rank."""
        return self.path / (f"events-rank-{rank}.jsonl" if rank else "events.jsonl")

    def refuse_used(self) -> None:
        """Refuse to begin a run where something else is.

        Raises:
            UserError: there is something.
            CheckpointAccessError: the folder may not be read.
        """
        try:
            used = self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir()))
        except PermissionError as error:
            raise _no_access(self.path, error) from error
        if not used:
            return
        kind = "a folder that is not empty" if self.path.is_dir() else "a file"
        cure = (
            "To go on with the run in it, add --resume; for a new run name another folder."
            if self.header.exists()
            else "Name another folder."
        )
        message = f"{self.path} is {kind}. {cure}"
        raise UserError(message)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes of this host from training in the folder.

        The system releases the lock when the process ends, even if it is killed. A lock held on another host is
        ignored: after that host has failed, a shared file system may keep it for minutes. Windows has no such lock.

        Raises:
            UserError: another process trains in the folder.
            CheckpointAccessError: the folder may not be written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = self.lock.open("a+", encoding="utf-8")
        except PermissionError as error:
            raise _no_access(self.path, error) from error
        with file:
            holder = _lock(file)
            if holder is not None:
                message = (
                    f"process {holder} is training in {self.path}. Wait until it has ended, or stop it, before you "
                    "resume this run; for a new run choose another folder."
                )
                raise UserError(message)
            yield

    def read(self) -> RunHeader:
        """Return the header of the run.

        Raises:
            MissingCheckpointError: no run was begun here.
            CheckpointError: the file is not what was written.
        """
        try:
            text = self.header.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            message = (
                f"there is no run to go on with in {self.path}: {self.header.name} is missing. "
                "Name the folder of a run, or begin one without --resume."
            )
            raise MissingCheckpointError(message, path=self.header) from None
        except PermissionError as error:
            raise _no_access(self.header, error) from error
        try:
            found = json.loads(text)
            stretches = [
                Stretch(each["first_step"], Settings.from_json(each["settings"]), each["schedule_steps"])
                for each in found["stretches"]
            ]
            # With a default: folders of runs that were begun before this was kept are read, too.
            largest = found.get("largest_micro_batch_size")
            return RunHeader(found["origin"], (stretches[0], *stretches[1:]), largest)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            message = (
                f"{self.header} is not what this version of anybatch writes ({error!r}). "
                "Begin a new run, or use the version that began this one."
            )
            raise CheckpointError(message, path=self.header) from error

    def write(self, header: RunHeader) -> None:
        """Write down what the run is asked for, so that it is there as a whole or not at all."""
        content: dict[str, Any] = {
            "version": _VERSION,
            "origin": dict(header.origin),
            "stretches": [
                {
                    "first_step": stretch.first_step,
                    "settings": stretch.settings.as_json(),
                    "schedule_steps": stretch.schedule_steps,
                }
                for stretch in header.stretches
            ],
            "largest_micro_batch_size": header.largest_micro_batch_size,
        }
        partial = self.header.with_name(f"{self.header.name}.saving")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with partial.open("w", encoding="utf-8") as file:
                file.write(json.dumps(content, indent=2) + "\n")
                file.flush()
                # On the disk before it is renamed: after a power failure the new name must not stand for an empty file.
                os.fsync(file.fileno())
            # A rename on one file system is indivisible: a killed run leaves the old header or the new one.
            partial.replace(self.header)
        except PermissionError as error:
            raise _no_access(self.path, error) from error

    def clear(self, rank: int) -> None:
        """Remove what a rank has written of a run that made no step, and the folder if nothing else is in it."""
        # Best effort: the folder may hold files of the user's, and then stays.
        with suppress(OSError):
            self.log(rank).unlink(missing_ok=True)
            if rank == 0:
                self.header.unlink(missing_ok=True)
                self.lock.unlink(missing_ok=True)
                shutil.rmtree(self.tensorboard, ignore_errors=True)
            self.path.rmdir()


def _lock(file: TextIO) -> str | None:
    """Lock a file for this process and write its id there; return the id of another process that holds it."""
    if sys.platform == "win32":
        return None
    import fcntl  # noqa: PLC0415 (missing on Windows)

    host = platform.node()
    try:
        # A POSIX lock: data workers that outlive a killed rank do not inherit it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows either
        file.seek(0)
        holder_host, _, holder = file.read().partition(" ")
        return holder if holder_host == host else None
    except OSError:  # a file system without locks
        return None
    file.truncate(0)
    file.write(f"{host} {os.getpid()}")
    file.flush()
    return None


def _no_access(path: Path, error: OSError) -> CheckpointAccessError:
    message = f"{path} cannot be used: {error.strerror}. Name another folder, or change its rights."
    return CheckpointAccessError(message, path=path)
