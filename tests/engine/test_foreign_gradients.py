"""Code in the training loop that touches gradients does not change the engine's, or raises an error.

Most cases run two steps and compare the parameters with a plain loop over unsplit batches.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core.torch_internals import num_changes
from anybatch.errors import AnyBatchError, AnyBatchWarning, LossError, ParameterError, UserError
from anybatch.parallel.dtensors import gather
from anybatch.parallel.strategy import choose_strategy
from anybatch.testing import relative_error
from tests.engine.cases import Batch, Gradients, InMemory, classify, perceptron, sgd_engine, vectors
from tests.faults import sees
from tests.raising import raises
from tests.ranks_fixture import Ranks

TOLERANCE = 1e-12
NUM_STEPS = 2
WARNED = "gradients_from_elsewhere"
Beside = Callable[[nn.Module, torch.optim.Optimizer], object]
"""Code that the loop runs before and after each step."""


def zero_grad(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Reset gradients, as most loops do."""
    optimizer.zero_grad()


def zero_grad_in_place(model: nn.Module, _: torch.optim.Optimizer) -> None:
    """Reset gradients, but keep their tensors."""
    model.zero_grad(set_to_none=False)


def backward(model: nn.Module, _: torch.optim.Optimizer) -> None:
    """Add the gradients of a penalty, as a second loss or a GAN does."""
    sum(parameter.square().sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]


def half_backward(model: nn.Module, _: torch.optim.Optimizer) -> None:
    """Do the same for one parameter only."""
    model.get_parameter("0.weight").square().sum().backward()


BESIDE: dict[str, tuple[Beside, bool]] = {
    "zero_grad": (zero_grad, False),
    "zero_grad in place": (zero_grad_in_place, False),
    "backward": (backward, True),
    "backward of a part": (half_backward, True),
}
"""Code in the loop, and whether it causes a warning."""


@contextmanager
def codes_of_warnings(engine_options: dict[str, Any]) -> Iterator[list[str]]:
    """Collect the codes of all warnings through an observer."""
    codes: list[str] = []

    class Listener:
        def observe(self, record: Any) -> None:
            if getattr(record, "level", "") == "warning":
                codes.append(record.code)

    engine_options["observer"] = Listener()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AnyBatchWarning)
        yield codes


def plain_steps(num_steps: int, batch: Batch, *, prepare: Callable[[nn.Module], object] = lambda _: None) -> Gradients:
    """Return the parameters after steps of a plain loop."""
    model = perceptron()
    prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(num_steps):
        optimizer.zero_grad()
        classify(model, batch).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def engine_steps(
    beside: Beside, strategy: str, *, prepare: Callable[[nn.Module], object] = lambda _: None, **options: Any
) -> tuple[float, list[str]]:
    """Run on every rank: return the error of the parameters after some steps, and the codes of the warnings."""
    batch, model = vectors(13), perceptron()
    prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given: dict[str, Any] = {"micro_batch_size": 3, "strategy": choose_strategy(strategy, ab.World()), **options}
    with codes_of_warnings(given) as codes:
        beside(model, optimizer)
        with ab.Engine(model, optimizer, ab.mean_over_samples(classify), **given) as engine:
            for _ in range(NUM_STEPS):
                beside(model, optimizer)
                engine.step(InMemory(batch))
                beside(model, optimizer)
    trained = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return relative_error(trained, plain_steps(NUM_STEPS, batch, prepare=prepare)), codes


@sees(
    "gradients from before a step are added to it",
    "src/anybatch/parallel/single.py",
    """
        for parameter in self._parameters:
            parameter.grad = None
        if self._buffers is not None:
            self._buffers.place()
""",
    """
        if self._buffers is not None:
            self._buffers.place()
""",
    cases=["backward"],
)
@pytest.mark.parametrize("name", BESIDE)
def test_foreign_gradients_are_discarded(name: str) -> None:
    """Gradients that a loop leaves in `.grad` between steps are discarded, with one warning."""
    beside, warns = BESIDE[name]

    error, codes = engine_steps(beside, "single")
    assert error <= TOLERANCE
    assert codes == [WARNED] * warns


def clamped(model: nn.Module) -> None:
    """Register a hook on each parameter that clamps its gradient."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


@sees(
    "hooks on parameters run in every micro-batch",
    "src/anybatch/engine/step_guard.py",
    "        return without_tensor_hooks(self._parameters) if self._hooks else _NOTHING\n",
    "        return _NOTHING\n",
    cases=["single"],
)
@pytest.mark.parametrize("strategy", ["single", "all_reduce", "ddp"])
def test_hooks_on_parameters_run_once_on_the_sum(strategy: str, two_ranks: Ranks) -> None:
    """A hook that clamps a parameter's gradient applies once, to the gradient of the whole batch, over all ranks."""
    for error, codes in (
        [steps_with_clamp(strategy)] if strategy == "single" else two_ranks.run(steps_with_clamp, strategy)
    ):
        assert error <= TOLERANCE
        assert not codes


