"""Ways to leave a step unfinished, and the state that the engine must restore after each."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.core.batch import LaterUnits, Positions
from anybatch.core.records import MicroBatchRecord, Record
from anybatch.errors import AnyBatchError, DoesNotFitError, NonFiniteError
from anybatch.parallel.dtensors import local_part
from anybatch.parallel.strategy import choose_strategy
from anybatch.recipes.session import StoppedOnRequest
from tests.engine.cases import Batch, InMemory

State = dict[str, Any]
NUM_SAMPLES = 16


class FaultError(Exception):
    """An error in user code."""


class UserInterrupt(KeyboardInterrupt):
    """Ctrl-C; the plain exception would end pytest."""


class StopRequested(StoppedOnRequest):
    """A stop request from a recipe."""


WAYS: Mapping[str, type[BaseException]] = {
    "forward hook": FaultError,
    "loss": FaultError,
    "backward": FaultError,
    "parameter hook": FaultError,
    "observer": FaultError,
    "loading": FaultError,
    "refused batch": AnyBatchError,  # before the first micro-batch, so the previous step's copy must not be restored
    "NaN loss": NonFiniteError,
    "NaN gradient": NonFiniteError,
    "Ctrl-C": UserInterrupt,
    "stop request": StopRequested,
    "out of memory": AnyBatchError,  # DoesNotFitError, or CannotRedoError where the strategy cannot retry
    "out of memory while clipping": DoesNotFitError,
}
"""How a step fails, and the error that the engine raises."""


class Centered(nn.Module):
    """Subtracts a running mean, which each forward updates in place, and counts calls in a replaced tensor."""

    center: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(6))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return centred values."""
        self.center.mul_(0.9).add_(values.detach().mean(0), alpha=0.1)
        self.calls = self.calls + 1
        return values - self.center


def network() -> nn.Sequential:
    """Return a small model with BatchNorm, dropout and buffers that the forward updates.

    BatchNorm sees several values per sample, so that single samples can be normalised.
    """
    torch.default_generator.manual_seed(3)
    norm = nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2), nn.Flatten()
    return nn.Sequential(nn.Linear(4, 6), *norm, Centered(), nn.Dropout(0.3), nn.Linear(6, 3))


def samples(step: int) -> Batch:
    """Return an effective batch."""
    generator = torch.Generator().manual_seed(100 + step)
    return {
        "x": torch.randn(NUM_SAMPLES, 4, generator=generator),
        "y": torch.randint(0, 3, (NUM_SAMPLES,), generator=generator),
    }


class Trial:
    """An engine whose step fails on some ranks while `way` is set."""

    def __init__(self, strategy: str, world: ab.World, **options: Any) -> None:
        self.way: str | None = None
        self.model = network()
        self.model[4].register_forward_hook(self.on_forward)
        self.engine = ab.Engine(
            self.model,
            lambda named: torch.optim.Adam(named, lr=0.1),
            ab.mean_over_samples(self.loss),
            micro_batch_size=4,
            strategy=choose_strategy(strategy, world),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            observer=self,
            world=world,
            check_loss=False,
            norms="keep",
            **options,
        )

    def on_forward(self, *_: object) -> None:
        """Fail in a module's forward hook, after the buffers have changed."""
        if self.way == "forward hook":
            raise FaultError

    def observe(self, record: Record) -> None:
        """Fail in the observer."""
        if self.way == "observer" and isinstance(record, MicroBatchRecord):
            raise FaultError

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean, or raise or spoil it, as `way` demands."""
        value = F.cross_entropy(model(batch["x"]), batch["y"])
        if self.way in ("loss", "Ctrl-C", "stop request"):
            raise WAYS[self.way]
        if self.way == "out of memory":
            raise torch.OutOfMemoryError
        if self.way == "NaN loss":
            return value * torch.nan
        if self.way in ("backward", "NaN gradient") and value.requires_grad:
            value.register_hook(self.on_gradient)
        return value

    def on_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Fail in the backward, or in a parameter's hook."""
        if self.way == "out of memory while clipping":
            raise torch.OutOfMemoryError
        if self.way in ("backward", "parameter hook"):
            raise FaultError
        return gradient * torch.nan

    def fail(self, way: str) -> BaseException | ab.StepReport:
        """Run a step that fails, and return its error, or the report of a skipped step."""
        self.way = way
        hooks = []
        if way in ("parameter hook", "out of memory while clipping"):
            hooks.append(next(self.model.parameters()).register_hook(self.on_gradient))
        try:
            return self.engine.step(BATCHES.get(way, InMemory)(samples(7)))
        except (Exception, UserInterrupt, StopRequested) as error:  # noqa: BLE001 (returned)
            return error
        finally:
            self.way = None
            for hook in hooks:
                hook.remove()

    def state(self) -> State:
        """Return a copy of everything that a step changes."""
        engine, model = self.engine, self.model
        found: State = {f"model: {name}": value for name, value in model.state_dict().items()}
        found |= {f"gradient of {name}": _gradient(parameter) for name, parameter in model.named_parameters()}
        groups = engine.optimizer.param_groups
        found |= {
            f"gradient {number} of the optimizer": _gradient(parameter)
            for number, parameter in enumerate(one for group in groups for one in group["params"])
        }
        found |= _flat("optimizer", engine.optimizer.state_dict())
        assert isinstance(engine.scheduler, torch.optim.lr_scheduler.LRScheduler)
        found |= _flat("scheduler", engine.scheduler.state_dict())
        found["generator"] = torch.get_rng_state()
        found["modes"] = [module.training for module in model.modules()]
        found["momentum"] = model[2].momentum
        found["steps"], found["position"] = engine.num_steps, engine.position
        return {name: copy.deepcopy(_local(value)) for name, value in found.items()}


