"""Run a short training program on forked ranks, one of which misbehaves, and report how each rank ended."""

import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import numpy as np  # noqa: F401 (before ranks are forked)
import torch
import torch._dynamo  # (likewise: the first step of an optimizer imports it)
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.engine import engine as _preloaded  # noqa: F401 (before ranks are forked)
from anybatch.errors import AnyBatchError
from anybatch.parallel import all_reduce, ddp, fsdp, zero1  # noqa: F401 (likewise)
from anybatch.parallel.torch_internals import TCPStore
from anybatch.records import MicroBatchRecord

DEADLINE_SECONDS = 60.0
BATCH_SIZE, NUM_STEPS = 8, 5
SAVE_STEP, EVALUATE_STEP, LOAD_STEP = 1, 2, 3
_MAX_ERRORS = 3
_MAX_TEXT = 1500
Strategy = Literal["all_reduce", "ddp", "zero1", "fsdp"]
Act = Callable[["Program"], str | None]
"""The action of the misbehaving rank; between steps it may return "skip", "again" or "stop" to the loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misbehaviour:
    """A way for one rank to misbehave, and how each rank must end.

    Attributes:
        name: a unique name.
        place: where the rank acts; empty if it only differs.
        act: its action there.
        step: the step in which it acts, from 0 on.
        own: pattern for how the misbehaving rank ends: "finished", "died CODE" or "TYPE: text".
        peers: the same for every other rank.
        mode: after an error a rank "ends" its process, "lingers" until its peers have ended, or "continues".
        odd: options of the engine on the misbehaving rank.
        common: options of the engine on all ranks.
        num_ranks: the number of ranks.
        odd_rank: the rank that misbehaves.
        timeout_seconds: how long ranks wait for each other.
        makes: objects that the misbehaving rank builds or loads differently, by name; see `Program`.
        strategies: the strategies it runs under.
    """

    name: str
    place: str = ""
    act: Act | None = None
    step: int = 2
    own: str = "finished"
    peers: str = "finished"
    mode: Literal["ends", "lingers", "continues"] = "ends"
    odd: Mapping[str, Any] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int = 2
    odd_rank: int = 1
    timeout_seconds: float = 600.0
    makes: Mapping[str, Any] = field(default_factory=dict)
    strategies: tuple[Strategy, ...] = ("all_reduce", "ddp", "zero1", "fsdp")


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rank ended ("finished", "died CODE", "hung" or "TYPE: text"), its weights, and the errors it survived."""

    text: str
    weights: tuple[float, ...] = ()
    is_ours: bool = True
    seconds: float = 0.0
    survived: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether all ranks of a case ended as expected: "right", "hang", "raw error", "wrong reason" or "numbers"."""

    kind: Literal["right", "hang", "raw error", "wrong reason", "numbers"]
    endings: tuple[Ending, ...]


class _Identity(torch.autograd.Function):
    """Calls a function in its backward."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        """Keep the function."""
        context.function = function
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        """Call it."""
        context.function()
        return gradients[0], None


class Block(nn.Module):
    """A layer in whose forward and backward a rank can act."""

    def __init__(self, program: "Program", number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self._act, self._number = program.at, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus a layer of it."""
        if self._number == 1 and self.training:
            self._act("forward")
        h = F.gelu(self.linear(x))
        if self._number == 1 and h.requires_grad:
            h.register_hook(lambda _: self._act("backward"))
            h = _Identity.apply(h, lambda: self._act("autograd function"))  # type: ignore[no-untyped-call]
        return x + h


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples, made on access."""

    def __init__(self, program: "Program", size: int = BATCH_SIZE * NUM_STEPS) -> None:
        self._program, self._size = program, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        self._program.at("dataset")
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(int(self._program.made("features", 6)), generator=generator)
        if self._program.step == self._program.case.step and number % 2:
            x = x * float(self._program.made("factor", 1.0))
        return {"x": x, "y": torch.tensor(number % 3)}


class Adam(torch.optim.AdamW):
    """An optimizer in whose step a rank can act, after the update."""

    program: "Program"

    def step(self, closure: Any = None) -> Any:
        """Update, then act."""
        updated = super().step(closure)
        self.program.at("optimizer")
        return updated


class Rates(torch.optim.lr_scheduler.LambdaLR):
    """A scheduler in which a rank can act."""

    def __init__(self, optimizer: torch.optim.Optimizer, program: "Program") -> None:
        self._act: Callable[[str], object] = lambda _: None
        super().__init__(optimizer, lambda step: 1.0 / (1 + step))
        self._act = program.at

    def step(self, epoch: int | None = None) -> None:
        """Act, then advance."""
        self._act("scheduler")
        super().step(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, without the program."""
        return {name: value for name, value in super().state_dict().items() if name != "_act"}


