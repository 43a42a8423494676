"""Ranks that diverge in the middle of a run: what one rank does differently, and the results on all."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import anybatch as ab
from anybatch.core.batch import Position
from anybatch.core.records import PhaseRecord, Record
from anybatch.parallel.torch_internals import default_store
from tests.engine.cases import (
    STRATEGIES,
    Batch,
    InMemory,
    classify,
    cut,
    perceptron,
    sgd_engine,
    vectors,
)

BATCH_SIZE, NUM_BATCHES, APART = 6, 5, 2
"""Samples per batch, batches per run, and the batch at which the last rank differs."""
MESSAGE = "sample 17 is unreadable"


@dataclass
class Told:
    """The results of a rank.

    Attributes:
        ends: for each call, the number of the step it made, or the error's class and text.
        fields: of the last error.
        weights: the final ones.
    """

    ends: list[str] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    weights: list[float] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        """The ends without the texts."""
        return [end.partition(":")[0] for end in self.ends]


class Run:
    """A user's loop over batches, which catches the errors of a step and continues."""

    def __init__(self, strategy: str, optimizer: type[torch.optim.SGD] = torch.optim.SGD) -> None:
        self.world = ab.World.from_environment(device="cpu")
        self.layers = perceptron()
        self.optimizer = optimizer(self.layers.parameters(), lr=0.1)
        self.is_last = self.world.rank == self.world.size - 1
        self.raises: BaseException | None = None
        self.engine = ab.Engine(
            self.layers,
            self.optimizer,
            ab.mean_over_samples(self.loss),
            micro_batch_size=2,
            strategy=STRATEGIES[strategy](),
            world=self.world,
        )
        self.told = Told()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean, or raise once."""
        if self.raises is not None:
            error, self.raises = self.raises, None
            raise error
        return classify(model, batch)

    def step(self, batch: Any) -> None:
        """Make a step, or record its error."""
        self.attempt(partial(self.engine.step, batch))

    def attempt(self, act: Callable[[], Any]) -> None:
        """Call a function, and record how it ended."""
        try:
            done = act()
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (recorded)
            self.told.ends.append(f"{type(error).__name__}: {error}")
            self.told.fields = {name: value for name, value in vars(error).items() if name[0] != "_"}
        else:
            self.told.ends.append(str(getattr(done, "step", "done")))

    def end(self) -> Told:
        """Close the engine and return the results."""
        self.told.weights = weights_of(self.layers)
        self.engine.close()
        self.world.close()
        return self.told


def weights_of(model: nn.Module) -> list[float]:
    """Return all weights as numbers."""
    return [float(value) for parameter in model.parameters() for value in parameter.detach().reshape(-1)]


def samples(number: int) -> Batch:
    """Return the samples of a batch of the run."""
    return cut(vectors(BATCH_SIZE * NUM_BATCHES), BATCH_SIZE * number, BATCH_SIZE * (number + 1))


def batch_at(number: int, kind: type[InMemory] = InMemory) -> InMemory:
    """Return a batch of the run."""
    batch = kind(samples(number), end=Position(0, BATCH_SIZE * (number + 1)))
    batch.sample_ids = range(BATCH_SIZE * number, BATCH_SIZE * (number + 1))
    return batch


def plain_loop(numbers: Sequence[int]) -> list[float]:
    """Return the weights after a plain loop over some batches, in one process."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in numbers:
        optimizer.zero_grad()
        classify(model, samples(number)).backward()
        optimizer.step()
    return weights_of(model)


def skips(strategy: str) -> Told:
    """Run on every rank: the last one skips a batch."""
    run = Run(strategy)
    numbers = [0, 1, 3] if run.is_last else [0, 1, 2]
    for number in numbers:
        run.step(batch_at(number))
    return run.end()


def sets_rate(strategy: str) -> Told:
    """Run on every rank: the last one sets another learning rate for one step."""
    run = Run(strategy)
    for number in range(NUM_BATCHES):
        run.optimizer.param_groups[0]["lr"] = 0.2 if number == APART and run.is_last else 0.1
        run.step(batch_at(number))
    return run.end()