def steps_with_clamp(strategy: str) -> tuple[float, list[str]]:
    """Run on every rank: `engine_steps` of a model whose gradients are clamped."""
    return engine_steps(lambda *_: None, strategy, prepare=clamped)


def backward_inside(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Call `backward()` in the loss, as adversarial training does."""
    loss = classify(model, batch)
    loss.backward(retain_graph=True)
    return loss


def replaces_gradients(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Replace each gradient, as normalising does, by a tensor that was written to equally often."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            (number,) = num_changes([parameter.grad], "this case")
            parameter.grad = parameter.grad * 2
            for _ in range(number):
                parameter.grad.mul_(1)
    return classify(model, batch)


def zero_grad_inside(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Call `zero_grad()` in the loss."""
    model.zero_grad()
    return classify(model, batch)


def scales_wide_gradients(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Scale the `.grad` of float64 parameters in place."""
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.dtype == torch.float64:
            parameter.grad.mul_(2)
    return classify(model, batch)


class InTwoTypes(nn.Module):
    """A classifier whose first layer is in bf16 and the rest in float64."""

    def __init__(self) -> None:
        super().__init__()
        first, *others = perceptron().children()
        self.first = first.to(torch.bfloat16)
        self.others = nn.Sequential(*others)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return class scores in float64."""
        found: torch.Tensor = self.others(self.first(x.bfloat16()).double())
        return found


@sees(
    "if some gradients accumulate in buffers, the others are not checked",
    "src/anybatch/engine/step_guard.py",
    "self._all_in_buffers = num_in_buffers == sum(",
    "self._all_in_buffers = num_in_buffers > 0 * sum(",
    cases=["in two types"],
)
@sees(
    "a replaced gradient is not detected",
    "src/anybatch/engine/step_guard.py",
    "if not is_same or num_changes(counted, _WATCHED) != num_before:",
    "if num_changes(counted, _WATCHED) != num_before:",
    cases=["replaced"],
)
@sees(
    "a backward inside the loss is not detected",
    "src/anybatch/engine/step_guard.py",
    "if not is_same or num_changes(counted, _WATCHED) != num_before:",
    "if not is_same:",
    cases=["backward in bf16"],
)
@pytest.mark.parametrize(
    ("loss", "make", "dtype"),
    [
        (backward_inside, perceptron, torch.float64),
        (zero_grad_inside, perceptron, torch.float64),
        (replaces_gradients, perceptron, torch.float64),
        # Gradients of bf16 parameters add up outside of `.grad`, where zero_grad does not reach them.
        (backward_inside, lambda: perceptron().bfloat16(), torch.bfloat16),
        (scales_wide_gradients, InTwoTypes, torch.float64),
    ],
    ids=["backward", "zero_grad", "replaced", "backward in bf16", "in two types"],
)
def test_a_loss_that_changes_gradients_is_refused(loss: Any, make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    """A loss that changes gradients (`backward()`, `zero_grad()`) raises an error, and parameters stay unchanged."""
    model = make()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    batch = vectors(7)
    batch["x"] = batch["x"].to(dtype)
    engine = ab.Engine(
        model,
        lambda named: torch.optim.SGD(named, lr=0.1),
        ab.mean_over_samples(loss),
        micro_batch_size=2,
        check_loss=False,
    )
    with engine, raises(LossError, "gradients_changed"):
        engine.step(InMemory(batch))
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def refused_on_a_rank(strategy: str) -> bool:
    """Run on every rank: return whether a loss that calls `backward()` raises, and parameters are unchanged."""
    model, start = perceptron(), perceptron()
    engine = ab.Engine(
        model,
        lambda named: torch.optim.SGD(named, lr=0.1),
        ab.mean_over_samples(backward_inside),
        micro_batch_size=2,
        check_loss=False,
        strategy=strategy,
    )
    with engine:
        try:
            engine.step(InMemory(vectors(7)))
        except LossError:
            return all(map(torch.equal, model.parameters(), start.parameters()))
    return False


@sees(
    "writes to a buffer of all gradients are not detected",
    "src/anybatch/engine/step_guard.py",
    "counted = self._buffers if",
    "counted = () if",
)
@pytest.mark.parametrize("strategy", ["all_reduce", "ddp"])
def test_a_loss_that_changes_gradients_is_refused_on_ranks(strategy: str, two_ranks: Ranks) -> None:
    """A loss that calls `backward()` also raises an error on ranks, where gradients are views of buffers."""
    assert all(two_ranks.run(refused_on_a_rank, strategy))


def step_in_backward(model: nn.Module) -> None:
    """Update each parameter as soon as its gradient is there, as in a torch tutorial."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: p.data.sub_(p.grad))


@pytest.mark.parametrize("when", ["before the engine", "before a step"])
def test_an_update_inside_of_the_backward_is_refused(when: str) -> None:
    """A post-accumulate hook raises an error, because its update would run once per micro-batch."""
    model = perceptron()
    if when == "before the engine":
        step_in_backward(model)
        with raises(ParameterError, "accumulation_hook"):
            sgd_engine(model)
        return
    with sgd_engine(model) as engine:
        step_in_backward(model)
        with raises(ParameterError, "accumulation_hook"):
            engine.step(InMemory(vectors(7)))


def thaw(model: nn.Module) -> None:
    """Unfreeze the first layer."""
    model.get_submodule("0").requires_grad_(True)


def freeze(model: nn.Module) -> None:
    """Freeze the last layer."""
    model.get_submodule("3").requires_grad_(False)


def replace_head(model: nn.Module) -> None:
    """Replace the last layer."""
    model.register_module("3", nn.Linear(16, 4).double())


def add_layer(model: nn.Module) -> None:
    """Add a layer at the end."""
    model.register_module("4", nn.Linear(4, 4).double())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (thaw, r"trainable now, but not in the engine: '0.weight', '0.bias'\."),
        (freeze, r"now frozen or removed: '3.weight', '3.bias'\."),
        (replace_head, r"not in the engine: '3.weight', '3.bias'; now frozen or removed: '3.weight'"),
        (add_layer, r"not in the engine: '4.weight', '4.bias'\."),
    ],
    ids=["thawed", "frozen", "replaced", "added"],
)
def test_changed_parameters_are_refused(change: Callable[[nn.Module], None], named: str) -> None:
    """After a parameter was unfrozen, frozen or replaced, the next step raises an error that names it."""
    model = perceptron()
    model.get_submodule("0").requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with ab.Engine(model, optimizer, ab.mean_over_samples(classify), micro_batch_size=3) as engine:
        engine.step(InMemory(vectors(7)))
        change(model)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        with pytest.raises(ParameterError, match=named):
            engine.step(InMemory(vectors(7)))
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("method", ["step", "gradients"])
def test_a_closed_engine_trains_no_more(method: str) -> None:
    """A closed engine raises an error instead of training."""
    model = perceptron()
    with sgd_engine(model) as engine:
        engine.step(InMemory(vectors(7)))
    with raises(UserError, "closed"):
        getattr(engine, method)(InMemory(vectors(7)))


def failing_hook(rank: int) -> Callable[[torch.Tensor], None]:
    """Return a hook that raises on one rank."""

    def hook(_: torch.Tensor) -> None:
        if rank == 1:
            message = "a hook of rank 1"
            raise ValueError(message)

    return hook


def ends_with_failing_hook(strategy: str) -> tuple[str, bool, float]:
    """Run on every rank: make a step in which a hook raises on rank 1, then train on without the hook.

    Return the error, whether weights were unchanged after it, and how far two later steps are from plain ones.
    """
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    world, model, batch = ab.World.from_environment(), perceptron(), vectors(13)
    handle = model.get_parameter("0.weight").register_hook(failing_hook(world.rank))
    loss = ab.mean_over_samples(classify)
    with ab.Engine(
        model,
        lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
        loss,
        micro_batch_size=3,
        strategy=strategy,
        check_loss=False,
        world=world,
    ) as engine:
        error = ""
        try:
            engine.step(InMemory(batch))
        except (ValueError, AnyBatchError) as caught:
            error = type(caught).__name__
        start = perceptron()
        is_as_before = all(
            torch.equal(gather(one.detach()), other)
            for one, other in zip(model.parameters(), start.parameters(), strict=True)
        )
        handle.remove()
        for _ in range(NUM_STEPS):
            engine.step(InMemory(batch))
        trained = {name: gather(parameter.detach()) for name, parameter in model.named_parameters()}
    return error, is_as_before, relative_error(trained, plain_steps(NUM_STEPS, batch))


@pytest.mark.parametrize("strategy", ["all_reduce", "ddp"])
def test_a_hook_that_raises_on_one_rank_stops_all(strategy: str, two_ranks: Ranks) -> None:
    """If a hook raises on one rank, no rank updates, and all can continue."""
    ends = two_ranks.run(ends_with_failing_hook, strategy)
    assert [error for error, _, _ in ends] == ["RankFailedError", "ValueError"]
    assert all(is_as_before for _, is_as_before, _ in ends)
    assert max(distance for _, _, distance in ends) <= TOLERANCE


def critic_loss(generator: nn.Module) -> Callable[[nn.Module, Batch], torch.Tensor]:
    """Return the loss of a critic that sees samples and the outputs of a generator."""

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            made = generator(batch["x"])
        return nn.functional.softplus(-model(batch["x"])).mean() + nn.functional.softplus(model(made)).mean()

    return loss


def generator_loss(critic: nn.Module) -> Callable[[nn.Module, Batch], torch.Tensor]:
    """Return the loss of a generator, which runs through the critic."""
    return lambda model, batch: nn.functional.softplus(-critic(model(batch["x"]))).mean()


def networks() -> tuple[nn.Module, nn.Module]:
    """Return a generator and a critic, with the same weights each time."""
    torch.default_generator.manual_seed(3)
    generator = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    return generator, nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def plain_adversaries() -> Gradients:
    """Return the weights of both after alternating steps in plain torch."""
    pair = networks()
    losses = (generator_loss(pair[1]), critic_loss(pair[0]))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for one in pair]
    for _ in range(3):
        for place in (1, 0):
            optimizers[place].zero_grad()
            losses[place](pair[place], vectors(13)).backward()
            optimizers[place].step()
    return {name: one.detach() for name, one in nn.ModuleList(pair).named_parameters()}


def adversaries(strategy: str, shares_world: bool) -> tuple[float, list[str]]:
    """Run on every rank: alternate steps of a generator and a critic; return the error of the weights, and warnings."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    pair, world = networks(), ab.World() if strategy == "single" else ab.World.from_environment()
    given: dict[str, Any] = {"micro_batch_size": 3, "strategy": strategy}

    def optimizer(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(named, lr=0.1, momentum=0.9, weight_decay=0.1)

    with codes_of_warnings(given) as codes:
        given["check_loss"] = False
        critic = ab.Engine(pair[1], optimizer, ab.mean_over_samples(critic_loss(pair[0])), world=world, **given)
        other = world if shares_world else ab.World.from_environment()
        generator = ab.Engine(pair[0], optimizer, ab.mean_over_samples(generator_loss(pair[1])), world=other, **given)
        for _ in range(3):
            critic.step(InMemory(vectors(13)))
            generator.step(InMemory(vectors(13)))
        trained = {name: gather(one.detach()) for name, one in nn.ModuleList(pair).named_parameters()}
        generator.close()
        critic.close()
        if not shares_world:
            other.close()
    return relative_error(trained, plain_adversaries()), codes


@sees(
    "a backward reaches other engines' parameters",
    "src/anybatch/engine/accumulate.py",
    "torch.autograd.backward(total if scale is None else scale(total), inputs=inputs)",
    "torch.autograd.backward(total)",
    cases=["single-True", "all_reduce-True"],
)
@pytest.mark.parametrize(
    ("strategy", "shares_world"),
    [*((name, True) for name in ("single", "all_reduce", "ddp", "zero1", "fsdp")), ("all_reduce", False)],
)
def test_a_loss_may_run_through_the_model_of_another_engine(
    strategy: str, shares_world: bool, two_ranks: Ranks
) -> None:
    """A GAN's generator and critic, each with an engine, train as in plain torch, without a warning."""
    found = (
        [adversaries(strategy, shares_world)]
        if strategy == "single"
        else two_ranks.run(adversaries, strategy, shares_world)
    )
    for error, codes in found:
        assert error <= TOLERANCE
        assert codes == []


def steps_with_hook_on_shard(when: str) -> None:
    """Run on every rank: train under FSDP with a hook on a parameter, added before or after the engine is built."""
    model = perceptron()
    if when == "before":
        model.get_parameter("0.weight").register_hook(failing_hook(0))
    with (
        raises(ParameterError, "hook_on_shard"),
        ab.Engine(
            model,
            lambda named: torch.optim.SGD(named, lr=0.1),
            ab.mean_over_samples(classify),
            micro_batch_size=3,
            strategy="fsdp",
            check_loss=False,
            world=ab.World.from_environment(),
        ) as engine,
    ):
        assert when == "after"
        model.get_parameter("0.weight").register_hook(failing_hook(0))
        engine.step(InMemory(vectors(13)))


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_on_sharded_parameters_are_refused(one_rank: Ranks, when: str) -> None:
    """Under FSDP such a hook would see a shard of its gradient."""
    one_rank.run(steps_with_hook_on_shard, when)
