"""One rank of `anybatch train`: join the others, train, and report the outcome."""

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from anybatch.cli.screen import RunDisplay, summary
from anybatch.cli.status import Status, explain, status_of
from anybatch.cli.train_request import DEFAULT_RECIPE, RUNS, TrainRequest, short_name
from anybatch.errors import RankFailedError, UserError, WorldError
from anybatch.parallel.launchers import is_restarted, launch_id, max_restarts
from anybatch.parallel.world import World
from anybatch.planner.measurements import KnownDevices, KnownSizes
from anybatch.recipes.load import load_recipe
from anybatch.recipes.run.folder import RunFolder
from anybatch.recipes.run.prepare import on_first_rank
from anybatch.recipes.run.session import CHECKPOINT_SECONDS, train


def join() -> World:
    """Return the world of ranks.

    Raises:
        WorldError: the ranks could not connect.
    """
    try:
        return World.from_environment()
    except dist.DistError as error:
        message = (
            f"the ranks could not connect: {str(error).splitlines()[0].rstrip('.')}. If an earlier run still uses the "
            "port, wait for it, or give the launcher another port (torchrun's --master-port)."
        )
        raise WorldError(message) from error


def run_rank(
    request: TrainRequest, world: World, stop: Callable[[], bool] | None, *, is_watched: bool = False
) -> tuple[Status, str]:
    """Train as one rank; return its status and the error message.

    The first rank that fails prints the error.

    Args:
        request: the requested run.
        world: the ranks.
        stop: returns whether to stop after this step; None: stop on signals.
        is_watched: our launcher reports ranks that die without an error message.
    """
    try:
        with warnings.catch_warnings():
            _quiet_warnings(world)
            return _train(request, world, stop), ""
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001 (every error becomes a status)
        # When a rank fails, all ranks raise; only the first to publish its error prints it.
        is_first = world.publish_failure(error, 0)
        words = explain(error)
        status = status_of(error)
        is_silent = status is Status.CLOSED_PIPE or (isinstance(error, RankFailedError) and is_watched)
        if is_first and not is_silent:
            _write(sys.stderr, f"{words}\n")
        return status, words


def print_stopping(number: signal.Signals) -> None:
    """Confirm a stop request. Called from a signal handler, where a buffered print may fail.

    On a terminal the console shows it above its bar instead.
    """
    if sys.stderr.isatty():
        return
    again = " Press Ctrl-C again to quit immediately without saving." if number == signal.SIGINT else ""
    os.write(sys.stderr.fileno(), f"\n{number.name}: finishing this step, then saving.{again}\n".encode())


def _train(request: TrainRequest, world: World, stop: Callable[[], bool] | None) -> Status:
    if request.ranks not in (None, "auto", world.size):
        message = f"--ranks {request.ranks} differs from the {world.size} ranks of the launcher. Omit --ranks."
        raise UserError(message)
    if request.folder is None and (max_restarts() or is_restarted()):
        message = (
            f"the launcher {'has restarted' if is_restarted() else 'may restart'} these ranks, and without --out each "
            "restart would begin a new run. Set the folder: --out FOLDER."
        )
        raise UserError(message)
    recipe = request.recipe or DEFAULT_RECIPE
    # The name contains the time, which differs between ranks.
    folder = on_first_rank(world, partial(new_folder, recipe)) if request.folder is None else request.folder
    resume = on_first_rank(world, partial(_resumes, request, RunFolder(folder)))
    origin: dict[str, str | int] = {"recipe": recipe, "ranks": request.ranks or "auto"}
    if (launch := launch_id()) is not None:
        origin["launch"] = launch
    seconds = request.checkpoint_seconds
    with RunDisplay(stop) as display:
        result = train(
            load_recipe(recipe),
            folder,
            request.config,
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


def _resumes(request: TrainRequest, place: RunFolder) -> bool:
    """Return whether to resume the run in a folder instead of starting a new one."""
    if request.resume in ("always", "never") or not place.header.exists():
        return request.resume == "always"
    return request.resume == "auto" or is_restarted() or place.read().origin.get("launch", "") == launch_id()


def new_folder(recipe: str | None) -> Path:
    """Return the default folder of a new run."""
    return RUNS / f"{short_name(recipe or DEFAULT_RECIPE)}-{time.strftime('%Y%m%d-%H%M%S')}"


def _quiet_warnings(world: World) -> None:
    """Print warnings as one sentence, on the first rank only, since all ranks warn about the same."""
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
