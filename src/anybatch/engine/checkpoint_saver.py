"""Save checkpoints, with the run waiting or in the background, and load them on all ranks."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

from anybatch.checkpoints import LoadedCheckpoint, SavedCheckpoint
from anybatch.checkpoints.loading import candidates, newest_intact, stored_state, verify
from anybatch.checkpoints.saving import HeldPart, SharedSave
from anybatch.errors import CheckpointError, DamagedCheckpointError, MissingCheckpointError, NotACheckpointError
from anybatch.parallel.world import World


def num_processes(world: World) -> int:
    """Return the number of real processes, including this one; simulated ranks do not count."""
    return 1 if world.roll_call is None else world.num_processes


def _begin_on_all_ranks(
    make: Callable[[], SharedSave], writers: Sequence[int], world: World, *, copied: bool
) -> tuple[Path, SharedSave | None]:
    """Begin a checkpoint, and deal its parts to the processes that write it."""
    shares: list[SharedSave] = []
    writes = world.process in writers

    def begin() -> tuple[Path, list[HeldPart]]:
        shares.append(make())
        if world.is_first:
            shares[0].begin()
        return shares[0].path, shares[0].held

    def deal() -> None:
        shares[0].deal([begun[process][1] for process in writers])
        if copied:
            shares[0].stage()

    with _abandoned_after_error(shares, world):
        begun = world.run_on_all_processes(begin if writes else None)
        world.run_on_all_processes(deal if writes else None)
    return begun[world.first_process][0], shares[0] if writes else None


@contextmanager
def _abandoned_after_error(shares: Sequence[SharedSave | None], world: World) -> Iterator[None]:
    """After an error, remove the files written so far."""
    try:
        yield
    except BaseException:
        for share in shares:
            if share is not None and world.is_first:
                share.abandon()
        raise


@contextmanager
def loaded_on_all_ranks(path: Path, world: World) -> Iterator[LoadedCheckpoint]:
    """Open the newest intact checkpoint, the same one on every rank."""
    found: list[Path] = []

    def find() -> list[str]:
        found.extend(candidates(path))
        return [one.name for one in found]

    names = world.run_on_all_processes(find)
    # All ranks compare the same number of newest checkpoints; a rank may have more of the older ones.
    least = min(map(len, names))
    _refuse_different([own[len(own) - max(least, 1) :] for own in names], path)
    verify_together = partial(_verify_on_all_ranks, world=world)
    newest = newest_intact(path, tuple(found[len(found) - least :]), verify_together)
    with ExitStack() as stack:
        state: dict[str, Any] = {}

        def open_state() -> list[int]:
            state.update(stack.enter_context(stored_state(newest.path)))
            return [state["num_steps"]]

        _refuse_different(world.run_on_all_processes(open_state), path)
        yield replace(newest, state=state)


def _refuse_different(seen: Sequence[Sequence[Any]], path: Path) -> None:
    """Raise if ranks see different checkpoints; the last of each list is the newest."""
    if any(own != seen[0] for own in seen):
        message = (
            f"ranks see checkpoints of different steps in {path}: {[own[-1:] for own in seen]}. "
            "Put it on a file system that all ranks share."
        )
        raise CheckpointError(message, path=path)


def _verify_on_all_ranks(path: Path, world: World) -> None:
    """Verify a checkpoint's digests; raise the error of any rank on all ranks."""

    def compare() -> CheckpointError | None:
        try:
            verify(path, process=world.process, num_processes=num_processes(world))
        except (DamagedCheckpointError, MissingCheckpointError, NotACheckpointError) as error:
            return error
        return None

    damage = next((error for error in world.run_on_all_processes(compare) if error is not None), None)
    if damage is not None:
        raise damage


# Interval at which the first process polls for the files of the others, which take seconds.
_LOOK_SECONDS = 0.02
# Polls in `close`: ten minutes, the usual timeout between ranks.
_MOST_LOOKS = 30_000


