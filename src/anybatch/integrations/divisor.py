"""Which items a loss averages over, read from the autograd graph of its first values.

For loops that cannot be called on other samples: torch keeps the divisor of a mean in the node of its backward, as
documented attributes (`_saved_...`, https://docs.pytorch.org/docs/stable/notes/autograd.html#saved-tensors).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node

from anybatch.core.loss_kinds import Term
from anybatch.core.tree import tensors_of
from anybatch.errors import LossError
from anybatch.integrations.probe import Batch, counts_for, num_rows

MEAN = 1  # of `_saved_reduction`
NUM_COMPARED = 8
"""Micro-batches in which a kind of items must fit after it is found; labels may be masked only in the loop."""
HELP = "count=ab.tokens(shift=False), count=ab.samples(), or a function that returns their number in a micro-batch"
Fitting = dict[str, int] | LossError | None
RESHAPING = ("ViewBackward", "ReshapeAliasBackward", "SqueezeBackward", "ToCopyBackward", "NegBackward")


class ItemCounter:
    """Counts the items of a micro-batch over which a loss averages: as declared, or as found in the first losses.

    Args:
        count: the items, or None to find them.
    """

    def __init__(self, count: Term | Callable[[Any], Any] | None) -> None:
        self.items = "" if count is None else "items counted by count="
        self.is_found = count is not None
        self._count: Callable[[Any], Any] = count.count or num_rows if isinstance(count, Term) else count or num_rows
        self._multiples: dict[str, int] | None = None
        self._num_left = 0 if self.is_found else NUM_COMPARED

    def __call__(self, batch: Any) -> Any:  # noqa: ANN401 (any nested batch; a number or a tensor)
        """Return the number of items in a micro-batch."""
        return self._count(batch)

    def observe(self, loss: Tensor, batch: Any) -> None:  # noqa: ANN401
        """Read the divisor of a micro-batch's loss, in the first ones. Ranks call it together until `is_found`.

        Items may be counted several times, such as samples in a mean over samples and features. A loss that divides by
        0, of a micro-batch without targets, shows nothing.

        Raises:
            LossError: on all ranks, if no kind of items fits on a rank, or only others than in an earlier micro-batch.
        """
        if not self._num_left:
            return
        self._num_left -= self.is_found
        fitting_here = self._fitting(loss, batch)
        everywhere = [fitting_here] if self.is_found else _gathered(fitting_here)
        for fitting in everywhere:
            if isinstance(fitting, LossError):
                raise fitting
        known = [fitting for fitting in (self._multiples, *everywhere) if isinstance(fitting, dict)]
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

    def _fitting(self, loss: Tensor, batch: Any) -> Fitting:  # noqa: ANN401
        """Return the kinds of items that fit a loss, and how many times; None if it divides by 0."""
        fields = _fields(batch)
        counts = {name: float(count(fields)) for name, count in _candidates(fields).items()}
        try:
            divisor = divisor_of(loss, batch)
        except LossError as error:
            return error
        if not divisor:
            return None
        held = ", ".join(f"{count:.0f} {name}" for name, count in counts.items())
        mismatch = _unknown(f"it divides by {divisor:.6g}, but the micro-batch has {held}")
        return _multiples(divisor, counts) or mismatch


def _multiples(divisor: float, counts: Mapping[str, float]) -> dict[str, int]:
    """Return the kinds of items whose number divides the divisor, and how many times."""
    ratios = {name: divisor / count for name, count in counts.items() if 0 < count <= divisor}
    return {name: round(ratio) for name, ratio in ratios.items() if math.isclose(ratio, round(ratio), rel_tol=1e-6)}


def _common(known: list[dict[str, int]]) -> dict[str, int]:
    """Return the entries that all have in common."""
    first, *others = known
    return {name: multiple for name, multiple in first.items() if all(other.get(name) == multiple for other in others)}


def divisor_of(loss: Tensor, batch: Any) -> float:  # noqa: ANN401
    """Return the number by which a loss divides a sum.

    Raises:
        LossError: its graph has another form (a sum, a compiled function), or its terms have different divisors.
    """
    found = set(_divisors(loss.grad_fn, loss.output_nr, batch))
    if len(found) > 1:
        reason = f"its terms are means over {' and '.join(f'{number:.6g}' for number in sorted(found))} items"
        raise _unknown(reason)
    return found.pop()


def _divisors(node: Node | None, number: int, batch: Any) -> Iterator[float]:  # noqa: ANN401
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


def _refuse_unlike_means(saved: Callable[[str], Any], batch: Any) -> None:  # noqa: ANN401
    """Refuse a cross entropy with class weights, or between the samples of a micro-batch."""
    if saved("weight") is not None:
        message = "it weights classes, so it divides by the weights of the targets"
        raise _unknown(message)
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


def _fields(batch: Any) -> Batch:  # noqa: ANN401
    """Return a batch as a mapping; of a tuple, such as (inputs, labels), the last entry has the labels."""
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, (tuple, list)):
        return {**{f"{number}": value for number, value in enumerate(batch)}, "labels": batch[-1]}
    return {"inputs": batch}


def _candidates(fields: Batch) -> dict[str, Callable[[Batch], Any]]:
    counts, labels = counts_for("labels"), fields.get("labels")
    of_tokens = isinstance(labels, Tensor) and not labels.is_floating_point() and labels.dim() > 1
    # Tokens first: a few targets may by chance be as many as the samples.
    return {name: counts[name] for name in (("tokens", "shifted tokens", "samples") if of_tokens else ("samples",))}


def _gathered(fitting: Fitting) -> list[Fitting]:
    if not (dist.is_available() and dist.is_initialized()):
        return [fitting]
    everywhere: list[Fitting] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, fitting)
    return everywhere
