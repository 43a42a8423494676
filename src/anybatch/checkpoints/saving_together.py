"""Save with several processes: each writes its parts, and the first one renames the folder.

```text
all      SharedSave(...)           packs the state of the process; refuses values that cannot be restored
first    begin()                   creates the folder, under a temporary name
all      write()                   writes this process's file, and returns its digest
first    finish(digests)           writes the rest, and renames the folder atomically
```

The caller synchronises the processes between these calls. Background threads use files in the folder instead: `leave`
writes a digest or an error, which the first process reads with `left`.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from anybatch.checkpoints.disk import LOCAL_DISK, Disk
from anybatch.checkpoints.files import (
    DIGESTS,
    STATE,
    Digest,
    digests_bytes,
    json_bytes,
    part_name,
    write_file,
)
from anybatch.checkpoints.folder import SAVING, folder_name, make_folders, put_in_place, remove, tidy
from anybatch.checkpoints.parts import HeldPart, assign_parts, held_parts
from anybatch.checkpoints.saving import SavedCheckpoint, file_errors_explained, finish_saving
from anybatch.checkpoints.structure import TensorPart, pack_parts
from anybatch.checkpoints.tensors import file_layout
from anybatch.core.whole_numbers import checked_int
from anybatch.errors import CheckpointError


@final
class SharedSave:
    """One process's share in saving a checkpoint of parts; arguments as for `save`.

    `folder` is on a shared file system. In `state`, a `TensorPart` replaces a tensor of which this process has a part,
    and a tensor without data one of other processes. Names and other values are written by process 0, the first one.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        step: int,
        state: Mapping[Any, Any],
        *,
        process: int,
        num_processes: int,
        keep_last: int = 2,
        disk: Disk = LOCAL_DISK,
    ) -> None:
        checked_int("step", step, least=0)
        checked_int("keep_last", keep_last)
        packed = pack_parts(state)
        self._state = json_bytes({"step": step, "state": packed.structure})
        self._parts: Mapping[str, TensorPart] = packed.parts
        self._process, self._num_processes = process, num_processes
        self._keep_last, self._disk = keep_last, disk
        self._target = Path(folder) / folder_name(step)
        self._partial = self._target.with_name(self._target.name + SAVING)
        self._warnings: list[str] = []

    @property
    def path(self) -> Path:
        """The final folder of the checkpoint."""
        return self._target

    @property
    def held(self) -> list[HeldPart]:
        """The parts of this process, to exchange with the others."""
        return held_parts(self._parts)

    def begin(self) -> None:
        """Make the folder that all processes write into."""
        folder = self._target.parent
        with file_errors_explained(self._target, self._num_bytes, self._disk):
            make_folders(folder, disk=self._disk)
            self._warnings += tidy(folder, disk=self._disk)
            self._disk.make_folder(self._partial)
            self._disk.sync_folder(folder)

    def deal(self, told: Sequence[Sequence[HeldPart]]) -> None:
        """Keep the parts that this process writes, and free the rest."""
        dealt = assign_parts(told)[self._process]
        self._parts = {name: self._parts[name] for name, _ in dealt}

    def stage(self) -> None:
        """Copy the parts that this process writes to host memory, so that training may continue."""
        self._parts = {
            name: TensorPart(held.part.detach().to("cpu", copy=True), held.shape, held.offset)
            for name, held in self._parts.items()
        }

    def write(self) -> Digest:
        """Write this process's file, and return its digest."""
        with file_errors_explained(self._target, self._num_bytes, self._disk):
            if not self._partial.is_dir():
                message = (
                    f"{self._target} could not be saved: process {self._process} does not see the folder that the "
                    "first process has made. Save into a folder that all processes share, or whole tensors by the "
                    "first process alone: engine.save(folder, sharded=False)."
                )
                raise CheckpointError(message, path=self._target)
            offsets = {name: held.offset for name, held in self._parts.items()} if self._num_processes > 1 else None
            laid_out = file_layout({name: held.part for name, held in self._parts.items()}, offsets=offsets)
            path = self._partial / part_name(self._process, self._num_processes)
            return write_file(path, laid_out.blocks(), disk=self._disk)

    def leave(self, digest: Digest | None, reason: str = "") -> None:
        """Report success or failure to the first process, by a small file next to the written one."""
        note = self._note(self._process)
        draft = note.with_suffix(".draft")
        body = {"digest": None if digest is None else asdict(digest), "reason": reason}
        write_file(draft, [json_bytes(body)], disk=self._disk)
        # Renamed, so that nobody reads a partial file.
        self._disk.rename(draft, note)

    def left(self) -> list[Digest] | None:
        """Return the digests of all processes and remove their reports; None while some are missing."""
        notes = [self._note(process) for process in range(self._num_processes)]
        if not all(note.exists() for note in notes):
            return None
        found = [json.loads(note.read_bytes()) for note in notes]
        for process, body in enumerate(found):
            if body["digest"] is None:
                message = f"{self._target} could not be saved: process {process} failed: {body['reason']}"
                raise CheckpointError(message, path=self._target)
        for note in notes:
            self._disk.remove_file(note)
        return [Digest(**body["digest"]) for body in found]

    def _note(self, process: int) -> Path:
        return self._partial / f"{part_name(process, self._num_processes)}.written"

    def finish(self, digests: Sequence[Digest]) -> SavedCheckpoint:
        """Write the rest of the state, rename the folder, and remove the oldest checkpoints."""
        num_bytes = sum(digest.num_bytes for digest in digests) + len(self._state)
        with file_errors_explained(self._target, num_bytes, self._disk):
            state = write_file(self._partial / STATE, [self._state], disk=self._disk)
            parts = {part_name(process, len(digests)): digest for process, digest in enumerate(digests)}
            last = digests_bytes({STATE: state, **parts})
            # Written last, so that its presence proves that the others are complete.
            write_file(self._partial / DIGESTS, [last], disk=self._disk)
            self._disk.sync_folder(self._partial)
            put_in_place(self._partial, self._target, disk=self._disk)
        return finish_saving(
            self._target, num_bytes + len(last), self._warnings, keep_last=self._keep_last, disk=self._disk
        )

    def abandon(self) -> None:
        """Remove the written files if possible; the next save removes the rest."""
        with suppress(OSError):
            remove(self._partial, disk=self._disk)

    @property
    def _num_bytes(self) -> int:
        return len(self._state) + sum(held.part.nbytes for held in self._parts.values())
