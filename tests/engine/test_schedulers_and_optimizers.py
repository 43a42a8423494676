"""Schedulers and optimizers run as in a plain loop and are saved with the run, or are refused by the engine."""

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import anybatch as ab
from anybatch.core.records import StepRecord
from anybatch.errors import AnyBatchWarning, CheckpointError, CompositionError, UserError
from anybatch.optimizers import CombinedOptimizer
from anybatch.testing import relative_error
from tests.engine.cases import InMemory, classify, perceptron, sgd_engine, vectors
from tests.faults import sees
from tests.raising import raises, warns
from tests.ranks_fixture import Ranks

TOLERANCE = 1e-12
LR = torch.optim.lr_scheduler


def engine_of(model: nn.Module, optimizer: Any, **options: Any) -> ab.Engine:
    """Return an engine with micro-batches of 3."""
    return ab.Engine(model, optimizer, ab.mean_over_samples(classify), micro_batch_size=3, **options)


@contextmanager
def no_warning() -> Iterator[None]:
    """Turn warnings of anybatch into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", AnyBatchWarning)
        yield


class TwoSteps(torch.optim.SGD):
    """An optimizer with the interface of the original SAM implementation."""

    def first_step(self) -> None:
        """Move to the perturbed weights."""

    def second_step(self) -> None:
        """Update the weights."""


@pytest.mark.parametrize("given", ["instance", "function"])
@pytest.mark.parametrize(
    "make", [lambda named: torch.optim.LBFGS(list(named)), lambda named: TwoSteps(named, lr=0.1)], ids=["lbfgs", "sam"]
)
def test_optimizers_that_repeat_the_loss_are_refused(make: Callable[[Any], Optimizer], given: str) -> None:
    """LBFGS and SAM are refused when the engine is built, with an alternative."""
    model = perceptron()
    optimizer: Any = make(model.parameters()) if given == "instance" else lambda named: make([p for _, p in named])
    with raises(CompositionError, "several_gradients"):
        engine_of(model, optimizer)


def test_a_scheduler_that_needs_a_metric_is_refused_and_can_be_saved(tmp_path: Path) -> None:
    """ReduceLROnPlateau is refused as `scheduler=`, but resumes exactly if the user steps and saves it."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises(UserError, "step_arguments"):
        engine_of(model, optimizer, scheduler=LR.ReduceLROnPlateau(optimizer))

    def run(stop: int | None) -> list[float]:
        network = perceptron()
        own = torch.optim.SGD(network.parameters(), lr=0.1)
        plateau = LR.ReduceLROnPlateau(own, factor=0.5, patience=1)
        rates = []
        with no_warning(), engine_of(network, own) as engine:
            engine.save_also(plateau=plateau)
            if stop is None:
                engine.load(tmp_path / "run")
            while engine.num_steps < (stop or 6):
                engine.step(InMemory(vectors(7)))
                plateau.step(1.0)
                rates.append(own.param_groups[0]["lr"])
            if stop == 3:
                engine.save(tmp_path / "run")
        return rates

    assert run(3) + run(None) == run(6)


def test_a_scheduler_that_is_not_saved_warns(tmp_path: Path) -> None:
    """An unsaved scheduler that the user steps would restart on resume, so the first save warns."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LR.StepLR(optimizer, 1)
    with engine_of(model, optimizer) as engine:
        engine.step(InMemory(vectors(7)))
        scheduler.step()
        with warns("scheduler_not_saved"):
            engine.save(tmp_path / "run")
        engine.save(tmp_path / "run")  # a second warning would be an error
        engine.save_also(scheduler=scheduler)
        engine.save(tmp_path / "run")


def saved_by(make: Callable[[Any], Optimizer], folder: Path) -> Path:
    """Return a checkpoint after one step with an optimizer."""
    model = perceptron()
    with engine_of(model, make(model.parameters())) as engine:
        engine.step(InMemory(vectors(7)))
        return engine.save(folder)


@sees(
    "a checkpoint of another kind of optimizer is loaded",
    "src/anybatch/engine/checkpoint_state.py",
    "    if new - old and old - new:\n",
    "    if new is old:\n",
)
def test_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    """Loading SGD state into AdamW is refused immediately, and nothing has changed."""
    path = saved_by(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), tmp_path / "run")
    model = perceptron()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with engine_of(model, torch.optim.AdamW(model.parameters())) as engine:
        with raises(CheckpointError, "other_optimizer"):
            engine.load(path)
        assert engine.num_steps == 0
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


class Adapter(nn.Module):
    """A frozen base with a small trainable part."""

    def __init__(self) -> None:
        super().__init__()
        self.base = perceptron().requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.base(x) * self.scale
        return scaled


def test_an_adapter_is_saved_without_its_base(tmp_path: Path) -> None:
    """`only_trainable` skips frozen parameters, and the run resumes bitwise."""
    ends, sizes = [], []
    for only_trainable in (False, True):
        model = Adapter()
        folder = tmp_path / str(only_trainable)
        with engine_of(model, torch.optim.AdamW([model.scale])) as engine:
            engine.step(InMemory(vectors(7)))
            path = engine.save(folder, only_trainable=only_trainable)
        sizes.append(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))
        resumed = Adapter()
        with engine_of(resumed, torch.optim.AdamW([resumed.scale])) as engine:
            engine.load(path)
            engine.step(InMemory(vectors(7)))
        ends.append(resumed.scale.detach())
    assert torch.equal(*ends)
    assert sizes[0] - sizes[1] >= 8 * sum(parameter.numel() for parameter in Adapter().base.parameters())


def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return a loss that draws from the global generators of torch, Python and numpy."""
    shift = random.random() + np.random.rand() + random.gauss() + np.random.randn()
    return classify(model, {**batch, "x": batch["x"] + shift * torch.randn_like(batch["x"])})


