"""Which items a loss averages over, read from the autograd graph of its first values; and the weight that follows.

For loops that cannot be called on other samples: torch keeps the divisor of a mean in the node of its backward, as
documented attributes (`_saved_...`, https://docs.pytorch.org/docs/stable/notes/autograd.html#saved-tensors).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node

from anybatch.core.tensors import widest_dtype
from anybatch.core.tree import tensors_of
from anybatch.errors import LossError
from anybatch.integrations.loops import Count, Share, gather_objects
from anybatch.integrations.probe import Batch, candidates, count_of, counts_for

MEAN = 1  # of `_saved_reduction`
NUM_COMPARED = 8
"""Micro-batches in which a kind of items must fit after it is found; labels may be masked only in the loop."""
HELP = "count=ab.tokens(shift=False), count=ab.samples(), or a function that returns their number in a micro-batch"
Finding = TypeVar("Finding")
RESHAPING = ("ViewBackward", "ReshapeAliasBackward", "SqueezeBackward", "ToCopyBackward", "NegBackward")


class ItemCounter:
    """Counts the items of a micro-batch over which a loss averages: as declared, or as found in the first losses."""

    def __init__(self, count: Count) -> None:
        self.items = "" if count is None else "items counted by count="
        self.is_found = count is not None
        self._count = count_of(count)
        self._multiples: dict[str, int] | None = None
        self._num_left = 0 if self.is_found else NUM_COMPARED

    def __call__(self, batch: Any) -> Any:
        """Return the number of items in a micro-batch."""
        return self._count(batch)

    def observe(self, loss: Tensor, batch: Any) -> None:
        """Read the divisor of a micro-batch's loss, in the first ones. Ranks call it together until `is_found`.

        Items may be counted several times, such as samples in a mean over samples and features. A loss that divides by
        0, of a micro-batch without targets, shows nothing.

        Raises:
            LossError: on all ranks, if no kind of items fits on a rank, or only others than in an earlier micro-batch.
        """
        if not self._num_left:
            return
        self._num_left -= self.is_found
        find = partial(_fitting, loss, batch)
        fitting = [find()] if self.is_found else findings_of_ranks(find)
        known = [kinds for kinds in (self._multiples, *fitting) if kinds is not None]
        if not known:
            return
        multiples = _common(known)
        if not multiples or self.items not in ("", *multiples):
            reason = f"micro-batches divide by different items: {'; '.join(', '.join(kinds) for kinds in known)}"
            raise _unknown(reason)
        exact = [name for name, multiple in multiples.items() if multiple == 1]
        self._multiples, self.is_found = multiples, len(exact or multiples) == 1
        if not self.items:
            self.items = (exact or list(multiples))[0]
            count = counts_for("labels")[self.items]
            self._count = lambda batch: count(_fields(batch))


class StepItems:
    """The items of one loss in an effective batch, and the weight of each micro-batch; ranks create it together.

    `check_other_ranks` is called before ranks communicate within a micro-batch.
    """

    def __init__(
        self,
        counter: ItemCounter,
        share: Share,
        device: torch.device,
        ranks: int,
        check_other_ranks: Callable[[], None],
    ) -> None:
        self._counter, self._share, self._device, self._ranks = counter, share, device, ranks
        self._check_other_ranks = check_other_ranks
        self.total = self._count_all() if counter.items else None

    def weighted(self, loss: Tensor, batch: Any, weight: float) -> tuple[Tensor, Tensor]:
        """Return a micro-batch's part in the loss of the step, times the ranks, and its number of items."""
        if not self._counter.is_found:
            self._check_other_ranks()  # before `observe` communicates
        self._counter.observe(loss, batch)
        if not self._counter.items:  # no rank has had any items
            return loss.nan_to_num(0.0) * 0.0, torch.zeros((), device=self._device)
        if self.total is None:
            self.total = self._count_all()
        items = num_items(self._counter, batch, self._device) * weight
        return weighted_mean(loss, items, self.total, self._ranks), items

    def _count_all(self) -> Tensor:
        return total_items(self._counter, self._share.pairs, self._device)


def num_items(count: Callable[[Any], Any], batch: Any, device: torch.device) -> Tensor:
    """Return the number of items of a micro-batch, in a dtype that is the same on all ranks: it may be a fraction."""
    return torch.as_tensor(count(batch), dtype=widest_dtype(device), device=device)


def total_items(count: Callable[[Any], Any], pairs: Iterable[tuple[Any, float]], device: torch.device) -> Tensor:
    """Return the number of items of a step on all ranks, 1 if there are none; ranks call it together."""
    total = torch.zeros((), dtype=widest_dtype(device), device=device)
    for batch, weight in pairs:
        total += num_items(count, batch, device) * weight
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    return torch.where(total > 0, total, 1.0)


def weighted_mean(loss: Tensor, items: Tensor, total: Tensor, ranks: float) -> Tensor:
    """Return a mean's part in the mean over the items of all, times the ranks, over which DDP and FSDP average."""
    # The mean over no items is NaN, and is left out.
    return torch.where(items > 0, loss, loss.nan_to_num(0.0)) * (items * ranks / total)


