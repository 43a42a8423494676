"""Whether a loss is what it was declared to be, seen from a few samples: the gradients of its pieces have to add up.

The loss is looked at, not the network. The model runs once, and the loss function then runs on all samples and on
pieces of them with a stand-in that answers with rows of what the model has returned. For a right declaration

    gradient(whole) = sum over pieces of share x gradient(piece)

holds to rounding, the gradients being those with respect to what the model has returned; dropout and BatchNorm have no
part in it. Comparing values instead fails both ways: a mean over tokens that is declared over samples differs by 5e-5
in an untrained model, where no token is likelier than another.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from anybatch.core.loss import Loss, LossSum
from anybatch.core.nested import Batch, map_tensors, slice_samples
from anybatch.engine.stand_in import Call, Rows, StandIn, UndecidedError, modules_in, sample_axes
from anybatch.engine.untouched import Draws

Gradients = list[torch.Tensor | None]

_ROUNDING = {"wide": 1e-4, "low": 2e-2}
"""Relative differences up to here are rounding: right losses differ by 1e-6 in float32, and by 1e-2 in bf16."""
_BEYOND_DOUBT = {"wide": 2e-2, "low": 1e-1}
"""From here on a difference needs no other declaration that explains it."""
_SMALLEST_LEAF = 1e-2  # what one output's gradient is compared with, at least, as a part of all outputs' gradient
_MOST_ROUNDS = 6  # how many levels of modules are opened


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is looked at.

    Attributes:
        loss: the declaration.
        model: what the loss function is called with.
        batch: some samples of a micro-batch, on the device.
        num_samples: how many.
        counts: by term, what each sample counts.
        candidates: other things that samples may count as, by how they are declared.
        autocast: makes the context of a forward.
        is_low: whether bf16 or fp16 takes part.
        draws: the generators.
    """

    loss: Loss
    model: nn.Module | Mapping[str, nn.Module]
    batch: Batch
    num_samples: int
    counts: Mapping[str, Sequence[float]]
    candidates: Mapping[str, Sequence[float]]
    autocast: Callable[[], AbstractContextManager[object]]
    is_low: bool
    draws: Draws


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one term.

    Attributes:
        error: relative difference between the whole's gradient and the pieces'.
        whole: norm of the whole's gradient.
        pieces: norm of the pieces' gradients, added up as declared.
        sizes: samples of the pieces.
        adds_up: whether the function returned a sum (`LossSum`, or one loss per item) and not a mean.
        is_scalar: whether it returned one number.
        explanation: what explains the difference: a candidate, "sum", "other" counts, "terms" or "joint".
        share: the first piece's part of the whole, as found and as declared.
    """

    error: float
    whole: float
    pieces: float
    sizes: tuple[int, ...]
    adds_up: bool
    is_scalar: bool
    explanation: str = ""
    share: tuple[float, float] = (0.0, 0.0)


def findings(subject: Subject) -> dict[str, Finding]:
    """Return what is found of every term; a finding with an explanation is one of a broken declaration.

    Raises:
        UndecidedError: nothing can be said.
    """
    reason = UndecidedError("nothing could be tried")
    for wide in (True, False) if subject.is_low else (True,):
        for exact in (False, True):
            try:
                found = _findings_of(subject, wide=wide, exact=exact)
            except UndecidedError as undecided:
                reason = undecided
                continue
            if exact or not any(one.explanation for one in found.values()):
                return found
    raise reason


def _findings_of(subject: Subject, *, wide: bool, exact: bool) -> dict[str, Finding]:
    found: dict[str, Finding] = {}
    for interleaved in (False, True):
        trial = _open_trial(subject, wide=wide, exact=exact, interleaved=interleaved)
        found = trial.findings()
        if not any(one.explanation for one in found.values()) or not trial.has_two_layouts:
            return found
    return found


@dataclass(frozen=True, slots=True)
class _Reading:
    """A term's value as it was returned, reduced to one number, and what is known of its count."""

    value: torch.Tensor
    adds_up: bool
    count: float
    is_scalar: bool


def _readings(loss: Loss, output: object) -> dict[str, _Reading]:
    if loss.named and not isinstance(output, Mapping):
        raise _not_as_declared()
    values = output if loss.named and isinstance(output, Mapping) else {loss.names[0]: output}
    if set(values) != set(loss.names):
        raise _not_as_declared()
    return {name: _reading(values[name]) for name in loss.names}


