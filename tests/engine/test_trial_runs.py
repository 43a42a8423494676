"""User code in trial runs leaves no trace in the gradient, can detect them, and is never rolled back."""

import os
import signal
import threading
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.core.tensors import relative_error
from anybatch.errors import CannotRedoError
from tests.engine.cases import Batch
from tests.faults import sees
from tests.raising import raises

SIZES: dict[str, Any] = {"one": {"micro_batch_size": 16}, "auto": {"micro_batch_size": "auto"}}


def batch_of(number: int = 64) -> Batch:
    """Return labelled vectors."""
    generator = torch.Generator().manual_seed(0)
    x = 100 * torch.randn(number, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(0, 3, (number,), generator=generator)}


def error_between(found: Any, other: nn.Module) -> float:
    """Return the relative error of a gradient."""
    return relative_error(found, {name: parameter.grad for name, parameter in other.named_parameters()})


def engine_of(model: nn.Module, loss: Any, **options: Any) -> ab.Engine:
    """Return an engine on one rank."""
    return ab.Engine(model, torch.optim.SGD(model.parameters()), loss, world=ab.World(), **options)


def cross_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a mean over samples."""
    return F.cross_entropy(model(batch["x"] / 100), batch["y"])


def in_place(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a mean over samples, changing the batch in place and removing an entry."""
    return F.cross_entropy(model(batch["x"].div_(100)), batch.pop("y"))


def wide() -> nn.Module:
    """Return a model with enough weights for "auto" to time sizes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8000), nn.Tanh(), nn.Linear(8000, 3)).double()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
def test_inputs_that_are_changed_in_place(sizes: str) -> None:
    """A loss that changes its batch in place, or removes an entry, still sees each sample unchanged."""
    model, plain = wide(), wide()
    engine = engine_of(model, ab.mean_over_samples(in_place), **SIZES[sizes])
    found = engine.gradients(batch_of())
    engine.close()
    cross_entropy(plain, batch_of()).backward()

    assert error_between(found, plain) <= 1e-12


def encoded(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Encode a batch, changing it in place."""
    return {"z": model(batch["x"].div_(100)), "y": batch.pop("y")}


def of_all(_model: nn.Module, outputs: Batch) -> torch.Tensor:
    """Return a cross-sample loss."""
    near = F.normalize(outputs["z"], dim=1)
    alike = (outputs["y"][:, None] == outputs["y"]).double()
    return F.binary_cross_entropy_with_logits(near @ near.T, alike)


@sees(
    "both passes of a joint loss use the same input objects",
    "src/anybatch/engine/micro_batches.py",
    "            micro_batches = (_private_copy(batch, device) for batch in micro_batches)\n",
    "            pass\n",
)
def test_a_second_pass_gets_the_original_inputs() -> None:
    """If `encode` changes its batch in place, the second pass gets the original."""
    model, plain = wide(), wide()
    engine = engine_of(model, ab.joint(encoded, of_all), micro_batch_size=16)
    found = engine.gradients(batch_of())
    engine.close()
    of_all(plain, encoded(plain, batch_of())).backward()

    assert error_between(found, plain) <= 1e-12


@pytest.mark.slow
def test_a_step_is_not_retried_on_changed_inputs() -> None:
    """A step that ran out of memory after an in-place change is not retried, because its inputs differ."""
    calls: list[int] = []

    def full(model: nn.Module, batch: Batch) -> torch.Tensor:
        found = in_place(model, batch)
        calls.append(1)
        if len(calls) == 2:
            message = "full"
            raise torch.OutOfMemoryError(message)
        return found

    engine = engine_of(wide(), ab.mean_over_samples(full), micro_batch_size=16, check_loss=False)
    with raises(CannotRedoError, "batch_changed_in_place"):
        engine.gradients(batch_of())
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
def test_code_can_detect_a_trial(sizes: str) -> None:
    """Outside of trial runs each sample counts once, with checks and size trials enabled."""
    seen: SimpleQueue[int] = SimpleQueue()
    trials: SimpleQueue[int] = SimpleQueue()

    def counting(model: nn.Module, batch: Batch) -> torch.Tensor:
        (trials if ab.in_trial_run() else seen).put(len(batch["x"]))
        return cross_entropy(model, batch)

    engine = engine_of(wide(), ab.mean_over_samples(counting), **SIZES[sizes])
    engine.step(batch_of())
    engine.close()

    assert sum(seen.get() for _ in range(seen.qsize())) == 64
    assert trials.qsize()
    assert not ab.in_trial_run()


class Stop:
    """A loss whose second call receives a signal and runs a thread."""

    def __init__(self, seen: list[int]) -> None:
        self.seen = seen
        self.asked = False
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Send the signal, let the thread append, and return the loss."""
        self.calls += 1
        if self.calls == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            thread = threading.Thread(target=self.seen.append, args=(self.calls,))
            thread.start()
            thread.join()
        return cross_entropy(model, batch)

    def stop(self, *_: object) -> None:
        """Handle the signal."""
        self.asked = True


def test_signals_and_threads_lose_nothing() -> None:
    """A signal handler's flag and a thread's entry survive the loss check of the first step, in 10 runs."""
    before = signal.getsignal(signal.SIGTERM)
    kept = 0
    try:
        for _ in range(10):
            loss = Stop([])
            signal.signal(signal.SIGTERM, loss.stop)
            torch.manual_seed(0)
            engine = engine_of(nn.Linear(6, 3).double(), ab.mean_over_samples(loss), micro_batch_size=16)
            engine.step(batch_of(32))
            engine.close()
            assert loss.calls > 2
            kept += loss.asked and loss.seen == [2]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert kept == 10
