"""Which items a loss averages over, found out by calling it without gradients.

A trainer gives the loss of a model a divisor, `num_items_in_batch`. Some models divide by it, some ignore it and return
a mean over their own items, and signatures do not tell which. So the loss is called on a few samples with different
divisors, and on parts of them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core.loss import tokens
from anybatch.core.loss_kinds import Term
from anybatch.errors import LossError

Batch = Mapping[str, Any]
Loss = Callable[[Batch, Tensor | None], float]
"""The loss of a batch, given the divisor; without a divisor for None."""
Collated = Callable[[list[int]], Batch]
Counts = Mapping[str, Callable[[Batch], Tensor | float]]
Parts = tuple[Batch, Batch, Batch]
"""A batch, its first part, and the rest."""

DIVISOR = 2.0**16
"""Large, so that a part of the loss that is not divided, such as that of a router, stands out; dividing is exact."""
NUM_TRIALS = 3
MAX_ROWS = 4
IGNORED = -100
EPSILON = torch.finfo(torch.float32).eps
ROUNDINGS = 16
"""Roundings in three losses, one of them divided by a difference."""
VARIATION = 0.1
UNCERTAIN = 0.02
"""The largest rounding error of a part's weight with which the probe still tells kinds of items apart."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """How a loss combines its items."""

    divides: bool  # a sum over items by the given divisor, which it ignores otherwise
    items: str  # "samples", "tokens", "shifted tokens" or "items counted by count="; "sum" if nothing is averaged
    factor: float = 1.0  # by which the trainer multiplies a loss that divides: the number of ranks, or 1

    def __str__(self) -> str:
        if self.items == "sum":
            return "a sum that is not divided"
        return (
            f"a sum over {self.items}, divided by num_items_in_batch" if self.divides else f"a mean over {self.items}"
        )


def num_rows(batch: Batch) -> int:
    """Return the length of the first tensor."""
    return next(len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim())


def counts_for(labels: str) -> Counts:
    """Return the numbers of items, by kind, for batches with these labels (samples, positions)."""
    given, shifted = count_of(tokens(labels, shift=False)), count_of(tokens(labels))
    own = count_of(tokens("shift_labels", shift=False))
    return {
        "samples": num_rows,
        "tokens": given,
        "shifted tokens": lambda batch: own(batch) if "shift_labels" in batch else shifted(batch),
    }


