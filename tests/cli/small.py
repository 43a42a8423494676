"""A job that takes a second, and faults in the middle of its steps.

It has everything that makes resuming hard: dropout, AdamW's moments, a schedule, epochs with a smaller last batch.
"""

import dataclasses
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

import anybatch as ab
from anybatch.checkpoints import list_checkpoints, load
from anybatch.core.gradient_noise import GradientNoise
from anybatch.core.run_config import RunConfig
from anybatch.events.jsonl import read_jsonl
from anybatch.parallel.world import World
from anybatch.recipes.run_folder import RunFolder
from anybatch.recipes.session import SessionResult, train

NUM_SAMPLES = 50
BATCH_SIZE = 8
STEPS_PER_EPOCH = 7
NUM_STEPS = 21
CROWDED = "tests.cli.small:crowded_job"
FAULT = "ANYBATCH_TEST_FAULT"
SAID = "ANYBATCH_TEST_SAID"
SPEC = "tests.cli.small:job"


class FaultError(Exception):
    """A user's own exception."""


@dataclass
class Calls:
    """Counts the calls of the loss in this process."""

    number: int = 0


CALLS = Calls()


def job(strike: Callable[[], None] | None = None) -> ab.Job:
    """Return the job; each forward calls `strike`, or by default triggers the fault set in the environment.

    Forwards of a step count; forwards of the first-step check do not.
    """
    made: list[nn.Module] = []

    def build() -> nn.Module:
        made.append(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).double())
        return made[-1]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if any(model is one for one in made) and not ab.in_trial_run():
            (strike or strike_from_environment)()
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    return ab.Job(
        model=build,
        optimizer=torch.optim.AdamW,
        loss=ab.mean_over_samples(loss),
        dataset=dataset,
        evaluate=ab.Evaluation(dataset=dataset, metric=error),
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR,
        clip=1.0,
        defaults=ab.RunConfig(effective_batch_size=BATCH_SIZE, learning_rate=0.01, epochs=3, learning_rate_rule="sqrt"),
    )


def dataset() -> torch.utils.data.Dataset[tuple[Tensor, ...]]:
    """Return 50 samples: six steps of 8 and one of 2 make an epoch."""
    inputs = torch.randn(NUM_SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the squared error of each sample."""
    return {"error": (model(batch[0]) - batch[1]).square().squeeze(1)}


def strike_from_environment() -> None:
    """Trigger the fault in FAULT, "what:call:rank", at that call of the loss on that rank."""
    CALLS.number += 1
    what, _, where = os.environ.get(FAULT, "").partition(":")
    if not what or where != f"{CALLS.number}:{os.environ.get('RANK', '0')}":
        return
    FAULTS[what]()


def signal_launcher(number: signal.Signals) -> None:
    """Send a signal to the parent process of this rank."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    os.kill(parent.pid, number)


def kill_launcher() -> None:
    """Kill the parent process and wait for its end."""
    signal_launcher(signal.SIGKILL)
    while multiprocessing.parent_process().is_alive():  # type: ignore[union-attr]
        pass


def terminate_launcher() -> None:
    """Send SIGTERM to the parent, and wait for its message in the standard error file named by SAID."""
    signal_launcher(signal.SIGTERM)
    while "SIGTERM" not in Path(os.environ[SAID]).read_text():
        pass


def raise_fault() -> None:
    """Raise an exception like the user's code."""
    message = "mine"
    raise FaultError(message)


def interrupt_twice() -> None:
    """Send SIGINT, wait for the message about a second one, send it again, and never end this step."""
    signal_launcher(signal.SIGINT)
    while "SIGINT" not in Path(os.environ[SAID]).read_text():
        pass
    signal_launcher(signal.SIGINT)
    while True:
        pass


def hang() -> None:
    """Report it and hang in this step; the reader kills the host."""
    Path(os.environ[SAID]).write_text("hangs")
    signal.pause()


FAULTS: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill_launcher": kill_launcher,
    "terminate_launcher": terminate_launcher,
    "interrupt_twice": interrupt_twice,
    "hang": hang,
}


