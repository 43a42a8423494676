"""Finds why a declaration is broken, and the right one, with a few more runs of the same samples."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anybatch.core.loss import Loss
from anybatch.core.tree import tensors_of
from anybatch.engine.loss_check.comparison import Verdict, candidates, paddings
from anybatch.engine.loss_check.runs import Gradients, LossRuns, Piece, UndecidedError, difference

Cause = Literal[
    "count",  # it does not add up over samples
    "form",  # of the returned value
    "encode",  # the encode function of ab.joint depends on other samples
    "masked",  # samples with a count of 0 have a gradient
    "sum",
    "mean",  # over known items
    "other_items",  # a mean over items that are not in the batch
    "no_count",  # the divisor does not count items
    "inputs",  # mixed before the model runs
    "module",  # samples interact inside one
    "broadcast",
    "backward",
    "joint",  # samples interact in the loss
    "unknown",
]

_FITS = {torch.float64: 1e-6}
_FITS_NARROW = 2e-3
_CLEARLY = 50.0
_LEAST_DIFFERENCE = 2e-4
_SHARES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The fault of a declaration and its remedy, in sentences; `where` names the module, or the model's inputs."""

    cause: Cause
    says: str
    remedy: str
    term: str | None = None
    where: str = ""


_JOINT = "Declare ab.joint(encode, loss), whose loss gets the outputs of the whole effective batch."
_BEFOREHAND = (
    "Compute it for the effective batch beforehand, in the data set or in "
    "ab.batches(collate=anybatch.data.OverEffectiveBatch(collate))."
)


def diagnose(runs: LossRuns, verdict: Verdict, *, in_lockstep: bool = False) -> Diagnosis:
    """Return why a declaration is broken."""
    loss = runs.parts.loss
    if verdict.counts is not None:
        name, count, total = verdict.counts
        return Diagnosis(
            "count",
            f"the count of term {name!r} does not add up over samples: {count:g} for {verdict.full.num_samples} "
            f"samples in one piece, and {total:g} for pieces of {in_words(verdict.sizes)} together.",
            "Return a sum over samples, such as the number of targets: len of a dict counts its keys, and clamp(min=1) "
            "counts items that do not exist. With counts of 0, return ab.LossSum(total, count) from the loss.",
            name,
        )
    if verdict.is_certain:
        return Diagnosis("form", verdict.reason, "")
    if loss.kind.encode is not None:
        return Diagnosis(
            "encode",
            "the encode function of ab.joint returns other outputs for the same samples in smaller micro-batches.",
            "Let encode process each sample independently, and move steps across samples (centring, normalising, "
            "attention between samples) into the loss function.",
        )
    term = _broken_term(runs, verdict)
    try:
        with _only(runs, term):
            try:
                with nullcontext() if runs.narrowest in _FITS else runs.widened():
                    found = _explained(runs, verdict, in_lockstep=in_lockstep)
            except Exception:  # noqa: BLE001 (not every model runs in float64)
                found = _explained(runs, verdict, in_lockstep=in_lockstep)
    except Exception:  # noqa: BLE001 (an error in further runs does not change the verdict)
        found = _unknown()
    return dataclasses.replace(found, term=term)


def described(loss: Loss, verdict: Verdict, found: Diagnosis, *, returned_number: bool = False) -> str:
    """Return a broken verdict and its diagnosis as a message, without the remedy."""
    if found.cause in ("form", "count"):
        return found.says
    term = loss.names[0] if found.term is None else found.term
    what = f"term {term!r} of the loss" if loss.kind.named else "the loss"
    items = loss.kind.terms[term]
    kind = "a sum with its count" if loss.kind.brings_count and not returned_number else f"a {items}"
    declared = f"{what} is {'taken' if loss.kind.brings_count else 'declared'} as {kind}, but {found.says}"
    if loss.kind.encode is not None:
        declared = found.says
    return (
        f"{declared} Check: {verdict.full.num_samples} samples in one piece and in pieces of "
        f"{in_words(verdict.sizes)} give gradients that differ by {verdict.error:.2g} (relative norm, parameter "
        f"{verdict.parameter!r}; rounding: below {verdict.tolerance:g})."
    )