def count_of(count: Term | Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """Return the function that counts the items of a micro-batch; samples if nothing else is declared."""
    return (count.count if isinstance(count, Term) else count) or num_rows


def candidates(batch: Batch, labels: str) -> Counts:
    """Return the numbers of items, by kind, that the loss of this batch may average over."""
    counts, given = counts_for(labels), batch.get(labels)
    of_tokens = isinstance(given, Tensor) and not given.is_floating_point() and given.dim() > 1
    return counts if of_tokens else {"samples": num_rows}


def divides(loss: Loss, batch: Batch) -> bool:
    """Return whether a loss divides by the given divisor; raise LossError if only a part of it does."""
    one, half = (loss(batch, torch.tensor(divisor)) for divisor in (DIVISOR, 2 * DIVISOR))
    if math.isclose(one, half, rel_tol=1e-5):
        return False
    if math.isclose(one, 2 * half, rel_tol=1e-5):
        return True
    message = (
        f"only a part of the loss is divided by num_items_in_batch: it is {one:.6g} for {DIVISOR:.0f} items and "
        f"{half:.6g} for {2 * DIVISOR:.0f}. The auxiliary loss of a router, for example, is not a sum over items."
    )
    raise LossError(message, code="partly_divided")


def find_reduction(
    loss: Loss, batch: Batch, labels: str, num_classes: int, collated: Collated | None, *, module: nn.Module | None
) -> Reduction:
    """Find out how a loss, in eval mode and without gradients, combines the items of two or more samples.

    `collated` is for batches whose rows are not samples, such as pairs. If nothing was found, parameters of the module
    are changed for a second try: all samples have the same loss where policy and reference start equal, as in DPO.

    Raises:
        LossError: the items could not be found out.
    """
    counts = candidates(batch, labels)
    if divides(loss, batch):
        return _by_own_count(loss, list(_relabelled(batch, labels, num_classes)), counts)
    of_rows = partial(_parts_of_rows, list(_relabelled(batch, labels, num_classes)))
    of_samples = partial(_parts_of_samples, collated)
    reason = ""
    # Rows first: a collate function that masks at random gives a sample other labels in every call.
    for make in (of_rows, of_samples):
        try:
            found = _by_parts(loss, make(), counts)
        except (ValueError, RuntimeError, IndexError) as error:  # the rows are no samples
            reason = f"the model fails on a part of a batch: {error}"
            continue
        if isinstance(found, Reduction):
            return found
        reason = found
    if module is not None:
        with _varied(module):
            return find_reduction(loss, batch, labels, num_classes, collated, module=None)
    message = (
        f"cannot find out which items the loss averages over: {reason}. If it is a mean over items, name them: "
        "ab.exact(trainer, count=ab.tokens(shift=False)), ab.samples(), or a function that returns their number in a "
        "micro-batch; with class weights: count=lambda batch: weights[batch['labels']].sum(). A loss that compares "
        "samples cannot be made exact this way; for sentence-transformers there is anybatch.integrations.Joint."
    )
    raise LossError(message, code="unknown_items")


@contextmanager
def _varied(module: nn.Module) -> Iterator[None]:
    """Change trained parameters within the context: vectors, or all if only matrices are trained, as in LoRA."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    varied = [parameter for parameter in trained if parameter.dim() == 1] or trained
    before = [parameter.detach().clone() for parameter in varied]
    try:
        for parameter in varied:
            parameter.add_(torch.randn_like(parameter), alpha=VARIATION)
        yield
    finally:
        for parameter, value in zip(varied, before, strict=True):
            parameter.copy_(value)


def _by_own_count(loss: Loss, batches: list[Batch], counts: Counts) -> Reduction:
    """Compare the loss with and without a divisor: their ratio is the model's own number of items."""
    rows, seen = [], []
    for batch in batches:
        try:
            seen.append(DIVISOR * loss(batch, torch.tensor(DIVISOR)) / (loss(batch, None) or math.nan))
        except TypeError as error:
            message = "the loss needs num_items_in_batch: name the items that it counts: ab.exact(trainer, count=...)."
            raise LossError(message, code="unknown_items") from error
        rows.append({name: float(count(batch)) for name, count in counts.items()})
    for name in counts:
        factors = [own / max(row[name], 1.0) for own, row in zip(seen, rows, strict=True)]
        if math.isclose(min(factors), max(factors), rel_tol=1e-3) and math.isclose(
            factors[0], round(factors[0]), rel_tol=1e-3
        ):
            return Reduction(divides=True, items=name, factor=float(round(factors[0])))
    message = (
        f"the loss divides by num_items_in_batch, and by {seen[0]:.6g} items without it, but the batch has "
        f"{rows[0]}. Name the items that it averages over: ab.exact(trainer, count=...)."
    )
    raise LossError(message, code="unknown_items")


def _by_parts(loss: Loss, trials: list[Parts], counts: Counts) -> Reduction | str:
    """Return the items with which the losses of two parts average to that of both, in every trial, or why none do."""
    possible, decided, reason = [*counts, "sum"], 0, "all samples have the same loss"
    for parts in trials:
        whole, first, rest = (loss(part, None) for part in parts)
        if not math.isfinite(whole + first + rest):  # a part without targets
            continue
        # The weight of the first part, with its rounding error.
        error = max(1e-4, ROUNDINGS * EPSILON * abs(whole) / max(abs(first - rest), 1e-30))
        is_sum = math.isclose(whole, first + rest, rel_tol=1e-4)
        if error > UNCERTAIN and not is_sum:
            continue
        weight = (whole - rest) / (first - rest)
        shares = {name: _share(float(count(parts[1])), float(count(parts[2]))) for name, count in counts.items()}
        possible = [name for name in possible if (is_sum if name == "sum" else abs(shares[name] - weight) <= error)]
        decided += 1
        reason = (
            f"the loss of {num_rows(parts[0])} samples is {whole:.6g}, and {first:.6g} and {rest:.6g} for two parts of "
            f"them; that is neither their sum nor a mean over {' or '.join(counts)}"
        )
    if decided and len(possible) == 1:
        return Reduction(divides=False, items=possible[0])
    return f"a mean over {' and over '.join(possible)} would both fit" if decided and possible else reason


def _share(first: float, rest: float) -> float:
    return first / (first + rest) if first + rest else math.nan


def _parts_of_rows(batches: Sequence[Batch]) -> list[Parts]:
    """Return each batch whole, its row of the batch's number, and the other rows; at most `MAX_ROWS` rows."""
    length = num_rows(batches[0])
    chosen = range(min(length, MAX_ROWS))

    def rows(batch: Batch, numbers: list[int]) -> dict[str, Any]:
        return {
            key: value[numbers] if isinstance(value, Tensor) and value.dim() and len(value) == length else value
            for key, value in batch.items()
        }

    parts: list[Parts] = []
    for number, batch in enumerate(batches):
        first, rest = [number % len(chosen)], [row for row in chosen if row != number % len(chosen)]
        parts.append((rows(batch, first + rest), rows(batch, first), rows(batch, rest)))
    return parts


def _parts_of_samples(collated: Collated | None) -> list[Parts]:
    """Return three samples, the first of them and the others; none without access to samples."""
    numbers = range(NUM_TRIALS if collated else 0)
    return [(collated([n, n + 1, n + 2]), collated([n]), collated([n + 1, n + 2])) for n in numbers]  # type: ignore[misc]


def _relabelled(batch: Batch, labels: str, num_classes: int) -> Iterator[Batch]:
    """Yield the batch with other labels, so that kinds of items differ in number, and classes in weight."""
    given = batch.get(labels)
    for number in range(NUM_TRIALS):
        if not isinstance(given, Tensor) or given.is_floating_point():
            yield batch
        elif given.dim() == 1:
            yield {**batch, labels: (torch.arange(len(given), device=given.device) + number) % num_classes}
        else:
            yield {**batch, labels: _masked(given, number)}


def _masked(labels: Tensor, number: int) -> Tensor:
    """Mask another number of labels in every row, and the first position, which may be no target, in every second."""
    labels = labels.clone(memory_format=torch.contiguous_format)
    for row, targets in enumerate(labels.flatten(1)):
        valid = [place for place in targets.ne(IGNORED).nonzero().flatten().tolist() if place > 0] or [-1]
        num_kept = max(1, len(valid) * (row + number + 1) // (NUM_TRIALS + MAX_ROWS))
        targets[valid[num_kept:]] = IGNORED
        targets[valid[0]] = first = max(int(targets[valid[0]]), 0)  # a row without targets gets one
        targets[0] = first if (row + number) % 2 else IGNORED
    return labels