class _Kept:
    """A user's object whose state is saved too."""

    def __init__(self, program: "Program") -> None:
        self._act = program.at

    def state_dict(self) -> dict[str, Any]:
        """Act, and return a state."""
        self._act("state_dict")
        return {"kept": 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Act."""
        del state
        self._act("load_state_dict")


class Program:
    """The program that a rank runs: it builds an engine, makes five steps, saves, evaluates, loads and closes.

    Args:
        case: how one rank misbehaves.
        strategy: the engine's strategy.
        rank: this rank.
        folder: the folder for checkpoints.
    """

    def __init__(self, case: Misbehaviour, strategy: str, rank: int, folder: Path) -> None:
        self.case, self.strategy, self.rank, self.folder = case, strategy, rank, folder
        self.is_odd = rank == case.odd_rank
        self.step, self.num_steps = -1, 0
        self.survived: list[str] = []
        self._has_acted = False
        self.batch: Any = None
        self.engine: ab.Engine

    def at(self, place: str) -> str | None:
        """Act once, if this is the rank, the place and the step of the case."""
        case = self.case
        if self.is_odd and case.act and place == case.place and not self._has_acted and self.step in (case.step, -1):
            self._has_acted = True
            return case.act(self)
        return None

    def made(self, name: str, usual: Any) -> Any:
        """Return the misbehaving rank's object of this name, or the usual one."""
        return self.case.makes.get(name, usual) if self.is_odd else usual

    def __call__(self) -> tuple[float, ...]:
        """Train, and return the weights."""
        self.at("before meeting")
        world = ab.World.from_environment(device="cpu", timeout_seconds=self.case.timeout_seconds)
        self.at("before engine")
        self.engine = self.build(world)
        self.engine.save_also(kept=_Kept(self))
        batches = ab.batches(
            Samples(self, self.made("size", BATCH_SIZE * NUM_STEPS)),
            effective_batch_size=self.made("batch_size", BATCH_SIZE),
            steps=self.made("steps", NUM_STEPS),
            seed=self.made("data_seed", 0),
        )
        for self.step, self.batch in enumerate(batches):
            found = self.at("between")
            if found == "skip":
                continue
            if found == "stop":
                break
            self.num_steps += 1
            for _ in range(2 if found == "again" else 1):
                self.survive(lambda: self.engine.step(self.batch))
            self.now_and_then()
        self.step = NUM_STEPS
        weights = self.weights()
        self.at("before close")
        self.engine.close()
        self.at("after close")
        world.close()
        return weights

    def now_and_then(self) -> None:
        """Save, evaluate and load after some steps."""
        if self.step == SAVE_STEP and not self.at("save"):
            self.survive(lambda: self.engine.save(self.folder, **self.made("save", {})))
        if self.step == EVALUATE_STEP and not self.at("evaluate"):
            self.survive(lambda: self.engine.evaluate(self.evaluated()))
        if self.step == LOAD_STEP and not self.at("load"):
            self.survive(lambda: self.engine.load(self.folder))

    def survive(self, act: Callable[[], object]) -> None:
        """Call a function; in a case that continues, survive its errors a few times."""
        try:
            act()
        except (Exception, KeyboardInterrupt) as error:
            if self.case.mode != "continues" or len(self.survived) == _MAX_ERRORS:
                raise
            self.survived.append(_described(error))

    def build(self, world: ab.World, *, seed: int = 0) -> ab.Engine:
        """Return an engine."""
        torch.manual_seed(seed)
        self.at("model")
        model = self.made("model", usual_model)(self)
        options: dict[str, Any] = {"micro_batch_size": 2, "check_loss": False, "strategy": self.strategy}
        options |= dict(self.case.common) | (dict(self.case.odd) if self.is_odd else {})
        options = {name: value(self) if name in _MADE_BY_RANK else value for name, value in options.items()}
        loss = options.pop("loss", None) or ab.mean_over_samples(self.loss)
        options.setdefault("scheduler", self.scheduler)
        options.setdefault("observer", self)
        return ab.Engine(model, options.pop("optimizer", self.optimizer), loss, world=world, **options)

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean cross-entropy."""
        self.at("loss" if model.training else "metric")
        value = F.cross_entropy(model(batch["x"]), batch["y"])
        self.at("end of loss")
        return value

    def optimizer(self, named: Any) -> torch.optim.Optimizer:
        """Return the optimizer."""
        self.at("optimizer function")
        found = self.made("optimizer class", Adam)([p for _, p in named], lr=self.made("lr", 1e-2))
        found.program = self
        found.register_step_pre_hook(lambda *_: self.at("optimizer hook"))
        return found  # type: ignore[no-any-return]

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Rates:
        """Return the scheduler."""
        self.at("scheduler function")
        return Rates(optimizer, self)

    def observe(self, record: object) -> None:
        """Act as an observer."""
        self.at("observer, micro-batch" if isinstance(record, MicroBatchRecord) else "observer")

    def evaluated(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield this rank's batches for an evaluation."""
        for number in range(2):
            self.at("evaluated data")
            yield {"x": torch.ones(4, 6) * number, "y": torch.zeros(4, dtype=torch.int64)}

    def weights(self) -> tuple[float, ...]:
        """Return all weights as numbers."""
        state = self.engine.model.state_dict().values()  # type: ignore[union-attr]
        if self.strategy == "fsdp" and (self.survived or self.num_steps < NUM_STEPS):
            return ()  # gathering needs all ranks in the same step
        whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in state]
        return tuple(float(number) for tensor in whole for number in tensor.reshape(-1))


