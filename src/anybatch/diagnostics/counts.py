"""Over what a loss really is a mean: solved for from gradients, then put into the words of a declaration."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from anybatch.core.loss import Term, tokens
from anybatch.core.nested import Batch, slice_samples
from anybatch.diagnostics.trial import Trial


@dataclass(frozen=True, slots=True)
class Candidate:
    """A declaration that may be the right one.

    Attributes:
        factors: what each piece's value has to be multiplied with to add up to that of the whole.
        says: the loss in words: "a mean over unmasked targets".
        change: the declaration to use.
    """

    factors: tuple[float, ...]
    says: str
    change: str


def right_declaration(trial: Trial, sizes: Sequence[int], term: str | None, tolerance: float) -> Candidate | None:
    """Return what a loss, or one term of it, is a mean over; None if no factors make its pieces add up to the whole.

    For pieces k with the gradients g_k and the whole batch's gradient g, a mean over counts n_k has
    g = sum over k of (n_k / n) * g_k. So the factors n_k / n solve a least-squares problem, and a residual says that
    there is no count at all: the loss depends on the samples together.
    """
    rows, whole = _gradients(trial, sizes, term)
    declared = declared_factors(trial, sizes, term)
    if _residual(rows, whole, declared) <= tolerance:
        return Candidate(declared, "as declared", "")
    for candidate in _candidates(trial, sizes, term):
        if _residual(rows, whole, candidate.factors) <= tolerance:
            return candidate
    if not rows.isfinite().all():
        return None
    solved = _solved(rows, whole)
    if _residual(rows, whole, solved) > tolerance or min(solved) < 0:
        return None
    call = "ab.counted(count)" if term else "ab.mean_over(loss, count)"
    return Candidate(
        tuple(solved),
        "a weighted mean",
        f"declare it {call}, where count(batch) is what the loss divides by, such as the sum of the targets' class "
        "weights: lambda batch: class_weights[batch['label']].sum().",
    )


def _candidates(trial: Trial, sizes: Sequence[int], term: str | None) -> Iterator[Candidate]:
    total = sum(sizes)
    call = "ab.samples()" if term else "ab.mean_over_samples(loss)"
    yield Candidate(tuple(size / total for size in sizes), "a mean over samples", f"declare it {call}.")
    yield Candidate(
        (1.0,) * len(sizes),
        "a sum, or divided by a constant",
        "return the mean over the samples instead of the sum (reduction='mean'), or "
        "ab.LossSum(total, count=number of samples), and take any division by the accumulation steps out of it.",
    )
    # What masks targets comes first: a mask of the inputs may happen to count the same.
    for name, labels in sorted(_leaves(trial.batch), key=lambda leaf: not bool((leaf[1] == -100).any())):  # noqa: PLR2004 (torch's mark)
        if labels.is_floating_point() or labels.dim() < 1:
            continue
        for shift in (False, True) if labels.dim() > 1 else (False,):
            kind = tokens(name, shift=shift)
            factors = _factors(kind, trial.batch, sizes)
            if factors is not None:
                call = f"ab.tokens({name!r}, shift={shift})"
                if not term:
                    call = f"ab.mean_over_tokens(loss, labels={name!r}, shift={shift})"
                yield Candidate(factors, f"a mean over the unmasked targets in {name!r}", f"declare it {call}.")
        if set(labels.unique().tolist()) <= {0, 1}:
            factors = _factors(Term(lambda batch, name=name: _leaf(batch, name).sum()), trial.batch, sizes)  # type: ignore[misc]
            if factors is not None:
                count = f"lambda batch: batch[{name!r}].sum()"
                call = f"ab.counted({count})" if term else f"ab.mean_over(loss, {count})"
                yield Candidate(factors, f"a mean over what {name!r} marks", f"declare it {call}.")


def declared_factors(trial: Trial, sizes: Sequence[int], term: str | None) -> tuple[float, ...]:
    """Return the factors that the declaration gives to pieces of the batch; 1 to those that bring their own sums."""
    if trial.loss.terms is None or trial.brings_sums(term):
        return (1.0,) * len(sizes)
    kind = next(iter(trial.loss.terms.values())) if term is None else trial.loss.terms[term]
    by_samples = tuple(size / sum(sizes) for size in sizes)
    return by_samples if kind.count is None else _factors(kind, trial.batch, sizes) or by_samples


def best_residual(trial: Trial, sizes: Sequence[int], term: str | None) -> float:
    """Return how far pieces stay away from the whole with the best factors there are."""
    rows, whole = _gradients(trial, sizes, term)
    return _residual(rows, whole, _solved(rows, whole)) if rows.isfinite().all() else float("nan")


def _gradients(
    trial: Trial, sizes: Sequence[int], term: str | None
) -> tuple[Float[Tensor, "pieces parameters"], Float[Tensor, " parameters"]]:
    rows = torch.stack([_flat(gradient) for gradient in trial.pieces(sizes, term)])
    return rows, _flat(trial.pieces([sum(sizes)], term)[0])


def _solved(rows: Float[Tensor, "pieces parameters"], whole: Float[Tensor, " parameters"]) -> list[float]:
    found: list[float] = torch.linalg.lstsq(rows.T, whole[:, None], driver="gelsd").solution[:, 0].tolist()
    return found


def _factors(kind: Term, batch: Batch, sizes: Sequence[int]) -> tuple[float, ...] | None:
    """Return each piece's share of the whole batch's count; None if that is 0."""
    assert kind.count is not None
    ends = list(itertools.accumulate(sizes, initial=0))
    counts = [float(kind.count(slice_samples(batch, start, stop))) for start, stop in itertools.pairwise(ends)]
    return tuple(count / sum(counts) for count in counts) if sum(counts) else None


def _leaves(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch that has names for them."""
    items = batch.items() if hasattr(batch, "items") else vars(batch).items() if hasattr(batch, "__dict__") else ()
    return ((name, value) for name, value in items if isinstance(name, str) and isinstance(value, Tensor))


def _leaf(batch: Batch, name: str) -> Any:  # noqa: ANN401 (a tensor by its name in any container)
    return batch[name] if hasattr(batch, "items") else getattr(batch, name)


def _flat(gradient: Mapping[str, Tensor]) -> Float[Tensor, " parameters"]:
    return torch.cat([value.double().flatten() for value in gradient.values()])


def _residual(
    rows: Float[Tensor, "pieces parameters"], whole: Float[Tensor, " parameters"], factors: Sequence[float]
) -> float:
    """Return how far the rows, times their factors, are from the whole; a row with factor 0 may be NaN."""
    weights = torch.tensor(factors, dtype=rows.dtype)[:, None]
    found = torch.where(weights == 0, 0, rows * weights).sum(dim=0)
    norm = float(whole.norm())
    return float((found - whole).norm()) / norm if norm else float(found.norm())
