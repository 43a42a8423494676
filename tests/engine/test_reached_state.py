"""What a loss writes to outside of its model, in the ways that people write, is of its samples alone."""

import functools
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import anybatch as ab
from anybatch.engine.reached_state import ReachedState
from tests.engine import cases as user_module
from tests.engine.cases import Batch
from tests.faults import sees

seen_by_all: list[int] = []
number = 0
mean = torch.zeros((), dtype=torch.float64)
histogram = np.zeros(65)
by_kind: Counter[str] = Counter()


class Meter:
    """What people write to average something over a run."""

    runs: ClassVar[list[int]] = []
    total = 0

    def __init__(self) -> None:
        self.count = 0
        self.nested = SimpleNamespace(value=None)

    def update(self, count: int) -> None:
        """Count, in the object, in its class and in a list of the class."""
        self.count += count
        Meter.total += count
        self.runs.append(count)


@dataclass(slots=True)
class Slotted:
    """A record with slots."""

    count: int = 0
    counts: list[int] = field(default_factory=list)


class CountingModule(nn.Module):
    """A metric as packages of metrics make them."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.in_steps = 0

    def forward(self, count: int) -> None:
        self.count += count
        self.in_steps += count


meter = Meter()
metric = CountingModule()
slotted = Slotted()


def helper(count: int) -> None:
    """Write to global variables of all kinds, one function away from the loss."""
    global number, mean, made_by_the_loss  # noqa: PLW0603 (what is shown)
    number += count
    mean = mean + count
    made_by_the_loss = globals().get("made_by_the_loss", 0) + count  # type: ignore[name-defined]
    seen_by_all.append(count)
    histogram[count] += count
    by_kind["all"] += count
    meter.update(count)
    metric(count)
    slotted.count += count
    slotted.counts.append(count)
    helper.calls = getattr(helper, "calls", 0) + count  # type: ignore[attr-defined]
    user_module.samples_counted = getattr(user_module, "samples_counted", 0) + count  # type: ignore[attr-defined]


def found() -> dict[str, float]:
    """Return what everything has counted."""
    return {
        "list": sum(seen_by_all),
        "number": number,
        "tensor": float(mean),
        "new": globals().get("made_by_the_loss", 0),
        "array": histogram.sum(),
        "counter": by_kind["all"],
        "object": meter.count,
        "class": Meter.total,
        "list of the class": sum(Meter.runs),
        "slot": slotted.count,
        "list in a slot": sum(slotted.counts),
        "buffer": float(metric.count),
        "attribute": metric.in_steps,
        "function": getattr(helper, "calls", 0),
        "module": getattr(user_module, "samples_counted", 0),
    }


def closing() -> tuple[Callable[..., torch.Tensor], Callable[[], list[float]]]:
    """Return a loss that counts in what it closes over, and what it has counted."""
    counted, seen, total = 0, [], torch.zeros(())

    def inner(count: int) -> None:
        nonlocal counted
        counted += count
        seen.append(count)
        total.add_(count)

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        inner(len(batch["x"]))
        helper(len(batch["x"]))
        return F.cross_entropy(model(batch["x"]), batch["y"])

    return loss, lambda: [counted, sum(seen), float(total)]


def wide() -> nn.Module:
    """Return a model with so many weights that "auto" finds sizes worth timing."""
    return nn.Sequential(nn.Linear(6, 8000), nn.Tanh(), nn.Linear(8000, 3)).double()


def batch_of() -> Batch:
    """Return labelled vectors."""
    return {"x": torch.randn(64, 6, dtype=torch.float64), "y": torch.randint(0, 3, (64,))}


@pytest.mark.slow
@sees(
    "variables of closures are not put back",
    "src/anybatch/engine/restoring.py",
    "                    cell.cell_contents = before\n",
    "                    pass\n",
    cases=["bare-one"],
)
@sees(
    "global variables are not put back",
    "src/anybatch/engine/restoring.py",
    "                    space[name] = value\n",
    "                    pass\n",
    cases=["bare-one"],
)
@sees(
    "new global variables stay",
    "src/anybatch/engine/restoring.py",
    "                    space.pop(name, None)\n",
    "                    pass\n",
    cases=["bare-one"],
)
@sees(
    "attributes of classes are not put back",
    "src/anybatch/engine/restoring.py",
    "                    setattr(kind, name, value)\n",
    "                    pass\n",
    cases=["bare-one"],
)
@sees(
    "arrays are not put back",
    "src/anybatch/engine/restoring.py",
    "            array[...] = value\n",
    "            pass\n",
    cases=["bare-one"],
)
@sees(
    "functions that a loss calls are not looked at",
    "src/anybatch/engine/reached_state.py",
    "        self._pending += [space.get(name) for name in names - known]\n",
    "",
    cases=["bare-one"],
)
@pytest.mark.parametrize("size", [16, "auto"], ids=["one", "auto"])
@pytest.mark.parametrize("form", ["bare", "declared", "partial", "decorated", "method"])
def test_each_sample_is_counted_once(form: str, size: Any) -> None:
    """Closures, globals, classes, objects, modules, arrays, attributes of functions: what is counted is 64 samples."""
    before = found()
    loss, closed_over = closing()
    forms: dict[str, Any] = {
        "bare": loss,
        "declared": ab.mean_over_samples(loss),
        "partial": ab.mean_over_samples(functools.partial(loss)),
        "decorated": ab.mean_over_samples(torch.enable_grad()(loss)),
        "method": ab.mean_over_samples(OfAnObject(loss).method),
    }
    model = wide()
    engine = ab.Engine(model, torch.optim.SGD(model.parameters()), forms[form], world=ab.World(), micro_batch_size=size)
    engine.step(batch_of())
    engine.close()

    assert {name: value - before[name] for name, value in found().items()} == dict.fromkeys(before, 64)
    assert closed_over() == [64, 64, 64]


class OfAnObject:
    """A trainer of the user's own, whose method is the loss."""

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        self.loss = loss

    def method(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss."""
        return self.loss(model, batch)


class Cached(Dataset[int]):
    """A data set that fills as it is read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Node:
    """One of a long chain."""

    def __init__(self, after: "Node | None") -> None:
        self.after = after


def chain(length: int) -> Node:
    """Return the first of a chain."""
    first = None
    for _ in range(length):
        first = Node(first)
    assert first is not None
    return first


@sees("data sets are put back", "src/anybatch/engine/reached_state.py", " and not _reads_data(value)", "")
def test_what_reads_data_is_left_alone() -> None:
    """A data set that a loss refers to may be read by other threads meanwhile: what it keeps is not touched."""
    data = Cached()
    reached = ReachedState([lambda: data], nn.Linear(1, 1))
    data[3]
    reached.restore()

    assert data.read == [3]


def version_of(tensor: Any) -> int:
    """Return how often a tensor was written to."""
    version: int = tensor._version  # noqa: SLF001 (autograd's own count, which has no public name)
    return version


def test_what_has_not_changed_is_not_written_to() -> None:
    """Tensors keep their version, containers and attributes their identity, and large tensors are not copied."""
    kept: dict[str, Any] = {
        "small": torch.zeros(3),
        "large": torch.zeros(2**24 + 1),
        "list": [1, 2],
        "array": np.ones(3),
    }
    kept["array"].flags.writeable = False
    node = chain(3)
    reached = ReachedState([lambda: (kept, node)], nn.Linear(1, 1))
    values = dict(kept)
    reached.restore()

    assert all(kept[name] is value for name, value in values.items())
    assert [version_of(kept[name]) for name in ("small", "large")] == [0, 0]


def test_a_large_tensor_is_taken_to_be_only_read() -> None:
    """What would take more than 64 MiB to keep is not kept, so it stays as the trial has left it."""
    large = torch.zeros(2**24 + 1)
    reached = ReachedState([lambda: large], nn.Linear(1, 1))
    large.add_(1)
    reached.restore()

    assert large[0] == 1


class MadeWhenAsked(OrderedDict[str, Any]):
    """Holds classes, and gives an object of one at each look-up, as the table of activations of transformers does."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


@sees(
    "a mapping is put back by what it makes",
    "src/anybatch/engine/restoring.py",
    "kept = dict(_items(value)) if isinstance(value, dict) else value.copy()",
    "kept = value.copy()",
)
def test_a_mapping_holds_what_it_holds() -> None:
    """What a mapping makes when it is asked is no change of it; what is added to it is taken out, in its order."""
    table = MadeWhenAsked(relu=nn.ReLU, bilinear=nn.Bilinear)  # the second cannot be made without arguments
    reached = ReachedState([lambda: table], nn.Linear(1, 1))
    table["tanh"] = nn.Tanh
    table.move_to_end("relu")
    reached.restore()

    assert list(OrderedDict.items(table)) == [("relu", nn.ReLU), ("bilinear", nn.Bilinear)]


@pytest.mark.slow
def test_a_long_chain_of_objects_is_no_recursion() -> None:
    """100,000 objects that refer to each other are looked at up to a bound, one after the other."""
    first = chain(100_000)
    ReachedState([lambda: first], nn.Linear(1, 1)).restore()
    while first.after is not None:  # Python itself would free them one within the other
        first = first.after


def test_a_variable_that_is_defined_later() -> None:
    """A closure over what does not exist yet is put back to that."""

    def loss() -> int:
        return later

    reached = ReachedState([loss], nn.Linear(1, 1))
    later = 3
    reached.restore()

    with pytest.raises(NameError):
        loss()
