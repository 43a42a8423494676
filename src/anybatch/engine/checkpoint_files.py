"""Checkpoints that all ranks write or read together: who does what, and that all of them agree on it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

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
    """Write a checkpoint on rank 0 while the others wait; return what was saved on every rank.

    Raises:
        CheckpointError: on rank 0, which could not write it; a RankFailedError carries it on the others.
    """

    def write() -> SavedCheckpoint:
        return save(folder, step, state, keep_last=keep_last)

    saved: SavedCheckpoint = world.run_on_all_ranks(write if world.is_first else None)[0]
    return saved


def save_on_all_ranks(sharing: SharedSave, world: World) -> SavedCheckpoint:
    """Write what was begun, each process its part; return what was saved on every rank.

    Raises:
        CheckpointError: on the rank that could not write; a RankFailedError carries it on the others.
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


def begin_on_all_ranks(
    folder: Path, step: int, state: Mapping[str, Any], world: World, *, keep_last: int, alone: bool = False
) -> SharedSave | None:
    """Begin a checkpoint on all processes, deal out its parts, and return this process's share; None if it has none.

    Args:
        folder: of the run's checkpoints.
        step: of the checkpoint.
        state: what this process has, see `collect_state`.
        world: the ranks.
        keep_last: how many are kept.
        alone: the first process writes all of it.

    Raises:
        CheckpointError, UserError: on the rank that could not; a RankFailedError carries it on the others.
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
            sharing.deal([told[world.first_process]] if alone else told[:others])

    try:
        told = world.run_on_all_processes(begin if world.is_first or not alone else None)
        world.run_on_all_processes(deal)
    except BaseException:
        if world.is_first and sharing is not None:
            sharing.abandon()
        raise
    return sharing


def num_processes(world: World) -> int:
    """Return how many processes there are to talk to, with this one; imagined ranks hold nothing."""
    return 1 if world.roll_call is None else world.num_processes


@contextmanager
def loaded_on_all_ranks(path: Path, world: World) -> Iterator[LoadedCheckpoint]:
    """Open the newest intact checkpoint, the same one on every rank.

    Args:
        path: one checkpoint, or a folder of checkpoints.
        world: the ranks. Each compares a file of whole tensors with its digest, and some of several files of parts.

    Yields:
        The checkpoint, whose tensors are on the disk and can be read as long as this is entered.

    Raises:
        CheckpointError: there is none, none is intact, or ranks do not see the same one.
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
    # All ranks look at equally many, the newest; a rank that keeps more of the older ones does not matter.
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
    """Compare a checkpoint with its digests; damage that one rank finds is raised on all of them, as it was found."""

    def compare() -> CheckpointError | None:
        try:
            verify(path, process=world.process, num_processes=num_processes(world))
        except (DamagedCheckpointError, MissingCheckpointError, NotACheckpointError) as error:
            return error
        return None

    damage = next((error for error in world.run_on_all_processes(compare) if error is not None), None)
    if damage is not None:
        raise damage
