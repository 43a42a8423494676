"""Which items a loss averages over, read from the autograd graph of its first values; and the weight that follows.

For loops that cannot be called on other samples: torch keeps the divisor of a mean in the node of its backward, as
documented attributes (`_saved_...`, https://docs.pytorch.org/docs/stable/notes/autograd.html#saved-tensors).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node

from anybatch.core.tensors import widest_dtype
from anybatch.core.tree import tensors_of
from anybatch.errors import LossError, warn_user
from anybatch.integrations.loops import Count, Share, gather_objects
from anybatch.integrations.probe import DECLARED, HELP, Batch, candidates, count_of, counts_for

MEAN, SUM = 1, 2  # of `_saved_reduction`
BY_SAMPLE = "samples counted by count="
NUM_PENDING = 32  # micro-batches whose numbers are read together, so that the loop rarely waits for an accelerator
Finding = TypeVar("Finding")
Ratios = dict[str, float]
"""The divisor of a micro-batch's loss per item of each kind; empty if it is unknown, but the items are declared."""
RESHAPING = ("ViewBackward", "ReshapeAliasBackward", "SqueezeBackward", "ToCopyBackward", "NegBackward")


class ItemCounter:
    """Counts the items of a micro-batch over which a loss averages: as declared, or as found in the first losses.

    In all micro-batches, the divisor must have the same ratio to this number: a wrong kind may show late, where a mask
    or an unequal length first occurs. `items` is the kind, if it is known.
    """

    def __init__(self, count: Count, labels: str = "labels", items: str = "") -> None:
        self.items = items if count is None else DECLARED
        self.is_found = bool(items)
        self._is_declared, self._labels, self._kinds = count is not None, labels, counts_for(labels)
        self._count = self._kinds.get(items) or count_of(count)
        self._ratios: Ratios = {}
        self._pending: list[tuple[list[_Divisor], dict[str, Any]]] = []
        self._is_readable = True

    def __call__(self, batch: Any) -> Any:
        """Return the number of items in a micro-batch."""
        return self._count(batch)

    def observe(self, loss: Tensor, batch: Any) -> None:
        """Compare the divisor of a micro-batch's loss with its items. Ranks call it together until `is_found`.

        Items may be counted several times, such as samples in a mean over samples and features. A loss that divides by
        0, of a micro-batch without targets, shows nothing. If no kind of items fits, or another one than before, all
        ranks raise LossError; after `is_found`, one rank, on an accelerator some micro-batches later.
        """
        if not self.is_found:
            self._decide(findings_of_ranks(partial(self._find, loss, batch)))
        elif self._is_readable:
            try:
                self._pending.append((list(_divisors(loss.grad_fn, loss.output_nr)), self.counts(batch)))
            except LossError:  # the items are known, although the divisor is not
                self._is_readable = False
            if loss.device.type == "cpu" or len(self._pending) == NUM_PENDING:
                self.settle()

    def settle(self) -> None:
        """Compare the pending micro-batches; raise LossError if their items do not fit."""
        pending, self._pending = self._pending, []
        for terms, counts in pending:
            if ratios := self._ratios_of(terms, counts):
                dtypes = [term.number.dtype for term in terms if isinstance(term.number, Tensor)]
                self._keep(ratios, max((4 * torch.finfo(d).eps for d in dtypes if d.is_floating_point), default=0.0))

    def _find(self, loss: Tensor, batch: Any) -> Ratios | None:
        """Return the ratios of a first micro-batch, for the kinds of items that fit."""
        try:
            terms = list(_divisors(loss.grad_fn, loss.output_nr))
        except LossError:
            if self._is_declared:
                return {}
            raise
        counts = self.counts(batch)
        if not self._is_declared:
            for term in terms:
                _refuse_unlike_means(term.saved, batch)
            fitting = _fitting(terms, {name: float(counts[name]) for name in counts if name in self._kinds})
            ratios = self._ratios_of(terms, counts) or {}
            return {name: ratios[name] for name in ratios if name in fitting or name not in self._kinds} or None
        if all(term.is_sum for term in terms):
            message = "count= declares a mean, but the loss is a sum that is not divided: return the mean."
            raise LossError(message, code="wrong_count")
        return {} if len(_numbers(terms)) > 1 else self._ratios_of(terms, counts)

    def _decide(self, findings: list[Ratios]) -> None:
        """Choose the items from the findings of all ranks."""
        self._is_readable, self.is_found = {} not in findings, self._is_declared
        if not self._is_readable:
            message = "count= could not be compared with the loss, whose autograd graph does not show one divisor."
            warn_user(message, "loss_not_checked")
            return
        for ratios in findings:
            self._keep(ratios)
        if findings and not self._is_declared:
            kinds = {name: ratio for name, ratio in self._ratios.items() if name in self._kinds}
            exact = [name for name, ratio in kinds.items() if ratio == 1]
            self.is_found = len(exact or kinds) == 1
            self.items = self.items or (exact or list(kinds))[0]
            count = self._kinds[self.items]
            self._count = lambda batch: count(_fields(batch))

    def counts(self, batch: Any) -> dict[str, Any]:
        """Return the numbers of items in a micro-batch, and the sums of its masks."""
        fields = _fields(batch)
        possible = candidates(fields, self._labels)
        # Tokens first: a few targets may by chance be as many as the samples.
        counts: dict[str, Any] = {name: possible[name](fields) for name in sorted(possible, key="samples".__eq__)}
        masks = {name: value for name, value in fields.items() if isinstance(value, Tensor) and "mask" in name}
        counts |= {f"batch[{name!r}].sum()": value.sum() for name, value in masks.items() if value.dim() > 1}
        return counts | ({DECLARED: self._count(batch)} if self._is_declared else {})

    def _ratios_of(self, terms: "list[_Divisor]", counts: dict[str, Any]) -> Ratios | None:
        """Return the divisor per item of each kind; None if it shows nothing about the counted items."""
        items, numbers = {name: float(count) for name, count in counts.items()}, _numbers(terms)
        # The terms may be the means of the samples.
        is_by_sample = len(terms) == items["samples"] and (self._is_declared or (len(terms) > 1 and self.is_found))
        number = max(numbers)
        if is_by_sample or len(numbers) > 1 or not 0 < abs(number) < math.inf or not items.get(self.items, 1):
            return None
        ratios = {name: number / count for name, count in items.items() if count}
        if self._is_declared and items["samples"] and all(term.is_plain for term in terms):
            ratios[BY_SAMPLE] = items["samples"] / items[DECLARED]
        return ratios

    def _keep(self, ratios: Ratios, tolerance: float = 0.0) -> None:
        """Keep the kinds whose ratios are as before; raise LossError if that of the counted kind is not."""
        before, is_close = self._ratios or ratios, partial(math.isclose, rel_tol=max(tolerance, 1e-6))
        self._ratios = {name: ratio for name, ratio in before.items() if is_close(ratio, ratios.get(name, 0.0))}
        counted = [DECLARED, BY_SAMPLE] if self._is_declared else [self.items] if self.items else list(self._kinds)
        if any(name in self._ratios for name in counted):
            return
        first, other = (
            next((f"{of[name]:.6g}" for name in counted if name in of), "others") for of in (before, ratios)
        )
        reason = (
            f"for each of the {self.items or 'items'}, it divides by {first} in one micro-batch and {other} in another"
        )
        if self._ratios:
            reason = f"{reason}; {' or '.join(self._ratios)} would fit"
        if not self._is_declared:
            raise _unknown(reason)
        message = f"the loss does not average over the items counted by count=: {reason}. Declare others: {HELP}."
        raise LossError(message, code="wrong_count")


