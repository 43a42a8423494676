"""Cooperative tasks run one at a time, in order, and finish together."""

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anybatch.errors import CompositionError
from anybatch.norms.exact import CooperativeThreads, Exchange, HostStore
from tests.raising import raises

Task = Callable[[Exchange[int, int]], int]


def total(key: str, numbers: Sequence[int]) -> int:
    """Add the contributions."""
    del key
    return sum(numbers)


def test_tasks_take_turns_and_get_the_combined_value() -> None:
    """Tasks run one at a time, in order, between exchanges; each exchange gives all of them the same value."""
    trace: list[tuple[int, str]] = []
    inside = threading.Lock()

    def task(number: int) -> Task:
        def run(exchange: Exchange[int, int]) -> int:
            value = number
            for key in ("a", "b"):
                assert inside.acquire(blocking=False), "two ran at once"
                trace.append((number, key))
                inside.release()
                value = exchange(key, value)
            return value + number

        return run

    assert CooperativeThreads[int, int, int](total).run([task(number) for number in range(4)]) == [24, 25, 26, 27]
    assert trace == [(number, key) for key in ("a", "b") for number in range(4)]


@pytest.mark.parametrize("when", ["before", "between", "in the merge"])
def test_an_error_ends_all_tasks_and_is_raised(when: str) -> None:
    """An exception in one task is raised to the caller; the other tasks stop and run their clean-up."""
    cleaned: list[int] = []

    def merge(key: str, numbers: Sequence[int]) -> int:
        if when == "in the merge" and key == "b":
            raise ZeroDivisionError
        return sum(numbers)

    def task(number: int) -> Task:
        def run(exchange: Exchange[int, int]) -> int:
            try:
                if when == "before" and number == 2:
                    raise ZeroDivisionError
                exchange("a", number)
                if when == "between" and number == 1:
                    raise ZeroDivisionError
                try:
                    return exchange("b", number)
                except Exception:
                    if when != "in the merge":
                        cleaned.append(-1)
                    raise
            finally:
                cleaned.append(number)

        return run

    with pytest.raises(ZeroDivisionError):
        CooperativeThreads[int, int, int](merge).run([task(number) for number in range(4)])
    assert set(cleaned) == ({0, 1, 2} if when == "before" else {0, 1, 2, 3})


def test_tasks_at_different_exchanges_are_refused() -> None:
    """A different, missing or extra exchange is an error."""
    together: Task = lambda exchange: exchange("a", 1) + exchange("b", 1)  # noqa: E731 (three of a kind)
    stranger: Task = lambda exchange: exchange("a", 1) + exchange("c", 1)  # noqa: E731
    early: Task = lambda exchange: exchange("a", 1)  # noqa: E731
    for tasks in ([together, stranger], [together, early], [early, together]):
        with raises(CompositionError, "different_layers"):
            CooperativeThreads[int, int, int](total).run(tasks)


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
