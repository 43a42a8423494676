"""Errors in user code name the step, rank and samples; out-of-memory errors name the line."""

from typing import Any

import pytest
import torch

import anybatch as ab
from anybatch.errors import DoesNotFitError
from tests.engine.cases import InMemory, sgd_engine


def batch_of(num_samples: int) -> InMemory:
    """Return a batch of vectors."""
    return InMemory({"x": torch.randn(num_samples, 3)})


def engine_of(loss: Any, **options: Any) -> ab.Engine:
    """Return an engine over a linear layer."""
    model = torch.nn.Linear(3, 1)
    return sgd_engine(model, loss, check_loss=False, **options)


def test_an_error_in_the_loss_names_step_rank_and_samples() -> None:
    """An error in the loss function keeps its type and gets notes with the step, rank and samples."""
    calls = []

    def loss(model: Any, part: Any) -> torch.Tensor:
        calls.append(part)
        if len(calls) == 6:
            raise KeyError("label")  # noqa: EM101 (as a dict raises it)
        value: torch.Tensor = model(part["x"]).mean()
        return value

    with engine_of(loss, micro_batch_size=3) as engine:
        engine.step(batch_of(10))
        with pytest.raises(KeyError) as caught:
            engine.step(batch_of(10))
        notes = " ".join(caught.value.__notes__)

    assert "samples 3 to 5 of the effective batch (its micro-batch 1, from 0 on)" in notes
    assert "in step 1 (counted from 0), on rank 0 of 1" in notes


@pytest.mark.slow
def test_memory_that_runs_out_names_the_users_line_and_the_sizes_tried() -> None:
    """An out-of-memory error names the user's line, although its frames are cleared, and the sizes tried."""

    def loss(model: Any, part: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError(str(model(part["x"]).shape))

    with engine_of(loss, micro_batch_size=4) as engine, pytest.raises(DoesNotFitError) as caught:
        engine.step(batch_of(4))

    assert f"(in {__file__}, line " in str(caught.value)
    assert "in loss)" in str(caught.value)
    assert "1 sample (after 4, 2)" in str(caught.value)