def findings_of_ranks(find: Callable[[], Finding | None]) -> list[Finding]:
    """Return what each rank finds, without None, or raise the LossError of any rank; ranks call it together."""
    finding: Finding | LossError | None
    try:
        finding = find()
    except LossError as error:
        finding = error
    findings = [found for found in gather_objects(finding) if found is not None]
    for found in findings:
        if isinstance(found, LossError):
            raise found
    return findings


def _fitting(loss: Tensor, batch: Any) -> dict[str, int] | None:
    """Return the kinds of items whose number divides a loss's divisor, and how many times; None if it divides by 0."""
    fields = _fields(batch)
    possible = candidates(fields, "labels")
    # Tokens first: a few targets may by chance be as many as the samples.
    counts = {name: float(possible[name](fields)) for name in sorted(possible, key="samples".__eq__)}
    divisor = divisor_of(loss, batch)
    if not divisor:
        return None
    ratios = {name: divisor / count for name, count in counts.items() if 0 < count <= divisor}
    fitting = {name: round(ratio) for name, ratio in ratios.items() if math.isclose(ratio, round(ratio), rel_tol=1e-6)}
    if not fitting:
        held = ", ".join(f"{count:.0f} {name}" for name, count in counts.items())
        message = f"it divides by {divisor:.6g}, but the micro-batch has {held}"
        raise _unknown(message)
    return fitting


def _common(known: list[dict[str, int]]) -> dict[str, int]:
    """Return the entries that all have in common."""
    first, *others = known
    return {name: multiple for name, multiple in first.items() if all(other.get(name) == multiple for other in others)}


def divisor_of(loss: Tensor, batch: Any) -> float:
    """Return the number by which a loss divides a sum; raise LossError if it has other forms, or several divisors."""
    found = set(_divisors(loss.grad_fn, loss.output_nr, batch))
    if len(found) > 1:
        reason = f"its terms are means over {' and '.join(f'{number:.6g}' for number in sorted(found))} items"
        raise _unknown(reason)
    return found.pop()


def _divisors(node: Node | None, number: int, batch: Any) -> Iterator[float]:
    """Yield the divisors of an output of a node."""
    if node is None:
        message = "it has no gradient"
        raise _unknown(message)
    name, saved = node.name(), _saved(node)
    parents = [(parent, output) for parent, output in node.next_functions if parent is not None]
    if name.startswith("NllLoss") and saved("reduction") == MEAN:
        _refuse_unlike_means(saved, batch)
        yield float(saved("total_weight"))
    elif saved("reduction") == MEAN:  # an elementwise loss, such as that of `mse_loss`
        yield float(saved("self").numel())
    elif name.startswith("MeanBackward"):
        yield float(saved("self_sym_numel"))
    elif name.startswith("DivBackward") and parents[0][0].name().startswith("SumBackward"):
        yield float(saved("other"))
    elif name.startswith(("AddBackward", "SubBackward")) or (
        len(parents) == 1 and name.startswith(("MulBackward", "DivBackward", *RESHAPING))
    ):
        for parent in parents:
            yield from _divisors(*parent, batch)
    elif name.startswith("_DDPSink"):  # DDP's own node, which returns its inputs
        yield from _divisors(*node.next_functions[number], batch)
    else:
        message = f"it ends with {name}, whose divisor is unknown"
        raise _unknown(message)


def _saved(node: Node) -> Callable[[str], Any]:
    return lambda name: getattr(node, f"_saved_{name}", None)


def _refuse_unlike_means(saved: Callable[[str], Any], batch: Any) -> None:
    """Refuse a cross entropy with class weights, or between the samples of a micro-batch."""
    if saved("weight") is not None:
        message = "the loss divides by class weights: count them, count=lambda batch: weights[batch['labels']].sum()."
        raise LossError(message, code="class_weights")
    scores, targets = saved("self"), saved("target")
    if scores.dim() != 2 or len(scores) < 2:  # noqa: PLR2004 (samples and classes)
        return
    numbered = torch.equal(targets, torch.arange(len(scores), device=targets.device))
    if numbered and not any(torch.equal(tensor.flatten().to(targets.device), targets) for tensor in tensors_of(batch)):
        message = (
            "the loss compares the samples of a micro-batch with each other, so that of smaller micro-batches is "
            "another loss. Use ab.joint with ab.Engine, or name its items with count= if each target is its own class."
        )
        raise LossError(message, code="compares_samples")


def _unknown(reason: str) -> LossError:
    message = f"cannot find out which items the loss averages over: {reason}. Name them: {HELP}."
    return LossError(message, code="unknown_items")


def _fields(batch: Any) -> Batch:
    """Return a batch as a mapping; of a tuple, such as (inputs, labels), the last entry has the labels."""
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, (tuple, list)):
        return {**{f"{number}": value for number, value in enumerate(batch)}, "labels": batch[-1]}
    return {"inputs": batch}