def _reading(value: object) -> _Reading:
    if isinstance(value, LossSum):
        return _Reading(value.total, adds_up=True, count=float(value.count), is_scalar=False)
    if not isinstance(value, torch.Tensor):
        raise _not_as_declared()
    if value.dim():
        return _Reading(value.sum(), adds_up=True, count=float(value.numel()), is_scalar=False)
    return _Reading(value, adds_up=False, count=math.nan, is_scalar=True)


def _not_as_declared() -> UndecidedError:
    return UndecidedError("the loss function does not return what was declared")


@dataclass(frozen=True, slots=True)
class _Pass:
    """The loss function run once, on samples `start` to `stop`: readings and gradients by term."""

    start: int
    stop: int
    readings: Mapping[str, _Reading]
    gradients: Mapping[str, Gradients]
    inputs: list[list[torch.Tensor]]

    def is_finite(self, name: str) -> bool:
        return all(bool(torch.isfinite(one).all()) for one in self.gradients[name] if one is not None)


@dataclass(slots=True)
class _Trial:
    """One recording of the model's answers, on which the loss function is tried."""

    subject: Subject
    stand_in: StandIn
    function: Callable[[Any, Batch], Any]
    calls: Sequence[Call]
    rows: list[list[Rows]]
    wide: bool
    has_two_layouts: bool
    whole: _Pass | None = field(default=None)

    @property
    def tracks(self) -> list[Rows]:
        """Where the samples are in everything that gradients are taken for; parameters have none."""
        parameters = [Rows(one, (), 1, interleaved=False) for one in self.stand_in.parameters]
        return [*(one for rows in self.rows for one in rows), *parameters]

    def run(self, start: int, stop: int, *, seed: int = 0, mixed_from: int = 0) -> _Pass:
        """Run the loss function on rows of the recorded answers, and differentiate each term."""
        subject = self.subject
        leaves = [[one.leaf(start, stop, wide=self.wide) for one in rows] for rows in self.rows]
        if mixed_from:
            leaves = [
                [one.mixed(leaf, mixed_from) for one, leaf in zip(rows, group, strict=True)]
                for rows, group in zip(self.rows, leaves, strict=True)
            ]
        answers = [
            [one.shaped(leaf) for one, leaf in zip(rows, group, strict=True)]
            for rows, group in zip(self.rows, leaves, strict=True)
        ]
        subject.draws.seed(seed)
        piece = _fresh(subject.batch, start, stop)
        with torch.enable_grad(), nullcontext() if self.wide else subject.autocast():
            output, inputs = self.stand_in.replay(
                self.calls, answers, lambda: self.function(self.stand_in.model, piece)
            )
            readings = _readings(subject.loss, output)
        flat = [*(leaf for group in leaves for leaf in group), *self.stand_in.parameters]
        gradients = {name: _gradients(reading.value, flat) for name, reading in readings.items()}
        return _Pass(start, stop, readings, gradients, inputs)

    def findings(self) -> dict[str, Finding]:
        """Compare whole and pieces."""
        cuts, spare = _cuts(self.subject.num_samples)
        tried = [found for cut in cuts if (found := self._pieces(cut)) is not None]
        if not tried:
            tried = [found for cut in spare if (found := self._pieces(cut)) is not None]
        if not tried:
            message = "it cannot be run on fewer samples"
            raise UndecidedError(message)
        self._refuse_meetings(tried)
        found: dict[str, Finding] = {}
        undecided = []
        for name in self.subject.loss.names:
            try:
                found[name] = self._finding(name, tried)
            except UndecidedError as error:
                undecided.append(error)
        if undecided and not any(one.explanation for one in found.values()):
            raise undecided[0]
        return found

    def _pieces(self, cut: Sequence[int]) -> list[_Pass] | None:
        """Run the pieces of a cut; None if one fails or has no finite gradient, as a variance of one sample has."""
        try:
            passes = [self.run(start, stop) for start, stop in zip(cut, cut[1:], strict=False)]
        except (UndecidedError, torch.OutOfMemoryError):
            raise
        except Exception:  # noqa: BLE001 (whatever the user's loss raises on few samples)
            return None
        names = self.subject.loss.names
        usable = all(one.is_finite(name) for one in passes for name in names if self._count(one, name))
        return passes if usable else None

    def _count(self, one: _Pass, name: str) -> float:
        """What a pass counts for a term, as declared."""
        reading = one.readings[name]
        if self.subject.loss.terms is None and reading.adds_up:
            return reading.count
        return sum(self.subject.counts[name][one.start : one.stop])

    def _declared(self, name: str, passes: Sequence[_Pass]) -> list[float]:
        """Return what each piece's gradient is multiplied with, if the whole's is taken as it is."""
        assert self.whole is not None
        counts = [self._count(one, name) for one in passes]
        if not sum(counts):
            return [0.0] * len(counts)
        if self.whole.readings[name].adds_up:
            return [self._count(self.whole, name) / sum(counts) if count else 0.0 for count in counts]
        return [count / sum(counts) for count in counts]

    def _finding(self, name: str, tried: Sequence[Sequence[_Pass]]) -> Finding:
        assert self.whole is not None
        if not self._count(self.whole, name):
            message = "these samples count nothing"
            raise UndecidedError(message)
        if not self.whole.is_finite(name):
            message = "its gradient is not finite"
            raise UndecidedError(message)
        compared = [self._difference(name, passes, self._declared(name, passes)) for passes in tried]
        worst = max(range(len(tried)), key=lambda number: compared[number][0])
        error, whole, pieces = compared[worst]
        if not whole and not pieces:
            message = "nothing that the model returned has a gradient"
            raise UndecidedError(message)
        reading = self.whole.readings[name]
        finding = Finding(
            error=error,
            whole=whole,
            pieces=pieces,
            sizes=tuple(one.stop - one.start for one in tried[worst]),
            adds_up=reading.adds_up,
            is_scalar=reading.is_scalar,
        )
        return finding if error <= self._rounding else self._explained(name, tried, worst, finding)

    @property
    def _rounding(self) -> float:
        return _ROUNDING["wide" if self.wide else "low"]

    def _explained(self, name: str, tried: Sequence[Sequence[_Pass]], worst: int, finding: Finding) -> Finding:
        """Add what explains a difference that is no rounding."""
        assert self.whole is not None
        again = self.run(0, self.subject.num_samples, seed=1)
        if self._difference(name, [again], [1.0])[0] > self._rounding:
            message = "it draws random numbers of its own"
            raise UndecidedError(message)
        shares = [self._fitted(name, one) for one in tried[worst]]
        explanation = self._candidate(name, tried)
        if not explanation:
            if finding.error < _BEYOND_DOUBT["wide" if self.wide else "low"]:
                message = (
                    f"pieces differ from the whole by {finding.error:.1e}, which is neither rounding nor plainly more"
                )
                raise UndecidedError(message)
            if self._depends_on_others(name):
                explanation = "joint"
            else:
                fitted = max(self._difference(name, p, [self._fitted(name, one) for one in p])[0] for p in tried)
                explanation = "other" if fitted <= self._rounding else "terms"
        return Finding(
            error=finding.error,
            whole=finding.whole,
            pieces=finding.pieces,
            sizes=finding.sizes,
            adds_up=finding.adds_up,
            is_scalar=finding.is_scalar,
            explanation=explanation,
            share=(shares[0], self._declared(name, tried[worst])[0]),
        )

    def _candidate(self, name: str, tried: Sequence[Sequence[_Pass]]) -> str:
        """Return the name of what explains all cuts, or an empty string."""
        ones = {"sum": [1.0] * self.subject.num_samples}
        for candidate, counts in {**ones, **self.subject.candidates}.items():
            worst = 0.0
            for passes in tried:
                parts = [sum(counts[one.start : one.stop]) for one in passes]
                shares = [1.0] * len(parts) if candidate == "sum" else [part / (sum(parts) or 1.0) for part in parts]
                worst = max(worst, self._difference(name, passes, shares)[0])
            if worst <= self._rounding:
                return candidate
        return ""

    def _depends_on_others(self, name: str) -> bool:
        """Whether the gradient of the first samples' outputs changes with the other samples' outputs."""
        assert self.whole is not None
        first = max(1, self.subject.num_samples // 2)
        mixed = self.run(0, self.subject.num_samples, mixed_from=first)
        ours, theirs = [], []
        for track, one, other in zip(self.tracks, self.whole.gradients[name], mixed.gradients[name], strict=True):
            if track.has_samples and one is not None and other is not None:
                ours.append(track.window(one, 0, first))
                theirs.append(track.window(other, 0, first))
        return _relative(ours, theirs)[0] > self._rounding

    def _fitted(self, name: str, one: _Pass) -> float:
        """Return the factor with which a piece's gradient comes closest to its part of the whole's."""
        assert self.whole is not None
        along = square = 0.0
        for track, whole, piece in zip(self.tracks, self.whole.gradients[name], one.gradients[name], strict=True):
            if track.has_samples and whole is not None and piece is not None:
                along += float((track.window(whole, one.start, one.stop) * piece).sum())
                square += float(piece.square().sum())
        return along / square if square else 0.0

    def _difference(self, name: str, passes: Sequence[_Pass], shares: Sequence[float]) -> tuple[float, float, float]:
        """Return how far shares of passes are from the whole, relatively; the whole's norm; theirs."""
        assert self.whole is not None
        sums: Gradients = []
        for place, (track, whole) in enumerate(zip(self.tracks, self.whole.gradients[name], strict=True)):
            parts = zip(passes, shares, strict=True)
            known = [(one, share) for one, share in parts if share and one.gradients[name][place] is not None]
            if not known:
                sums.append(None)
                continue
            like = whole if whole is not None else self._whole_leaf(place)
            total = torch.zeros_like(like)
            for one, share in known:
                gradient = one.gradients[name][place]
                assert gradient is not None
                track.window(total, one.start, one.stop).add_(gradient, alpha=share)
            sums.append(total)
        return _relative(self.whole.gradients[name], sums)

    def _whole_leaf(self, place: int) -> torch.Tensor:
        flat = [one for rows in self.rows for one in rows]
        if place < len(flat):
            return flat[place].leaf(0, self.subject.num_samples, wide=self.wide)
        return self.stand_in.parameters[place - len(flat)]

    def _refuse_meetings(self, tried: Sequence[Sequence[_Pass]]) -> None:
        """Refuse to judge where samples meet on the way from one call of the model to the next.

        Raises:
            UndecidedError: what a later call is given for some samples is not what it is given for them among all.
        """
        assert self.whole is not None
        if not any(_meet(self.whole, one, self._rounding) for passes in tried for one in passes):
            return
        again = self.run(0, self.subject.num_samples, seed=1)
        if not _meet(self.whole, again, self._rounding):  # otherwise it is drawn at random: dropout between two calls
            message = "samples meet between two calls of the model"
            raise UndecidedError(message)


def _open_trial(subject: Subject, *, wide: bool, exact: bool, interleaved: bool) -> _Trial:
    """Record the model's answers, opening modules until everything that the loss depends on has rows of samples."""
    function = subject.loss.function
    own = {id(module) for module in modules_in(function)} - {id(module) for module in modules_in(subject.model)}
    opened = set(own)
    for _ in range(_MOST_ROUNDS):
        stand_in = StandIn(subject.model, opened)
        called = stand_in.clone(function) if isinstance(function, nn.Module) else function
        calls, axes = _recorded(subject, stand_in, called, exact=exact)
        rows = [
            [Rows(t, at, subject.num_samples, interleaved=interleaved) for t, at in zip(c.tensors, places, strict=True)]
            for c, places in zip(calls, axes, strict=True)
        ]
        two = any(entries > 1 for places in axes for at in places for _, entries in at)
        trial = _Trial(subject, stand_in, called, calls, rows, wide, two)
        trial.whole = _attempted(lambda trial=trial: trial.run(0, subject.num_samples))
        found = set(_without_samples(trial))
        if not found:
            return trial
        if found <= opened:
            break
        opened |= found
    message = "the loss depends on something the model makes of all samples at once"
    raise UndecidedError(message)


def _without_samples(trial: _Trial) -> Iterator[int]:
    """Yield the modules that returned something that the loss depends on and that has no rows of samples."""
    assert trial.whole is not None
    owners = [id(call.module) for call, rows in zip(trial.calls, trial.rows, strict=True) for _ in rows]
    for place, owner in enumerate(owners):
        gradients = [of_term[place] for of_term in trial.whole.gradients.values()]
        if not trial.tracks[place].has_samples and any(g is not None and bool(g.any()) for g in gradients):
            yield owner


def _recorded(
    subject: Subject, stand_in: StandIn, function: Callable[[Any, Batch], Any], *, exact: bool
) -> tuple[tuple[Call, ...], Any]:
    """Record the model's answers, and find where the samples are in them."""

    def record(number: int) -> tuple[Call, ...]:
        piece = _fresh(subject.batch, 0, number)
        subject.draws.seed(0)
        with subject.autocast():
            return stand_in.record(lambda: function(stand_in.model, piece))

    def of(number: int) -> tuple[Call, ...]:
        try:
            with torch.no_grad():
                return record(number)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a model that differentiates in its forward needs gradients there
            with torch.enable_grad():
                return _attempted(lambda: record(number))

    calls = _attempted(lambda: of(subject.num_samples))
    others = _attempted(lambda: of(subject.num_samples - 1)) if exact else None
    return calls, sample_axes(calls, subject.num_samples, others, subject.num_samples - 1)


def _attempted(function: Callable[[], Any]) -> Any:  # noqa: ANN401 (what the function returns)
    """Run something of the user's; whatever it raises is no verdict, and will be raised again in earnest."""
    try:
        return function()
    except (UndecidedError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        message = f"it cannot be run with a stand-in for the model ({type(error).__name__})"
        raise UndecidedError(message) from error


def _fresh(batch: Batch, start: int, stop: int) -> Batch:
    """Return some samples, copied: a loss function may take things out of its batch, or change them."""
    return map_tensors(slice_samples(batch, start, stop), torch.clone)


def _cuts(num_samples: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return uneven cuts of so many samples, and others for losses that are not defined for one sample."""
    n = num_samples
    if n == 2:  # noqa: PLR2004
        return [(0, 1, 2)], []
    if n == 3:  # noqa: PLR2004
        return [(0, 1, 3), (0, 1, 2, 3)], []
    return [(0, 1, n), (0, 2, n - 1, n)], [(0, 2, n)]


def _gradients(value: torch.Tensor, leaves: Sequence[torch.Tensor]) -> Gradients:
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not value.requires_grad or not wanted:
        return [None] * len(leaves)
    found = iter(torch.autograd.grad(value, wanted, retain_graph=True, allow_unused=True))
    dense = (next(found) if leaf.requires_grad else None for leaf in leaves)
    return [None if one is None else one.to_dense() if one.is_sparse else one for one in dense]


def _norm(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None else float(torch.linalg.vector_norm(tensor, dtype=_wide_type(tensor)))


def _wide_type(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _relative(ones: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None]) -> tuple[float, float, float]:
    """Return the largest relative difference of two lists of gradients, and the norms of both.

    A gradient that is small among the others is compared with a hundredth of them all: it may be rounding alone.
    """
    norms = [(_norm(one), _norm(other)) for one, other in zip(ones, others, strict=True)]
    one_norm, other_norm = (math.hypot(*column) for column in zip(*norms, strict=True)) if norms else (0.0, 0.0)
    least = _SMALLEST_LEAF * max(one_norm, other_norm)
    worst = 0.0
    for one, other, sizes in zip(ones, others, norms, strict=True):
        gap = sizes[0] + sizes[1] if one is None or other is None else _norm(one - other)
        if gap:
            worst = max(worst, gap / max(*sizes, least))
    return worst, one_norm, other_norm


def _meet(whole: _Pass, piece: _Pass, rounding: float) -> bool:
    """Whether a piece's later calls of the model are given something else than those of the whole."""
    for ones, others in zip(whole.inputs, piece.inputs, strict=True):
        for one, other in zip(ones, others, strict=False):
            num_samples = whole.stop - whole.start
            is_rows = one.dim() and one.shape[0] == num_samples and other.shape[0] == piece.stop - piece.start
            if is_rows and one.shape[1:] == other.shape[1:]:
                gap = _relative([one[piece.start : piece.stop]], [other])[0]
                if gap > rounding:
                    return True
    return False
