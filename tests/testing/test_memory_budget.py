"""Enforced memory budgets, and out-of-memory faults at chosen allocations, on any machine."""

from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from anybatch.memory.trace import Phase
from anybatch.testing import memory_budget, out_of_memory_at


def trained() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """Return a model, its optimizer and a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    values = torch.randn(32, 8)

    def step() -> None:
        model(values).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def test_allocations_above_the_budget_raise() -> None:
    """Allocations up to the budget succeed, one byte more raises, and freed memory is available again."""
    with memory_budget(1000) as budget:
        one = torch.empty(600, dtype=torch.uint8)
        other = torch.empty(400, dtype=torch.uint8)
        assert (budget.held_bytes, budget.peak_bytes, budget.num_refused) == (1000, 1000, 0)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1, dtype=torch.uint8)
        del other
        assert budget.held_bytes == 600
        one = torch.empty(400, dtype=torch.uint8)
    assert (budget.peak_bytes, budget.num_refused, one.numel()) == (1000, 1, 400)


def test_existing_tensors_are_counted() -> None:
    """Existing modules, optimizers and tensors count as memory in use, each storage once."""
    model, optimizer, step = trained()
    step()
    weights = sum(p.numel() * 4 for p in model.parameters())
    buffers = sum(b.numel() * b.itemsize for b in model.buffers())
    state = sum(v.numel() * v.itemsize for s in optimizer.state.values() for v in s.values())
    weight = next(model.parameters())
    with memory_budget(10**6, model) as budget:
        assert budget.held_bytes == weights + buffers
        budget.hold(optimizer, weight, weight[:1])
        assert budget.held_bytes == weights + buffers + state


def test_existing_arguments_never_raise() -> None:
    """An existing tensor that an operation reads counts without raising; only new tensors can raise."""
    before = torch.zeros(1000)
    with memory_budget(100) as budget:
        before.add_(1)
        assert before.view(10, 100).shape == (10, 100)
        assert budget.held_bytes == 4000
        with pytest.raises(torch.OutOfMemoryError):
            before + 1


@pytest.mark.parametrize("phase", ["backward", "update"])
@pytest.mark.slow
def test_each_allocation_can_fail_and_always_the_same(phase: Phase) -> None:
    """Every single allocation can be made to fail, in the requested phase, in the same operation each time."""
    _, _, step = trained()
    step()
    with out_of_memory_at(0, phase=phase) as counted:
        step()
    assert counted.num_allocations > 5
    for number in range(1, counted.num_allocations + 1):
        failed = []
        for _ in range(2):
            _, _, step = trained()
            step()
            with out_of_memory_at(number, phase=phase) as fault, pytest.raises(torch.OutOfMemoryError) as caught:
                step()
            assert f"Fault on purpose at allocation {number} of" in str(caught.value)
            assert fault.num_allocations == number
            failed.append(fault.failed)
        assert failed[0] == failed[1]
        assert phase == failed[0][0][1]


def test_faults_occur_as_often_as_requested() -> None:
    """After each fault counting restarts; after the last one nothing fails."""
    with out_of_memory_at(2, times=2) as fault:
        outcomes = []
        for _ in range(8):
            try:
                torch.empty(3)
            except torch.OutOfMemoryError:
                outcomes.append("fails")
            else:
                outcomes.append("works")
    assert outcomes == ["works", "fails", "works", "fails", "works", "works", "works", "works"]
    assert [operation for operation, _ in fault.failed] == ["aten.empty.memory_format"] * 2


def test_nothing_remains_after_the_contexts() -> None:
    """After the contexts, also on an error, no dispatch mode and no optimizer hook is left."""
    _, _, step = trained()
    with pytest.raises(torch.OutOfMemoryError), memory_budget(0):
        step()
    with pytest.raises(torch.OutOfMemoryError), out_of_memory_at(1, phase="update"):
        step()
    assert _get_current_dispatch_mode_stack() == []
    hooks = import_module("torch.optim.optimizer")  # torch.optim deletes this name
    assert not hooks._global_optimizer_pre_hooks  # noqa: SLF001
    assert not hooks._global_optimizer_post_hooks  # noqa: SLF001
