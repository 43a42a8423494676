"""Save checkpoints, with the run waiting or in the background, and load them on all ranks."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

from anybatch.checkpoints import LoadedCheckpoint, SavedCheckpoint
from anybatch.checkpoints.files import Digest
from anybatch.checkpoints.loading import candidates, newest_intact, stored_state, verify
from anybatch.checkpoints.saving import LocalPart, SharedSave
from anybatch.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MissingCheckpointError,
    NotACheckpointError,
)
from anybatch.parallel.world import World


def num_processes(world: World) -> int:
    """Return the number of real processes, including this one; simulated ranks do not count."""
    return 1 if world.call_tracker is None else world.size


@contextmanager
def loaded_on_all_ranks(path: Path, world: World) -> Iterator[LoadedCheckpoint]:
    """Open the newest intact checkpoint, the same one on every rank."""
    checkpoints: list[Path] = []

    def find() -> list[str]:
        checkpoints.extend(candidates(path))
        return [checkpoint.name for checkpoint in checkpoints]

    names = world.run_on_all_ranks(find)
    _check_same_checkpoint([names_on_rank[-1:] for names_on_rank in names], path)
    # Some ranks may see older checkpoints that other ranks do not see.
    common = tuple(item for item in checkpoints if all(item.name in names_on_rank for names_on_rank in names))
    newest = newest_intact(path, common, partial(_verify_on_all_ranks, world=world))
    with ExitStack() as stack:
        state: dict[str, Any] = {}

        def open_state() -> list[int]:
            state.update(stack.enter_context(stored_state(newest.path)))
            return [state["num_steps"]]

        _check_same_checkpoint(world.run_on_all_ranks(open_state), path)
        yield replace(newest, state=state)


def _check_same_checkpoint(seen: Sequence[Sequence[Any]], path: Path) -> None:
    """Raise if ranks see different checkpoints; `seen` has the name or step of each rank's newest checkpoint."""
    if any(on_rank != seen[0] for on_rank in seen):
        message = (
            f"ranks see checkpoints of different steps in {path}: {list(seen)}. "
            "Put this folder on a file system that all ranks share."
        )
        raise CheckpointError(message, path=path)


def _verify_on_all_ranks(path: Path, world: World) -> None:
    """Verify a checkpoint's digests; raise the error of any rank on all ranks."""

    def compare() -> CheckpointError | None:
        try:
            verify(path, process=world.rank, num_processes=num_processes(world))
        except (DamagedCheckpointError, MissingCheckpointError, NotACheckpointError) as error:
            return error
        return None

    damage = next((error for error in world.run_on_all_ranks(compare) if error is not None), None)
    if damage is not None:
        raise damage


@final
class CheckpointSaver:
    """Writes checkpoints, at most one at a time in the background.

    Only a checkpoint that one process writes alone can be written in the background, by a thread of the first process.
    The thread uses no collectives, because they could interfere with the collectives of a step.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.writing: _BackgroundWrite | None = None

    def save(
        self, folder: Path, step: int, state: Mapping[str, Any], *, keep_last: int, in_parts: bool, wait: bool
    ) -> tuple[Path, SavedCheckpoint | None]:
        """Write a checkpoint; return its path, and the completed checkpoint (None if a thread still writes it)."""
        world = self._world
        writers = range(num_processes(world)) if in_parts else [0]
        saves: list[SharedSave] = []  # this rank's part of the save; empty before `begin` has run

        def begin() -> tuple[Path, list[LocalPart]]:
            process = world.rank if in_parts else 0
            save = SharedSave(folder, step, state, process=process, num_processes=len(writers), keep_last=keep_last)
            saves.append(save)
            if world.is_first:
                save.begin()
            return save.path, save.local_parts

        def write() -> Digest | None:
            saves[0].assign([begun[rank][1] for rank in writers])
            if wait:
                return saves[0].write()
            saves[0].stage()
            return None

        writes = world.rank in writers
        try:
            begun = world.run_on_all_ranks(begin if writes else None)
            written = world.run_on_all_ranks(write if writes else None)
            path = begun[0][0]
            if not wait:
                self.writing = _BackgroundWrite(saves[0]) if writes else None
                return path, None
            finish = partial(saves[0].finish, [written[rank] for rank in writers]) if world.is_first else None
            return path, world.run_on_all_ranks(finish)[0]
        except BaseException:
            if saves and world.is_first:
                saves[0].abandon()
            raise

    def completed(self) -> SavedCheckpoint | None:
        """Return a checkpoint that was completed in the background since the last call, without waiting."""
        return None if self.writing is None else self.writing.take_completed()

    @property
    def failure(self) -> str:
        """Error of the background save on this rank so far; empty without one.

        Only calls that all ranks make together raise it: an error on one rank during a step would hang other ranks.
        """
        return "" if self.writing is None else str(self.writing.error or "")

    def settle(self) -> SavedCheckpoint | None:
        """Wait on all ranks for the background save; return its checkpoint unless it was returned before."""
        writing, self.writing = self.writing, None
        self._world.run_on_all_ranks(None if writing is None else writing.join)
        return None if writing is None else writing.take_completed()

    def close(self, *, failed: bool) -> SavedCheckpoint | None:
        """Wait for the background save on this rank alone, and return its checkpoint as `completed` does."""
        writing, self.writing = self.writing, None
        if writing is None:
            return None
        with suppress(Exception) if failed else nullcontext():  # after an error, a second one would hide the first
            writing.join()
        return writing.take_completed()


class _BackgroundWrite:
    """A thread of the first process that writes a whole checkpoint."""

    def __init__(self, saving: SharedSave) -> None:
        self._saving = saving
        self._saved: SavedCheckpoint | None = None
        self.error: Exception | None = None
        # A daemon thread does not block a process that exits without closing its engine. `load` ignores partial files.
        self._thread = threading.Thread(target=self._run, name="anybatch checkpoint", daemon=True)
        self._thread.start()

    def take_completed(self) -> SavedCheckpoint | None:
        """Return the completed checkpoint in the first call after its completion, and None in all other calls."""
        saved, self._saved = self._saved, None
        return saved

    def join(self) -> None:
        """Wait for the thread; raise its error."""
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            self._saved = self._saving.finish([self._saving.write()])
        except Exception as error:  # noqa: BLE001 (the next call that all ranks make together raises it)
            self.error = error
            self._saving.abandon()
