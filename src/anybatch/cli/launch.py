"""Run the ranks of a request: in this process alone, as one rank of a launcher, or in new processes."""

import dataclasses
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from anybatch.checkpoints import list_checkpoints
from anybatch.cli.rank import join, new_folder, print_stopping, run_rank
from anybatch.cli.screen import resume_command
from anybatch.cli.status import Status
from anybatch.cli.train_request import TrainRequest
from anybatch.errors import CheckpointError
from anybatch.parallel.launchers import find_launch
from anybatch.recipes.run.folder import RunFolder
from anybatch.recipes.run.stop import StopRequest

_RESUMABLE = frozenset({Status.UNEXPECTED, Status.NOT_FINITE, Status.RANKS, Status.OUT_OF_MEMORY, Status.INTERRUPTED})


def launch(request: TrainRequest) -> Status:
    """Run a request on its ranks and return the exit status."""
    request = with_former_settings(request)
    # torchrun has already started this program once per rank.
    if find_launch() is not None:
        world = join()
        with StopRequest(print_stopping if world.rank == 0 else None) as asked:
            status, _ = run_rank(request, world, asked)
        # After a failure, destroying the group would wait for ranks that may be dead.
        if status in (Status.DONE, Status.STOPPED):
            dist.destroy_process_group()
        return status
    # Choose the folder here, so that all ranks and the hint on resuming use the same one.
    folder = new_folder(request.recipe) if request.folder is None else request.folder
    request = dataclasses.replace(request, folder=folder)
    num_ranks = number_of_ranks(request)
    warn_of_unused(num_ranks)
    # A resumed run may already have a limit; a lower one means that a smaller size is left to try.
    limit = largest_micro_batch_size(folder)
    status = start(request, num_ranks)
    while status is Status.OUT_OF_MEMORY and request.resume != "never":
        former, limit = limit, largest_micro_batch_size(folder)
        if limit == former:  # no smaller size is left
            break
        sys.stderr.write(
            f"anybatch: out of memory: resuming with micro-batches of at most {limit} (disable with --resume never)\n"
        )
        request = dataclasses.replace(request, resume="always", ranks=num_ranks)
        status = start(request, num_ranks)
    # No hint after wrong options, when nothing was trained, or after a failure to resume.
    if status in _RESUMABLE or (status is Status.FILES and request.resume != "always"):
        print_resume_command(folder)
    return status


def start(request: TrainRequest, num_ranks: int) -> Status:
    """Run `num_ranks` ranks on this machine and return the exit status."""
    if num_ranks == 1:
        with StopRequest(print_stopping) as asked:
            return run_rank(request, join(), asked)[0]
    from anybatch.cli.local_ranks import run_local_ranks  # noqa: PLC0415 (one rank does not need it)

    return run_local_ranks(request, num_ranks)


def largest_micro_batch_size(folder: Path) -> int | None:
    """Return the largest size that a run may use after running out of memory; None without a limit."""
    place = RunFolder(folder)
    return place.read().largest_micro_batch_size if place.header.exists() else None


def with_former_settings(request: TrainRequest) -> TrainRequest:
    """Return the request with missing options filled in from the resumed run."""
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
    """Return the requested number of ranks, or one per accelerator, or one on a CPU.

    On a CPU, threads of one rank use the cores better than several ranks (measured in
    docs/decisions/0008-command-line.md).
    """
    if request.ranks in (None, "auto"):
        return max(1, torch.accelerator.device_count())
    return int(request.ranks)


def warn_of_unused(num_ranks: int) -> None:
    """Warn if this run does not use an accelerator of this machine, or shares one between ranks."""
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
