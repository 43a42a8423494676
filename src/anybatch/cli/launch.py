"""Run a request to train: as the only rank, as one rank of a launcher such as torchrun, or in new processes."""

import dataclasses
import os
import shlex
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final, TextIO

import torch
import torch.distributed as dist

from anybatch.checkpoints import list_checkpoints
from anybatch.cli.command import DEFAULT_RECIPE, RUNS, print_report, write_json
from anybatch.cli.status import ErrorValues, Status, error_values, explain, status_of
from anybatch.cli.train import TrainRequest, short_name
from anybatch.core.records import Observer, Observers
from anybatch.core.units import Reserve, describe_reserve, duration, in_bytes, per_second, three_digits
from anybatch.errors import CheckpointError, RankFailedError, UserError, WorldError
from anybatch.events.console import Console
from anybatch.events.metrics_log import LIBRARIES, TensorBoardLog
from anybatch.events.plot import plot_losses
from anybatch.memory.device_memory import MEANINGS
from anybatch.parallel.launchers import find_launch, is_restarted, launch_id, max_restarts
from anybatch.parallel.world import World
from anybatch.recipes.load import load_recipe
from anybatch.recipes.prepare import on_first_rank
from anybatch.recipes.run_folder import RunFolder
from anybatch.recipes.session import CHECKPOINT_SECONDS, SessionResult, StopRequest, train

_NAME_WIDTH: Final = 13


def describe_files(folder: RunFolder) -> str:
    """Return the folder, log and checkpoints of a run as one line."""
    return f"run in {folder.path}: log {folder.log(0).name}, checkpoints in {folder.checkpoints.name}/"


def summary(result: SessionResult, *, tensorboard: str) -> str:
    """Return the result of a session: time, loss, metrics, files, and the command to continue."""
    lines = {"stopped" if result.stopped else "finished": _effort(result)}
    if result.loss is not None:
        lines["loss"] = f"{three_digits(result.loss)} in the last step"
    if result.metrics:
        lines["metrics"] = ", ".join(f"{name} {value:.4g}" for name, value in result.metrics.items())
    if result.peak_bytes is not None:
        lines["memory"] = _memory(result.peak_bytes, result.limit_bytes)
    lines["settings"] = str(result.folder.header)
    num_others = len(list(result.folder.path.glob("events-rank-*.jsonl")))
    lines["log"] = f"{result.folder.log(0)}{f' (and {num_others} of other ranks)' * bool(num_others)}"
    if result.loss is not None:
        lines["plot"] = _picture(result.folder)
        lines["tensorboard"] = tensorboard or f"tensorboard --logdir {shlex.quote(str(result.folder.tensorboard))}"
    if result.checkpoint is not None:
        lines["checkpoint"] = str(result.checkpoint)
    command = resume_command(result.folder.path)
    lines["resume" if result.stopped else "continue"] = command if result.stopped else f"{command} --epochs N"
    return "\n".join(f"{name:<{_NAME_WIDTH}}{text}" for name, text in lines.items())


def _picture(folder: RunFolder) -> str:
    """Draw the losses and return the files, or the error message: a failed picture must not fail the run."""
    try:
        return ", ".join(map(str, plot_losses(folder.log(0), folder.plots)))
    except UserError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 (the run is complete and saved)
        return f"not drawn, because of {type(error).__name__}: {' '.join(str(error).split())}"


def resume_command(folder: Path) -> str:
    """Return the command that resumes a run."""
    return f"anybatch train --resume --out {shlex.quote(str(folder))}"


def _effort(result: SessionResult) -> str:
    if result.num_session_steps == 0:
        return f"nothing left to do: all {result.num_steps:,} steps were already made"
    steps = f"{result.num_session_steps:,} step{'s' * (result.num_session_steps != 1)}"
    total = f" ({result.num_steps:,} in total)" if result.num_steps != result.num_session_steps else ""
    speed = result.num_session_samples / result.stepping_seconds if result.stepping_seconds > 0 else None
    return (
        f"{steps}{total}, {result.num_session_samples:,} samples in "
        f"{duration(result.session_seconds)}, {per_second(speed)} samples/s while training"
    )


def _memory(peak_bytes: int, limit_bytes: int | None) -> str:
    if limit_bytes is None:
        return f"peak {in_bytes(peak_bytes)} (resident memory of the rank 0 process)"
    return f"{describe_reserve(Reserve(peak_bytes, limit_bytes))}; allocated on rank 0: {MEANINGS['allocated']}"


