"""Memory for the update is allocated before the first step, without other effects."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.engine.optimizer_memory import make_state
from anybatch.errors import DoesNotFitError
from anybatch.testing import memory_budget
from tests.engine.cases import InMemory
from tests.engine.out_of_memory_cases import Listening, Run, engine_of, samples
from tests.faults import sees

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "NAdam": torch.optim.NAdam,
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Adafactor": torch.optim.Adafactor,
    "a custom optimizer": lambda p: Own(p, {}),
}


class Own(torch.optim.Optimizer):
    """A custom optimizer, whose state is not created early."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Subtract the gradient."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad)


def three_steps(make: Make, *, early: bool) -> tuple[list[torch.Tensor], dict[Any, Any]]:
    """Return parameters and state after three steps that never use the last parameter."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((4, 5), (3,), (2, 2))]
    optimizer = make(parameters)
    made = make_state(optimizer) if early else []
    assert all(parameter.grad is None for parameter in parameters)
    for parameter in made:
        if parameter is parameters[-1]:
            del optimizer.state[parameter]
    for _ in range(3):
        for parameter in parameters[:-1]:
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()
    return [p.detach() for p in parameters], optimizer.state_dict()["state"]


@sees(
    "state is created with a gradient of one",
    "src/anybatch/engine/optimizer_memory.py",
    "    return [parameter for parameter in parameters if parameter in added and parameter in optimizer.state]",
    """
    for parameter in optimizer.state:
        for value in optimizer.state[parameter].values():
            if isinstance(value, torch.Tensor):
                value.add_(1)
    return [parameter for parameter in parameters if parameter in added and parameter in optimizer.state]
""",
    cases=["AdamW"],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_early_state_equals_the_optimizers_state(name: str) -> None:
    """With state created early, parameters and state after three steps are bitwise the same."""
    parameters, state = three_steps(OPTIMIZERS[name], early=True)
    expected_parameters, expected = three_steps(OPTIMIZERS[name], early=False)
    assert all(map(torch.equal, parameters, expected_parameters))
    assert state.keys() == expected.keys()
    for number, values in state.items():
        assert list(values) == list(expected[number])
        for key, value in values.items():
            other = expected[number][key]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, key


@sees(
    "early state is kept for unused parameters",
    "src/anybatch/engine/optimizer_memory.py",
    "if gradient is None and parameter in unused:",
    "if gradient is None and parameter not in unused:",
)
def test_state_exists_before_the_first_micro_batch() -> None:
    """Optimizer state exists before the first forward, and after the step only for used parameters."""
    sizes = []

    def loss(model: nn.ModuleDict, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        sizes.append(len(engine.optimizer.state))
        outputs: torch.Tensor = model["used"](batch["x"].flatten(1))
        return outputs.square().mean()

    model = nn.ModuleDict({"used": nn.Linear(10, 1), "unused": nn.Linear(3, 3)}).double()
    with ab.Engine(
        model, torch.optim.AdamW(model.parameters()), ab.mean_over_samples(loss), check_loss=False
    ) as engine:
        engine.step(InMemory(samples(0, 4)))
    assert sizes == [4]
    assert set(engine.optimizer.state) == set(model["used"].parameters())


def test_state_that_does_not_fit_raises_early() -> None:
    """If the state does not fit, the error lists live memory; nothing has changed, and a later step works."""
    model, engine = engine_of(Run(), ab.World(), Listening())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = InMemory(samples(0, 4))
    with engine:
        with memory_budget(0, model) as budget:
            budget.num_bytes = budget.held_bytes + 100
            with pytest.raises(DoesNotFitError) as caught:
                engine.step(batch)
        assert (caught.value.rank, caught.value.step, caught.value.phase) == (0, 0, "update")
        assert not engine.optimizer.state
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert engine.step(batch).step == 0
