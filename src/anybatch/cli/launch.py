"""From a command line to running ranks: this process is the only one, or was started as one of them, or starts them."""

import dataclasses
import importlib
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from anybatch.checkpoints import list_checkpoints
from anybatch.cli.rank import join, new_folder, run_rank
from anybatch.cli.screen import resume_command
from anybatch.cli.status import Status
from anybatch.cli.train_request import Task
from anybatch.errors import CheckpointError
from anybatch.parallel.world import has_launcher
from anybatch.recipes.run.folder import RunFolder
from anybatch.recipes.run.stop import StopRequest

_CAN_GO_ON = frozenset({Status.UNEXPECTED, Status.NOT_FINITE, Status.RANKS, Status.OUT_OF_MEMORY, Status.INTERRUPTED})


def launch(task: Task) -> int:
    """Run what was asked for on as many ranks as there should be, and return the exit status."""
    task = as_before(task)
    if has_launcher():
        world = join()
        with StopRequest(say_stopping if world.rank == 0 else None) as asked:
            status, _ = run_rank(task, world, asked)
        if status in (Status.DONE, Status.STOPPED):
            dist.destroy_process_group()
        return status
    folder = new_folder(task.recipe) if task.folder is None else task.folder
    task = dataclasses.replace(task, folder=folder)
    num_ranks = number_of_ranks(task)
    warn_of_unused(num_ranks)
    if num_ranks == 1:
        with StopRequest(say_stopping) as asked:
            status, _ = run_rank(task, join(), asked)
    else:
        # Brings torch's launcher along, which a single rank does not need.
        status = importlib.import_module("anybatch.cli.local_ranks").run_local_ranks(task, num_ranks)
    if status in _CAN_GO_ON or (status is Status.FILES and not task.resume):
        say_how_to_resume(folder)
    return status


def as_before(task: Task) -> Task:
    """Return the task with what was not given taken from the run that is resumed."""
    if not task.resume:
        return task
    assert task.folder is not None
    origin = RunFolder(task.folder).read().origin
    recipe, ranks = task.recipe or origin.get("recipe"), task.ranks or origin.get("ranks")
    if not isinstance(recipe, str):
        message = (
            f"{task.folder} does not say which recipe it was begun with. Name it: anybatch train RECIPE --resume ..."
        )
        raise CheckpointError(message, path=task.folder)
    return dataclasses.replace(task, recipe=recipe, ranks="auto" if ranks in (None, "auto") else int(ranks))


def number_of_ranks(task: Task) -> int:
    """Return how many ranks to run here: one per accelerator, else one, unless it was said.

    One rank without an accelerator, since torch's threads share its cores better than ranks do: see
    docs/decisions/0008-command-line.md for the measurement.
    """
    if task.ranks in (None, "auto"):
        return max(1, torch.accelerator.device_count())
    return int(task.ranks)


def warn_of_unused(num_ranks: int) -> None:
    """Say so if an accelerator is here that this run will not use, or must share."""
    num_accelerators = torch.accelerator.device_count()
    message = ""
    if num_ranks < num_accelerators:
        message = f"{num_accelerators} accelerators are here, and {num_ranks} of them will be used (--ranks auto: all)"
    elif 0 < num_accelerators < num_ranks:
        message = f"{num_ranks} ranks share {num_accelerators} accelerators; more ranks than those are not faster"
    elif num_accelerators == 0 and shutil.which("nvidia-smi"):
        message = f"an NVIDIA driver is here, and torch {torch.__version__} cannot use it: this run uses the CPU"
    if message:
        sys.stderr.write(f"warning: {message}\n")


def say_how_to_resume(folder: Path) -> None:
    """Say how to go on with a run that has failed, if it can be."""
    if list_checkpoints(RunFolder(folder).checkpoints):
        sys.stderr.write(f"\nTo go on from the newest checkpoint: {resume_command(folder)}\n")


def say_stopping(number: signal.Signals) -> None:
    """Say that a stop was asked for; called from a signal handler, where a buffered print may fail.

    On a terminal the console says it, above its bar.
    """
    if sys.stderr.isatty():
        return
    again = "; Ctrl-C again ends at once, without" if number == signal.SIGINT else ""
    os.write(sys.stderr.fileno(), f"\n{number.name}: stopping after this step, and saving{again}\n".encode())