class Unreadable(InMemory):
    """An effective batch whose second micro-batch cannot be loaded."""

    def feed(self, units: Sequence[Positions], later_units: LaterUnits | None = None) -> Iterator[Batch]:
        """Yield one micro-batch and fail."""
        feed = super().feed(units, later_units)
        yield next(feed)
        raise FaultError


BATCHES: Mapping[str, Callable[[Batch], InMemory]] = {
    "loading": Unreadable,
    "refused batch": lambda _: InMemory({"x": torch.empty(0, 4), "y": torch.empty(0)}),
}


def _flat(name: str, value: Any) -> State:
    """Return the leaves of a state by path."""
    if isinstance(value, Mapping):
        return {k: v for key, one in value.items() for k, v in _flat(f"{name}.{key}", one).items()}
    if isinstance(value, (list, tuple)):
        return {k: v for number, one in enumerate(value) for k, v in _flat(f"{name}.{number}", one).items()}
    return {name: value}


def _local(value: Any) -> Any:
    return local_part(value.detach()) if isinstance(value, torch.Tensor) else value


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a gradient, or None if all of it is zero."""
    gradient = None if parameter.grad is None else local_part(parameter.grad)
    return gradient if gradient is not None and gradient.any() else None


def differing(first: State, second: State) -> list[str]:
    """Return the names under which two states differ in any bit."""
    names = first.keys() | second.keys()
    return sorted(name for name in names if not _same(first.get(name), second.get(name)))


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    return bool(type(first) is type(second) and first == second)


class Outcome(NamedTuple):
    """The results of a failing step on one rank.

    Attributes:
        error: class of the error; None for a skipped step.
        changed: names of the state that the failed step changed.
        later: names of the state that differ, after one more step, from an engine that never failed.
    """

    error: str | None
    changed: list[str]
    later: list[str]


def leave(strategy: str, way: str) -> Outcome:
    """Run on every rank: make two steps, one that fails, and one more."""
    with ab.World.from_environment() as world:
        return _leave(strategy, way, world)


def _leave(strategy: str, way: str, world: ab.World) -> Outcome:
    trials, changed, error = [], [], None
    for fails in (True, False):
        trial = Trial(strategy, world)
        trials.append(trial)
        torch.manual_seed(5 + world.rank)
        for step in range(2):
            trial.engine.step(InMemory(samples(step)))
        if fails:
            before = trial.state()
            raised = trial.fail(way)
            changed = differing(before, trial.state())
            if not isinstance(raised, ab.StepReport):
                error = type(raised).__name__
                assert isinstance(raised, WAYS[way]), raised
        if way != "out of memory":  # the next step would be split into smaller micro-batches
            trial.engine.step(InMemory(samples(2)))
        trial.engine.close()
    failed, reference = (trial.state() for trial in trials)
    del failed["generator"], reference["generator"]
    later = [] if way == "out of memory" else differing(failed, reference)
    return Outcome(error, changed, later)
