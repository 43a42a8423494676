"""A loss function run on pieces of a batch, with answers that its model has given once for the whole.

What is differentiated is the loss alone, with respect to the recorded answers; nothing here judges what comes out.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from anybatch.core.loss import Loss, LossSum, factors_of, scaled
from anybatch.core.tree import Batch, copied, slice_samples
from anybatch.engine.loss_check.recorded_model import (
    Axes,
    Call,
    HarmlessError,
    RecordedModel,
    RecordedRows,
    UndecidedError,
    modules_in,
    sample_axes,
)
from anybatch.engine.loss_check.sample_choice import joined
from anybatch.engine.loss_check.shared_draws import SharedDraws
from anybatch.engine.side_effects import SeededGenerators
from anybatch.errors import LossError, WorldError

Gradients = list[torch.Tensor | None]

_SMALLEST_LEAF = 1e-2  # what one answer's gradient is compared with, at least, as a part of all answers' gradient
_MOST_ROUNDS = 6  # how many levels of modules are opened


class CannotRunError(UndecidedError):
    """The loss function, or the model, does not run with a recorded model."""


class WrongCountError(UndecidedError):
    """The loss function returns another count than was declared; carries the message for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSamples:
    """Samples of a micro-batch with everything that a check of the loss needs.

    Attributes:
        loss: the declaration.
        model: what the loss function is called with.
        batch: some samples of a micro-batch, on the device.
        num_samples: how many.
        counts: by term, what each sample counts.
        candidates: other things that samples may count as, by how they are declared.
        autocast: makes the context of a forward.
        is_low: whether bf16 or fp16 takes part.
        generators: those that a model or a loss may draw from.
    """

    loss: Loss
    model: nn.Module | Mapping[str, nn.Module]
    batch: Batch
    num_samples: int
    counts: Mapping[str, Sequence[float]]
    candidates: Mapping[str, Sequence[float]]
    autocast: Callable[[], AbstractContextManager[object]]
    is_low: bool
    generators: SeededGenerators

    def fresh(self, start: int, stop: int) -> Batch:
        """Return some samples, copied: a loss function may take things out of its batch, or change them."""
        return copied(slice_samples(self.batch, start, stop))

    def of_another_number(self) -> tuple[Batch, int]:
        """Return one sample less, and how many these are; of two samples one more, since BatchNorm refuses one."""
        if self.num_samples > 2:  # noqa: PLR2004
            return self.fresh(0, self.num_samples - 1), self.num_samples - 1
        more = joined([self.batch, slice_samples(self.batch, 0, 1)])
        return copied(more), self.num_samples + 1


@dataclass(frozen=True, slots=True)
class Reading:
    """A term's value as it was returned, reduced to one number.

    Attributes:
        value: the number.
        adds_up: whether it is a sum (of `LossSum`, or of one loss per item, or declared as one) and not a mean.
        count: what was returned beside a sum.
        is_scalar: whether one number was returned.
    """

    value: torch.Tensor
    adds_up: bool
    count: float
    is_scalar: bool


@dataclass(frozen=True, slots=True)
class Pass:
    """The loss function run once, on samples `start` to `stop`: by term its reading and its gradients.

    `inputs` are what later calls of the model were given that follows from earlier answers.
    """

    start: int
    stop: int
    readings: Mapping[str, Reading]
    gradients: Mapping[str, Gradients]
    inputs: list[list[torch.Tensor]]

    def is_finite(self, name: str) -> bool:
        """Whether a term has neither NaN nor infinity in its gradients."""
        return all(bool(torch.isfinite(one).all()) for one in self.gradients[name] if one is not None)


