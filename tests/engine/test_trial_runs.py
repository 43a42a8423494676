"""User code that anybatch runs more than once leaves no trace: not in the gradient, not in what the code keeps."""

from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.core.comparison import relative_error
from anybatch.core.loss import Loss
from anybatch.errors import CannotRedoError
from tests.engine.cases import Batch
from tests.faults import sees

SIZES: dict[str, Any] = {"one": {"micro_batch_size": 16}, "auto": {"micro_batch_size": "auto"}}


class Keeper(nn.Module):
    """Keeps all that models keep beside parameters and buffers, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        # So many weights that "auto" finds sizes worth timing.
        self.wide = nn.Linear(6, 8000, dtype=torch.float64)
        self.head = nn.Linear(8000, 3, dtype=torch.float64)
        self.centre = torch.zeros(3, dtype=torch.float64)
        self.averages = {"head": torch.ones(3, dtype=torch.float64)}
        self.seen: list[int] = []
        self.numbers: dict[str, list[int]] = {"train": []}
        self.recent: deque[int] = deque(maxlen=100)
        self.kinds: set[int] = set()
        self.captured: list[torch.Tensor] = []
        self.has_hooks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.has_hooks:
            self.has_hooks = True
            self.wide.register_forward_hook(lambda _module, _inputs, output: self.captured.append(output))
        self.captured.clear()
        found = self.head(torch.tanh(self.wide(x))) - self.centre
        for keeps in (self.seen, self.numbers["train"], self.recent):
            keeps.append(len(x))
        self.kinds.add(len(x))
        self.averages["head"].mul_(0.9)
        self.centre.add_(0.5)
        scaled: torch.Tensor = found + sum(one.mean() for one in self.captured)
        return scaled


def batch_of(number: int = 64) -> Batch:
    """Return labelled vectors."""
    generator = torch.Generator().manual_seed(0)
    x = 100 * torch.randn(number, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(0, 3, (number,), generator=generator)}


def plain_run(model: Keeper, batch: Batch, function: Callable[[nn.Module, Batch], torch.Tensor]) -> None:
    """Add up the gradient in four micro-batches, as a plain loop does."""
    for start in range(0, 64, 16):
        piece = {name: value[start : start + 16].clone() for name, value in batch.items()}
        (function(model, piece) / 4).backward()


def error_between(found: Any, other: nn.Module) -> float:
    """Return the relative error of a gradient."""
    return relative_error(found, {name: parameter.grad for name, parameter in other.named_parameters()})


def engine_of(model: nn.Module, loss: Any, **options: Any) -> ab.Engine:
    """Return an engine on one rank."""
    return ab.Engine(model, torch.optim.SGD(model.parameters()), loss, world=ab.World(), **options)


def cross_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a mean over samples."""
    return F.cross_entropy(model(batch["x"] / 100), batch["y"])


def keeper() -> Keeper:
    """Return a model, the same one each time."""
    torch.manual_seed(0)
    return Keeper()


@sees(
    "contents of lists, dicts and hooks are not put back",
    "src/anybatch/engine/restoring.py",
    "            for one in inside:\n                one()\n",
    "",
)
@sees(
    "values of tensors in attributes are not put back",
    "src/anybatch/engine/restoring.py",
    "            tensor.copy_(value)\n",
    "            pass\n",
)
def test_what_a_model_keeps_is_as_after_its_micro_batches_alone() -> None:
    """Hooks of the first call, tensors in place, lists, dicts, sets: as in the plain loop, and so is the gradient."""
    model, plain = keeper(), keeper()
    engine = engine_of(model, ab.mean_over_samples(cross_entropy), micro_batch_size=16)
    found = engine.gradients(batch_of())
    engine.close()
    plain_run(plain, batch_of(), cross_entropy)

    assert error_between(found, plain) <= 1e-12
    assert torch.equal(model.centre, plain.centre)
    assert torch.equal(model.averages["head"], plain.averages["head"])
    assert model.seen == model.numbers["train"] == list(model.recent) == [16] * 4
    assert model.kinds == {16}
    assert len(vars(model.wide)["_forward_hooks"]) == 1


@pytest.mark.slow
def test_trials_of_sizes_leave_nothing() -> None:
    """Under "auto" as well, whatever size was found."""
    model = keeper()
    engine = engine_of(model, ab.mean_over_samples(cross_entropy), micro_batch_size="auto")
    engine.gradients(batch_of())
    engine.close()

    assert sum(model.seen) == sum(model.numbers["train"]) == sum(model.recent) == 64
    assert len(vars(model.wide)["_forward_hooks"]) == 1
    assert float(model.centre[0]) == 0.5 * len(model.seen)


