"""Reports, engines, batches and losses print as one readable paragraph."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.errors import DataError
from tests.engine.cases import classify, perceptron, vectors

MAX_LENGTH = 300


def dataset(number: int) -> list[dict[str, torch.Tensor]]:
    """Return samples."""
    batch = vectors(number)
    return [{name: value[index] for name, value in batch.items()} for index in range(number)]


def engine_of(loss: Any, **options: Any) -> ab.Engine:
    """Return an engine with micro-batches of 4."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ab.Engine(model, optimizer, loss, micro_batch_size=4, **options)


LOSSES: Mapping[str, Callable[[], object]] = {
    "mean over samples of classify": lambda: ab.mean_over_samples(classify),
    "sum over samples of classify": lambda: ab.sum_over_samples(classify),
    "mean over unmasked targets of classify": lambda: ab.mean_over_tokens(classify),
    "mean over counted items of CrossEntropyLoss": lambda: ab.mean_over(nn.CrossEntropyLoss(), len),
    "joint loss <lambda> of the outputs of classify": lambda: ab.joint(classify, lambda *_: 0.0),
    "sum of lm (mean over unmasked targets), aux (mean over samples, times 0.1) of classify": lambda: ab.sum_of(
        classify, lm=ab.tokens(), aux=ab.samples(weight=0.1)
    ),
}


@pytest.mark.parametrize("words", LOSSES)
def test_losses(words: str) -> None:
    """A declared loss prints its unit and function, without a memory address."""
    assert str(LOSSES[words]()) == words


def test_a_report() -> None:
    """A report shows its step, loss, gradient norm, learning rate and geometry."""
    with engine_of(ab.mean_over_samples(classify)) as engine:
        report = engine.step(vectors(10))

    assert (
        str(report)
        == repr(report)
        == (
            f"step 0: loss {report.loss:.4g}, gradient norm {report.grad_norm:.4g}, learning rate 0.1, "
            f"{report.plan}, next: epoch 0, sample 10"
        )
    )
    assert len(str(report)) <= MAX_LENGTH


def test_a_report_of_a_skipped_step_with_terms() -> None:
    """A skipped step prints its terms, a common rate once, the skipped update, and the sizes that did not fit."""
    terms = ab.sum_of(
        lambda model, batch: dict.fromkeys(("a", "b"), classify(model, batch)), a=ab.samples(), b=ab.samples()
    )
    with engine_of(terms, measure_gradient_norm=False) as engine:
        report = engine.step(vectors(10))
    object.__setattr__(report, "skipped", True)  # as after an overflow
    object.__setattr__(report, "too_large", (8, 6))

    value = f"{report.losses['a']:.4g}"
    assert f"(a {value}, b {value})" in str(report)
    assert "gradient norm" not in str(report)
    assert str(report).endswith("update skipped, repeated after out of memory at micro-batches of 8, 6")


def test_an_engine() -> None:
    """An engine prints its modules, its settings and its progress."""
    with engine_of(ab.mean_over_samples(classify)) as engine:
        engine.step(vectors(10))
        words = str(engine)

    assert " object at 0x" not in words
    assert len(words) <= MAX_LENGTH
    for part in (
        "mean over samples of classify",
        "SGD",
        "single on 1 rank (cpu)",
        "at most 4",
        "1 step made",
        "sample 10",
    ):
        assert part in words


def test_a_batch() -> None:
    """A batch prints its samples once known and how to load them; printing does not load it."""
    run = iter(ab.batches(dataset(7), effective_batch_size=4, shuffle=False))
    first = next(run)
    assert "the engine's step decides" in str(first)
    assert not first.is_known
    second = next(run)

    assert "3 samples, 4 to 6 of epoch 0" in str(second)
    assert all("batch.load()" in str(batch) and len(str(batch)) <= MAX_LENGTH for batch in (first, second))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loading_a_batch(num_workers: int) -> None:
    """`load` returns all collated samples of an effective batch and does not change the step."""
    data, reports = dataset(12), []
    for looks in (True, False):
        with engine_of(ab.mean_over_samples(classify), check_loss=False) as engine:
            for batch in ab.batches(data, effective_batch_size=6, seed=1, num_workers=num_workers):
                if looks:
                    whole = batch.load()
                    assert torch.equal(whole["x"], torch.stack([data[index]["x"] for index in batch.sample_ids]))
                reports.append(engine.step(batch).loss)

    assert reports[:2] == reports[2:]


@pytest.mark.parametrize("read", [lambda batch: batch["x"], lambda batch: batch[0], list, dict])
def test_reading_a_batch_like_a_loaded_one(read: Callable[[Any], object]) -> None:
    """Reading a batch like a dict or list raises an error that names `load`."""
    batch = next(iter(ab.batches(dataset(4), effective_batch_size=4)))

    with pytest.raises(DataError, match=r"batch\.load\(\)"):
        read(batch)


def test_a_share() -> None:
    """A share prints without its tensors."""
    share = next(iter(ab.shares([vectors(4)])))

    assert str(share) == "Share of one rank in an effective batch: dict in share.batch."