class Replay:
    """One recording of a model's answers, on which a loss function is tried.

    Args:
        checked: the loss, its model and the samples.
        opened: ids of modules that run, so that it is their children whose answers are recorded.
        wide: answers in bf16 and fp16 are taken as float32, and the loss is run without autocast.
        exact: record twice, for another number of samples too, to see which axes are of samples.
        interleaved: see `RecordedRows`.
    """

    def __init__(
        self, checked: CheckedSamples, opened: set[int], *, wide: bool, exact: bool, interleaved: bool
    ) -> None:
        self.checked = checked
        self.recorded_model = RecordedModel(checked.model, opened)
        function = checked.loss.function
        self._function = self.recorded_model.clone(function) if isinstance(function, nn.Module) else function
        self._wide = wide
        self._draws = SharedDraws()
        self.calls, axes = self._recorded(exact=exact)
        self._rows = [
            [
                RecordedRows(tensor, at, checked.num_samples, interleaved=interleaved)
                for tensor, at in zip(call.tensors, places, strict=True)
            ]
            for call, places in zip(self.calls, axes, strict=True)
        ]
        self.has_two_layouts = any(entries > 1 for places in axes for at in places for _, entries in at)
        answers = [rows for group in self._rows for rows in group]
        self.tracks = [
            *answers,
            *(RecordedRows(one, (), 1, interleaved=False) for one in self.recorded_model.parameters),
        ]
        self.whole: Pass = attempted(lambda: self.run(0, checked.num_samples))

    def run(self, start: int, stop: int, *, seed: int = 0, mixed_from: int = 0) -> Pass:
        """Run the loss function on rows of the recorded answers, and differentiate each term.

        Args:
            start: the first sample.
            stop: the one after the last.
            seed: what random numbers start from.
            mixed_from: let the answers of every sample from here on be others; 0 for none.
        """
        leaves = [[rows.leaf(start, stop, wide=self._wide) for rows in group] for group in self._rows]
        if mixed_from:
            leaves = _both(self._rows, leaves, lambda rows, leaf: rows.mixed(leaf, mixed_from))
        answers = _both(self._rows, leaves, lambda rows, leaf: rows.shaped(leaf))
        # The same numbers in every pass, so that passes differ by their samples alone.
        self.checked.generators.seed(seed)
        piece = self.checked.fresh(start, stop)
        precision = nullcontext() if self._wide else self.checked.autocast()
        with torch.enable_grad(), self._draws.of(start, stop), precision:
            output, inputs = self.recorded_model.replay(
                self.calls, answers, lambda: self._function(self.recorded_model.model, piece)
            )
            _refuse_undeclared(self.checked, output, start, stop)
            readings = _readings(self.checked.loss, output)
        flat = [*(leaf for group in leaves for leaf in group), *self.recorded_model.parameters]
        gradients = {name: _gradients(reading.value, flat) for name, reading in readings.items()}
        return Pass(start, stop, readings, gradients, inputs)

    def pieces(self, cut: Sequence[int]) -> list[Pass] | None:
        """Run the pieces of a cut; None if one fails or has no finite gradient, as a variance of one sample has."""
        try:
            passes = [self.run(start, stop) for start, stop in itertools.pairwise(cut)]
        except (UndecidedError, torch.OutOfMemoryError):
            raise
        except Exception:  # noqa: BLE001 (whatever the user's loss raises on few samples)
            return None
        names = self.checked.loss.names
        # A piece that counts nothing has no share in the sum, so that its NaN does no harm.
        usable = all(one.is_finite(name) for one in passes for name in names if self.count(one, name))
        return passes if usable else None

    def count(self, one: Pass, name: str) -> float:
        """Return what a pass counts for a term, as declared."""
        reading = one.readings[name]
        if self.checked.loss.kind.brings_count and reading.adds_up:
            return reading.count
        return sum(self.checked.counts[name][one.start : one.stop])

    def difference(self, name: str, passes: Sequence[Pass], shares: Sequence[float]) -> tuple[float, float, float]:
        """Return how far shares of passes are from the whole, relatively; the whole's norm; theirs."""
        sums: Gradients = []
        for place, (track, whole) in enumerate(zip(self.tracks, self.whole.gradients[name], strict=True)):
            total = None
            for one, share in zip(passes, shares, strict=True):
                gradient = one.gradients[name][place]
                if gradient is None or not share:
                    continue
                if total is None:
                    total = torch.zeros_like(whole if whole is not None else self._whole_leaf(place))
                track.window(total, one.start, one.stop).add_(gradient, alpha=share)
            sums.append(total)
        return relative_difference(self.whole.gradients[name], sums)

    def fitted_share(self, name: str, one: Pass) -> float:
        """Return the factor with which a piece's gradient comes closest to its part of the whole's."""
        along = square = 0.0
        for track, whole, piece in zip(self.tracks, self.whole.gradients[name], one.gradients[name], strict=True):
            if track.has_samples and whole is not None and piece is not None:
                along += float((track.window(whole, one.start, one.stop) * piece).sum())
                square += float(piece.square().sum())
        return along / square if square else 0.0

    def coupling(self, name: str, first: int) -> float:
        """Return how much the gradient of the `first` samples changes when the answers for all others do.

        One, if entries that belong to two samples have a gradient: a matrix of all with all.
        """
        whole = self.whole.gradients[name]
        pairs = [track.between_samples(one) for track, one in zip(self.tracks, whole, strict=True) if one is not None]
        if any(bool(one.any()) for one in pairs):
            return 1.0
        mixed = self.run(0, self.checked.num_samples, mixed_from=first)
        ours, theirs = [], []
        for track, one, other in zip(self.tracks, whole, mixed.gradients[name], strict=True):
            if track.has_samples and one is not None and other is not None:
                ours.append(track.window(one, 0, first))
                theirs.append(track.window(other, 0, first))
        return relative_difference(ours, theirs)[0]

    def owners_without_samples(self) -> Iterator[int]:
        """Yield the modules that returned something which the loss depends on and which has no rows of samples."""
        owners = [id(call.module) for call, group in zip(self.calls, self._rows, strict=True) for _ in group]
        for place, owner in enumerate(owners):
            gradients = [of_term[place] for of_term in self.whole.gradients.values()]
            if not self.tracks[place].has_samples and any(g is not None and bool(g.any()) for g in gradients):
                yield owner

    def _whole_leaf(self, place: int) -> torch.Tensor:
        answers = [rows for group in self._rows for rows in group]
        if place < len(answers):
            return answers[place].leaf(0, self.checked.num_samples, wide=self._wide)
        return self.recorded_model.parameters[place - len(answers)]

    def _recorded(self, *, exact: bool) -> tuple[tuple[Call, ...], list[list[Axes]]]:
        """Record the model's answers, and find where the samples are in them."""
        num_samples = self.checked.num_samples
        calls: tuple[Call, ...] = attempted(lambda: self._record(lambda: self.checked.fresh(0, num_samples)))
        if not exact:
            return calls, sample_axes(calls, num_samples, None, 0)
        _, number = attempted(self.checked.of_another_number)
        others = attempted(lambda: self._record(lambda: self.checked.of_another_number()[0]))
        return calls, sample_axes(calls, num_samples, others, number)

    def _record(self, samples: Callable[[], Batch]) -> tuple[Call, ...]:
        def record() -> tuple[Call, ...]:
            piece = samples()
            self.checked.generators.seed(0)
            with self.checked.autocast():
                return self.recorded_model.record(lambda: self._function(self.recorded_model.model, piece))

        try:
            # A recording needs no graph; what is differentiated are leaves made from it.
            with torch.no_grad():
                return record()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a model that differentiates in its forward needs gradients there
            with torch.enable_grad():
                return record()