_MADE_BY_RANK = ("loss", "optimizer")


def usual_model(program: Program) -> nn.Module:
    """Return two blocks and a layer."""
    return nn.Sequential(Block(program, 0), Block(program, 1), nn.Linear(6, 3))


def run_case(case: Misbehaviour, strategy: Strategy, *, deadline_seconds: float = DEADLINE_SECONDS) -> Verdict:
    """Run a case on fresh ranks and judge it; a rank that has not ended at the deadline hangs."""
    context = multiprocessing.get_context("fork")
    folder = Path(tempfile.mkdtemp(prefix="anybatch-misbehaving-"))
    begun = time.monotonic()
    pipes: list[Any] = []
    processes: list[Any] = []
    try:
        for rank in range(case.num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_rank, args=(case, strategy, rank, folder, theirs, [*pipes, ours]))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        endings = _collect(case, pipes, processes, begun, deadline_seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()
        shutil.rmtree(folder, ignore_errors=True)
    return Verdict(_kind(case, endings), tuple(endings))


def _collect(
    case: Misbehaviour, pipes: list[Any], processes: list[Any], begun: float, deadline_seconds: float
) -> list[Ending]:
    """Wait for all ranks, and release the lingering ones once all others have ended."""
    found: dict[int, Ending] = {}
    released = False
    while len(found) < len(pipes) and (left := deadline_seconds - (time.monotonic() - begun)) > 0:
        waiting = {pipes[rank]: rank for rank in range(len(pipes)) if rank not in found}
        for pipe in wait(list(waiting), left):
            rank, seconds = waiting[pipe], time.monotonic() - begun
            try:
                text, weights, is_ours, survived = pipes[rank].recv()
                found[rank] = Ending(text, weights, is_ours, seconds, survived)
            except (EOFError, ConnectionError):
                processes[rank].join(5)
                found[rank] = Ending(f"died {processes[rank].exitcode}", seconds=seconds)
            if case.mode != "lingers" or rank != case.odd_rank:
                _release(pipes[rank])
        if not released and case.odd_rank in found and len(found) == len(pipes):
            released = True
            _release(pipes[case.odd_rank])
    return [found.get(rank, Ending("hung", seconds=deadline_seconds)) for rank in range(len(pipes))]


def _release(pipe: Any) -> None:
    try:
        pipe.send("end")
    except OSError:
        return


def _run_rank(  # noqa: PLR0917 (all arguments of a process)
    case: Misbehaviour, strategy: str, rank: int, folder: Path, pipe: Connection, inherited: list[Connection]
) -> None:
    """Run the program in a process, report how it ended, and exit without waiting."""
    for one in inherited:
        one.close()
    with open(folder / f"{rank}.log", "w", encoding="utf-8") as log:  # noqa: PTH123
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(case.num_ranks), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.update(MASTER_PORT=str(_store_port(rank, folder, pipe)))
    program = Program(case, strategy, rank, folder / "checkpoints")
    try:
        weights = program()
        pipe.send(("finished", weights, True, tuple(program.survived)))
    except BaseException as error:  # noqa: BLE001 (reported)
        pipe.send((_described(error), (), isinstance(error, AnyBatchError), tuple(program.survived)))
    if case.mode == "lingers" and program.is_odd:
        pipe.poll(DEADLINE_SECONDS)
    os._exit(0)


def _store_port(rank: int, folder: Path, pipe: Connection) -> int:
    """Return the port of the store, which rank 0 runs in a separate process, as torchrun does."""
    port_file = folder / "port"
    if rank == 0 and os.fork() == 0:
        pipe.close()  # its end shows that the rank has died
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(port_file)
        while folder.exists():
            time.sleep(0.2)
        os._exit(0)
    while not port_file.exists():
        time.sleep(0.01)
    return int(port_file.read_text())


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_TEXT]


def _kind(case: Misbehaviour, endings: list[Ending]) -> Any:
    if any(ending.text == "hung" for ending in endings):
        return "hang"
    peers = [ending for rank, ending in enumerate(endings) if rank != case.odd_rank]
    if any(not ending.is_ours for ending in peers):
        return "raw error"
    own = endings[case.odd_rank]
    if not re.search(case.own, own.text, re.DOTALL) or not all(re.search(case.peers, p.text, re.DOTALL) for p in peers):
        return "wrong reason"
    trained = [ending.weights for ending in endings if ending.text == "finished"]
    return "numbers" if any(weights != trained[0] for weights in trained) else "right"


def stop_for(seconds: float) -> None:
    """Suspend this process for a while (SIGSTOP)."""
    own = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(own, signal.SIGCONT)
        os._exit(0)
    os.kill(own, signal.SIGSTOP)


def step_in_thread(program: Program) -> None:
    """Make a step in a thread while this thread is inside one, and raise its error."""
    raised: list[BaseException] = []

    def step() -> None:
        try:
            program.engine.step(program.batch)
        except BaseException as error:  # noqa: BLE001 (raised by the caller)
            raised.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    raise raised[0]
