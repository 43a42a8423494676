"""Private torch APIs used by several folders: their behavior, and the fallback if torch lacks them."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from anybatch.core.torch_internals import (
    BatchNormBase,
    InstanceNormBase,
    add_to_each,
    buffer_tables,
    checkpointed_forward,
    clamp_each,
    copy_each,
    dense_values,
    hides_worker,
    interpolate_each,
    is_in_backward,
    multiply_each,
    num_axes_unbatched,
    num_changes,
    storage_key,
    zero_each,
)
from anybatch.errors import UnsupportedTorchError

NOTHING: Any = SimpleNamespace()
OTHERS = [torch.tensor([2.0, -3.0]), torch.tensor([0.5])]
CHANGES: dict[
    str, tuple[Callable[..., None], tuple[Any, ...], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]
] = {
    "copy": (copy_each, (OTHERS,), lambda _, other: other),
    "zero": (zero_each, (), lambda one, _: torch.zeros_like(one)),
    "add": (add_to_each, (OTHERS,), lambda one, other: one + other),
    "multiply": (multiply_each, (torch.tensor(3.0),), lambda one, _: one * 3),
    "clamp": (clamp_each, (0.75,), lambda one, _: one.clamp(-0.75, 0.75)),
    "interpolate": (interpolate_each, (OTHERS, 0.25), lambda one, other: one.lerp(other, 0.25)),
}


class Bare:
    """A stand-in for a tensor, storage or module with few attributes and no private ones."""

    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("of", [torch, NOTHING], ids=["together", "one by one"])
def test_many_tensors_are_changed_in_place(name: str, of: object) -> None:
    """Each function changes its tensors in place like its loop, with and without torch's foreach function."""
    change, args, expected = CHANGES[name]
    tensors = [torch.tensor([-1.0, 1.0]), torch.tensor([0.5])]
    before = [tensor.clone() for tensor in tensors]

    change(tensors, *args, of)

    for tensor, one, other in zip(tensors, before, OTHERS, strict=True):
        torch.testing.assert_close(tensor, expected(one, other), rtol=0, atol=0)


def test_every_normalisation_layer_has_one_of_two_bases() -> None:
    """BatchNorm layers are a `BatchNormBase`, InstanceNorm layers an `InstanceNormBase`, and other norms neither."""
    batch_norms = (nn.BatchNorm1d(1), nn.BatchNorm2d(1), nn.BatchNorm3d(1), nn.SyncBatchNorm(1), nn.LazyBatchNorm2d())
    instance_norms = (nn.InstanceNorm1d(1), nn.InstanceNorm2d(1), nn.InstanceNorm3d(1))

    assert all(isinstance(layer, BatchNormBase) for layer in batch_norms)
    assert all(isinstance(layer, InstanceNormBase) for layer in instance_norms)
    assert not any(isinstance(layer, BatchNormBase) for layer in (*instance_norms, nn.GroupNorm(1, 1), nn.LayerNorm(1)))


def test_views_have_their_tensor_s_storage() -> None:
    """Tensors that share memory have the same key, others different ones, even without data."""
    for device in ("cpu", "meta"):
        one, other = torch.empty(4, device=device), torch.empty(4, device=device)
        keys = [storage_key(tensor.untyped_storage()) for tensor in (one, one[2:], other)]

        assert keys[0] == keys[1] != keys[2]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_stored_numbers_are_the_tensor_s_own() -> None:
    """Changing the stored values of a sparse tensor changes the tensor; a dense tensor is its own values."""
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True
    ).coalesce()
    dense_values(sparse).mul_(2)
    dense = torch.ones(2)

    assert sparse.to_dense().tolist() == [2, 0, 4]
    assert dense_values(dense) is dense


def test_stored_numbers_come_by_the_public_name_instead() -> None:
    """If torch hides stored values, a coalesced tensor uses `values()`, and others raise."""
    values = torch.ones(2)
    coalesced: Any = Bare(is_sparse=True, is_coalesced=lambda: True, values=lambda: values)
    repeated: Any = Bare(is_sparse=True, is_coalesced=lambda: False)

    assert dense_values(coalesced) is values
    with pytest.raises(UnsupportedTorchError):
        dense_values(repeated)


def test_buffers_are_put_back_by_writing_to_their_tables() -> None:
    """Each module's table is the one that the module reads; a model without one raises."""
    layer = nn.BatchNorm1d(2)
    tables = buffer_tables(nn.Sequential(nn.Linear(1, 1), layer))
    tables[2]["running_mean"] = torch.full((2,), 7.0)
    hidden: Any = Bare(modules=lambda: [Bare()])

    assert [set(table) for table in tables] == [set(), set(), {"running_mean", "running_var", "num_batches_tracked"}]
    assert layer.running_mean is not None
    assert layer.running_mean.tolist() == [7, 7]
    with pytest.raises(UnsupportedTorchError):
        buffer_tables(hidden)


def test_a_backward_is_told_from_a_forward() -> None:
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


def test_axes_of_one_sample_are_known_without_asking() -> None:
    """Without torch's private property the number of axes comes from the layer class; unknown classes are refused."""

    class Silent(nn.InstanceNorm2d):
        @property
        def _get_no_batch_dim(self) -> Any:
            raise AttributeError

    class Unknown(nn.InstanceNorm2d.__base__):  # type: ignore[name-defined, misc]
        @property
        def _get_no_batch_dim(self) -> Any:
            raise AttributeError

    assert num_axes_unbatched(Silent(2)) == 3
    with pytest.raises(UnsupportedTorchError):
        num_axes_unbatched(Unknown(2))


def test_what_torch_lacks_is_refused() -> None:
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
        yield hides_worker() if self.knows else hides_worker(SimpleNamespace())
        yield get_worker_info() is None


def test_a_worker_hides() -> None:
    """`hides_worker` makes `get_worker_info` return None; if torch's private interface is missing, it returns False."""
    found, without = (list(DataLoader(Answers(knows=knows), batch_size=None, num_workers=1)) for knows in (True, False))

    assert found == [False, True, True]
    assert without == [False, False, False]
