"""Private torch APIs used by several folders: their behavior, and the fallback if torch lacks them."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from anybatch.core.torch_internals import (
    BatchNormBase,
    BufferKeeper,
    InstanceNormBase,
    TrainableParts,
    accumulation_hooks,
    active_dispatch_modes,
    change_each,
    checkpointed_forward,
    dense_values,
    hide_worker,
    is_in_backward,
    is_in_checkpoint,
    layer_versions,
    num_changes,
    packing_function,
    set_layer_versions,
    storage_key,
    tensor_hooks,
    widened,
    without_tensor_hooks,
)
from anybatch.errors import UnsupportedTorchError

NOTHING: Any = SimpleNamespace()
OTHERS = [torch.tensor([2.0, -3.0]), torch.tensor([0.5])]
CHANGES: dict[str, tuple[tuple[Any, ...], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "copy": ((OTHERS,), lambda _, other: other),
    "zero": ((), lambda one, _: torch.zeros_like(one)),
    "add": ((OTHERS,), lambda one, other: one + other),
    "mul": ((torch.tensor(3.0),), lambda one, _: one * 3),
    "lerp": ((OTHERS, 0.25), lambda one, other: one.lerp(other, 0.25)),
}


class Bare:
    """A stand-in for a tensor, storage or module with few attributes and no private ones."""

    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("of", [torch, NOTHING], ids=["together", "one by one"])
def test_many_tensors_are_changed_in_place(name: str, of: object) -> None:
    """Tensors are changed in place like in a loop, with and without torch's foreach function."""
    args, expected = CHANGES[name]
    tensors = [torch.tensor([-1.0, 1.0]), torch.tensor([0.5])]
    before = [tensor.clone() for tensor in tensors]

    change_each(name, tensors, *args, of=of)

    for tensor, one, other in zip(tensors, before, OTHERS, strict=True):
        torch.testing.assert_close(tensor, expected(one, other), rtol=0, atol=0)


def test_every_normalisation_layer_has_one_of_two_bases() -> None:
    """BatchNorm layers are a `BatchNormBase`, InstanceNorm layers an `InstanceNormBase`, and other norms neither."""
    batch_norms = (nn.BatchNorm1d(1), nn.BatchNorm2d(1), nn.BatchNorm3d(1), nn.SyncBatchNorm(1), nn.LazyBatchNorm2d())
    instance_norms = (nn.InstanceNorm1d(1), nn.InstanceNorm2d(1), nn.InstanceNorm3d(1))

    assert all(isinstance(layer, BatchNormBase) for layer in batch_norms)
    assert all(isinstance(layer, InstanceNormBase) for layer in instance_norms)
    assert not any(isinstance(layer, BatchNormBase) for layer in (*instance_norms, nn.GroupNorm(1, 1), nn.LayerNorm(1)))


def test_views_share_their_storage() -> None:
    """Tensors that share memory have the same key, others different ones, even without data."""
    for device in ("cpu", "meta"):
        one, other = torch.empty(4, device=device), torch.empty(4, device=device)
        keys = [storage_key(tensor.untyped_storage()) for tensor in (one, one[2:], other)]

        assert keys[0] == keys[1] != keys[2]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_stored_values_belong_to_the_tensor() -> None:
    """Changing the stored values of a sparse tensor changes the tensor; a dense tensor is its own values."""
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True
    ).coalesce()
    dense_values(sparse).mul_(2)
    dense = torch.ones(2)

    assert sparse.to_dense().tolist() == [2, 0, 4]
    assert dense_values(dense) is dense


def test_stored_values_without_private_names() -> None:
    """If torch hides stored values, a coalesced tensor uses `values()`, and others raise."""
    values = torch.ones(2)
    coalesced: Any = Bare(is_sparse=True, is_coalesced=lambda: True, values=lambda: values)
    repeated: Any = Bare(is_sparse=True, is_coalesced=lambda: False)

    assert dense_values(coalesced) is values
    with pytest.raises(UnsupportedTorchError):
        dense_values(repeated)


def test_buffers_are_put_back_by_writing_to_their_tables() -> None:
    """Restoring writes to the table that the module reads; a model without one raises."""
    layer = nn.BatchNorm1d(2)
    keeper = BufferKeeper(nn.Sequential(nn.Linear(1, 1), layer))
    keeper.keep()
    layer.running_mean = torch.full((2,), 7.0)
    hidden: Any = Bare(modules=lambda: [Bare()])

    keeper.restore()

    assert layer.running_mean is not None
    assert layer.running_mean.tolist() == [0, 0]
    with pytest.raises(UnsupportedTorchError):
        BufferKeeper(hidden)


def test_backwards_are_distinguished_from_forwards() -> None:
    """Gradient hooks are recognized as running in a backward; a torch that cannot tell raises."""
    seen = []
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda _: seen.append(is_in_backward()))
    weight.sum().backward()

    assert seen == [True]
    assert not is_in_backward()
    with pytest.raises(UnsupportedTorchError):
        is_in_backward(NOTHING)


def test_every_change_in_place_counts() -> None:
    """A tensor counts writes to its memory, also through a view; one that does not count raises."""
    values = torch.zeros(2)
    (before,) = num_changes([None, values], "this")
    values.add_(1)
    values[:1].mul_(2)

    assert num_changes([values, None], "this") == [before + 2]
    with pytest.raises(UnsupportedTorchError):
        num_changes([cast("torch.Tensor", NOTHING)], "this")


