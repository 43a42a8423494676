"""The collectives of a step carry the gradient's bytes once, for any number of accumulated micro-batches."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.parallel.call_tracker import NUM_DIGESTS
from anybatch.parallel.control import ControlGroup, Message
from tests.engine.cases import STRATEGIES, Batch, InMemory, sgd_engine, vectors
from tests.faults import sees
from tests.ranks_fixture import Ranks

NEW = tuple(name for name in ("all_gather_single", "reduce_scatter_single") if hasattr(dist, name))  # torch 2.13
COLLECTIVES = (
    *NEW,
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_object", "reduce_scatter_tensor"),
    *("all_gather_into_tensor", "all_to_all", "gather", "scatter", "barrier", "send", "recv"),
)
NUM_PARAMETERS = 5 * 64 + 64 + 64 * 4 + 4


class Call(NamedTuple):
    """One call of a collective."""

    name: str
    in_data_group: bool
    num_bytes: int
    dtype: torch.dtype | None


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Record all collective calls through torch.distributed, and all messages of control groups."""
    calls: list[Call] = []
    plain = {name: getattr(dist, name) for name in COLLECTIVES}
    start = ControlGroup.start

    def starting(group: ControlGroup, mine: bytes) -> Message:
        calls.append(Call("start", in_data_group=False, num_bytes=len(mine), dtype=None))
        return start(group, mine)

    def recording(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[0] if isinstance(args[0], torch.Tensor) else None
            group = kwargs.get("group")
            num_bytes = 0 if tensor is None else tensor.numel() * tensor.itemsize
            in_data_group = group is None or group is dist.group.WORLD
            calls.append(Call(name, in_data_group, num_bytes, None if tensor is None else tensor.dtype))
            return plain[name](*args, **kwargs)

        return call

    with (
        replaced(dist, {name: recording(name) for name in COLLECTIVES}),
        replaced(ControlGroup, {"start": starting}),
    ):
        yield calls


@contextmanager
def replaced(owner: object, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions of torch.distributed or of a class."""
    plain = {name: getattr(owner, name) for name in functions}
    for name, function in functions.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(owner, name, function)


def make_engine(strategy: str, world: ab.World) -> ab.Engine:
    """Return an engine over a float32 model, whose gradients differ in dtype from a report's float64 numbers."""
    torch.manual_seed(14)
    model = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 4))

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"].float()), batch["y"])

    return sgd_engine(model, loss, micro_batch_size=2, strategy=STRATEGIES[strategy](), world=world)


def calls_of_a_step(strategy: str, num_micro_batches: int) -> list[Call]:
    """Run on every rank: return the calls of the third step; earlier steps check the loss."""
    world = ab.World.from_environment()
    with make_engine(strategy, world) as engine:
        batch = InMemory(vectors(2 * num_micro_batches * world.size))
        for _ in range(2):
            engine.step(batch)
        with recorded() as calls:
            report = engine.step(batch)
    assert report.plan.accumulation_steps == num_micro_batches
    return calls


@sees(
    "DDP reduces in every micro-batch",
    "src/anybatch/parallel/ddp.py",
    """
        if turn.last:
            return self._reducing()
""",
    """
        if turn is not None:
            return self._reducing()
""",
    cases=["ddp"],
)
@sees(
    "all_reduce sends in every micro-batch",
    "src/anybatch/parallel/all_reduce.py",
    """
        return _NULL_CONTEXT
""",
    """
        dist.all_reduce(self._gradients.buckets[0].flat.clone())
        return _NULL_CONTEXT
""",
    cases=["all_reduce, after"],
)
@pytest.mark.parametrize("strategy", ["all_reduce", "all_reduce, after", "ddp"])
def test_one_reduction_per_step(strategy: str, two_ranks: Ranks) -> None:
    """With 1, 4 and 16 accumulation steps, a step's gradient collectives carry the gradient's bytes exactly once.

    The control group also sends one small message: float64 numbers of the report, flags, and digests of the rank's
    settings for the step.
    """
    found = {number: two_ranks.run(calls_of_a_step, strategy, number) for number in (1, 4, 16)}
    for ranks in found.values():
        for calls in ranks:
            gradients = [call for call in calls if call.dtype == torch.float32]
            others = [call for call in calls if call.dtype != torch.float32]
            assert all(call.name == "all_reduce" and call.in_data_group for call in gradients)
            assert sum(call.num_bytes for call in gradients) == 4 * NUM_PARAMETERS
            assert [(call.name, call.in_data_group) for call in others] == [("start", False)]
            assert sum(call.num_bytes for call in others) <= 2 + 4 + 8 * (1 + NUM_DIGESTS)
    assert found[1] == found[4] == found[16]


class Waited:
    """A started reduction that counts how often it is waited for."""

    def __init__(self, work: Any) -> None:
        self.work = work
        self.times = 0

    def wait(self, *timeout: timedelta) -> object:
        """Wait as usual."""
        done = self.work.wait(*timeout)
        self.times += 1  # not after a wait that timed out
        return done

    def is_completed(self) -> bool:
        """Return whether the reduction is complete."""
        return bool(self.work.is_completed())

    @property
    def rows(self) -> object:
        """Return the rows of a message."""
        return self.work.rows


def waits_of_a_step(strategy: str) -> list[int]:
    """Run on every rank: return how often each reduction and the last message of a step are waited for."""
    started: list[Waited] = []

    def recording(plain: Callable[..., Any]) -> Callable[..., Any]:
        def start(*args: Any, **kwargs: Any) -> Any:
            work = plain(*args, **kwargs)
            if work is None:
                return None
            started.append(Waited(work))
            return started[-1]

        return start

    world = ab.World.from_environment()
    with (
        make_engine(strategy, world) as engine,
        replaced(dist, {"all_reduce": recording(dist.all_reduce)}),
        replaced(ControlGroup, {"start": recording(ControlGroup.start)}),
    ):
        engine.step(InMemory(vectors(8 * world.size)))
    return [work.times for work in started]


@sees(
    "a bucket is not waited for",
    "src/anybatch/parallel/all_reduce.py",
    "for work in self._started:",
    "for work in self._started[1:]:",
    cases=["all_reduce"],
)
@pytest.mark.parametrize("strategy", ["all_reduce", "all_reduce, after"])
def test_each_reduction_is_waited_for_once(strategy: str, two_ranks: Ranks) -> None:
    """Each started reduction is waited for exactly once, so no bucket is read early."""
    for times in two_ranks.run(waits_of_a_step, strategy):
        assert len(times) > (2 if strategy == "all_reduce" else 1)
        assert set(times) == {1}
