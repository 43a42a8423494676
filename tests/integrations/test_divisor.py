"""The items that a loss averages over are read from its autograd graph."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import anybatch as ab
from anybatch.errors import LossError
from anybatch.integrations.divisor import ItemCounter, divisor_of
from tests.raising import raises

CLASSES, WIDTH = 5, 7
Loss = Callable[[Tensor, Any], Tensor]


def token_batch(lengths: Sequence[int], masked: int = 0) -> dict[str, Tensor]:
    """Return rows of these lengths, padded with -100; the first `masked` positions are no targets."""
    labels = torch.full((len(lengths), max(lengths)), -100)
    for row, length in zip(labels, lengths, strict=True):
        row[:length] = torch.randint(CLASSES, (length,))
        row[:masked] = -100
    return {"input_ids": labels.clamp(min=0), "labels": labels}


def over_tokens(scores: Tensor, batch: Any) -> Tensor:
    """Return the mean over all targets."""
    return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())


def over_shifted(scores: Tensor, batch: Any) -> Tensor:
    """Return the mean over targets of a causal language model."""
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def over_masked(scores: Tensor, batch: Any) -> Tensor:
    """Return a mean over targets, written by hand."""
    mask = batch["labels"] != -100
    return torch.as_tensor((scores.square().sum(-1) * mask).sum() / mask.sum())


LOSSES: dict[str, tuple[Loss, str]] = {
    "cross entropy": (over_tokens, "tokens"),
    "smoothed": (
        lambda scores, batch: F.cross_entropy(
            scores.transpose(1, 2), batch["labels"], label_smoothing=0.1, ignore_index=-100
        ),
        "tokens",
    ),
    "two dimensions": (lambda scores, batch: F.cross_entropy(scores.transpose(1, 2), batch["labels"]), "tokens"),
    "causal": (over_shifted, "shifted tokens"),
    "by hand": (over_masked, "tokens"),
    "scaled": (lambda scores, batch: -over_tokens(scores, batch).view(1).squeeze() * 3 / 2, "tokens"),
    "over samples": (lambda scores, _: scores.mean((1, 2)).mean(), "samples"),
    "sum of two": (lambda scores, batch: over_tokens(scores, batch) + 0.1 * over_masked(scores, batch), "tokens"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_kinds_of_items(name: str) -> None:
    """The kind of items is found, and the micro-batch's number of them is counted."""
    loss, items = LOSSES[name]
    counter, batch = ItemCounter(None), token_batch([3, 6, 4])
    scores = torch.randn(3, 6, CLASSES, requires_grad=True)
    counter.observe(loss(scores, batch), batch)

    assert counter.items == items
    assert int(counter(token_batch([5, 2]))) == {"samples": 2, "tokens": 7, "shifted tokens": 5}[items]


def test_as_many_targets_as_samples_by_chance() -> None:
    """A first micro-batch with one target per sample does not make a later one, with more targets, an error."""
    counter = ItemCounter(None)
    for length in (2, 5):
        batch = token_batch([length, length], masked=1)
        counter.observe(over_tokens(torch.randn(2, length, CLASSES, requires_grad=True), batch), batch)

    assert counter.items == "tokens"
    assert int(counter(token_batch([6, 3]))) == 9


@pytest.mark.parametrize(
    "function", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits]
)
def test_elementwise_losses(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A mean over samples and features counts samples, also for batches that are tuples."""
    counter = ItemCounter(None)
    batch = (torch.rand(4, WIDTH), torch.rand(4, WIDTH))
    counter.observe(function(batch[0].requires_grad_(), batch[1]), batch)

    assert counter.items == "samples"
    assert counter((torch.rand(9, WIDTH), torch.rand(9, WIDTH))) == 9


def test_an_ambiguous_first_micro_batch() -> None:
    """Where two kinds have the same number, later micro-batches decide, and a wrong first choice is refused."""
    ambiguous, decisive = token_batch([4, 5], masked=1), token_batch([4, 5])

    def counter_after(loss: Loss) -> ItemCounter:
        counter = ItemCounter(None)
        for batch in (ambiguous, decisive):
            counter.observe(loss(torch.randn(2, 5, CLASSES, requires_grad=True), batch), batch)
        return counter

    assert counter_after(over_tokens).items == "tokens"
    with raises(LossError, "unknown_items"):
        counter_after(over_shifted)


def test_items_that_only_the_loop_masks() -> None:
    """A loss whose later micro-batches have other items than its first one is refused."""
    counter, masked = ItemCounter(None), token_batch([4, 6], masked=2)
    for batch in (token_batch([4, 5]), token_batch([3, 6])):
        counter.observe(
            over_tokens(torch.randn(2, batch["labels"].shape[1], CLASSES, requires_grad=True), batch), batch
        )
    loss = over_tokens(torch.randn(2, 6, CLASSES, requires_grad=True), masked)

    with raises(LossError, "unknown_items"):
        counter.observe(loss, token_batch([4, 6]))


def test_a_given_count_is_used() -> None:
    """`count=` is not questioned."""
    counter = ItemCounter(ab.tokens(shift=False))
    counter.observe(torch.rand(3, requires_grad=True).sum(), token_batch([2]))

    assert int(counter(token_batch([3, 6]))) == 9


def test_refusals() -> None:
    """Class weights, sums, means over padding, terms with other items, and losses across samples are refused."""
    batch = token_batch([3, 6])
    scores = torch.randn(2, 6, CLASSES, requires_grad=True)
    weighted = F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), torch.rand(CLASSES))
    with raises(LossError, "class_weights"):
        ItemCounter(None).observe(weighted, batch)
    losses = (
        scores.sum(),
        scores.mean(1)[:, :3].square().mean() + over_tokens(scores, batch),
        scores.prod(),
        torch.rand(()),
    )
    for loss in losses:
        with raises(LossError, "unknown_items"):
            ItemCounter(None).observe(loss, batch)
    vectors = torch.randn(4, WIDTH, requires_grad=True)
    with raises(LossError, "compares_samples"):
        divisor_of(F.cross_entropy(vectors @ vectors.T, torch.arange(4)), (vectors,))
    numbered = torch.arange(4)  # labels that happen to be numbered
    assert divisor_of(F.cross_entropy(vectors, numbered), (vectors, numbered)) == 4
