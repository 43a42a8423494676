"""From a command line to running ranks: this process is the only one, or was started as one of them, or starts them."""

import dataclasses
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from anybatch.checkpoints import list_checkpoints
from anybatch.cli.rank import join, new_folder, run_rank
from anybatch.cli.screen import resume_command
from anybatch.cli.status import Status
from anybatch.cli.stopping import say_stopping
from anybatch.cli.train_request import TrainRequest
from anybatch.errors import CheckpointError
from anybatch.parallel.launchers import find_launch
from anybatch.recipes.run.folder import RunFolder
from anybatch.recipes.run.stop import StopRequest

_CAN_GO_ON = frozenset({Status.UNEXPECTED, Status.NOT_FINITE, Status.RANKS, Status.OUT_OF_MEMORY, Status.INTERRUPTED})


def launch(request: TrainRequest) -> Status:
    """Run what was asked for on as many ranks as there should be, and return the exit status."""
    request = with_former_settings(request)
    # torchrun on several nodes starts this program once per rank: then there is nothing left to start here.
    if find_launch() is not None:
        world = join()
        with StopRequest(say_stopping if world.rank == 0 else None) as asked:
            status, _ = run_rank(request, world, asked)
        # After a failure other ranks may be gone already, and leaving the group together would wait for them.
        if status in (Status.DONE, Status.STOPPED):
            dist.destroy_process_group()
        return status
    # Named here, so that all ranks share it, and the advice on resuming can name it too.
    folder = new_folder(request.recipe) if request.folder is None else request.folder
    request = dataclasses.replace(request, folder=folder)
    num_ranks = number_of_ranks(request)
    warn_of_unused(num_ranks)
    # A resumed run may have a limit from before: what counts is that it has fallen.
    limit = largest_micro_batch_size(folder)
    status = start(request, num_ranks)
    while status is Status.OUT_OF_MEMORY and request.resume != "never":
        former, limit = limit, largest_micro_batch_size(folder)
        if limit == former:  # also where there is none: nothing smaller would help
            break
        sys.stderr.write(f"anybatch: going on by itself, in micro-batches of at most {limit} (--resume never: not)\n")
        request = dataclasses.replace(request, resume="always", ranks=num_ranks)
        status = start(request, num_ranks)
    # Not after wrong options, where nothing has been trained, nor where it was the resuming that failed.
    if status in _CAN_GO_ON or (status is Status.FILES and request.resume != "always"):
        say_how_to_resume(folder)
    return status


def start(request: TrainRequest, num_ranks: int) -> Status:
    """Run that many ranks on this machine to their end."""
    if num_ranks == 1:  # and then torch's launcher need not be imported
        with StopRequest(say_stopping) as asked:
            return run_rank(request, join(), asked)[0]
    from anybatch.cli.local_ranks import run_local_ranks  # noqa: PLC0415 (brings torch's launcher, see above)

    return run_local_ranks(request, num_ranks)


def largest_micro_batch_size(folder: Path) -> int | None:
    """Return the size that a run has left to go on with, after memory has run out; None if there is none."""
    place = RunFolder(folder)
    return place.read().largest_micro_batch_size if place.header.exists() else None


def with_former_settings(request: TrainRequest) -> TrainRequest:
    """Return the request with what was not given taken from the run that is resumed."""
    if request.resume not in ("always", "auto"):
        return request
    assert request.folder is not None
    if request.resume == "auto" and not RunFolder(request.folder).header.exists():
        return request
    origin = RunFolder(request.folder).read().origin
    recipe, ranks = request.recipe or origin.get("recipe"), request.ranks or origin.get("ranks")
    if not isinstance(recipe, str):
        message = (
            f"{request.folder} does not say which recipe it was begun with. Name it: anybatch train RECIPE --resume ..."
        )
        raise CheckpointError(message, path=request.folder)
    return dataclasses.replace(request, recipe=recipe, ranks="auto" if ranks in (None, "auto") else int(ranks))


def number_of_ranks(request: TrainRequest) -> int:
    """Return how many ranks to run here: one per accelerator, else one, unless it was said.

    One rank without an accelerator, since torch's threads share its cores better than ranks do: see
    docs/decisions/0008-command-line.md for the measurement.
    """
    if request.ranks in (None, "auto"):
        return max(1, torch.accelerator.device_count())
    return int(request.ranks)


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
    elif largest_micro_batch_size(folder) is not None:
        sys.stderr.write(f"\nTo begin again, in smaller micro-batches: {resume_command(folder)}\n")