class StopAfter:
    """Requests a stop after this many steps of a session, like a signal."""

    def __init__(self, num_steps: int) -> None:
        self.left = num_steps

    def __call__(self) -> bool:
        """Return whether to stop; called once per step."""
        self.left -= 1
        return self.left == 0


def run(
    folder: Path,
    choices: RunConfig | None = None,
    *,
    resume: bool = False,
    stop_after: int = 0,
    stopping_rank: int = 0,
    failing_call: int = 0,
) -> SessionResult:
    """Train the small job on every rank that calls this, one sample at a time, so that logs name every sample."""
    world = World.from_environment(device="cpu")
    calls = Calls()

    def strike() -> None:
        calls.number += 1
        if calls.number == failing_call:
            raise_fault()

    return train(
        job(strike),
        folder,
        choices or RunConfig(micro_batch_size=1),
        resume=resume,
        world=world,
        stop=StopAfter(stop_after if world.rank == stopping_rank else 0),
    )


def parameters(folder: Path) -> dict[str, Tensor]:
    """Return the parameters in a run's newest checkpoint."""
    return dict(load(list_checkpoints(RunFolder(folder).checkpoints)[-1])["model"])


def lines(folder: Path, *, rank: int = 0) -> list[dict[str, Any]]:
    """Return the lines of a rank's log."""
    return list(read_jsonl(RunFolder(folder).log(rank)))


def samples_of_steps(folder: Path) -> dict[int, list[int]]:
    """Return step -> ids of its samples over all ranks, from the logs, without steps that a resume discarded."""
    starts = [(line["first_step"], line["world_size"]) for line in logged(folder, "start")]
    # For each session, the steps that no later session repeated.
    kept = [
        range(first, min([after for after, _ in starts[number + 1 :]], default=1 << 62))
        for number, (first, _) in enumerate(starts)
    ]
    steps: dict[int, list[int]] = {}
    for rank in range(max(size for _, size in starts)):
        sessions = iter([steps for steps, (_, size) in zip(kept, starts, strict=True) if rank < size])
        own = range(0)
        for line in read_jsonl(RunFolder(folder).log(rank)):
            if line["kind"] == "start":
                own = next(sessions)
            elif line["kind"] == "micro_batch" and line["event"] == "begin" and line["step"] in own:
                steps.setdefault(line["step"], []).append(line["first_sample_id"])
    return {step: sorted(ids) for step, ids in sorted(steps.items())}


def logged(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of one kind in rank 0's log."""
    return [line for line in lines(folder) if line["kind"] == kind]


def header(folder: Path) -> dict[str, Any]:
    """Return the run's settings."""
    return dict(json.loads(RunFolder(folder).header.read_text()))


def step_bytes() -> int:
    """Return the bytes of AdamW's step counters, one for each parameter."""
    return 4 * len([*job().model().parameters()])  # type: ignore[union-attr]


class RunsOut(torch.autograd.Function):
    """Runs out of memory in its backward, at a point where strategies that reduce cannot leave the step."""

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        """Return the values."""
        return values.clone()

    @staticmethod
    def backward(_: Any, *__: Tensor) -> Tensor:
        """Raise the error of a device's allocator."""
        message = "planted: no memory left"
        raise torch.OutOfMemoryError(message)


def measured_job() -> ab.Job:
    """Return the job with gradient noise measured in every step."""
    return dataclasses.replace(job(), noise=GradientNoise(every=1))


def crowded_job(most: int = 2, from_call: int = 10) -> ab.Job:
    """Return the job without dropout: from one call on, micro-batches above `most` samples do not fit on rank 1."""
    calls = Calls()
    made: list[nn.Module] = []

    def build() -> nn.Module:
        made.append(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double())
        return made[-1]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs = model(batch[0])
        calls.number += model is made[-1] and not ab.in_trial_run()
        if len(batch[0]) > most and calls.number >= from_call and distributed.get_rank() == 1:
            outputs = RunsOut.apply(outputs)  # type: ignore[no-untyped-call]
        return nn.functional.mse_loss(outputs, batch[1])

    return dataclasses.replace(job(), model=build, loss=ab.mean_over_samples(loss))