def changes_weight(strategy: str, folder: str) -> Told:
    """Run on every rank: a weight of the last one changes; then all save and evaluate."""
    run = Run(strategy)
    run.step(batch_at(0))
    if run.is_last:
        with torch.no_grad():
            next(iter(run.layers.parameters()))[1, 2] += 1e-12
    run.attempt(partial(run.engine.save, Path(folder)))
    run.attempt(partial(run.engine.evaluate, [batch_at(1)]))
    return run.end()


class RaisesAfterBackward:
    """An observer that raises when the sums over ranks have started."""

    def observe(self, record: Record) -> None:
        """Raise after the last backward of a step."""
        if isinstance(record, PhaseRecord) and (record.name, record.event) == ("forward_backward", "end"):
            message = "planted"
            raise ValueError(message)


def raises_on_all(strategy: str, where: str) -> Told:
    """Run on every rank: the second step raises on all ranks, which catch it and continue."""
    run = Run(strategy)
    run.step(batch_at(0))
    if where == "loss":
        run.raises = ValueError("planted")
    with nullcontext() if where == "loss" else run.engine.observed_by(RaisesAfterBackward()):
        run.step(batch_at(1))
    run.step(batch_at(2))
    return run.end()


class Fails(torch.optim.SGD):
    """An optimizer whose step fails half-way on request."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        """Update one parameter and raise, or update all."""
        if self.fails:
            self.fails = False
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            message = "planted"
            raise RuntimeError(message)
        return super().step(closure)


def fails_in_update(strategy: str, apart: int = APART) -> Told:
    """Run on every rank: the last rank's update fails half-way in a step, and its loop continues."""
    run = Run(strategy, Fails)
    for number in range(apart + 2):
        if isinstance(run.optimizer, Fails):
            run.optimizer.fails = number == apart and run.is_last
        run.step(batch_at(number))
    return run.end()


def called_by_one(strategy: str, name: str, folder: str) -> Told:
    """Run on every rank: all but the last save or evaluate where the last one steps."""
    run = Run(strategy)
    run.step(batch_at(0))
    if not run.is_last:
        acts: dict[str, Callable[[], Any]] = {
            "save": partial(run.engine.save, Path(folder)),
            "evaluate": partial(run.engine.evaluate, [batch_at(1)]),
        }
        run.attempt(acts[name])
    run.step(batch_at(1))
    return run.end()


def evaluates_more(strategy: str) -> Told:
    """Run on every rank: the last one evaluates one batch more; then all evaluate equally many, and step."""
    run = Run(strategy)
    for more in (int(run.is_last), 0):
        run.attempt(partial(run.engine.evaluate, [samples(0), samples(1)][: 1 + more]))
    run.step(batch_at(0))
    return run.end()


def saves_alone_in_shares(strategy: str, folder: str) -> Told:
    """Run on every rank: all but the last save after a loader's first share, in a world of the loader's own."""
    run = Run(strategy)
    own = [samples(run.world.rank), samples(2 + run.world.rank)]
    shares = ab.shares(own)

    def loop() -> None:
        for share in shares:
            run.attempt(partial(run.engine.step, share))
            if not run.is_last:
                run.attempt(partial(run.engine.save, Path(folder)))
                return

    run.attempt(loop)
    return run.end()


def ends_in_shares(strategy: str, *, is_killed: bool) -> None:
    """Run on every rank: the last rank's loader raises at its second share, or kills the process."""
    run = Run(strategy)

    def loader() -> Iterator[Batch]:
        yield samples(run.world.rank)
        if run.is_last and is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if run.is_last:
            raise RuntimeError(MESSAGE)  # torch raises this type too, also if a collective breaks
        yield samples(2)

    for share in ab.shares(loader(), world=run.world):
        run.engine.step(share)


def saves_without_the_others(folder: str) -> str:
    """Run on every rank: all but the last save, with a short timeout, and the last one makes no call."""
    world = ab.World.from_environment(device="cpu", timeout_seconds=1.0)
    engine = sgd_engine(perceptron(), micro_batch_size=2, world=world)
    key, error = "the others have given up", ""
    if world.rank == world.size - 1:
        default_store().wait([key])
    else:
        try:
            engine.save(Path(folder))
        except Exception as caught:  # noqa: BLE001 (the test reports it)
            error = f"{type(caught).__name__}: {caught}"
        default_store().set(key, "1")
    engine.close()
    world.close()
    return error