def in_words(sizes: Sequence[int]) -> str:
    """Return sizes as `1, 2 and 3`."""
    return " and ".join(filter(None, [", ".join(map(str, sizes[:-1])), str(sizes[-1])]))


def _broken_term(runs: LossRuns, verdict: Verdict) -> str | None:
    """Return the term that differs most if all others have a weight of 0."""
    names = runs.parts.loss.names
    if len(names) == 1:
        return names[0]
    worst: tuple[float, str | None] = (_LEAST_DIFFERENCE, None)
    for name in names:
        with _only(runs, name), suppress(UndecidedError):
            full = runs.gradient([verdict.full], is_full=True)
            error, _ = difference(full, runs.gradient(verdict.pieces[1:]))
            worst = max(worst, (error, name), key=lambda pair: pair[0])
    return worst[1]


@contextmanager
def _only(runs: LossRuns, name: str | None) -> Iterator[None]:
    """Set the weights of all terms but one to 0 temporarily."""
    before = runs.parts
    if name is not None and len(before.loss.names) > 1:
        kind: Any = before.loss.kind
        terms = {key: dataclasses.replace(term, weight=float(key == name)) for key, term in kind.terms.items()}
        loss = dataclasses.replace(before.loss, kind=dataclasses.replace(kind, terms=terms))
        runs.parts = dataclasses.replace(before, loss=loss)
    try:
        yield
    finally:
        runs.parts = before


def _explained(runs: LossRuns, verdict: Verdict, *, in_lockstep: bool) -> Diagnosis:
    fits = _FITS.get(runs.narrowest, _FITS_NARROW)
    full, pieces = verdict.full, list(verdict.pieces[1:])
    whole = runs.gradient([full], is_full=True)
    value = runs.value
    runs.gradient(pieces)
    value_adds_up = abs(runs.value - value) <= fits * max(abs(value), 1e-12)
    parts = list(filter(None, (_of_piece(runs, piece) for piece in pieces)))
    found: Diagnosis | None = None
    if len(parts) == len(pieces):
        found = _mean(runs, full, pieces, _Parts(*_flat(whole, parts), fits))
    if in_lockstep:
        return found or _unknown()
    if found is None or found.cause not in ("sum", "mean"):
        found = _masked(runs, pieces) or found
    if found is None or found.cause not in ("sum", "mean", "masked"):
        with BroadcastWatch(full.num_samples) as watch:
            runs.plain_gradient(full)
        if watch.found:
            found = Diagnosis(
                "broadcast",
                f"samples are mixed by broadcasting. {watch.found}.",
                "Give both the same shape: squeeze(1), or targets of shape (n, 1). If the loss compares samples on "
                f"purpose: {_begun_small(_JOINT)}",
            )
    found = found or _first_difference(runs, full, pieces)
    if found is None and value_adds_up:
        return Diagnosis(
            "backward",
            "its values add up but its gradients do not: an autograd function combines all samples, or adds a term to "
            "the gradient.",
            "Return that term with the loss, as a term of ab.sum_of, and let backward functions process each sample "
            "independently.",
        )
    if found is None and _samples_interact(runs, full):
        return Diagnosis("joint", "the gradient of one sample's output depends on the other samples' outputs.", _JOINT)
    return found or _unknown()


def _unknown() -> Diagnosis:
    joint, beforehand = _begun_small(_JOINT), _begun_small(_BEFOREHAND)
    return Diagnosis(
        "unknown",
        "its pieces add up with no count: it has terms with different divisors, or weights that are computed over the "
        "batch.",
        "Return terms by name and declare ab.sum_of(loss, one=..., other=...). For weights or advantages of the batch: "
        f"{beforehand} If samples are compared with each other: {joint}",
    )