def noisy_engine(model: nn.Module) -> ab.Engine:
    """Return an engine with unkeyed random numbers."""
    return sgd_engine(model, noisy, micro_batch_size=3, rng=None, check_loss=False)


@sees(
    "unkeyed random numbers restart after a resume",
    "src/anybatch/engine/checkpoint_state.py",
    "        generator.set_state(state)\n",
    "        pass\n",
)
@sees(
    "random numbers of Python and numpy restart after a resume",
    "src/anybatch/engine/checkpoint_state.py",
    """
        restore_host_random_state(saved[world.rank])
""",
    """
        pass
""",
)
def test_unkeyed_random_numbers_are_resumed(tmp_path: Path) -> None:
    """With rng=None a resumed run draws bitwise the same numbers as an uninterrupted one."""
    ends = []
    for stop in (None, 2):
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        model = perceptron()
        with noisy_engine(model) as engine:
            for _ in range(stop or 4):
                engine.step(InMemory(vectors(7)))
            path = engine.save(tmp_path / str(stop))
        if stop is not None:
            random.seed(99)
            np.random.seed(99)
            torch.manual_seed(99)
            model = perceptron()
            with noisy_engine(model) as engine:
                engine.load(path)
                for _ in range(2):
                    engine.step(InMemory(vectors(7)))
        ends.append([parameter.detach() for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))


class WithModes(torch.optim.SGD):
    """An optimizer with modes, like schedule-free ones: in eval mode the weights are shifted."""

    mode = "none"

    def train(self) -> None:
        """Restore the training weights."""
        self._move("train", -1.0)

    def eval(self) -> None:
        """Set the evaluation weights."""
        self._move("eval", 1.0)

    @torch.no_grad()
    def _move(self, mode: str, by: float) -> None:
        if self.mode not in (mode, "none"):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(by)
        self.mode = mode


def test_optimizers_with_modes_are_evaluated_in_eval_mode() -> None:
    """A schedule-free optimizer trains in its training mode and is evaluated with its evaluation weights."""
    model, shifted = perceptron(), perceptron()
    optimizer = WithModes(model.parameters(), lr=0.1)
    with engine_of(model, optimizer) as engine:
        assert optimizer.mode == "train"
        found = engine.evaluate([InMemory(vectors(7))])["loss"]
        assert optimizer.mode == "train"
        engine.step(InMemory(vectors(7)))
    with torch.no_grad():
        for parameter in shifted.parameters():
            parameter.add_(1)
    assert found == pytest.approx(float(classify(shifted, vectors(7)).detach()), rel=TOLERANCE)


