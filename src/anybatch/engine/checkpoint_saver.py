"""Saves checkpoints while the run waits, or while it goes on."""

import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from anybatch.checkpoints import SavedCheckpoint
from anybatch.checkpoints.saving_together import SharedSave
from anybatch.engine.checkpoint_files import begin_on_all_ranks, save_on_all_ranks, save_on_first_rank
from anybatch.errors import CheckpointError
from anybatch.parallel.world import World

# How often the first process looks whether the others have written; they take seconds.
_LOOK_SECONDS = 0.02
# How often it does so when nothing else is left to do: for ten minutes, as ranks wait for each other elsewhere.
_MOST_LOOKS = 30_000


@final
class CheckpointSaver:
    """Writes checkpoints, at most one at a time in the background.

    A thread of each process writes what the process has copied before; that of the first process gives the checkpoint
    its name when the files of all are there. No thread talks to another rank, so no collective can meet one of a step.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._writing: _BackgroundWrite | None = None

    def save(
        self, folder: Path, step: int, state: Mapping[str, Any], *, keep_last: int, in_parts: bool
    ) -> SavedCheckpoint:
        """Write a checkpoint, and return on all ranks when it is complete.

        Args:
            folder: of the run's checkpoints.
            step: of the checkpoint.
            state: as `collect_state` returns it, in parts or whole.
            keep_last: how many are kept.
            in_parts: which of these it is.

        Raises:
            CheckpointError: on the rank that could not; a RankFailedError carries it on the others.
        """
        if not in_parts:
            return save_on_first_rank(folder, step, state, self._world, keep_last=keep_last)
        sharing = begin_on_all_ranks(folder, step, state, self._world, keep_last=keep_last)
        assert sharing is not None
        return save_on_all_ranks(sharing, self._world)

    def start(self, folder: Path, step: int, state: Mapping[str, Any], *, keep_last: int, in_parts: bool) -> Path:
        """Copy into the host's memory what a checkpoint takes, begin to write it, and return where it will be.

        Args and errors are those of `save`, as far as they show before anything is written.
        """
        sharing = begin_on_all_ranks(folder, step, state, self._world, keep_last=keep_last, alone=not in_parts)
        # Memory that runs out here leaves a folder that the next save removes, and nothing that is read.
        self._world.run_on_all_ranks(None if sharing is None else sharing.stage)
        if sharing is not None:
            self._writing = _BackgroundWrite(sharing, finishes=self._world.is_first)
        path: Path = self._world.run_on_all_ranks(lambda: None if sharing is None else sharing.path)[0]
        return path

    def completed(self) -> SavedCheckpoint | None:
        """Return what has been saved in the background since this was asked last, without waiting."""
        return None if self._writing is None else self._writing.news()

    @property
    def failure(self) -> str:
        """Why what was to be saved in the background could not be, as far as this rank knows by now; empty if it can.

        Not raised before all ranks can be told at once: one that left a step alone would leave messages behind.
        """
        return "" if self._writing is None else self._writing.failure

    def settle(self) -> SavedCheckpoint | None:
        """Wait on all ranks for what is being written, and return it where that has not been told yet.

        Raises:
            CheckpointError: it could not be saved; a RankFailedError carries it on the other ranks.
        """
        writing, self._writing = self._writing, None
        try:
            self._world.run_on_all_processes(None if writing is None else writing.join_writing)
        except BaseException:
            if writing is not None:
                writing.stop()
            raise
        # Every file is written, so the first process does not wait for another rank any more.
        self._world.run_on_all_ranks(None if writing is None else writing.join)
        return None if writing is None else writing.news()

    def close(self, *, failed: bool) -> SavedCheckpoint | None:
        """Wait for what is being written, and return it as `completed` does; other ranks do not take part.

        Args:
            failed: the run has ended by an error: a file of another rank that is not there yet will not come.

        Raises:
            CheckpointError: it could not be saved, or another rank ended before it had written its part.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        for _ in range(_MOST_LOOKS):
            failed = failed or self._world.published_failure() is not None
            if failed or writing.ended_within(_LOOK_SECONDS):
                break
        writing.stop()
        if failed:  # the rank that failed has said why
            return None
        writing.join()
        return writing.news()


class _BackgroundWrite:
    """A thread that writes this process's part of a checkpoint and, on the first process, completes it."""

    def __init__(self, sharing: SharedSave, *, finishes: bool) -> None:
        self._sharing = sharing
        self._finishes = finishes
        self._has_written = threading.Event()
        self._gives_up = threading.Event()
        self._saved: SavedCheckpoint | None = None
        self._error: Exception | None = None
        # A daemon: a process that ends without closing its engine is not held up, and leaves nothing that is read.
        self._thread = threading.Thread(target=self._run, name="anybatch checkpoint", daemon=True)
        self._thread.start()

    def news(self) -> SavedCheckpoint | None:
        """Return what was saved, once and as soon as it is known."""
        saved, self._saved = self._saved, None
        return saved

    @property
    def failure(self) -> str:
        """Why nothing was saved, as far as is known; empty if nothing has failed."""
        return "" if self._error is None else str(self._error)

    def join_writing(self) -> None:
        """Wait for this process's file; raises what has failed."""
        self._has_written.wait()
        self._refuse_failed()

    def join(self) -> None:
        """Wait until nothing is left to do; raises what has failed."""
        self._thread.join()
        self._refuse_failed()

    def ended_within(self, seconds: float) -> bool:
        """Wait so long for the thread; return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Wait for this process's file, and not for those of others."""
        self._gives_up.set()
        self._thread.join()

    def _refuse_failed(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            try:
                self._write()
            finally:
                self._has_written.set()
            if self._finishes:
                self._saved = self._finish()
        except Exception as error:  # noqa: BLE001 (raised by the next call that all ranks begin together)
            self._error = error
            if self._finishes:
                self._sharing.abandon()

    def _write(self) -> None:
        try:
            digest = self._sharing.write()
        except Exception as error:
            # Where this fails too, on a full disk, `settle` tells the first process.
            with suppress(OSError):
                self._sharing.leave(None, str(error))
            raise
        self._sharing.leave(digest)

    def _finish(self) -> SavedCheckpoint:
        while (digests := self._sharing.left()) is None:
            if self._gives_up.wait(_LOOK_SECONDS):
                message = (
                    f"{self._sharing.path} could not be saved: another rank ended before it had written its part. The "
                    "checkpoints that were there are as they were."
                )
                raise CheckpointError(message, path=self._sharing.path)
        return self._sharing.finish(digests)