def join() -> World:
    """Connect to the other ranks and return the `World` of all ranks.

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
    request: TrainRequest, world: World, stop: Callable[[], bool], *, is_watched: bool = False
) -> tuple[Status, ErrorValues]:
    """Train as one rank; return its status and the values of an error, which the first rank that fails also prints.

    `stop` returns whether to stop after the current step. `is_watched` means that our launcher started this rank, and
    reports ranks that die without an error message.
    """
    try:
        with warnings.catch_warnings():
            _quiet_warnings(world)
            return _train(request, world, stop), {}
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001 (every error becomes a status)
        # When a rank fails, all ranks raise; only the first to publish its error prints it.
        is_first = world.publish_failure(error, 0)
        message = explain(error)
        status = status_of(error)
        is_silent = status is Status.CLOSED_PIPE or (isinstance(error, RankFailedError) and is_watched)
        if is_first and not is_silent:
            _write(sys.stderr, f"{message}\n")
        return status, error_values(error)


def print_stopping(number: signal.Signals) -> None:
    """Confirm a stop request. Called from a signal handler, where a buffered print may fail.

    On a terminal, print nothing: the console shows the confirmation above its progress bar.
    """
    if sys.stderr.isatty():
        return
    again = " Press Ctrl-C again to quit immediately without saving." if number == signal.SIGINT else ""
    os.write(sys.stderr.fileno(), f"\n{number.name}: finishing this step, then saving.{again}\n".encode())


def _train(request: TrainRequest, world: World, stop: Callable[[], bool]) -> Status:
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
    # The first rank chooses the folder, because its name contains the time, which differs between ranks.
    folder = on_first_rank(world, partial(new_folder, recipe)) if request.folder is None else request.folder
    resume = on_first_rank(world, partial(_resumes, request, RunFolder(folder)))
    origin: dict[str, str | int] = {"recipe": recipe, "ranks": request.ranks or "auto"}
    if (launch := launch_id()) is not None:
        origin["launch"] = launch
    seconds = request.checkpoint_seconds
    missing: list[str] = []
    with ExitStack() as stack:
        result = train(
            load_recipe(recipe),
            folder,
            request.config,
            resume=resume,
            origin=origin,
            world=world,
            observer=partial(_terminal_observers, request, stack, missing, stop) if world.rank == 0 else None,
            stop=stop,
            checkpoint_seconds=CHECKPOINT_SECONDS if seconds is None else seconds,
        )
    status = Status.STOPPED if result.stopped else Status.DONE
    if world.rank == 0:
        print_report(summary(result, tensorboard="".join(missing)), result, request, status=status)
        sys.stdout.flush()
    return status


def _terminal_observers(  # noqa: PLR0917 (for `partial`)
    request: TrainRequest,
    stack: ExitStack,
    missing: list[str],
    stop: Callable[[], bool],
    folder: RunFolder,
    num_steps: int | None,
) -> Observer:
    """Print the run's folder, and return the observers for console and TensorBoard, which `stack` closes.

    If TensorBoard is not installed, append the reason to `missing`.
    """
    # Printed before the first step, so that the user knows the folder even if the run is killed in that step.
    observers: list[Observer] = []
    if not request.quiet:
        _write(sys.stderr, f"{describe_files(folder)}\n")
        observers.append(stack.enter_context(Console(num_steps, stop_requested=stop)))
    try:
        observers.append(stack.enter_context(TensorBoardLog(folder.tensorboard)))
    except UserError as error:
        missing.append(str(error))
    observers += [stack.enter_context(LIBRARIES[name](folder.path)) for name in request.loggers]
    return Observers(*observers)


def _resumes(request: TrainRequest, folder: RunFolder) -> bool:
    """Return whether to resume the run in a folder instead of starting a new one."""
    if request.resume in ("always", "never") or not folder.header.exists():
        return request.resume == "always"
    return request.resume == "auto" or is_restarted() or folder.read().origin.get("launch", "") == launch_id()


def new_folder(recipe: str | None) -> Path:
    """Return the default folder of a new run."""
    return RUNS / f"{short_name(recipe or DEFAULT_RECIPE)}-{time.strftime('%Y%m%d-%H%M%S')}"


def _quiet_warnings(world: World) -> None:
    """Print warnings without file and line, and only on the first rank, because all ranks raise the same warnings."""
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


_RESUMABLE = frozenset({Status.UNEXPECTED, Status.NOT_FINITE, Status.RANKS, Status.OUT_OF_MEMORY, Status.INTERRUPTED})


def launch(request: TrainRequest) -> Status:
    """Run a request on its ranks and return the exit status."""
    request = with_former_settings(request)
    # torchrun has already started this program once per rank.
    if find_launch() is not None:
        world = join()
        with StopRequest(print_stopping if world.rank == 0 else None) as stop:
            status, error = run_rank(request, world, stop)
        if world.rank == 0:
            _write_error(request, status, error)
        # After a failure, destroying the group would wait for ranks that may be dead.
        if status in (Status.DONE, Status.STOPPED):
            dist.destroy_process_group()
        return status
    # Choose the folder here, so that all ranks and the hint on resuming use the same one.
    folder = new_folder(request.recipe) if request.folder is None else request.folder
    request = dataclasses.replace(request, folder=folder)
    num_ranks = number_of_ranks(request)
    warn_of_unused(num_ranks)
    # Resume after an out-of-memory error only if the run has lowered this limit; else it would fail again.
    limit = largest_micro_batch_size(folder)
    status, error = start(request, num_ranks)
    while status is Status.OUT_OF_MEMORY and request.resume != "never":
        former, limit = limit, largest_micro_batch_size(folder)
        if limit == former:
            break
        sys.stderr.write(
            f"anybatch: out of memory: resuming with micro-batches of at most {limit} (disable with --resume never)\n"
        )
        request = dataclasses.replace(request, resume="always", ranks=num_ranks)
        status, error = start(request, num_ranks)
    _write_error(request, status, error)
    # After invalid options there is no run to resume, and after a failed resume the command would fail again.
    if status in _RESUMABLE or (status is Status.FILES and request.resume != "always"):
        print_resume_command(folder)
    return status


def _write_error(request: TrainRequest, status: Status, error: ErrorValues) -> None:
    """Write the error of a failed run as JSON, if the request asks for JSON."""
    if request.json is not None and status not in (Status.DONE, Status.STOPPED, Status.CLOSED_PIPE):
        write_json(request.json, {"verb": request.verb, "status": status, "error": error})


def start(request: TrainRequest, num_ranks: int) -> tuple[Status, ErrorValues]:
    """Run `num_ranks` ranks on this machine; return the exit status, and the values of an error."""
    if num_ranks == 1:
        with StopRequest(print_stopping) as stop:
            return run_rank(request, join(), stop)
    from anybatch.cli.local_ranks import run_local_ranks

    return run_local_ranks(request, num_ranks)


def largest_micro_batch_size(folder: Path) -> int | None:
    """Return the largest size that a run may use after running out of memory; None without a limit."""
    run = RunFolder(folder)
    return run.read().largest_micro_batch_size if run.header.exists() else None


def with_former_settings(request: TrainRequest) -> TrainRequest:
    """Return the request, with recipe and ranks of the resumed run if the command line omits them."""
    if request.resume not in ("always", "auto"):
        return request
    assert request.folder is not None
    if request.resume == "auto" and not RunFolder(request.folder).header.exists():
        return request
    origin = RunFolder(request.folder).read().origin
    recipe, ranks = request.recipe or origin.get("recipe"), request.ranks or origin.get("ranks")
    if not isinstance(recipe, str):
        message = f"the recipe of the run in {request.folder} is unknown. Give it: anybatch train RECIPE --resume ..."
        raise CheckpointError(message, path=request.folder)
    return dataclasses.replace(request, recipe=recipe, ranks="auto" if ranks in (None, "auto") else int(ranks))


def number_of_ranks(request: TrainRequest) -> int:
    """Return the requested number of ranks; by default one per accelerator, or one on a CPU.

    On a CPU, threads of one rank use the cores better than several ranks (measured in
    docs/decisions/0008-command-line.md).
    """
    if request.ranks in (None, "auto"):
        return max(1, torch.accelerator.device_count())
    return int(request.ranks)


def warn_of_unused(num_ranks: int) -> None:
    """Warn if an accelerator of this machine is not used, or is shared by several ranks."""
    num_accelerators = torch.accelerator.device_count()
    message = ""
    if num_ranks < num_accelerators:
        message = f"this run uses {num_ranks} of {num_accelerators} accelerators; use all with --ranks auto"
    elif 0 < num_accelerators < num_ranks:
        message = f"{num_ranks} ranks share {num_accelerators} accelerators, which is not faster than one rank on each"
    elif num_accelerators == 0 and shutil.which("nvidia-smi"):
        message = f"torch {torch.__version__} cannot use this machine's NVIDIA driver: this run uses the CPU"
    if message:
        sys.stderr.write(f"warning: {message}\n")


def print_resume_command(folder: Path) -> None:
    """Print the command that resumes a failed run, if it can be resumed."""
    if list_checkpoints(RunFolder(folder).checkpoints):
        sys.stderr.write(f"\nTo resume from the newest checkpoint: {resume_command(folder)}\n")
    elif largest_micro_batch_size(folder) is not None:
        sys.stderr.write(f"\nTo restart with smaller micro-batches: {resume_command(folder)}\n")
