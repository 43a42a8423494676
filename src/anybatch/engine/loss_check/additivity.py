"""Whether a loss is what it was declared to be, seen from a few samples: the gradients of its pieces have to add up.

The loss is looked at, not the network. The model runs once, and the loss function then runs on all samples and on
pieces of them with a recorded model that answers with rows of what the model has returned. For a right declaration

    gradient(whole) = sum over pieces of share x gradient(piece)

holds to rounding, the gradients being those with respect to what the model has returned; dropout and BatchNorm have no
part in it. Comparing values instead fails both ways: a mean over tokens that is declared over samples differs by 5e-5
in an untrained model, where no token is likelier than another.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn

from anybatch.core.loss import Loss
from anybatch.core.tree import Batch, count_samples
from anybatch.engine.loss_check.broadcasts import BroadcastWatch
from anybatch.engine.loss_check.recorded_model import HarmlessError, UndecidedError
from anybatch.engine.loss_check.replay import (
    CannotRunError,
    CheckedSamples,
    Pass,
    Replay,
    open_replay,
    relative_difference,
)
from anybatch.engine.loss_check.sample_choice import candidates, choose_samples, paddings, sample_counts
from anybatch.engine.side_effects import SeededGenerators


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far pieces may be from the whole, relatively.

    Attributes:
        rounding: up to here it is rounding: right losses differ by 1e-6 in float32, and by 1e-2 in bf16.
        beyond_doubt: from here on a difference needs no other declaration that explains it.
    """

    rounding: float
    beyond_doubt: float


