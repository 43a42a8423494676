"""A loss that is not what it was declared to be, in words: what was seen, and how to declare what it is."""

from anybatch.core.loss import Loss
from anybatch.engine.loss_check.additivity import TermFinding


def broken(loss: Loss, name: str, found: TermFinding) -> str:
    """Return what was declared of a term, and how far its gradients are from that.

    Args:
        loss: the declaration.
        name: of the term, one of `loss.names`.
        found: what was seen of it.
    """
    what = f"term {name!r} of the loss" if loss.kind.named else "the loss"
    unit = loss.kind.terms[name].items.description
    verb = "declared" if not loss.kind.brings_count else "taken"
    kind = "a sum with its count" if loss.kind.brings_count and found.adds_up else f"a mean over {unit}"
    if loss.kind.terms[name].is_sum:
        kind = "a sum over samples"
    weighted = "" if loss.kind.terms[name].is_sum else "each weighted by its share of the count and "
    sizes = " + ".join(map(str, found.sizes))
    return (
        f"{what} was {verb} as {kind}, but it is not. It was computed of {sum(found.sizes)} samples of the batch, in "
        f"one call and in calls of {sizes}, {weighted}added: the two gradients with respect to what the model "
        f"returned differ by {found.error:.2g}, as the norm of their difference over the norm of the first (their "
        f"norms are {found.whole:.4g} and {found.pieces:.4g}; rounding would be below {found.rounding:g})."
    )


def explained(name: str, found: TermFinding, *, named: bool) -> str:
    """Return what a broken term is, and how to declare that.

    Args:
        name: of the term.
        found: what was seen of it.
        named: whether the loss function returns a dict of terms, so that each is declared by its name.
    """
    if found.broadcast and found.explanation in ("joint", "terms", "other"):
        return (
            f"{found.broadcast}. If the loss compares samples on purpose (contrastive, triplet), declare "
            "ab.joint(encode, loss); if not, give both the same shape: squeeze(1), or targets of shape (n, 1)."
        )
    if found.explanation == "joint":
        return (
            "The gradient of a sample's output depends on the other samples' outputs, so no count can mend it: declare "
            "ab.joint(encode, loss), whose loss gets the outputs of the whole effective batch."
        )
    if found.explanation == "terms":
        return (
            "No single count makes the pieces add up, though no sample depends on another's output. Either there are "
            "several terms with divisors of their own: return them by name, and declare ab.sum_of(loss, one=..., "
            "other=...). Or the loss function computes something over the data of its micro-batch (whitened "
            "advantages, weights that are normalised): compute that for the effective batch beforehand, in the data "
            "set or in ab.batches(collate=anybatch.data.OverEffectiveBatch(collate))."
        )
    if found.explanation == "sum":
        return (
            "Its sums add up, but the counts beside them do not: return how many items were added."
            if found.adds_up
            else "It adds up over samples and does not average (reduction='sum', or divided by a constant?): return "
            "the mean, or ab.LossSum(total, count); declare ab.sum_over_samples(loss) if the sum itself is meant."
        )
    over, declaration = _mean_over(name, found, named=named)
    if found.adds_up and not found.is_scalar:
        return f"What it gives as a sum is a mean over {over}: return the sum over the items, not their mean."
    return f"It is a mean over {over}: declare {declaration}."


def _mean_over(name: str, found: TermFinding, *, named: bool) -> tuple[str, str]:
    """Return what a term is a mean over, and its declaration."""
    if found.explanation == "samples":
        return "samples", f"{name}=ab.samples()" if named else "ab.mean_over_samples(loss)"
    if found.explanation == "other":
        first, total = found.sizes[0], sum(found.sizes)
        count = "count=lambda batch: class_weights[batch['label']].sum()"
        return (
            f"something else (class weights?), of which the first {first} of these {total} samples make up "  # noqa: ISC004
            f"{found.share[0]:.4g} and not {found.share[1]:.4g}",
            f"{name}=ab.counted({count})" if named else f"ab.mean_over(loss, {count}), with what it is divided by",
        )
    if found.explanation.startswith("count="):
        call = f"{name}=ab.counted({found.explanation})" if named else f"ab.mean_over(loss, {found.explanation})"
        return "what a mask marks", call
    declared = f"{name}=ab.tokens({found.explanation})" if named else f"ab.mean_over_tokens(loss, {found.explanation})"
    ignored = found.explanation.partition("ignore_index=")[2].partition(",")[0] or "-100"
    return f"the targets that are not {ignored} ({found.explanation})", declared