def in_place(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a mean over samples, changing the batch in place and taking something out of it."""
    return F.cross_entropy(model(batch["x"].div_(100)), batch.pop("y"))


def wide() -> nn.Module:
    """Return a model with so many weights that "auto" finds sizes worth timing."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8000), nn.Tanh(), nn.Linear(8000, 3)).double()


@sees(
    "trials of sizes share their inputs",
    "src/anybatch/engine/micro_batch_size/sizes.py",
    "return [copied(slice_samples(self.whole, start, start + size)) for start in starts]",
    "return [slice_samples(self.whole, start, start + size) for start in starts]",
    cases=["auto"],
)
@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
def test_inputs_that_are_changed_in_place(sizes: str) -> None:
    """A loss that divides its batch in place, and takes the labels out of it, sees each sample as it was."""
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
    """Return a loss across samples."""
    near = F.normalize(outputs["z"], dim=1)
    alike = (outputs["y"][:, None] == outputs["y"]).double()
    return F.binary_cross_entropy_with_logits(near @ near.T, alike)


@sees(
    "the two passes of a joint loss share their inputs",
    "src/anybatch/engine/accumulation/planned_batch.py",
    "            micro_batches = (_private_copy(batch, device) for batch in micro_batches)\n",
    "            pass\n",
)
def test_a_second_pass_sees_the_inputs_of_the_first() -> None:
    """`encode` may change its batch in place: the second pass gets it as it was."""
    model, plain = wide(), wide()
    engine = engine_of(model, ab.joint(encoded, of_all), micro_batch_size=16)
    found = engine.gradients(batch_of())
    engine.close()
    of_all(plain, encoded(plain, batch_of())).backward()

    assert error_between(found, plain) <= 1e-12


@sees(
    "a step is begun again on inputs that its first try has changed",
    "src/anybatch/engine/step_runner.py",
    "            inputs.refuse_changed(step, self._world)\n",
    "",
)
@pytest.mark.slow
def test_a_step_is_not_begun_again_on_changed_inputs() -> None:
    """Out of memory behind a change in place: the error says so, since the second try would see other numbers."""
    calls: list[int] = []

    def full(model: nn.Module, batch: Batch) -> torch.Tensor:
        found = in_place(model, batch)
        calls.append(1)
        if len(calls) == 2:
            message = "full"
            raise torch.OutOfMemoryError(message)
        return found

    engine = engine_of(wide(), ab.mean_over_samples(full), micro_batch_size=16, check_loss=False)
    with pytest.raises(CannotRedoError, match="in place"):
        engine.gradients(batch_of())
    engine.close()


class Metric:
    """A loss that is an object, and keeps what it has seen."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.total = torch.zeros(())
        self.lengths: list[int] = []

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Count, and return the loss."""
        self.num_samples += len(batch["x"])
        self.total += len(batch["x"])
        self.lengths.append(len(batch["x"]))
        return cross_entropy(model, batch)

    def method(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Do the same as a method."""
        return self(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("form", ["object", "method", "bare"])
def test_what_the_loss_itself_keeps_is_of_its_samples_alone(form: str, sizes: str) -> None:
    """The attributes of a callable object, or of the object that a method belongs to, count each sample once."""
    metric = Metric()
    function = metric.method if form == "method" else metric
    loss: Any = function if form == "bare" else ab.mean_over_samples(function)
    engine = engine_of(wide(), loss, **SIZES[sizes])
    engine.step(batch_of())
    engine.close()

    assert metric.num_samples == int(metric.total) == sum(metric.lengths) == 64


@sees(
    "a check is no trial run",
    "src/anybatch/engine/side_effects.py",
    "        stack.enter_context(trial_run())\n",
    "",
    cases=["one", "auto"],
)
@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
def test_code_can_ask_whether_it_is_run_for_a_trial(sizes: str) -> None:
    """What is counted outside of trial runs is each sample once, in checks and trials of sizes as well."""
    seen: SimpleQueue[int] = SimpleQueue()  # whose contents do not go back by themselves
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


@sees(
    "a second pass is no trial run",
    "src/anybatch/engine/accumulation/two_pass.py",
    "        with trial_run():\n",
    "        if True:\n",
)
def test_a_second_pass_is_a_trial_run() -> None:
    """A loss across samples encodes each sample once outside of trial runs."""
    seen: list[int] = []

    def encode(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        if not ab.in_trial_run():
            seen.append(len(batch["x"]))
        return {"z": model(batch["x"] / 100), "y": batch["y"]}

    loss: Loss = ab.joint(encode, of_all)
    engine = engine_of(wide(), loss, micro_batch_size=16)
    engine.step(batch_of())
    engine.close()

    assert seen == [16] * 4
