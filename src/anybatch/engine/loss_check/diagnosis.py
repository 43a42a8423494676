"""Find why a declaration is wrong, and the right declaration, with a few more runs of the same samples."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anybatch.core.loss import Loss, tokens
from anybatch.core.tree import Batch, map_tensors, tensors_of
from anybatch.core.units import listed
from anybatch.engine.loss_check.comparison import Verdict
from anybatch.engine.loss_check.runs import LossRuns, Piece, UndecidedError, difference

Cause = Literal[
    "count",  # the count does not add up over samples
    "form",  # the returned value has a wrong type or shape
    "encode",  # the encode function of ab.joint depends on other samples
    "sum",
    "mean",  # over known items
    "other_items",  # a mean over items that are not in the batch
    "no_count",  # the divisor does not count items
    "inputs",  # samples are mixed before the model runs
    "module",  # samples interact inside a module
    "broadcast",
    "joint",  # samples interact in the loss
    "unknown",
]

_TOLERANCES = {torch.float64: 1e-6}
_NARROW_TOLERANCE = 2e-3
_CLEARLY = 50.0
_MIN_DIFFERENCE = 2e-4
_SHARES_SHOWN = 3
_IGNORED = -100
_TARGETS = ("label", "target")
_MAX_PADDINGS = 3
_INTERACTION = 1e-6


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The fault of a declaration and its remedy, in sentences; `where` is the module's name, or the model's inputs."""

    cause: Cause
    fault: str
    remedy: str
    term: str | None = None
    where: str = ""


_JOINT = "Declare ab.joint(encode, loss), whose loss gets the outputs of the whole effective batch."
_BEFOREHAND = (
    "Compute it for the effective batch beforehand, in the data set or in "
    "ab.batches(collate=anybatch.data.OverEffectiveBatch(collate))."
)