def test_a_checkpointed_forward_is_run_again() -> None:
    """A checkpointed forward saves nothing; the backward recomputes it, and the gradient is right."""
    calls = 0
    weight = nn.Parameter(torch.tensor([3.0]))

    class Block(nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return (values * weight).square()

    block, values = Block(), torch.tensor([2.0])
    running = checkpointed_forward(block, lambda: (nullcontext(), nullcontext()), (values,), {})
    next(running)
    output = block(values)
    assert next(running, "ended") == "ended"
    output.sum().backward()

    assert calls == 2
    assert weight.grad is not None
    assert float(weight.grad) == 2 * 3 * 2 * 2


def test_missing_torch_features_are_refused() -> None:
    """If a private interface is missing and no fallback is safe, the error names the missing feature."""
    with pytest.raises(UnsupportedTorchError):
        checkpointed_forward(nn.Identity(), lambda: (nullcontext(), nullcontext()), (), {}, NOTHING)
    other = SimpleNamespace(_checkpoint_without_reentrant_generator=lambda _: iter(()))
    with pytest.raises(UnsupportedTorchError):
        checkpointed_forward(nn.Identity(), lambda: (nullcontext(), nullcontext()), (), {}, other)


class Answers(IterableDataset[bool]):
    """Yields whether the worker info is hidden before and after hiding, and whether hiding worked."""

    def __init__(self, *, knows: bool) -> None:
        self.knows = knows

    def __iter__(self) -> Any:
        yield get_worker_info() is None
        yield hide_worker() if self.knows else hide_worker(SimpleNamespace())
        yield get_worker_info() is None


def test_a_worker_hides() -> None:
    """`hide_worker` makes `get_worker_info` return None; if torch's private interface is missing, it returns False."""
    found, without = (list(DataLoader(Answers(knows=knows), batch_size=None, num_workers=1)) for knows in (True, False))

    assert found == [False, True, True]
    assert without == [False, False, False]


def test_a_checkpointed_forward_is_detected() -> None:
    """`is_in_checkpoint` is true inside `checkpoint(use_reentrant=False)` only, not under other hooks."""
    seen = []

    def forward(values: torch.Tensor) -> torch.Tensor:
        seen.append(is_in_checkpoint())
        return values * 2

    values = torch.ones(1, requires_grad=True)
    forward(values)
    checkpoint(forward, values, use_reentrant=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        forward(values)

    assert seen == [False, True, False]


class Cached(nn.Module):
    """Caches a table in its forward, and calls a method through an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.table: torch.Tensor | None = None
        self.call = self.encode

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.ones_like(x)
        found: torch.Tensor = self.inner(x) + self.table
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


def test_wider_copies_are_separate_modules() -> None:
    """Widened copies compute the same in float64, also recurrent layers; the originals stay unchanged."""
    torch.manual_seed(0)
    cached, recurrent = Cached(), nn.LSTM(2, 2)
    for module in (cached, recurrent):
        before = list(module.parameters())
        wide, copy_of = widened(module, torch.float64)
        x = torch.randn(3, 2)
        expected, found = module(x), wide(x.double())
        one, other = (value if isinstance(value, torch.Tensor) else value[0] for value in (expected, found))

        assert other.dtype is torch.float64
        torch.testing.assert_close(other.float(), one)
        assert all(a is b and a.dtype is torch.float32 for a, b in zip(before, module.parameters(), strict=True))
        assert copy_of(before[0]) is next(wide.parameters())
        assert copy_of(module) is wide
    assert cached.table is not None
    assert cached.table.dtype is torch.float32


@pytest.mark.parametrize(
    ("ask", "purpose"),
    [
        (is_in_checkpoint, "exact"),
        (active_dispatch_modes, "exact"),
        (packing_function, "per_sample"),
    ],
)
def test_missing_features_of_training_are_refused(ask: Callable[[Any], object], purpose: str) -> None:
    """Without a safe fallback, the error names the missing feature."""
    with pytest.raises(UnsupportedTorchError, match=purpose):
        ask(NOTHING)


@pytest.mark.parametrize(
    "ask", [tensor_hooks, accumulation_hooks, lambda found: without_tensor_hooks(found).__enter__()]
)
def test_hidden_hooks_are_refused(ask: Callable[[Any], object]) -> None:
    """Hidden hooks are refused, because they would silently run in every micro-batch."""
    with pytest.raises(UnsupportedTorchError):
        ask([NOTHING])
    with pytest.raises(UnsupportedTorchError):
        TrainableParts(SimpleNamespace(modules=lambda: [NOTHING]))  # type: ignore[arg-type]


def test_layer_versions_are_saved() -> None:
    """A state dict with versions loads like the original; without them BatchNorm lacks its counter."""
    layer = nn.BatchNorm1d(2)
    layer(torch.rand(3, 2))
    state = layer.state_dict()
    copy = OrderedDict(state)
    assert layer_versions(copy) is None
    set_layer_versions(copy, layer_versions(state))
    del copy["num_batches_tracked"]

    missing = nn.BatchNorm1d(2).load_state_dict(copy, strict=False).missing_keys
    without = nn.BatchNorm1d(2).load_state_dict(OrderedDict(copy), strict=False).missing_keys

    assert missing == ["num_batches_tracked"]
    assert without == []