def open_replay(checked: CheckedSamples, *, wide: bool, exact: bool, interleaved: bool) -> Replay:
    """Return a replay in which all that the loss depends on has rows of samples.

    A model that computes the loss itself returns one number. Such modules are opened, so that it is computed again from
    what their children have returned.

    Raises:
        UndecidedError: there is no such replay.
    """
    # A loss that is a module has to run, on pieces; only what belongs to the model answers from the recording.
    inner = {id(module) for module in modules_in(checked.loss.function)}
    opened = inner - {id(module) for module in modules_in(checked.model)}
    for _ in range(_MOST_ROUNDS):
        replay = Replay(checked, opened, wide=wide, exact=exact, interleaved=interleaved)
        found = set(replay.owners_without_samples())
        if not found:
            return replay
        opened = opened | found
    message = "the loss depends on something that the model makes of all samples at once"
    raise UndecidedError(message)


def attempted(function: Callable[[], Any]) -> Any:  # noqa: ANN401 (what the function returns)
    """Run something of the user's; an error of it is no verdict; the step itself will raise it."""
    try:
        return function()
    except (UndecidedError, torch.OutOfMemoryError, WorldError):
        raise
    except Exception as error:
        message = f"it does not run with a recorded model for the model ({type(error).__name__})"
        raise CannotRunError(message) from error