def diagnose(runs: LossRuns, verdict: Verdict, *, in_lockstep: bool = False) -> Diagnosis:
    """Return what is wrong with a declaration that the check has rejected."""
    loss = runs.parts.loss
    if verdict.counts is not None:
        name, count, total = verdict.counts
        return Diagnosis(
            "count",
            f"the count of term {name!r} does not add up over samples: {count:g} for {verdict.full.num_samples} "
            f"samples in one piece, and {total:g} for pieces of {listed(verdict.sizes)} together.",
            "Return a sum over samples, such as the number of targets. Mistakes: len(batch) of a dict counts its keys, "
            "clamp(min=1) counts a missing item. With counts of 0, return ab.LossSum(total, count) from the loss.",
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
    for precision in (runs.widened, nullcontext):  # not every model runs in float64
        # If further runs fail, the verdict is still correct.
        with suppress(Exception), _only(runs, term), precision():
            return dataclasses.replace(_explained(runs, verdict, in_lockstep=in_lockstep), term=term)
    return dataclasses.replace(_UNKNOWN, term=term)


def describe(loss: Loss, verdict: Verdict, diagnosis: Diagnosis, *, returned_number: bool = False) -> str:
    """Return the error message for a rejected declaration and its diagnosis, without the remedy."""
    if diagnosis.cause in ("form", "count"):
        return diagnosis.fault
    term = loss.names[0] if diagnosis.term is None else diagnosis.term
    what = f"term {term!r} of the loss" if loss.kind.named else "the loss"
    items = loss.kind.terms[term]
    kind = "a sum with its count" if loss.kind.returns_count and not returned_number else f"a {items}"
    declared = f"{what} is {'taken' if loss.kind.returns_count else 'declared'} as {kind}, but {diagnosis.fault}"
    if loss.kind.encode is not None:
        declared = diagnosis.fault
    return (
        f"{declared} Check: {verdict.full.num_samples} samples in one piece and in pieces of "
        f"{listed(verdict.sizes)} give gradients that differ by {verdict.error:.2g} (relative norm) in parameter "
        f"{verdict.parameter!r}; rounding stays below {verdict.tolerance:g}."
    )


def _broken_term(runs: LossRuns, verdict: Verdict) -> str | None:
    """Return the term whose gradients differ most when it is the only term; None if none differ."""
    names = runs.parts.loss.names
    if len(names) == 1:
        return names[0]
    worst: tuple[float, str | None] = (_MIN_DIFFERENCE, None)
    for name in names:
        with _only(runs, name), suppress(UndecidedError):
            full = runs.gradient([verdict.full], is_full=True)
            error, _ = difference(full, runs.gradient(verdict.pieces[1:]))
            worst = max(worst, (error, name), key=lambda pair: pair[0])
    return worst[1]


@contextmanager
def _only(runs: LossRuns, name: str | None) -> Iterator[None]:
    """Within the context, set the weights of all terms except `name` to 0; None changes nothing."""
    before = runs.parts
    if name is not None and len(before.loss.names) > 1:
        kind = before.loss.kind
        terms = {key: dataclasses.replace(term, weight=float(key == name)) for key, term in kind.terms.items()}
        loss = dataclasses.replace(before.loss, kind=dataclasses.replace(kind, terms=terms))
        runs.parts = dataclasses.replace(before, loss=loss)
    try:
        yield
    finally:
        runs.parts = before


def _explained(runs: LossRuns, verdict: Verdict, *, in_lockstep: bool) -> Diagnosis:
    mean = None
    with suppress(UndecidedError):
        mean = _mean(runs, verdict)
    if in_lockstep or (mean is not None and mean.cause in ("sum", "mean")):
        return mean or _UNKNOWN
    return (
        _broadcast(runs, verdict.full)
        or mean
        or _first_difference(runs, verdict)
        or _interaction(runs, verdict.full)
        or _UNKNOWN
    )


def _with_small_initial(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


_UNKNOWN = Diagnosis(
    "unknown",
    "the gradients of its parts add up with no count as divisor: it has terms with different divisors, or weights "
    "that are computed over the batch.",
    "Return terms by name and declare ab.sum_of(loss, one=..., other=...). For weights or advantages of the batch: "
    f"{_with_small_initial(_BEFOREHAND)} If samples are compared with each other: {_with_small_initial(_JOINT)}",
)


def _columns(gradients: Iterable[Sequence[Tensor | None]]) -> Tensor:
    """Return gradients as the columns of a matrix, with zeros for missing gradients."""
    rows = []
    for column in zip(*gradients, strict=True):
        like = next((g for g in column if g is not None), None)
        if like is not None:
            rows.append(torch.stack([(torch.zeros_like(like) if g is None else g).flatten() for g in column], 1))
    return torch.cat(rows).double()


class _Parts(NamedTuple):
    """The gradient of all samples, the pieces' gradients as columns, and the relative error that rounding may cause."""

    whole: Tensor
    table: Tensor
    tolerance: float

    def add_up(self, factors: Sequence[float], within: float = 10.0) -> bool:
        """Return whether the pieces, with these factors, add up to the whole."""
        total = self.table @ torch.tensor(factors, dtype=self.table.dtype, device=self.table.device)
        return float((total - self.whole).norm()) <= within * self.tolerance * float(self.whole.norm())


def _mean(runs: LossRuns, verdict: Verdict) -> Diagnosis | None:
    """Find the items of the loss's mean, from weights with which the pieces add up; None if they are as declared."""
    loss, pieces, sizes = runs.parts.loss, verdict.pieces[1:], verdict.sizes
    whole = runs.gradient(verdict.pieces[:1], is_full=True)
    # A piece with a count of 0 may have other items, over which the loss may be a mean.
    parted = [runs.gradient([piece]) if any(runs.counts(piece)) else runs.plain_gradient(piece) for piece in pieces]
    columns = _columns([whole, *parted])
    parts = _Parts(columns[:, 0], columns[:, 1:], _TOLERANCES.get(runs.narrowest, _NARROW_TOLERANCE))
    term = next(name for name, item in loss.kind.terms.items() if item.weight)
    counts = [runs.counts(piece)[loss.names.index(term)] for piece in pieces]
    declared = [1.0 if loss.kind.terms[term].is_sum else count / (sum(counts) or 1.0) for count in counts]
    if not loss.kind.returns_count and parts.add_up(declared):
        return None
    if parts.add_up([1.0] * len(pieces)):
        if loss.kind.returns_count:
            return Diagnosis(
                "no_count", "its sums add up but its counts do not.", "Return the number of items that were summed."
            )
        return Diagnosis(
            "sum",
            "it behaves like a sum: it adds up over samples and does not average.",
            "Return the mean, or ab.LossSum(total, count); declare ab.sum_over_samples(loss) if the sum is meant.",
        )
    for declaration, each in _candidates(verdict.full, term if loss.kind.named else None):
        ends = itertools.accumulate(sizes, initial=0)
        sums = [sum(each[start:stop]) for start, stop in itertools.pairwise(ends)]
        if any(sums) and parts.add_up([count / sum(sums) for count in sums]):
            return Diagnosis("mean", "it is a mean over other items.", f"Declare {declaration}.")
    return _other_mean(parts, sizes, declared, term if loss.kind.named else None)


def _other_mean(parts: _Parts, sizes: Sequence[int], declared: Sequence[float], term: str | None) -> Diagnosis | None:
    """Return the diagnosis of a mean over unknown items; None if the pieces do not add up with any weights."""
    if parts.table.shape[0] <= parts.table.shape[1]:  # too few equations to determine the weights
        return None
    shares: list[float] = torch.linalg.lstsq(parts.table, parts.whole[:, None]).solution[:, 0].tolist()
    # A piece that counts nothing, although it has a gradient, is left out for another reason than its count.
    is_left_out = any(share < _INTERACTION for share, column in zip(shares, parts.table.T, strict=True) if column.any())
    if is_left_out or not parts.add_up(shares, within=1.0):
        return None
    shown, expected = (", ".join(f"{share:.3g}" for share in weights[:_SHARES_SHOWN]) for weights in (shares, declared))
    fault = f"it has another divisor: pieces of {listed(sizes)} samples have the weights {shown} instead of {expected}."
    if abs(sum(shares) - 1.0) < _CLEARLY * parts.tolerance:
        counted = _declaration("counted", "count=lambda batch: class_weights[batch['label']].sum()", term)
        return Diagnosis("other_items", fault, f"Declare {counted}, with its divisor (class weights?) as the count.")
    remedy = "Return ab.LossSum(total, count), the sum before any division and the number of its items."
    return Diagnosis("no_count", fault, remedy)


def _candidates(full: Piece, term: str | None) -> Iterator[tuple[str, list[float]]]:
    """Yield possible declarations with their counts of the samples: samples, targets, a mask, or weights."""
    yield _declaration("samples", "", term), [1.0] * full.num_samples
    named = [
        (name, value) for name, value in _named_tensors(full.batch) if value.dim() and len(value) == full.num_samples
    ]
    labels = [(name, value) for name, value in named if value.dim() > 1 and value.dtype in (torch.int64, torch.int32)]
    # Tensors with a name like "labels" first, since other tensors may have the same number of items.
    labels.sort(key=lambda item: not any(word in item[0].lower() for word in _TARGETS))
    for name, value in labels:
        yield from _targets(name, value, _IGNORED, term)
    for name, value in named:
        is_mask = ((value >= 0) & (value.is_floating_point() | (value <= 1))).all()
        if isinstance(full.batch, Mapping) and is_mask:
            count = f"count=lambda batch: batch[{name}].sum()"
            yield _declaration("counted", count, term), [float(row.sum()) for row in value.split(1)]
    for name, value in labels:
        values, times = value.unique(return_counts=True)
        # The padding token is usually 0, the largest id, or a frequent id.
        frequent = values[times.argsort(descending=True)[:_MAX_PADDINGS]].tolist()
        for ignored in dict.fromkeys((0, int(values.max()), *frequent)):
            yield from _targets(name, value, ignored, term)


def _targets(name: str, labels: Tensor, ignored: int, term: str | None) -> Iterator[tuple[str, list[float]]]:
    """Yield declarations of a mean over targets that are not ignored, with and without a shift, and their counts."""
    other = f"ignore_index={ignored}, " if ignored != _IGNORED else ""
    for shift in (True, False):
        count = tokens(lambda row: row, shift=shift, ignore_index=ignored).count
        assert count is not None
        arguments = f"labels={name}, {other}shift={shift}"
        yield _declaration("tokens", arguments, term), [float(count(row)) for row in labels.split(1)]


def _named_tensors(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors at the top level of a batch, each with the text for it in a declaration."""
    if isinstance(batch, Mapping):
        named = {repr(key): value for key, value in batch.items()}
    elif dataclasses.is_dataclass(batch):
        named = {repr(field.name): getattr(batch, field.name) for field in dataclasses.fields(batch)}
    elif isinstance(batch, (tuple, list)):
        named = {f"lambda batch: batch[{index}]": value for index, value in enumerate(batch)}
    else:
        named = {}
    yield from ((name, value) for name, value in named.items() if isinstance(value, Tensor))


def _declaration(items: Literal["samples", "tokens", "counted"], arguments: str, term: str | None) -> str:
    """Return a declaration of a loss, or of one of its terms."""
    if term is not None:
        return f"{term}=ab.{items}({arguments})"
    alone = {"samples": "mean_over_samples", "tokens": "mean_over_tokens", "counted": "mean_over"}[items]
    return f"ab.{alone}({', '.join(filter(None, ('loss', arguments)))})"


class _Call(NamedTuple):
    """A call of a module: its name and type, its floating-point inputs and outputs, and later their gradients."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    gradients: tuple[list[Tensor], list[Tensor]]


def _first_difference(runs: LossRuns, verdict: Verdict) -> Diagnosis | None:
    """Return the diagnosis for the first module whose inputs, outputs or backward for a sample depend on others."""
    whole, stop, number = _calls(runs, verdict.full), verdict.full.num_samples, verdict.full.num_samples
    index, term = next(pair for pair in enumerate(runs.parts.loss.kind.terms.values()) if pair[1].weight)
    for piece in reversed(verdict.pieces[1:]):  # the last piece is the largest
        part, rows = _calls(runs, piece), range(stop - piece.num_samples, stop)
        stop = rows.start
        share = 1.0 if term.is_sum else runs.counts(piece)[index] / (runs.counts(verdict.full)[index] or 1.0)
        if [call.name for call in whole] != [call.name for call in part]:
            continue
        for full_call, part_call in zip(whole, part, strict=True):
            if not _agree(full_call.inputs, part_call.inputs, number, rows):
                if (
                    full_call is not whole[0]
                ):  # later modules, such as the experts of a mixture, may get rows in another order
                    break
                return Diagnosis(
                    "inputs",
                    "the inputs of the model for one sample depend on the other samples: they are mixed or scaled "
                    f"before {full_call.name} runs.",
                    f"Use constants of the data set, or values of each sample. {_BEFOREHAND}",
                    where="inputs of the model",
                )
            where = full_call.name.partition(" ")[0]
            if not _agree(full_call.outputs, part_call.outputs, number, rows):
                return Diagnosis(
                    "module",
                    f"samples interact inside {full_call.name}: its output for one sample depends on other samples.",
                    "Let the module process each sample independently, or move the step across samples into the loss: "
                    f"{_with_small_initial(_JOINT)}",
                    where=where,
                )
            of_inputs, of_outputs = (
                _agree(ours, [share * each for each in theirs], number, rows)
                for ours, theirs in zip(full_call.gradients, part_call.gradients, strict=True)
            )
            has_rows = [bool(each.dim()) and len(each) % number == 0 for each in full_call.gradients[1]]
            if has_rows and all(has_rows) and of_outputs and not of_inputs:
                fault = (
                    f"the backward of {full_call.name} scales gradients by a factor that depends on the micro-batch."
                )
                remedy = "Scale by a constant, not by the number of samples of the micro-batch."
                return Diagnosis("module", fault, remedy, where=where)
    return None


def _calls(runs: LossRuns, piece: Piece) -> list[_Call]:
    calls: list[_Call] = []

    def note(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ANN401 (of any module)
            gradients = list[Tensor](), list[Tensor]()
            for kept, values in zip(gradients, ((args, kwargs), output), strict=True):
                for tensor in _tensors(values):
                    if tensor.requires_grad:
                        tensor.register_hook(kept.append)
            inputs, outputs = ([each.detach().clone() for each in _tensors(v)] for v in ((args, kwargs), output))
            calls.append(_Call(name, inputs, outputs, gradients))

        return hook

    modules = runs.parts.modules.named_modules()
    hooks = [
        module.register_forward_hook(note(f"{name or 'the model'} ({type(module).__name__})"), with_kwargs=True)
        for name, module in modules
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
        return [tensor for tensor in tensors_of(values) if tensor.is_floating_point()]
    return []


def _agree(whole: Sequence[Tensor], part: Sequence[Tensor], number: int, rows: range) -> bool:
    """Return whether each tensor of a part has the values of these rows of the whole, or no sample axis."""
    return all(_is_part(tensor, other, number, rows) for tensor, other in zip(whole, part, strict=False))


def _is_part(whole: Tensor, part: Tensor, number: int, rows: range) -> bool:
    if not whole.dim() or not part.numel() or len(whole) * len(rows) != len(part) * number or len(whole) % number:
        return True
    each = len(whole) // number
    # If each sample has several rows, these may be consecutive, or all first rows come before all second rows.
    layouts = whole.unflatten(0, (number, each))[rows.start : rows.stop], whole.unflatten(0, (each, number))[:, rows]
    scale = 1e-3 * float(part.abs().max()) + 1e-9
    return any(
        layout.numel() == part.numel() and float((layout.reshape(part.shape) - part).abs().max()) <= scale
        for layout in layouts
    )


def _interaction(runs: LossRuns, full: Piece) -> Diagnosis | None:
    """Return a diagnosis if the gradient of some samples' outputs changes when only the other outputs do.

    The other outputs are those of the second half of the samples, in reverse order or replaced by the first one's.
    """
    half, kept = full.num_samples // 2, list[Tensor]()
    models = [runs.parts.model] if isinstance(runs.parts.model, nn.Module) else list(runs.parts.model.values())

    def first_gradients(order: Sequence[int]) -> Tensor:
        def reordered(tensor: Tensor) -> Tensor:
            if not (tensor.is_floating_point() and tensor.dim() and len(tensor) % full.num_samples == 0):
                return tensor
            rows: Tensor = tensor.unflatten(0, (full.num_samples, -1))[list(order)].flatten(0, 1)
            kept.extend([rows] if rows.requires_grad else [])
            return rows

        kept.clear()
        hooks = [model.register_forward_hook(lambda *args: map_tensors(args[-1], reordered)) for model in models]
        try:
            found = torch.autograd.grad(runs.value_of(full), kept, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        return _columns([[None if g is None else g[: half * len(g) // full.num_samples] for g in found]])

    first, others = list(range(half)), list(range(half, full.num_samples))
    try:
        expected, *changed = map(first_gradients, (first + others, first + others[::-1], first + [0] * len(others)))
        if all(float((each - expected).norm()) <= _INTERACTION * float(expected.norm()) for each in changed):
            return None
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
        return None
    return Diagnosis("joint", "the gradient of one sample's output depends on the other samples' outputs.", _JOINT)


def _broadcast(runs: LossRuns, full: Piece) -> Diagnosis | None:
    with BroadcastWatch(full.num_samples) as watch:
        runs.gradient([full])
    if not watch.found:
        return None
    return Diagnosis(
        "broadcast",
        f"samples are mixed by broadcasting. {watch.found}.",
        "Give both the same shape: squeeze(1), or targets of shape (n, 1). If the loss compares samples on "
        f"purpose: {_with_small_initial(_JOINT)}",
    )


class BroadcastWatch(TorchFunctionMode):
    """Records the first function that broadcasts shapes (n, 1) and (n,) of n samples.

    Predictions of shape (n, 1) and targets of shape (n,) give a matrix (n, n) of all pairs, and its mean looks like an
    ordinary loss.
    """

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self._column, self._row = (num_samples, 1), (num_samples,)
        self.found = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 (torch's protocol)
        """Run the function, and check the shapes of its arguments."""
        given = dict(kwargs or {})
        # Only floating-point tensors, since losses that compare integer labels with each other do so on purpose.
        tensors = [value for value in (*args, *given.values()) if isinstance(value, Tensor)]
        shapes = [tuple(tensor.shape) for tensor in tensors if tensor.is_floating_point()]
        if not self.found and self._column in shapes and self._row in shapes:
            square = (*self._row, *self._row)
            name = getattr(func, "__name__", str(func)).strip("_")
            self.found = (
                f"In {name}, tensors of shapes {self._column} and {self._row} broadcast to {square}: every sample's "
                "output is compared with every sample's target"
            )
        return func(*args, **given)
