"""One rank of `anybatch train`: join the others, train, and report the outcome."""

import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from anybatch.cli.failure import explain
from anybatch.cli.screen import RunDisplay, summary
from anybatch.cli.status import Status, status_of
from anybatch.cli.train_request import DEFAULT_RECIPE, RUNS, TrainRequest, short_name
from anybatch.errors import RankFailedError, UserError, WorldError
from anybatch.parallel.launchers import is_restarted, launch_id, max_restarts
from anybatch.parallel.world import World
from anybatch.planner.cache.measured_devices import KnownDevices
from anybatch.planner.cache.measured_sizes import KnownSizes
from anybatch.recipes.load import load_recipe
from anybatch.recipes.run.folder import RunFolder
from anybatch.recipes.run.prepare import on_first_rank
from anybatch.recipes.run.session import CHECKPOINT_SECONDS, train
from anybatch.recipes.run.settings import Choices


def join() -> World:
    """Return the world, or say what kept the ranks from meeting.

    Raises:
        WorldError: they did not meet.
    """
    try:
        return World.from_environment()
    except dist.DistError as error:
        message = (
            f"the ranks could not meet: {str(error).splitlines()[0].rstrip('.')}. If the port is taken, by an earlier "
            "run that has not ended yet, wait for it or give the launcher another one (torchrun's --master-port)."
        )
        raise WorldError(message) from error


def run_rank(
    request: TrainRequest, world: World, stop: Callable[[], bool] | None, *, is_watched: bool = False
) -> tuple[Status, str]:
    """Train as one rank; return how that ended, and the words for it.

    What failed is printed by the rank on which it failed first.

    Args:
        request: what was asked for.
        world: the ranks.
        stop: whether to stop after this step; None lets signals decide.
        is_watched: a launcher of ours will say it if a rank ends without a word.
    """
    try:
        with warnings.catch_warnings():
            _quiet_warnings(world)
            return _train(request, world, stop), ""
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001 (whatever it is, the status says it)
        # Every rank sees an error when one fails; only the rank that published first prints it.
        is_first = world.publish_failure(error, 0)
        words = explain(error)
        status = status_of(error)
        is_silent = status is Status.CLOSED_PIPE or (isinstance(error, RankFailedError) and is_watched)
        if is_first and not is_silent:
            _write(sys.stderr, f"{words}\n")
        return status, words


def _train(request: TrainRequest, world: World, stop: Callable[[], bool] | None) -> Status:
    if request.ranks not in (None, "auto", world.size):
        message = f"--ranks {request.ranks}, but a launcher has started {world.size}. Leave --ranks to the launcher."
        raise UserError(message)
    if request.folder is None and (max_restarts() or is_restarted()):
        message = (
            f"the launcher starts these ranks again ({'it has done so' if is_restarted() else 'it may do so'}), and "
            "without --out each start begins a new run. Name the folder: --out FOLDER."
        )
        raise UserError(message)
    recipe = request.recipe or DEFAULT_RECIPE
    # The name has the time in it, and other ranks would read the clock a moment later.
    folder = on_first_rank(world, partial(new_folder, recipe)) if request.folder is None else request.folder
    resume = on_first_rank(world, partial(_goes_on, request, RunFolder(folder)))
    origin: dict[str, str | int] = {"recipe": recipe, "ranks": request.ranks or "auto"}
    if (launch := launch_id()) is not None:
        origin["launch"] = launch
    seconds = request.checkpoint_seconds
    with RunDisplay(stop) as display:
        result = train(
            load_recipe(recipe),
            folder,
            Choices(**request.choices),
            resume=resume,
            origin=origin,
            world=world,
            known=KnownSizes(),
            devices=KnownDevices(),
            observer=display.begin if world.rank == 0 else None,
            stop=stop,
            checkpoint_seconds=CHECKPOINT_SECONDS if seconds is None else seconds,
        )
    if world.rank == 0:
        _write(sys.stdout, summary(result, tensorboard=display.missing))
    return Status.STOPPED if result.stopped else Status.DONE


def _goes_on(request: TrainRequest, place: RunFolder) -> bool:
    """Return whether to go on with the run in a folder, and not to begin one."""
    if request.resume in ("always", "never") or not place.header.exists():
        return request.resume == "always"
    return request.resume == "auto" or is_restarted() or place.read().origin.get("launch", "") == launch_id()


def new_folder(recipe: str | None) -> Path:
    """Return a folder for a run that has no name yet."""
    return RUNS / f"{short_name(recipe or DEFAULT_RECIPE)}-{time.strftime('%Y%m%d-%H%M%S')}"


def _quiet_warnings(world: World) -> None:
    """Show warnings as sentences, and once: ranks do the same, so they warn of the same."""
    # Ranks run the same code, so their warnings are the same, too.
    if world.rank:
        warnings.simplefilter("ignore")

    def show(message: Warning | str, *_: object, **__: object) -> None:
        _write(sys.stderr, f"warning: {message}\n")

    # Under `python -X dev` a warning keeps its file and line.
    if not sys.flags.dev_mode:
        warnings.showwarning = show


def _write(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()
