"""Cooperative tasks run one at a time, in order, and finish together."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anybatch.norms.exact import CooperativeThreads, Exchange, HostStore

Task = Callable[[Exchange], Any]


def total(key: str, numbers: Sequence[int]) -> int:
    """Add the contributions."""
    del key
    return sum(numbers)


@pytest.mark.parametrize("when", ["in a task", "in the merge"])
def test_an_error_ends_all_tasks_and_is_raised(when: str) -> None:
    """An exception in one task or in the merge is raised to the caller; all tasks stop and run their clean-up."""
    cleaned: list[int] = []

    def merge(key: str, numbers: Sequence[int]) -> int:
        if when == "in the merge":
            raise ZeroDivisionError
        return total(key, numbers)

    def task(number: int) -> Task:
        def run(exchange: Exchange) -> Any:
            try:
                exchange("a", number)
                if number == 1:
                    raise ZeroDivisionError
                return exchange("b", number)
            finally:
                cleaned.append(number)

        return run

    with pytest.raises(ZeroDivisionError):
        CooperativeThreads(merge).run([task(number) for number in range(4)])
    assert set(cleaned) == {0, 1, 2, 3}


NUM = 64


def gradients(function: torch.nn.Module, values: torch.Tensor, store: HostStore | None) -> list[torch.Tensor]:
    """Return the gradients of the parameters, with saved tensors in the store if there is one."""
    function.zero_grad()
    if store is None:
        output = function(values)
    else:
        with store.hooks():
            output = function(values)
    output.square().sum().backward()
    return [p.grad.clone() for p in function.parameters() if p.grad is not None]


class SavedTwice(nn.Module):
    """One activation that three operations save, or one that is saved and then changed in place."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(NUM, NUM).double(), nn.Linear(NUM, NUM).double()
        self.in_place = in_place

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        inside = self.first(values)
        if not self.in_place:
            output: torch.Tensor = torch.sin(inside) + torch.cos(inside) * self.second(inside)
            return output
        kept = torch.sigmoid(inside)  # autograd saves the output of sigmoid
        shifted = kept.clone()
        squared = F.relu(shifted, inplace=True)  # autograd saves the tensor that it changes in place
        return torch.mul(self.second(squared), kept)


def test_gradients_are_the_same() -> None:
    """Gradients with saved tensors on the host are bitwise identical, also with in-place operations."""
    for in_place in (False, True):
        function, values = SavedTwice(in_place=in_place), torch.randn(NUM, NUM, dtype=torch.float64)
        expected = gradients(function, values, None)
        found = gradients(function, values, HostStore(function.parameters()))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_each_tensor_is_copied_once() -> None:
    """An activation saved by three operations is copied once; parameters and small tensors are never copied."""
    function, values = SavedTwice(in_place=False), torch.randn(NUM, NUM, dtype=torch.float64)
    store = HostStore(function.parameters())
    gradients(function, values, store)

    once = NUM * NUM * 8
    # The inputs, the activation, and the two factors of the product (the activation is not one of them).
    assert store.num_bytes == 4 * once
    store = HostStore(function.parameters())
    gradients(function, values[:1], store)
    assert store.num_bytes == 0


def test_a_changed_tensor_is_copied_again() -> None:
    """A storage changed between two saves is copied twice, because the key includes the tensor version."""
    weight = torch.ones(NUM, NUM, dtype=torch.float64, requires_grad=True)
    values = torch.randn(NUM, NUM, dtype=torch.float64)
    store = HostStore([weight])
    with store.hooks():
        first = (weight * values).sum()
        values.mul_(2.0)
        second = (weight * values).sum()
    (gradient,) = torch.autograd.grad(first + second, weight)

    assert store.num_bytes == 2 * values.numel() * 8
    torch.testing.assert_close(gradient, values * 1.5)