@dataclass
class StepItems:
    """The items of one loss in an effective batch, and the weight of each micro-batch; ranks create it together."""

    counter: ItemCounter
    share: Share
    device: torch.device
    ranks: int
    check_other_ranks: Callable[[], None]  # called before ranks communicate within a micro-batch

    def __post_init__(self) -> None:
        self._count_all = partial(total_items, self.counter, self.share.pairs, self.device)
        self.total = self._count_all() if self.counter.items else None

    def weighted(self, loss: Tensor, batch: Any, weight: float) -> tuple[Tensor, Tensor]:
        """Return a micro-batch's part in the loss of the step, times the ranks, and its number of items."""
        if not self.counter.is_found:
            self.check_other_ranks()  # before `observe` communicates
        self.counter.observe(loss, batch)
        if not self.counter.items:  # no rank has had any items
            return loss.nan_to_num(0.0) * 0.0, torch.zeros((), device=self.device)
        if self.total is None:
            self.total = self._count_all()
        items = num_items(self.counter, batch, self.device) * weight
        return weighted_mean(loss, items, self.total, self.ranks), items


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


class _Divisor(NamedTuple):
    """The divisor of a term of a loss, and further divisors of the term: numbers, or tensors of one element."""

    number: Any
    times: Any
    is_plain: bool = False  # the number of all elements
    is_sum: bool = False  # of a sum, 1
    saved: Callable[[str], Any] = lambda _: None  # of a cross entropy


