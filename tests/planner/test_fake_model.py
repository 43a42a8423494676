"""Fake copies of models: no data, the same ties, and an unchanged original."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from anybatch.errors import CannotPlanError
from anybatch.planner.step_spec import build, fake_batch, fake_twin


class Tied(nn.Module):
    """Has a tied weight, a buffer that is a view of another, and tensors in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4, bias=False)
        self.two = nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight
        vars(self.one.weight)["mark"] = "kept"
        self.table = nn.Buffer(torch.arange(12.0).reshape(3, 4))
        self.row = nn.Buffer(self.table[1])
        self.loose = [torch.ones(5), nn.Parameter(torch.ones(6))]  # the second belongs to no module


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors share storage, even without data."""
    names = [tensor.untyped_storage()._cdata for tensor in (one, other)]  # noqa: SLF001 (torch has no other name)
    return bool(names[0] == names[1])


def test_a_copy_keeps_ties_and_has_no_data() -> None:
    """In a copy, tied weights, views and unregistered tensors are fake and still tied; shapes are kept."""
    model = Tied()

    twin = fake_twin(model, FakeTensorMode())

    assert isinstance(twin.one.weight, nn.Parameter)
    assert all(isinstance(tensor, FakeTensor) for tensor in (*twin.parameters(), *twin.buffers(), *twin.loose))
    assert twin.one.weight is twin.two.weight
    assert vars(twin.one.weight)["mark"] == "kept"
    assert share_memory(twin.row, twin.table)
    assert twin.row.storage_offset() == 4
    assert {name: tensor.shape for name, tensor in twin.state_dict().items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }


def test_a_copied_optimizer_steps_the_copied_model() -> None:
    """An optimizer copied together with its model refers to the copy's parameters, and its state is fake."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    mode = FakeTensorMode()

    twin, copied = fake_twin((model, optimizer), mode)

    assert [id(parameter) for parameter in copied.param_groups[0]["params"]] == [id(p) for p in twin.parameters()]
    states = [state["exp_avg"] for state in copied.state.values()]
    assert len(states) == 2
    assert all(isinstance(state, FakeTensor) for state in states)
    assert set(map(id, copied.state)) == set(map(id, twin.parameters()))


def test_a_batch_is_resized_without_reading_it() -> None:
    """Every leaf with samples gets the requested number of them, in the same dtype and layout; the rest stays."""
    images = torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    batch = {"x": images, "names": ["a", "b"], "pair": (torch.zeros(2, dtype=torch.int64), 7), "scale": torch.ones(())}

    made = fake_batch(batch, 5, FakeTensorMode())

    assert made["x"].shape == (5, 3, 4, 4)
    assert made["x"].is_contiguous(memory_format=torch.channels_last)
    assert made["names"] == ["a", "b", "a", "b", "a"]
    assert made["pair"][0].shape == (5,)
    assert made["pair"][0].dtype is torch.int64
    assert made["pair"][1] == 7
    assert made["scale"].shape == ()
    assert all(isinstance(leaf, FakeTensor) for leaf in (made["x"], made["pair"][0], made["scale"]))


def test_factories_run_on_the_meta_device_if_possible() -> None:
    """A model factory runs on the meta device; one that reads values runs for real, and the reason is returned.

    The caller's random state is unchanged either way.
    """

    def reads() -> nn.Module:
        return nn.Linear(int(torch.ones(2).sum().item()), 3)

    before = torch.get_rng_state()
    without, reason = build(lambda: nn.Linear(2, 3))
    real, why = build(reads)

    assert without.weight.is_meta
    assert reason is None
    assert not real.weight.is_meta
    assert why is not None
    assert "meta" in why
    assert torch.equal(torch.get_rng_state(), before)


def test_models_that_cannot_be_copied_are_refused() -> None:
    """A model with a sparse tensor raises instead of being guessed."""
    model = nn.Linear(2, 2)
    model.register_buffer("odd", torch.eye(3).to_sparse())

    with pytest.raises(CannotPlanError, match="are not supported"):
        fake_twin(model, FakeTensorMode())
