"""The tasks: the same data everywhere, an initial loss at chance, and realistic memory limits."""

import hashlib
from typing import get_args

import pytest
import torch
from torch import Tensor

from anybatch.memory.ledger import MemoryLedger
from anybatch.memory.trace import timeline
from anybatch_guide.mistakes.windows import windows
from anybatch_guide.setting import SAMPLE_BYTES
from anybatch_guide.tasks.task import MicroBatches, PlaygroundTask, TaskName, cross_entropy, load
from tests.extras import skip_without

skip_without("sklearn", "anybatch[guide]")

NAMES = get_args(TaskName)


def first_loss(task: PlaygroundTask, num_samples: int) -> Tensor:
    """Return the loss of a new network on the first samples."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return cross_entropy(task.model()(task.rows.inputs[:num_samples]), task.rows.targets[:num_samples])


@pytest.mark.parametrize("name", NAMES)
def test_the_first_loss_is_at_chance(name: str) -> None:
    """The initial loss is within 10% of the logarithm of the number of classes, which is chance."""
    task = load(name)

    assert first_loss(task, 64).item() == pytest.approx(task.chance, rel=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_data_are_reproducible(name: str) -> None:
    """Loaded twice, a task has bitwise the same data, and torch's random state is unchanged."""
    before = torch.get_rng_state()
    first, second = (
        hashlib.sha256(rows.inputs.numpy().tobytes() + rows.targets.numpy().tobytes()).hexdigest()
        for rows in (load(name).rows, load(name).rows)
    )

    assert first == second
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_bytes_per_sample_match_measured_memory(name: TaskName) -> None:
    """The peak memory of 64 more samples is at most the stated bytes, and close to them."""
    task = load(name, norm="batch" if name == "shapes" else "none")
    model = task.model()

    def peak(num_samples: int) -> int:
        ledger = MemoryLedger(device_type="cpu")
        with ledger:
            cross_entropy(model(task.rows.inputs[:num_samples]), task.rows.targets[:num_samples]).backward()
        found = timeline(ledger.trace()).peak_bytes
        ledger.forget()
        return found

    peak(2)
    taken = (peak(128) - peak(64)) / 64

    assert SAMPLE_BYTES[name] / 2 <= taken <= SAMPLE_BYTES[name]


def test_micro_batches_have_every_sample_once() -> None:
    """An epoch has each sample once, in a new order; windows do not cross its end."""
    rows = load("spirals").rows
    loader = MicroBatches(rows, 64, seed=0)
    epochs = [torch.cat([inputs for inputs, _ in loader]) for _ in range(2)]
    sizes = [[len(targets) for _, targets in window] for window in windows(loader, 3)]

    assert all(sorted(epoch.tolist()) == sorted(rows.inputs.tolist()) for epoch in epochs)
    assert not torch.equal(*epochs)
    assert sizes == [[64, 64, 64], [64, 64, 64], [64, 52]]
    assert len(loader) == sum(map(len, sizes))
