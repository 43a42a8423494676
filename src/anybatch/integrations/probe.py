"""Which items a loss averages over, found out by calling it without gradients.

It is called on a few samples with different divisors (`num_items_in_batch`), and on parts of them: decision 0085.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core.loss import tokens
from anybatch.core.loss_kinds import Term
from anybatch.core.tree import tensors_of
from anybatch.errors import LossError

Batch = Mapping[str, Any]
Loss = Callable[[Batch, Tensor | None], float]
"""The loss of a batch, given the divisor; without a divisor for None."""
Collated = Callable[[list[int]], Batch]
Counts = Mapping[str, Callable[[Batch], Tensor | float]]
Parts = tuple[Batch, Batch, Batch]  # a batch, its first part, and the rest

DIVISOR = 2.0**16
"""Large, so that a part of the loss that is not divided, such as that of a router, stands out; dividing is exact."""
NUM_TRIALS = 3
MAX_ROWS = 4
IGNORED = -100
DECLARED = "items counted by count="
HELP = "count=ab.tokens(shift=False), count=ab.samples(), or a function that returns their number in a micro-batch"
EPSILON = torch.finfo(torch.float32).eps
ROUNDINGS = 16  # in three losses, one of them divided by a difference
VARIATION = 0.1
UNCERTAIN = 0.02  # the largest rounding error of a part's weight with which the probe tells kinds of items apart


@dataclass(frozen=True, slots=True)
class Reduction:
    """How a loss combines its items."""

    divides: bool  # a sum over items by the given divisor, which it ignores otherwise
    items: str  # "samples", "tokens", "shifted tokens" or "items counted by count="; "sum" if nothing is averaged
    factor: float = 1.0  # by which the trainer multiplies a loss that divides: the number of ranks, or 1

    def __str__(self) -> str:
        kind = f"sum over {self.items}, divided by num_items_in_batch" if self.divides else f"mean over {self.items}"
        return "a sum that is not divided" if self.items == "sum" else f"a {kind}"


def num_rows(batch: Batch) -> int:
    """Return the length of the first tensor, or 0."""
    return next((len(value) for value in tensors_of(batch) if value.dim()), 0)


def rows_of(batch: Batch, numbers: list[int]) -> dict[str, Any]:
    """Return some rows of a batch."""
    length = num_rows(batch)
    return {
        key: value[numbers] if isinstance(value, Tensor) and value.dim() and len(value) == length else value
        for key, value in batch.items()
    }


@cache  # it is asked for in every micro-batch
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
        f"{half:.6g} for twice as many. The auxiliary loss of a router, for example, is not a sum over items."
    )
    raise LossError(message, code="partly_divided")


def find_reduction(
    loss: Loss, batch: Batch, labels: str, num_classes: int, collated: Collated | None, *, module: nn.Module | None
) -> Reduction:
    """Find out how a loss, in eval mode and without gradients, combines the items of two or more samples.

    `collated` is for batches whose rows are not samples, such as pairs.
    """
    counts, relabelled = candidates(batch, labels), list(_relabelled(batch, labels, num_classes))
    is_divided, reason = divides(loss, batch), ""
    # Rows first: a collate function that masks at random gives a sample other labels in every call.
    for make in (partial(_parts_of_rows, relabelled), partial(_parts_of_samples, collated)):
        try:
            found = _by_own_count(loss, relabelled, counts) if is_divided else _by_parts(loss, make(), counts)
        except (ValueError, RuntimeError, IndexError) as error:  # the rows are no samples
            reason = f"the model fails on a part of a batch: {error}"
            continue
        if isinstance(found, Reduction):
            return found
        reason = found
    if module is not None and not is_divided:  # in DPO, all samples have the same loss at first
        with _varied(module):
            return find_reduction(loss, batch, labels, num_classes, collated, module=None)
    message = (
        f"cannot find out which items the loss averages over: {reason}. If it is a mean over items, name them: {HELP}; "
        "with class weights, count=lambda batch: weights[batch['labels']].sum(). A loss that compares samples cannot "
        "be made exact this way; for sentence-transformers there is anybatch.integrations.Joint."
    )
    raise LossError(message, code="unknown_items")


def check_declared(loss: Loss, batch: Batch, count: Callable[[Any], Any], labels: str, ranks: int) -> Reduction:
    """Return how a loss combines declared items, unless the batch, with its own labels, shows that it has others."""
    counts = {DECLARED: count, **candidates(batch, labels)}
    if is_divided := divides(loss, batch):
        found = _by_own_count(loss, [batch], counts, factors=(1, ranks))
    else:
        found = _by_parts(loss, _parts_of_rows([batch] * NUM_TRIALS) if num_rows(batch) > 1 else [], counts)
    if isinstance(found, Reduction) and found.items == DECLARED:
        return found
    if isinstance(found, str) and not is_divided:
        return Reduction(divides=False, items=DECLARED)
    held = ", ".join(f"{float(count(batch)):.6g} {name}" for name, count in counts.items())
    reason = found if isinstance(found, str) else f"it is {found}, and the batch has {held}"
    message = f"the loss does not average over the items counted by count=: {reason}. Declare others: {HELP}."
    raise LossError(message, code="wrong_count")


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


def _by_own_count(loss: Loss, batches: list[Batch], counts: Counts, factors: tuple[int, ...] = ()) -> Reduction | str:
    """Compare the loss with and without a divisor: their ratio is the model's own number of items, times a factor."""
    rows, seen, tolerance = [], [], 1e-4
    for batch in batches:
        try:
            mean = loss(batch, None) or math.nan
        except TypeError:  # it needs the divisor
            mean = math.nan
        seen.append(DIVISOR * loss(batch, torch.tensor(DIVISOR)) / mean)
        tolerance = 2.0**-7 if float(torch.tensor(mean, dtype=torch.bfloat16)) == mean else tolerance
        rows.append({name: float(count(batch)) for name, count in counts.items()})
    if math.isnan(sum(seen)):
        is_declared = DECLARED in counts
        return Reduction(divides=True, items=DECLARED, factor=max(factors)) if is_declared else "it has no own divisor"
    for name in counts:
        ratios = [own / (row[name] or 1.0) for own, row in zip(seen, rows, strict=True)]
        factor = round(ratios[0])
        is_fitting = all(math.isclose(ratio, factor, rel_tol=tolerance) for ratio in ratios)
        if is_fitting and factor in (factors or (factor,)):
            return Reduction(divides=True, items=name, factor=float(factor))
    return f"it divides by num_items_in_batch, and by {seen[0]:.6g} items without it, but the batch has {rows[0]}"


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
        items = {name: (float(count(parts[1])), float(count(parts[2]))) for name, count in counts.items()}
        shares = {name: number / (number + other or math.nan) for name, (number, other) in items.items()}
        possible = [name for name in possible if (is_sum if name == "sum" else abs(shares[name] - weight) <= error)]
        decided += 1
        reason = (
            f"the loss of {num_rows(parts[0])} samples is {whole:.6g}, and {first:.6g} and {rest:.6g} for two parts of "
            f"them; that is neither their sum nor a mean over {' or '.join(counts)}"
        )
    if decided and len(possible) == 1:
        return Reduction(divides=False, items=possible[0])
    return f"a mean over {' and over '.join(possible)} would both fit" if decided and possible else reason


def _parts_of_rows(batches: Sequence[Batch]) -> list[Parts]:
    """Return each batch whole, its row of the batch's number, and the other rows; at most `MAX_ROWS` rows."""
    chosen, parts = range(min(num_rows(batches[0]), MAX_ROWS)), list[Parts]()
    for number, batch in enumerate(batches):
        first, rest = [number % len(chosen)], [row for row in chosen if row != number % len(chosen)]
        parts.append((rows_of(batch, first + rest), rows_of(batch, first), rows_of(batch, rest)))
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
