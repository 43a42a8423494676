"""A stand-in for a model answers with rows of what the model has answered, and leaves the model alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from anybatch.core.tree import tensors_of
from anybatch.engine.loss_check.recorded_model import Call, RecordedModel, RecordedRows, UndecidedError, sample_axes
from tests.engine.cases import perceptron, vectors


@given(data=st.data(), number=st.integers(1, 5), interleaved=st.booleans())
@pytest.mark.slow
def test_rows_are_those_of_the_samples(data: st.DataObject, number: int, interleaved: bool) -> None:
    """RecordedRows are what indexing by hand gives, along however many axes, side by side or interleaved."""
    entries = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2), "entries per sample")
    sizes = [number * each for each in entries]
    tensor = torch.randn(*sizes, 2, dtype=torch.float64)
    start = data.draw(st.integers(0, number - 1), "start")
    stop = data.draw(st.integers(start + 1, number), "stop")

    rows = RecordedRows(tensor, tuple(enumerate(entries)), number, interleaved=interleaved)
    found = rows.shaped(rows.leaf(start, stop, wide=True))

    expected = tensor
    for axis, each in enumerate(entries):
        owner = torch.arange(number * each) % number if interleaved else torch.arange(number * each) // each
        expected = expected.index_select(axis, ((owner >= start) & (owner < stop)).nonzero().squeeze(1))
    assert torch.equal(found.detach(), expected)


def calls(*tensors: torch.Tensor, module: nn.Module = perceptron()) -> list[Call]:  # noqa: B008 (one module for all)
    """Return one call that returned these."""
    return [Call(module, tensors, tensors)]


def test_axes_of_samples_are_those_that_grow_with_them() -> None:
    """A second recording with another number of samples tells axes of samples from others of the same length."""
    ones = calls(
        torch.zeros(7, 7, 3), torch.zeros(7, 4), torch.zeros(3, 14), torch.zeros(7, 7), torch.zeros(()), torch.zeros(0)
    )
    others = calls(
        torch.zeros(6, 7, 3), torch.zeros(7, 4), torch.zeros(3, 12), torch.zeros(6, 6), torch.zeros(()), torch.zeros(0)
    )

    assert sample_axes(ones, 7, others, 6) == [[((0, 1),), (), ((1, 2),), ((0, 1), (1, 1)), (), ()]]


def test_axes_are_not_guessed_where_two_are_possible() -> None:
    """Without a second recording, only the first axis is taken for that of the samples, if no other can be."""
    assert sample_axes(calls(torch.zeros(7, 4), torch.zeros(3), torch.zeros(())), 7, None, 0) == [[((0, 1),), (), ()]]
    for shape in [(7, 7), (14, 3), (3, 7)]:
        with pytest.raises(UndecidedError, match="which axis"):
            sample_axes(calls(torch.zeros(shape)), 7, None, 0)


@dataclass
class Found:
    """What a model may return."""

    logits: torch.Tensor
    rest: tuple[torch.Tensor, dict[str, Any]]


class Model(nn.Module):
    """A model with everything that a loss function may reach for."""

    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 3)
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.temperature = nn.Parameter(torch.tensor(1.5))

    @property
    def width(self) -> int:
        return self.body.out_features

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for block in [self.body, *self.blocks]:
            x = torch.tanh(block(x))
        return x

    def forward(self, x: torch.Tensor) -> Found:
        z = self.encode(x)
        return Found(z, (z.mean(), {"half": z / 2}))


WAYS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "a call": lambda model, x: model(x).logits,
    "a call by name": lambda model, x: model(x=x).rest[1]["half"],
    "forward": lambda model, x: model.forward(x).logits,
    "a method": lambda model, x: model.encode(x),
    "a submodule": lambda model, x: model.blocks[1](model.body(x)),
    "a container": lambda model, x: nn.Sequential(model.body, *model.blocks)(x),
    "a parameter": lambda model, x: model.body(x) * model.temperature * model.scale * model.width,
    "torch.func": lambda model, x: torch.func.functional_call(model, dict(model.named_parameters()), (x,)).logits,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_calling_is_replayed(way: str) -> None:
    """Whatever a loss function calls, it gets the recorded answers again, and gradients reach them."""
    torch.manual_seed(0)
    model = Model()
    x = vectors(7)["x"].float()
    stand_in = RecordedModel(model, ())
    recorded = stand_in.record(lambda: WAYS[way](stand_in.model, x))
    answers = [[tensor.clone().requires_grad_() for tensor in call.tensors] for call in recorded]
    found, _ = stand_in.replay(recorded, answers, lambda: WAYS[way](stand_in.model, x))

    assert isinstance(stand_in.model, Model)
    torch.testing.assert_close(found, WAYS[way](model, x))
    leaves = [leaf for group in answers for leaf in group]
    gradients = torch.autograd.grad(found.sum(), leaves, allow_unused=True)
    assert any(gradient is not None for gradient in gradients)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_opened_modules_run_on_their_childrens_answers() -> None:
    """An opened module runs its own forward, and its children answer from the recording."""
    model = Model()
    x = vectors(7)["x"].float()
    stand_in = RecordedModel(model, {id(model)})
    recorded = stand_in.record(lambda: stand_in.model(x))  # type: ignore[operator]

    assert [call.module for call in recorded] == [model.body, *model.blocks]
    rows = [[tensor[2:5] for tensor in call.tensors] for call in recorded]
    found, _ = stand_in.replay(recorded, rows, lambda: stand_in.model(x[2:5]))  # type: ignore[operator]
    expected = model(x[2:5])
    for one, other in zip(tensors_of(found), tensors_of(expected), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("other", ["fewer", "more", "another"])
def test_other_calls_than_recorded_are_no_answer(other: str) -> None:
    """A loss function that calls the model differently for fewer samples cannot be looked at."""
    model = Model()
    x = vectors(7)["x"].float()
    stand_in = RecordedModel(model, ())
    clone: Any = stand_in.model
    recorded = stand_in.record(lambda: (clone.body(x), clone.body(x)))
    runs: dict[str, Callable[[], Any]] = {
        "fewer": lambda: clone.body(x),
        "more": lambda: [clone.body(x) for _ in range(3)],
        "another": lambda: (clone.body(x), clone(x)),
    }
    with pytest.raises(UndecidedError, match="another way"):
        stand_in.replay(recorded, [call.tensors for call in recorded], runs[other])


def test_hooks_of_the_model_stay_silent_in_a_replay() -> None:
    """A user's hooks run when the model itself is run, to be recorded, and not when a stand-in answers."""
    model, seen = Model(), []
    model.register_forward_hook(lambda *_: seen.append("forward"))
    model.temperature.register_hook(lambda _: seen.append("gradient"))
    x = vectors(7)["x"].float()
    stand_in = RecordedModel(model, ())
    clone: Any = stand_in.model
    recorded = stand_in.record(lambda: clone(x))
    assert seen == ["forward"]
    answers = [[tensor.clone().requires_grad_() for tensor in call.tensors] for call in recorded]
    found, _ = stand_in.replay(recorded, answers, lambda: WAYS["a call"](clone, x) * clone.temperature)
    torch.autograd.grad(found.sum(), [*answers[0], clone.temperature], allow_unused=True)

    assert seen == ["forward"]