WIDE = Tolerance(rounding=1e-4, beyond_doubt=2e-2)
LOW = Tolerance(rounding=2e-2, beyond_doubt=1e-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TermFinding:
    """The result of the check for one term.

    Attributes:
        error: relative difference between the whole's gradient and the pieces'.
        whole: norm of the whole's gradient.
        pieces: norm of the pieces' gradients, added up as declared.
        rounding: the largest difference that would be rounding.
        sizes: samples of the pieces.
        adds_up: whether it is a sum (`LossSum`, or one loss per item, or declared as one) and not a mean.
        is_scalar: whether it returned one number.
        explanation: what explains a difference that is no rounding: a candidate of the checked, "sum", "other" counts,
            several "terms", or "joint". Empty where the declaration holds.
        share: the first piece's part of the whole, as found and as declared.
        broadcast: where samples meet by broadcasting, in words; empty where they do not, or the declaration holds.
    """

    error: float
    whole: float
    pieces: float
    rounding: float
    sizes: tuple[int, ...]
    adds_up: bool
    is_scalar: bool
    explanation: str = ""
    share: tuple[float, float] = (0.0, 0.0)
    broadcast: str = ""


def checked_samples(
    loss: Loss,
    model: nn.Module | Mapping[str, nn.Module],
    batch: Batch,
    *,
    autocast: Callable[[], AbstractContextManager[object]],
    is_low: bool,
    generators: SeededGenerators,
) -> tuple[CheckedSamples, dict[str, str]]:
    """Return the samples of a batch that tell most about a loss; and by term why they cannot tell, if they cannot.

    Args:
        loss: the declaration.
        model: what the loss function is called with.
        batch: at least two samples, on the model's device.
        autocast: makes the context of a forward.
        is_low: whether bf16 or fp16 takes part.
        generators: those that a model or a loss may draw from.
    """
    chosen, number, doubtful = choose_samples(loss, batch, count_samples(batch))
    checked = CheckedSamples(
        loss=loss,
        model=model,
        batch=chosen,
        num_samples=number,
        counts=sample_counts(loss, chosen, number),
        candidates=candidates(chosen, number) | paddings(chosen, number),
        autocast=autocast,
        is_low=is_low,
        generators=generators,
    )
    return checked, doubtful


def findings(checked: CheckedSamples) -> dict[str, TermFinding]:
    """Return what is found of every term; a finding with an explanation is one of a broken declaration.

    A declaration is found broken only after the axes of samples have been made sure of, by a second recording.

    Raises:
        UndecidedError: nothing can be said.
    """
    if not checked.is_low:
        return _findings(checked, WIDE)
    try:
        return _findings(checked, WIDE)
    except CannotRunError:  # float32 answers do not go with bf16 parameters in the loss, say
        return _findings(checked, LOW)


def _findings(checked: CheckedSamples, tolerance: Tolerance) -> dict[str, TermFinding]:
    try:
        # The cheaper recording guesses the axes of samples; only if it finds fault, or nothing, is the second one made.
        found = _in_some_layout(checked, tolerance, exact=False)
    except UndecidedError:
        found = {}
    if found and not _is_broken(found):
        return found
    return _in_some_layout(checked, tolerance, exact=True)


def _in_some_layout(checked: CheckedSamples, tolerance: Tolerance, *, exact: bool) -> dict[str, TermFinding]:
    """Return findings; where a sample has several entries along an axis, of the layout in which the loss holds."""
    found: dict[str, TermFinding] = {}
    for interleaved in (False, True):
        replay = open_replay(checked, wide=tolerance is WIDE, exact=exact, interleaved=interleaved)
        found = _judged(replay, tolerance)
        if not _is_broken(found) or not replay.has_two_layouts:
            break
    return found


def _is_broken(found: dict[str, TermFinding]) -> bool:
    return any(one.explanation for one in found.values())


def _judged(replay: Replay, tolerance: Tolerance) -> dict[str, TermFinding]:
    """Compare whole and pieces, term by term."""
    cuts, spare = _cuts(replay.checked.num_samples)
    tried = [passes for cut in cuts if (passes := replay.pieces(cut)) is not None]
    # A loss such as a variance is not defined for one sample, so pieces of two are tried.
    tried = tried or [passes for cut in spare if (passes := replay.pieces(cut)) is not None]
    if not tried:
        message = "it is not defined on fewer samples"
        raise UndecidedError(message)
    _refuse_meetings(replay, tried, tolerance)
    found: dict[str, TermFinding] = {}
    undecided = []
    for name in replay.checked.loss.names:
        try:
            found[name] = _judged_term(replay, name, tried, tolerance)
        except UndecidedError as error:
            undecided.append(error)
    # One term that is found broken is reason enough, whatever cannot be said of the others.
    if undecided and not _is_broken(found):
        raise undecided[0]
    return found


def _judged_term(replay: Replay, name: str, tried: Sequence[Sequence[Pass]], tolerance: Tolerance) -> TermFinding:
    if not replay.count(replay.whole, name):
        message = "these samples count nothing"
        raise HarmlessError(message)
    if not replay.whole.is_finite(name):
        message = "its gradient is not finite"
        raise HarmlessError(message)
    compared = [replay.difference(name, passes, _declared(replay, name, passes)) for passes in tried]
    worst = max(range(len(tried)), key=lambda number: compared[number][0])
    error, whole, pieces = compared[worst]
    if not whole and not pieces:
        message = "it does not depend on what the model returned"
        raise HarmlessError(message)
    reading = replay.whole.readings[name]
    finding = TermFinding(
        error=error,
        whole=whole,
        pieces=pieces,
        rounding=tolerance.rounding,
        sizes=tuple(one.stop - one.start for one in tried[worst]),
        adds_up=reading.adds_up,
        is_scalar=reading.is_scalar,
    )
    if error <= tolerance.rounding:
        return finding
    first = tried[worst][0]
    with BroadcastWatch(replay.checked.num_samples) as watch:
        replay.run(0, replay.checked.num_samples)
    return dataclasses.replace(
        finding,
        broadcast=watch.found,
        explanation=_explanation(replay, name, tried, error, tolerance),
        share=(replay.fitted_share(name, first), _declared(replay, name, tried[worst])[0]),
    )


def _declared(replay: Replay, name: str, passes: Sequence[Pass]) -> list[float]:
    """Return what each piece's gradient is multiplied with, if the whole's is taken as it is."""
    counts = [replay.count(one, name) for one in passes]
    total = sum(counts) or 1.0
    if replay.whole.readings[name].adds_up:
        # Sums add up also where a piece counts nothing; a mean over nothing, times its count, is NaN and is left out.
        share = replay.count(replay.whole, name) / total
        return [share if one.is_finite(name) else 0.0 for one in passes]
    return [count / total for count in counts]


def _explanation(replay: Replay, name: str, tried: Sequence[Sequence[Pass]], error: float, tolerance: Tolerance) -> str:
    """Return what explains a difference that is no rounding.

    Raises:
        UndecidedError: the loss draws random numbers, or the difference is small and nothing explains it.
    """
    # The same samples under other numbers: if even they differ, the difference is none between cuts.
    again = replay.run(0, replay.checked.num_samples, seed=1)
    if replay.difference(name, [again], [1.0])[0] > tolerance.rounding:
        message = "it draws random numbers of its own"
        raise HarmlessError(message)
    for candidate, counts in {"sum": (), **replay.checked.candidates}.items():
        if all(_explains(replay, name, passes, counts) <= tolerance.rounding for passes in tried):
            return candidate
    if error < tolerance.beyond_doubt:
        message = f"its pieces are {error:.1e} off, which is more than rounding (a small term across samples?)"
        raise UndecidedError(message)
    if replay.coupling(name, max(1, replay.checked.num_samples // 2)) > tolerance.rounding:
        return "joint"
    # Where other shares of the pieces make up the whole, only the counts are wrong; otherwise there are several terms.
    fitted = [replay.difference(name, p, [replay.fitted_share(name, one) for one in p])[0] for p in tried]
    return "other" if max(fitted) <= tolerance.rounding else "terms"


def _explains(replay: Replay, name: str, passes: Sequence[Pass], counts: Sequence[float]) -> float:
    """Return how far the pieces are from the whole if samples counted like this, or if they added up (no counts)."""
    parts = [sum(counts[one.start : one.stop]) for one in passes]
    shares = [part / (sum(parts) or 1.0) for part in parts] if counts else [1.0] * len(passes)
    return replay.difference(name, passes, shares)[0]


def _refuse_meetings(replay: Replay, tried: Sequence[Sequence[Pass]], tolerance: Tolerance) -> None:
    """Refuse to judge where samples meet on the way from one call of the model to the next.

    Raises:
        UndecidedError: what a later call is given for some samples is not what it is given for them among all.
    """
    if not any(_meet(replay.whole, one, tolerance) for passes in tried for one in passes):
        return
    again = replay.run(0, replay.checked.num_samples, seed=1)
    if not _meet(replay.whole, again, tolerance):  # otherwise it is drawn at random: dropout between two calls
        message = "samples meet between two calls of the model"
        raise UndecidedError(message)


def _meet(whole: Pass, piece: Pass, tolerance: Tolerance) -> bool:
    """Whether a piece's later calls of the model are given something else than those of the whole."""
    for ones, others in zip(whole.inputs, piece.inputs, strict=True):
        for one, other in zip(ones, others, strict=False):
            is_whole = one.dim() > 0 and one.shape[0] == whole.stop - whole.start
            if is_whole and other.shape == (piece.stop - piece.start, *one.shape[1:]):
                gap = relative_difference([one[piece.start : piece.stop]], [other])[0]
                if gap > tolerance.rounding:
                    return True
    return False


def _cuts(num_samples: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return uneven cuts of so many samples, and others for losses that are not defined for one sample."""
    if num_samples == 2:  # noqa: PLR2004
        return [(0, 1, 2)], []
    if num_samples == 3:  # noqa: PLR2004
        return [(0, 1, 3), (0, 1, 2, 3)], []
    return [(0, 1, num_samples), (0, 2, num_samples - 1, num_samples)], [(0, 2, num_samples)]
