"""What a backward needs comes back from the host as it was, each tensor copied once."""

import torch
from torch import nn
from torch.nn import functional as F

from anybatch.norms.host_store import HostStore

NUM = 64


def gradients(function: torch.nn.Module, values: torch.Tensor, store: HostStore | None) -> list[torch.Tensor]:
    """Return the gradients of the parameters, with saved tensors in the store."""
    function.zero_grad()
    if store is None:
        output = function(values)
    else:
        with store.hooks():
            output = function(values)
    output.square().sum().backward()
    return [p.grad.clone() for p in function.parameters() if p.grad is not None]


class SavedTwice(nn.Module):
    """One activation that three operations save, and one that is changed in place after it was saved."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(NUM, NUM).double(), nn.Linear(NUM, NUM).double()
        self.in_place = in_place

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        inside = self.first(values)
        if not self.in_place:
            output: torch.Tensor = torch.sin(inside) + torch.cos(inside) * self.second(inside)
            return output
        kept = torch.sigmoid(inside)  # saves its output
        shifted = kept.clone()
        squared = F.relu(shifted, inplace=True)  # saves what it changes
        return torch.mul(self.second(squared), kept)


def test_gradients_are_the_same() -> None:
    """With everything on the host in between, gradients are bit for bit the same, in-place operations included."""
    for in_place in (False, True):
        function, values = SavedTwice(in_place=in_place), torch.randn(NUM, NUM, dtype=torch.float64)
        expected = gradients(function, values, None)
        found = gradients(function, values, HostStore(function.parameters()))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_each_tensor_is_copied_once() -> None:
    """Three operations that save one activation cost one copy; parameters and small tensors cost none."""
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
    """A storage that was changed between two saves has two copies: the key knows the version."""
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