def _numbers(terms: list[_Divisor]) -> set[float]:
    """Return the divisors of a loss: without further ones if these make them differ, as in label smoothing."""
    numbers = {float(term.number * term.times) for term in terms}
    return numbers if len(numbers) == 1 else {float(term.number) for term in terms}


def _fitting(terms: list[_Divisor], counts: dict[str, float]) -> list[str]:
    """Return the kinds of items whose number divides the divisor."""
    numbers = _numbers(terms)
    for divisor in (*numbers, float(terms[0].number)) if len(numbers) == 1 else ():
        ratios = {name: divisor / count for name, count in counts.items() if 0 < count <= divisor}
        fits = [name for name, ratio in ratios.items() if math.isclose(ratio, round(ratio), rel_tol=1e-6)]
        if fits or not divisor:
            return fits
    divisors, held = " and ".join(map(str, sorted(numbers))), ", ".join(f"{counts[name]:.0f} {name}" for name in counts)
    message = f"it divides by {divisors}, but the micro-batch has {held}"
    raise _unknown(message)


def _divisors(node: Node | None, number: int, times: Any = 1.0) -> Iterator[_Divisor]:
    """Yield the divisors of an output of a node that is divided by a number; raise LossError if they are unknown."""
    if node is None:
        message = "it has no gradient"
        raise _unknown(message)
    name, saved = node.name(), _saved(node)
    parents = [(parent, output) for parent, output in node.next_functions if parent is not None]
    reduction, is_entropy = saved("reduction"), name.startswith("NllLoss")
    if reduction in (MEAN, SUM) or name.startswith("MeanBackward"):
        items = saved("total_weight") if is_entropy else saved("self").numel() if reduction else saved("self_sym_numel")
        is_sum = reduction == SUM
        yield _Divisor(1 if is_sum else items, times, not is_entropy, is_sum, saved if is_entropy else lambda _: None)
    elif name.startswith("SumBackward") and _saved(parents[0][0])("reduction") == 0:
        yield _Divisor(1, times, is_sum=True)
    elif name.startswith("DivBackward") and parents[0][0].name().startswith("SumBackward"):
        yield _Divisor(saved("other"), times)
    elif name.startswith(("AddBackward", "SubBackward")) or (
        len(parents) == 1 and name.startswith(("MulBackward", "DivBackward", *RESHAPING))
    ):
        # A division may be by data, such as the share of observed values; a factor may change from step to step.
        other = saved("other") if name.startswith("DivBackward") else None
        for parent in parents:
            yield from _divisors(*parent, times if other is None else times * other)
    elif name.startswith("_DDPSink"):  # DDP's own node, which returns its inputs
        yield from _divisors(*node.next_functions[number], times)
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
    if scores is None or scores.dim() != 2 or len(scores) < 2:  # noqa: PLR2004 (samples and classes)
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
