"""The items that a loss averages over are read from its autograd graph."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import anybatch as ab
from anybatch.errors import LossError
from anybatch.integrations.divisor import NUM_PENDING, ItemCounter
from tests.raising import raises, warns

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


def observed(counter: ItemCounter, loss: Loss, *batches: Any) -> ItemCounter:
    """Let the counter observe a loss of each batch."""
    for batch in batches:
        counter.observe(loss(torch.randn(*batch["labels"].shape, CLASSES, requires_grad=True), batch), batch)
    return counter


RAGGED, EQUAL, SHORT = token_batch([3, 6, 4]), token_batch([5, 5, 5]), token_batch([2, 5, 5, 1])
COUNTS: dict[str, Any] = {"tokens": ab.tokens(shift=False), "shifted tokens": ab.tokens(), "samples": ab.samples()}


@pytest.mark.parametrize("declared", COUNTS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_declared_count_is_compared(name: str, declared: str) -> None:
    """A wrong `count=` is refused in the first micro-batch in which it shows; a right one is used."""
    loss, items = LOSSES[name]
    is_plain = name == "over samples"  # a mean over elements has one over samples of the same number
    counter = observed(ItemCounter(COUNTS[declared]), loss, EQUAL, EQUAL)
    if declared == items or (is_plain and declared == "samples"):
        assert int(observed(counter, loss, RAGGED, SHORT)(RAGGED)) == int(ItemCounter(COUNTS[declared])(RAGGED))
        return
    with raises(LossError, "wrong_count"):
        observed(counter, loss, RAGGED, SHORT)


def test_declared_counts_without_false_alarms() -> None:
    """Single samples, means of the means of samples, factors, rounding, and losses that cannot be read are accepted."""
    counts, batches = COUNTS, [token_batch([length]) for length in (3, 5)]
    observed(ItemCounter(counts["samples"]), over_tokens, *batches)
    observed(ItemCounter(lambda batch: 0.5 * len(batch["labels"])), LOSSES["over samples"][0], EQUAL, RAGGED)
    observed(ItemCounter(counts["samples"]), lambda scores, _: scores.square().mean(), EQUAL, RAGGED)
    with warns("loss_not_checked"):
        observed(ItemCounter(counts["samples"]), lambda scores, _: scores.logsumexp((0, 1, 2)), EQUAL, RAGGED)

    def by_sample(scores: Tensor, batch: Any) -> Tensor:
        rows = [F.cross_entropy(*row) for row in zip(scores, batch["labels"], strict=True)]
        return torch.as_tensor(sum(rows) / len(rows))

    observed(ItemCounter(counts["samples"]), by_sample, EQUAL, RAGGED)
    long = token_batch([700, 401])  # more targets than bf16 can count
    observed(ItemCounter(counts["tokens"]), lambda scores, batch: over_tokens(scores.bfloat16(), batch), RAGGED, long)
    weights = torch.rand(CLASSES)

    def weighted(scores: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), weights)

    observed(ItemCounter(lambda batch: weights[batch["labels"].clamp(min=0)].sum()), weighted, EQUAL, EQUAL)


@pytest.mark.parametrize("reduction", ["all", "none"])
def test_a_declared_count_of_a_sum(reduction: str) -> None:
    """A sum that is not divided has no items."""

    def summed(scores: Tensor, batch: Any) -> Tensor:
        if reduction == "all":
            return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        return F.mse_loss(scores, torch.zeros_like(scores), reduction="none").sum()

    with raises(LossError, "wrong_count"):
        observed(ItemCounter(COUNTS["tokens"]), summed, RAGGED)


def test_numbers_of_an_accelerator() -> None:
    """The loop does not wait for an accelerator: its numbers are compared later, at the latest when it ends."""
    counter = ItemCounter(COUNTS["samples"])
    batches = [EQUAL, EQUAL, RAGGED, *[EQUAL] * NUM_PENDING]

    def observe(number: int) -> None:
        loss = over_tokens(torch.randn(*batches[number]["labels"].shape, CLASSES, requires_grad=True), batches[number])
        on_device = SimpleNamespace(grad_fn=loss.grad_fn, output_nr=0, device=torch.device("cuda"))
        counter.observe(on_device, batches[number])  # type: ignore[arg-type]

    for number in range(NUM_PENDING):
        observe(number)
    with raises(LossError, "wrong_count"):
        observe(NUM_PENDING)
    observe(2)
    with raises(LossError, "wrong_count"):
        counter.settle()


def test_masks_that_occur_late() -> None:
    """A loss whose mask has been without effect at first is refused, with the count that fits."""

    def masked(batch: Any, num: int = 0) -> Any:
        mask = torch.ones(len(batch["labels"]), 4)
        mask[:num, num:] = 0
        return {"labels": batch["labels"][:, 0], "observed_mask": mask}

    def loss(batch: Any) -> Tensor:
        scores = torch.randn(batch["observed_mask"].shape, requires_grad=True)
        return torch.as_tensor((scores * batch["observed_mask"]).mean() / batch["observed_mask"].mean())

    counter = ItemCounter(None)
    for number in range(NUM_PENDING):
        batch = masked((EQUAL, RAGGED)[number % 2])
        counter.observe(loss(batch), batch)
    batch = masked(RAGGED, 2)

    assert counter.items == "samples"
    with raises(LossError, "unknown_items") as caught:
        counter.observe(loss(batch), batch)
    assert "batch['observed_mask'].sum()" in str(caught.value)


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
        ItemCounter(None).observe(F.cross_entropy(vectors @ vectors.T, torch.arange(4)), (vectors,))
    counter, numbered = ItemCounter(None), torch.arange(4)  # labels that happen to be numbered
    counter.observe(F.cross_entropy(vectors, numbered), (vectors, numbered))
    assert counter.items == "samples"