def relative_difference(
    ones: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None]
) -> tuple[float, float, float]:
    """Return the largest relative difference of two lists of gradients, and the norms of both.

    A gradient that is small among the others is compared with a hundredth of them all: it may be rounding alone.
    """
    norms = [(_norm(one), _norm(other)) for one, other in zip(ones, others, strict=True)]
    one_norm, other_norm = (math.hypot(*column) for column in zip(*norms, strict=True)) if norms else (0.0, 0.0)
    least = _SMALLEST_LEAF * max(one_norm, other_norm)
    worst = 0.0
    for one, other, sizes in zip(ones, others, norms, strict=True):
        # A gradient that one side lacks is zero there, and the norm of None is 0: the sum is the other's norm.
        gap = sum(sizes) if one is None or other is None else _norm(one - other)
        if gap:
            worst = max(worst, gap / max(*sizes, least))
    return worst, one_norm, other_norm


def _norm(tensor: torch.Tensor | None) -> float:
    if tensor is None:
        return 0.0
    # In double precision: the rounding of a long sum of squares is not to be taken for a difference.
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(tensor, dtype=dtype))


def _both(
    rows: Sequence[Sequence[RecordedRows]],
    leaves: Sequence[Sequence[torch.Tensor]],
    function: Callable[[RecordedRows, torch.Tensor], torch.Tensor],
) -> list[list[torch.Tensor]]:
    return [
        [function(one, leaf) for one, leaf in zip(ones, group, strict=True)]
        for ones, group in zip(rows, leaves, strict=True)
    ]


def _refuse_undeclared(checked: CheckedSamples, output: object, start: int, stop: int) -> None:
    """Leave it to the step itself to refuse an output that has not the form that was declared.

    Raises:
        HarmlessError: it has not.
        WrongCountError: its count, which the step itself does not read from a device, is another one.
    """
    if checked.loss.kind.brings_count:
        return
    counts = [sum(checked.counts[name][start:stop]) for name in checked.loss.names]
    try:
        factors = factors_of(checked.loss, counts, counts, 1.0)
        scaled(checked.loss, output, factors)
    except LossError as error:
        raise _not_as_declared() from error
    try:
        scaled(checked.loss, _with_counts_read(output), factors)
    except LossError as error:
        raise WrongCountError(str(error)) from error


def _with_counts_read(output: Any) -> Any:  # noqa: ANN401 (whatever the user's loss function returns)
    """Return what a loss returned with its counts on the host: the step itself does not wait for the device."""
    if isinstance(output, Mapping):
        return {name: _with_counts_read(value) for name, value in output.items()}
    return LossSum(output.total, float(output.count)) if isinstance(output, LossSum) else output


def _readings(loss: Loss, output: object) -> dict[str, Reading]:
    values: Mapping[Any, object] = {loss.names[0]: output}
    if loss.kind.named:
        values = output if isinstance(output, Mapping) else {}
    if set(values) != set(loss.names):
        raise _not_as_declared()
    return {name: _reading(values[name], is_sum=term.is_sum) for name, term in loss.kind.terms.items()}


def _reading(value: object, *, is_sum: bool) -> Reading:
    if isinstance(value, LossSum):
        return Reading(value.total, adds_up=True, count=float(value.count), is_scalar=False)
    if not isinstance(value, torch.Tensor):
        raise _not_as_declared()
    if value.dim():
        return Reading(value.sum(), adds_up=True, count=float(value.numel()), is_scalar=False)
    return Reading(value, adds_up=is_sum, count=math.nan, is_scalar=True)


def _not_as_declared() -> HarmlessError:
    return HarmlessError("the loss function does not return what was declared")


def _gradients(value: torch.Tensor, leaves: Sequence[torch.Tensor]) -> Gradients:
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not value.requires_grad or not wanted:
        return [None] * len(leaves)
    # Kept, because the other terms of the loss may share the graph.
    found = iter(torch.autograd.grad(value, wanted, retain_graph=True, allow_unused=True))
    dense = (next(found) if leaf.requires_grad else None for leaf in leaves)
    return [one.to_dense() if one is not None and one.is_sparse else one for one in dense]
