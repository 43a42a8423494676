"""Save checkpoints, with the run waiting or in the background, and load them on all ranks."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

from anybatch.checkpoints import LoadedCheckpoint, SavedCheckpoint, list_checkpoints, save
from anybatch.checkpoints.files import has_digests
from anybatch.checkpoints.loading import newest_intact, stored_state, verify
from anybatch.checkpoints.parts import HeldPart
from anybatch.checkpoints.saving_together import SharedSave
from anybatch.errors import CheckpointError, DamagedCheckpointError, MissingCheckpointError, NotACheckpointError
from anybatch.parallel.world import World


def save_on_first_rank(
    folder: Path, step: int, state: Mapping[str, Any], world: World, *, keep_last: int
) -> SavedCheckpoint:
    """Write a checkpoint on rank 0 while the others wait; return the saved checkpoint on every rank.

    Raises:
        CheckpointError: on rank 0, which could not write it; the others raise a RankFailedError with it.
    """

    def write() -> SavedCheckpoint:
        return save(folder, step, state, keep_last=keep_last)

    saved: SavedCheckpoint = world.run_on_all_ranks(write if world.is_first else None)[0]
    return saved


def save_on_all_ranks(sharing: SharedSave, world: World) -> SavedCheckpoint:
    """Write this process's part of a checkpoint that was begun; return the saved checkpoint on every rank.

    Raises:
        CheckpointError: on the rank that could not write; the others raise a RankFailedError with it.
    """
    try:
        digests = world.run_on_all_processes(sharing.write)[: num_processes(world)]
        finish = partial(sharing.finish, digests)
        saved: SavedCheckpoint = world.run_on_all_ranks(finish if world.is_first else None)[0]
    except BaseException:
        if world.is_first:
            sharing.abandon()
        raise
    return saved


def begin_save_on_all_ranks(
    folder: Path, step: int, state: Mapping[str, Any], world: World, *, keep_last: int, alone: bool = False
) -> SharedSave | None:
    """Begin a checkpoint on all processes, assign its parts, and return this process's share; None without one.

    Args:
        folder: of the run's checkpoints.
        step: of the checkpoint.
        state: of this process, see `collect_state`.
        world: the ranks.
        keep_last: number of checkpoints to keep.
        alone: the first process writes the whole checkpoint.

    Raises:
        CheckpointError, UserError: on the rank that failed; the others raise a RankFailedError with it.
    """
    sharing: SharedSave | None = None
    if alone:
        process, others = 0, 1
    else:
        process, others = world.process, num_processes(world)

    def begin() -> list[HeldPart]:
        nonlocal sharing
        sharing = SharedSave(folder, step, state, process=process, num_processes=others, keep_last=keep_last)
        if world.is_first:
            sharing.begin()
        return sharing.held

    def deal() -> None:
        if sharing is not None:
            sharing.deal([held[world.first_process]] if alone else held[:others])

    try:
        held = world.run_on_all_processes(begin if world.is_first or not alone else None)
        world.run_on_all_processes(deal)
    except BaseException:
        if world.is_first and sharing is not None:
            sharing.abandon()
        raise
    return sharing


def num_processes(world: World) -> int:
    """Return the number of real processes, including this one; simulated ranks do not count."""
    return 1 if world.roll_call is None else world.num_processes


@contextmanager
def loaded_on_all_ranks(path: Path, world: World) -> Iterator[LoadedCheckpoint]:
    """Open the newest intact checkpoint, the same one on every rank.

    Args:
        path: one checkpoint, or a folder of checkpoints.
        world: the ranks. Each verifies the digest of a file of whole tensors, or of some of the files of parts.

    Yields:
        The checkpoint; its tensors can be read from the files within the context.

    Raises:
        CheckpointError: no checkpoint is intact, or ranks see different ones.
    """
    is_one = False
    found: Sequence[Path] = ()

    def find() -> list[str]:
        nonlocal is_one, found
        is_one = has_digests(path)
        found = [path] if is_one else list_checkpoints(path)
        return [one.name for one in found]

    def check(candidate: Path) -> LoadedCheckpoint:
        _verify_on_all_ranks(candidate, world)
        return LoadedCheckpoint(candidate, {}, ())

    names = world.run_on_all_processes(find)
    # All ranks compare the same number of newest checkpoints; a rank may have more of the older ones.
    least = min(map(len, names))
    if len({tuple(own[len(own) - max(least, 1) :]) for own in names}) > 1:
        message = (
            f"ranks see checkpoints of different steps in {path}: {[own[-1:] for own in names]}. "
            "Put it on a file system that all ranks share."
        )
        raise CheckpointError(message, path=path)
    newest = check(path) if is_one else newest_intact(path, found[len(found) - least :], check)
    with ExitStack() as stack:
        state: dict[str, Any] = {}

        def open_state() -> int:
            state.update(stack.enter_context(stored_state(newest.path)))
            return int(state["num_steps"])

        steps = world.run_on_all_processes(open_state)
        if len(set(steps)) > 1:
            message = (
                f"ranks see checkpoints of different steps in {path}: {steps}. "
                "Put it on a file system that all ranks share."
            )
            raise CheckpointError(message, path=path)
        yield replace(newest, state=state)


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

    Args:
        world: the ranks.

    Attributes:
        writing: the newest background save; None before the first one and after waiting for it.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.writing: _BackgroundWrite | None = None

    def save(
        self, folder: Path, step: int, state: Mapping[str, Any], *, keep_last: int, in_parts: bool
    ) -> SavedCheckpoint:
        """Write a checkpoint; return on all ranks when it is complete.

        Args:
            folder: of the run's checkpoints.
            step: of the checkpoint.
            state: result of `collect_state`, in parts or whole.
            keep_last: number of checkpoints to keep.
            in_parts: whether the state is in parts.

        Raises:
            CheckpointError: on the rank that failed; the others raise a RankFailedError with it.
        """
        if not in_parts:
            return save_on_first_rank(folder, step, state, self._world, keep_last=keep_last)
        sharing = begin_save_on_all_ranks(folder, step, state, self._world, keep_last=keep_last)
        assert sharing is not None
        return save_on_all_ranks(sharing, self._world)

    def start(self, folder: Path, step: int, state: Mapping[str, Any], *, keep_last: int, in_parts: bool) -> Path:
        """Copy a checkpoint into host memory, begin to write it, and return its future path.

        Takes the arguments of `save`, and raises its errors if they occur before anything is written.
        """
        sharing = begin_save_on_all_ranks(folder, step, state, self._world, keep_last=keep_last, alone=not in_parts)
        # After out of memory here the next save removes the unfinished folder, which is never read.
        self._world.run_on_all_ranks(None if sharing is None else sharing.stage)
        if sharing is not None:
            self.writing = _BackgroundWrite(sharing, finishes=self._world.is_first)
        path: Path = self._world.run_on_all_ranks(lambda: None if sharing is None else sharing.path)[0]
        return path

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
        """Wait on all ranks for the background save; return its checkpoint unless it was returned before.

        Raises:
            CheckpointError: it could not be saved; the other ranks raise a RankFailedError with it.
        """
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
        """Wait for the background save on this rank alone, and return its checkpoint as `completed` does.

        Args:
            failed: the run has ended with an error, so missing files of other ranks will not appear.

        Raises:
            CheckpointError: it could not be saved, or another rank ended before it had written its part.
        """
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
            try:
                self._write()
            finally:
                self._has_written.set()
            if self._finishes:
                self._saved = self._finish()
        except Exception as error:  # noqa: BLE001 (the next call that all ranks make together raises it)
            self._error = error
            if self._finishes:
                self._sharing.abandon()

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