def _begun_small(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


def _of_piece(runs: LossRuns, piece: Piece) -> Gradients | None:
    """Return the gradient of one piece, even if its declared count is 0; None if it is not finite."""
    if any(runs.counts(piece)) or runs.parts.loss.kind.named:
        return runs.gradient([piece]) if any(runs.counts(piece)) else None
    with suppress(UndecidedError):
        return runs.plain_gradient(piece)
    return None


def _masked(runs: LossRuns, pieces: Sequence[Piece]) -> Diagnosis | None:
    """Return a diagnosis if a piece with a count of 0 has a finite gradient: its mean had another divisor."""
    empty = next((piece for piece in pieces if not all(runs.counts(piece))), None)
    if empty is None or runs.parts.loss.kind.brings_count or runs.parts.loss.kind.named:
        return None
    with suppress(UndecidedError):
        if any(gradient is not None and bool(gradient.any()) for gradient in runs.plain_gradient(empty)):
            return Diagnosis(
                "masked",
                "samples with a count of 0 have a gradient.",
                "Return ab.LossSum(total, count), without clamping the count.",
            )
    return None


def _flat(whole: Gradients, parts: Sequence[Gradients]) -> tuple[Tensor, Tensor]:
    """Return the whole gradient as one vector, and the gradients of the parts as columns."""
    shapes = [next((one for one in column if one is not None), None) for column in zip(whole, *parts, strict=True)]

    def flat(gradients: Gradients) -> Tensor:
        rows = zip(gradients, shapes, strict=True)
        return torch.cat(
            [(torch.zeros_like(s) if g is None else g).flatten().double() for g, s in rows if s is not None]
        )

    return flat(whole), torch.stack([flat(part) for part in parts], 1)


class _Parts(NamedTuple):
    """The whole gradient, the gradients of its pieces as columns, and the relative residual due to rounding."""

    whole: Tensor
    table: Tensor
    fits: float

    def add_up(self, factors: Sequence[float], within: float = 10.0) -> bool:
        """Return whether the pieces, with these factors, add up to the whole."""
        total = self.table @ torch.tensor(factors, dtype=self.table.dtype, device=self.table.device)
        return float((total - self.whole).norm()) <= within * self.fits * float(self.whole.norm())

    @property
    def factors(self) -> list[float]:
        """Factors with which the pieces add up; empty if none fit, or if any would fit for lack of equations."""
        if self.table.shape[0] <= self.table.shape[1]:
            return []
        factors: list[float] = torch.linalg.lstsq(self.table, self.whole[:, None]).solution[:, 0].tolist()
        return factors if self.add_up(factors, within=1.0) else []


def _mean(runs: LossRuns, full: Piece, pieces: Sequence[Piece], parts: _Parts) -> Diagnosis | None:
    """Return the items of the mean, from the factors of the pieces; None if they match the declaration."""
    loss = runs.parts.loss
    sizes = [piece.num_samples for piece in pieces]
    term = next(name for name, one in loss.kind.terms.items() if one.weight)
    counts = [runs.counts(piece)[loss.names.index(term)] for piece in pieces]
    declared = [1.0 if loss.kind.terms[term].is_sum else one / (sum(counts) or 1.0) for one in counts]
    if not loss.kind.brings_count and parts.add_up(declared):
        return None
    if parts.add_up([1.0] * len(pieces)):
        if loss.kind.brings_count:
            return Diagnosis("no_count", "its sums add up but its counts do not.", "Return how many items were added.")
        return Diagnosis(
            "sum",
            "it behaves like a sum: it adds up over samples and does not average.",
            "Return the mean, or ab.LossSum(total, count); declare ab.sum_over_samples(loss) if the sum is meant.",
        )
    offered = candidates(full.batch, full.num_samples) | paddings(full.batch, full.num_samples)
    for name, each in {**offered, **_weights(full.batch)}.items():
        ends = itertools.accumulate(sizes, initial=0)
        sums = [sum(each[start:stop]) for start, stop in itertools.pairwise(ends)] if len(each) == sum(sizes) else []
        if any(sums) and parts.add_up([one / sum(sums) for one in sums]):
            over, declaration = _declaration(name, term, named=loss.kind.named)
            return Diagnosis("mean", f"it is a mean over {over}.", f"Declare {declaration}.")
    return _other_mean(term, sizes, parts, named=loss.kind.named) if parts.factors else None


def _other_mean(term: str, sizes: Sequence[int], parts: _Parts, *, named: bool) -> Diagnosis:
    """Return the diagnosis of a mean over unknown items, or of a divisor that does not count items."""
    shares, close_to = parts.factors, parts.fits * _CLEARLY
    shown = ", ".join(f"{share:.3g}" for share in shares[:_SHARES_SHOWN])
    if abs(sum(shares) - 1.0) < close_to and min(shares) > -close_to:
        call = "count=lambda batch: class_weights[batch['label']].sum()"
        return Diagnosis(
            "other_items",
            f"it is a mean over something else (class weights?): pieces of {in_words(sizes)} samples have the shares "
            f"{shown}.",
            f"Declare {f'{term}=ab.counted({call})' if named else f'ab.mean_over(loss, {call})'}, with its divisor as "
            "the count.",
        )
    return Diagnosis(
        "no_count",
        f"it is divided by something that does not count items: pieces of {in_words(sizes)} samples add up with the "
        f"factors {shown}.",
        "Return ab.LossSum(total, count), the sum before any division and the number of its items.",
    )


def _declaration(name: str, term: str, *, named: bool) -> tuple[str, str]:
    """Return the items of a candidate, and their declaration."""
    if name == "samples":
        return "samples", f"{term}=ab.samples()" if named else "ab.mean_over_samples(loss)"
    if name.startswith("count="):
        return "a count from a tensor of the batch", (
            f"{term}=ab.counted({name})" if named else f"ab.mean_over(loss, {name})"
        )
    ignored = name.partition("ignore_index=")[2].partition(",")[0] or "-100"
    declared = f"{term}=ab.tokens({name})" if named else f"ab.mean_over_tokens(loss, {name})"
    return f"the targets that are not {ignored} ({name.rpartition(', ')[2]})", declared


def _weights(batch: Any) -> dict[str, list[float]]:  # noqa: ANN401 (any nested batch)
    """Return the tensors of the batch that may be weights of its samples."""
    weights = {}
    for name, value in batch.items() if isinstance(batch, Mapping) else ():
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 1 and bool((value >= 0).all()):
            weights[f"count=lambda batch: batch[{name!r}].sum()"] = value.tolist()
    return weights


Seen = list[tuple[str, list[Tensor], list[Tensor]]]
"""Calls of modules: name, inputs and outputs."""


def _first_difference(runs: LossRuns, full: Piece, pieces: Sequence[Piece]) -> Diagnosis | None:
    """Return the first module whose outputs, or inputs, for some samples depend on the other samples."""
    whole, stop = _calls(runs, full), full.num_samples
    for piece in reversed(pieces):  # the last piece is the largest
        part, rows = _calls(runs, piece), range(stop - piece.num_samples, stop)
        stop = rows.start
        if [name for name, *_ in whole] != [name for name, *_ in part]:
            continue
        for number, ((name, given, returned), (_, given_part, returned_part)) in enumerate(
            zip(whole, part, strict=True)
        ):
            if not _are_rows(given, given_part, full.num_samples, rows):
                if number:  # later modules, such as the experts of a mixture, may get rows in another order
                    break
                return Diagnosis(
                    "inputs",
                    "the inputs of the model for one sample depend on the other samples: they are mixed or scaled "
                    f"before {name} runs.",
                    f"Use constants of the data set, or values of each sample. {_BEFOREHAND}",
                    where="inputs of the model",
                )
            if not _are_rows(returned, returned_part, full.num_samples, rows):
                return Diagnosis(
                    "module",
                    f"samples interact inside {name}: its output for one sample depends on the others.",
                    "Let the module process each sample independently, or move the step across samples into the loss: "
                    f"{_begun_small(_JOINT)}",
                    where=name.partition(" ")[0],
                )
    return None


def _calls(runs: LossRuns, piece: Piece) -> Seen:
    calls: Seen = []

    def note(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs, output: calls.append((name, _tensors((args, kwargs)), _tensors(output)))

    hooks = [
        module.register_forward_hook(note(f"{name or 'the model'} ({type(module).__name__})"), with_kwargs=True)
        for name, module in runs.parts.modules.named_modules()
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    ]
    try:
        runs.gradient([piece])
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _tensors(values: Any) -> list[Tensor]:  # noqa: ANN401 (inputs or outputs of a module)
    with suppress(Exception):  # values may have any structure
        return [tensor.detach().clone() for tensor in tensors_of(values) if tensor.is_floating_point()]
    return []


def _are_rows(whole: Sequence[Tensor], part: Sequence[Tensor], number: int, rows: range) -> bool:
    return all(_is_part(a, b, number, rows) for a, b in zip(whole, part, strict=False))


def _is_part(whole: Tensor, part: Tensor, number: int, rows: range) -> bool:
    """Return whether `part` has these samples of `whole`, or the tensors have no sample axis."""
    size = len(rows)
    if whole.dim() != part.dim() or whole.shape == part.shape or not part.numel():
        return True
    axis = next((a for a in range(whole.dim()) if whole.shape[a] * size == part.shape[a] * number), None)
    if axis is None or whole.shape[axis] % number:
        return True
    each = whole.shape[axis] // number
    stacked = whole.unflatten(axis, (each, number)).narrow(axis + 1, rows.start, size).flatten(axis, axis + 1)
    layouts = (whole.narrow(axis, rows.start * each, size * each), stacked)
    scale = 1e-3 * float(part.abs().max()) + 1e-9
    return any(layout.shape == part.shape and float((layout - part).abs().max()) <= scale for layout in layouts)


def _samples_interact(runs: LossRuns, full: Piece) -> bool:
    """Return whether the gradient with respect to one sample's output depends on the other samples' outputs."""
    outputs: list[Tensor] = []
    models = [runs.parts.model] if isinstance(runs.parts.model, nn.Module) else list(runs.parts.model.values())

    def keep(_module: Any, _given: Any, output: Any) -> None:  # noqa: ANN401 (torch's protocol)
        found = [one for one in tensors_of(output) if one.is_floating_point() and one.dim() and one.requires_grad]
        outputs.extend([one for one in found if one.shape[0] % full.num_samples == 0][:1])

    hooks = [model.register_forward_hook(keep) for model in models]
    try:
        value = runs.value_of(full)
        slopes = torch.autograd.grad(value, outputs, create_graph=True, allow_unused=True)
        first = [one[0].flatten() for one in slopes if one is not None]
        projections = [
            (one * torch.linspace(0.5, 1.5, len(one), dtype=one.dtype, device=one.device)).sum() for one in first
        ]
        projection = torch.stack(projections).sum()
        curved = torch.autograd.grad(projection, outputs, allow_unused=True)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
        return False
    finally:
        for hook in hooks:
            hook.remove()
    return any(float(one[1:].abs().max()) > 1e-6 * float(one.abs().max()) > 0.0 for one in curved if one is not None)


class BroadcastWatch(TorchFunctionMode):
    """Records the first function that broadcasts a column (n, 1) of samples against a row (n,).

    Predictions of shape (n, 1) and targets of shape (n,) give a matrix (n, n) of all pairs, and its mean looks like a
    normal loss.
    """

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self._column, self._row = (num_samples, 1), (num_samples,)
        self.found = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 (torch's protocol)
        """Run the function, and check the shapes of its arguments."""
        given = dict(kwargs or {})
        # Only floating-point tensors: losses that compare integer labels with each other do so on purpose.
        tensors = (tensor for tensor in _argument_tensors((*args, *given.values())) if tensor.is_floating_point())
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if not self.found and self._column in shapes and self._row in shapes:
            square = (*self._row, *self._row)
            name = getattr(func, "__name__", str(func)).strip("_")
            self.found = (
                f"In {name}, tensors of shapes {self._column} and {self._row} broadcast to {square}: every sample's "
                "output is compared with every sample's target"
            )
        return func(*args, **given)


def _argument_tensors(values: Sequence[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _argument_tensors(value)