def test_a_model_in_evaluation_mode_warns() -> None:
    """Inactive dropout is reported once; a frozen part, or a model without such layers, is not reported."""
    dropping = nn.Sequential(perceptron(), nn.Dropout(0.5))
    with engine_of(dropping, torch.optim.SGD(dropping.parameters(), lr=0.1)) as engine:
        dropping.eval()
        with warns("model_in_evaluation_mode"):
            engine.step(InMemory(vectors(7)))
        engine.step(InMemory(vectors(7)))  # a second warning would be an error
    dropping.train()
    dropping[1].eval()
    plain = perceptron().eval()
    with no_warning():
        for model in (dropping, plain):
            with engine_of(model, torch.optim.SGD(model.parameters(), lr=0.1)) as engine:
                engine.step(InMemory(vectors(7)))


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    """Return an optimizer for matrices and one for other parameters."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def combined_engine(model: nn.Module) -> ab.Engine:
    """Return an engine with both optimizers, clipping and a schedule."""
    return engine_of(
        model,
        CombinedOptimizer(*muon_and_adamw(model)),
        clip=0.05,
        scheduler=lambda optimizer: LR.ExponentialLR(optimizer, 0.9),
    )


def test_several_optimizers_step_as_one(tmp_path: Path) -> None:
    """Muon with AdamW equals a loop over both with a common clipping norm, also after a resume."""
    plain, model, batch = perceptron(), perceptron(), vectors(7)
    optimizers = muon_and_adamw(plain)
    schedulers = [LR.ExponentialLR(one, 0.9) for one in optimizers]
    for _ in range(4):
        plain.zero_grad()
        classify(plain, batch).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        for one in optimizers:
            one.step()
        for schedule in schedulers:
            schedule.step()
    with combined_engine(model) as engine:
        for _ in range(2):
            engine.step(InMemory(batch))
        engine.save(tmp_path / "run")
    resumed = perceptron()
    with combined_engine(resumed) as engine:
        engine.load(tmp_path / "run")
        for _ in range(2):
            engine.step(InMemory(batch))
    assert relative_error(dict(resumed.named_parameters()), dict(plain.named_parameters())) <= 1e-9  # Muon's bf16


def test_a_failing_scheduler_keeps_its_step() -> None:
    """If a scheduler fails after its last step, the update is counted and reported, and a new schedule can continue."""
    model, twin, reports = perceptron(), perceptron(), []

    class Steps:
        def observe(self, record: Any, /) -> None:
            if isinstance(record, StepRecord):
                reports.append(record.step)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=3)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(plain, max_lr=0.1, total_steps=3)
    for number in range(4):
        plain.zero_grad()
        classify(twin, vectors(7)).backward()
        plain.step()
        if number < 3:
            schedule.step()
    options: dict[str, Any] = {"scheduler": scheduler, "micro_batch_size": 3, "observer": Steps()}
    with ab.Engine(model, optimizer, ab.mean_over_samples(classify), **options) as engine:
        for _ in range(3):
            engine.step(InMemory(vectors(7)))
        with pytest.raises(ValueError, match="Tried to step 4 times") as caught:
            engine.step(InMemory(vectors(7)))
        assert "after the update of step 3 (counted from 0), which is complete" in caught.value.__notes__[0]
        assert relative_error(dict(model.named_parameters()), dict(twin.named_parameters())) <= 1e-12
        assert engine.num_steps == 4
        assert reports == [0, 1, 2, 3]
        engine.reschedule(torch.optim.lr_scheduler.ConstantLR)
        engine.step(InMemory(vectors(7)))
        assert engine.num_steps == 5


def ends_with_sharded_states(folder: str) -> list[list[torch.Tensor]]:
    """Run on every rank: return the parameters of an uninterrupted and of a resumed run."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 (torch warns when it is imported)

    world, ends = ab.World.from_environment(), []
    for stops in ((4,), (2, 4)):
        model = perceptron()
        for stop in stops:
            model = perceptron()
            # Its state is sharded over ranks.
            optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.1)
            options: dict[str, Any] = {"micro_batch_size": 3, "world": world}
            with ab.Engine(model, optimizer, ab.mean_over_samples(classify), **options) as engine:
                if stop == 4 and len(stops) > 1:
                    engine.load(folder)
                while engine.num_steps < stop:
                    engine.step(InMemory(vectors(7 + engine.num_steps)))
                if stop == 2:
                    engine.save(folder)
        ends.append([parameter.detach() for parameter in model.parameters()])
    return ends


@sees(
    "the optimizer state of another rank is not gathered",
    "src/anybatch/engine/checkpoint_state.py",
    "        consolidate(to=0)\n",
    "        pass\n",
)
def test_sharded_states_are_saved(two_ranks: Ranks, tmp_path: Path) -> None:
    """With ZeroRedundancyOptimizer a resumed run is bitwise equal to an uninterrupted one."""
    for through, resumed in two_ranks.run(ends_with_sharded_states, str(tmp_path)):
        assert all(torch.equal(*pair) for pair in zip(through, resumed, strict=True))