@final
class CheckpointSaver:
    """Writes checkpoints, at most one at a time in the background.

    A thread of each process writes the data that the process has copied; on the first process it renames the checkpoint
    when all files are complete. Threads use no collectives, which could interfere with a step.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.writing: _BackgroundWrite | None = None

    def save(
        self, folder: Path, step: int, state: Mapping[str, Any], *, keep_last: int, in_parts: bool, wait: bool
    ) -> tuple[Path, SavedCheckpoint | None]:
        """Write a checkpoint; return its path, and the checkpoint if it is complete."""
        world = self._world
        writers = range(num_processes(world)) if in_parts else [world.first_process]
        process = world.process if in_parts else 0
        make = partial(SharedSave, folder, step, state, process=process, num_processes=len(writers))
        path, share = _begin_on_all_ranks(partial(make, keep_last=keep_last), writers, world, copied=not wait)
        if not wait:
            self.writing = None if share is None else _BackgroundWrite(share, finishes=world.is_first)
            return path, None
        with _abandoned_after_error([share], world):
            written = world.run_on_all_processes(None if share is None else share.write)
            digests = [written[process] for process in writers]
            finish = partial(share.finish, digests) if share is not None and world.is_first else None
            return path, world.run_on_all_ranks(finish)[0]

    def completed(self) -> SavedCheckpoint | None:
        """Return a checkpoint that was completed in the background since the last call, without waiting."""
        return None if self.writing is None else self.writing.news()

    @property
    def failure(self) -> str:
        """Error of the background save on this rank so far; empty without one.

        Raised only in calls that all ranks make together: a rank that leaves a step alone would block the others.
        """
        return "" if self.writing is None else self.writing.failure

    def settle(self) -> SavedCheckpoint | None:
        """Wait on all ranks for the background save; return its checkpoint unless it was returned before."""
        writing, self.writing = self.writing, None
        try:
            self._world.run_on_all_processes(None if writing is None else writing.join_writing)
        except BaseException:
            if writing is not None:
                writing.stop()
            raise
        # All files are written, so the first process no longer waits for other ranks.
        self._world.run_on_all_ranks(None if writing is None else writing.join)
        return None if writing is None else writing.news()

    def close(self, *, failed: bool) -> SavedCheckpoint | None:
        """Wait for the background save on this rank alone, and return its checkpoint as `completed` does."""
        writing, self.writing = self.writing, None
        if writing is None:
            return None
        for _ in range(_MOST_LOOKS):
            failed = failed or self._world.published_failure() is not None
            if failed or writing.ended_within(_LOOK_SECONDS):
                break
        writing.stop()
        if failed:  # the failed rank reports the reason
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
        # A daemon does not block a process that exits without closing its engine; its partial file is never read.
        self._thread = threading.Thread(target=self._run, name="anybatch checkpoint", daemon=True)
        self._thread.start()

    def news(self) -> SavedCheckpoint | None:
        """Return the completed checkpoint, once."""
        saved, self._saved = self._saved, None
        return saved

    @property
    def failure(self) -> str:
        """The error so far; empty without one."""
        return "" if self._error is None else str(self._error)

    def join_writing(self) -> None:
        """Wait for this process's file; raise its error."""
        self._has_written.wait()
        self._refuse_failed()

    def join(self) -> None:
        """Wait for the thread; raise its error."""
        self._thread.join()
        self._refuse_failed()

    def ended_within(self, seconds: float) -> bool:
        """Wait at most `seconds` for the thread; return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Wait for this process's file, but not for the files of other processes."""
        self._gives_up.set()
        self._thread.join()

    def _refuse_failed(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._write()
            self._has_written.set()
            if self._finishes:
                self._saved = self._finish()
        except Exception as error:  # noqa: BLE001 (the next call that all ranks make together raises it)
            self._error = error
            if self._finishes:
                self._sharing.abandon()
        finally:
            self._has_written.set()

    def _write(self) -> None:
        try:
            digest = self._sharing.write()
        except Exception as error:
            # If this fails too, as on a full disk, `settle` reports the error to the first process.
            with suppress(OSError):
                self._sharing.leave(None, str(error))
            raise
        self._sharing.leave(digest)

    def _finish(self) -> SavedCheckpoint:
        while (digests := self._sharing.left()) is None:
            if self._gives_up.wait(_LOOK_SECONDS):
                message = (
                    f"{self._sharing.path} could not be saved: another rank ended before it had written its part. "
                    "Older checkpoints are unchanged."
                )
                raise CheckpointError(message, path=self._sharing.path)
        return self._sharing.finish(digests)
