"""The declaration of a loss checked by real micro-batches: their gradients, added up, against that of all in one.

This is for what the check of pieces (`additivity.py`) cannot tell: batches that are no rows of tensors (graphs, lists
of boxes, sequences behind each other), losses over pairs and groups of rows, models that join samples on the way.
Layers that draw random numbers or normalise over samples are in evaluation mode meanwhile: the loss has no
part in them.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from anybatch.core.loss import Loss, factors_of, scaled, unit_counts
from anybatch.core.torch_internals import BatchNormBase
from anybatch.core.tree import Batch, copied, count_samples, map_tensors, slice_samples, tensors_of
from anybatch.engine.accumulation.planned_batch import PlannedBatch
from anybatch.engine.inputs import Model
from anybatch.engine.loss_check.recorded_model import HarmlessError, UndecidedError
from anybatch.engine.loss_check.replay import relative_difference
from anybatch.engine.loss_check.shared_draws import SharedDraws
from anybatch.engine.side_effects import SeededGenerators
from anybatch.errors import LossError

ROUNDING = 1e-3
"""Up to here a difference between gradients of parameters is taken for rounding in float32."""
BEYOND_DOUBT = 2e-2
_LOW = 30.0
"""So many times as much may be rounding in bf16 and fp16."""
_MOST_ENCODED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RealCuts:
    """Micro-batches as they are run, and the same samples in one.

    Attributes:
        pieces: the micro-batches, on the host.
        sizes: their samples.
        whole: all of them as one micro-batch, on the host.
        are_real: whether the pieces are micro-batches of the step, not halves of one.
    """

    pieces: tuple[Batch, ...]
    sizes: tuple[int, ...]
    whole: Batch
    are_real: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRun:
    """All that running a loss takes.

    Attributes:
        loss: the declaration.
        model: what the loss function is called with.
        modules: everything that trains.
        autocast: makes the context of a forward.
        generators: those that a model or a loss may draw from.
        device: where.
        is_low: whether bf16 or fp16 takes part.
    """

    loss: Loss
    model: Model
    modules: nn.Module
    autocast: Callable[[], AbstractContextManager[object]]
    generators: SeededGenerators
    device: torch.device
    is_low: bool

    @property
    def rounding(self) -> float:
        """The largest difference that may be rounding."""
        return ROUNDING * (_LOW if self.is_low else 1.0)

    @property
    def beyond_doubt(self) -> float:
        """The smallest difference that is wrong in any case."""
        return BEYOND_DOUBT * (_LOW if self.is_low else 1.0)


def real_cuts(planned: PlannedBatch, loaded: Sequence[Batch]) -> RealCuts | None:
    """Return a rank's first two micro-batches, or halves of its only one, beside the same samples in one.

    Args:
        planned: the effective batch.
        loaded: its first micro-batches on this rank, at least two if there are.
    """
    units = planned.units[:2]
    if len(units) == 2:  # noqa: PLR2004 (micro-batches)
        sizes = tuple(unit.num_samples for unit in units)
        return RealCuts(pieces=tuple(loaded[:2]), sizes=sizes, whole=planned.load(units), are_real=True)
    if not units or units[0].num_samples < 2:  # noqa: PLR2004 (samples that can be cut)
        return None
    start, middle, stop = units[0].start, units[0].start + units[0].num_samples // 2, units[0].stop
    halves = [dataclasses.replace(units[0], start=a, stop=b) for a, b in ((start, middle), (middle, stop))]
    sizes = tuple(half.num_samples for half in halves)
    return RealCuts(pieces=tuple(planned.load([half]) for half in halves), sizes=sizes, whole=loaded[0], are_real=False)


def difference_of_cuts(run: CutRun, cuts: RealCuts) -> float:
    """Return how far the gradients of the pieces, added up as declared, are from that of all in one, relatively.

    Raises:
        UndecidedError: they cannot be compared.
    """
    counts = [unit_counts(run.loss, copied(one), size) for one, size in zip(cuts.pieces, cuts.sizes, strict=True)]
    divisors = [sum(column) for column in zip(*counts, strict=True)]
    if not all(divisors):
        message = "these micro-batches count nothing"
        raise HarmlessError(message)
    whole_counts = unit_counts(run.loss, copied(cuts.whole), sum(cuts.sizes))
    with in_evaluation_mode(run.modules):
        draws = SharedDraws()
        whole = _gradient(run, cuts.whole, whole_counts, whole_counts, draws.of(0, sum(cuts.sizes)))
        again = _gradient(run, cuts.whole, whole_counts, whole_counts, draws.of(0, sum(cuts.sizes)), seed=1)
        if relative_difference(whole, again)[0] > run.rounding:
            message = "it draws random numbers of its own"
            raise HarmlessError(message)
        total: list[torch.Tensor | None] = [None] * len(whole)
        start = 0
        for piece, size, count in zip(cuts.pieces, cuts.sizes, counts, strict=True):
            if any(count):
                part = _gradient(run, piece, count, divisors, draws.of(start, start + size))
                total = [b if a is None else a if b is None else a + b for a, b in zip(total, part, strict=True)]
            start += size
    return relative_difference(whole, total)[0]


def difference_of_rows(run: CutRun, micro_batch: Batch) -> float:
    """Return how far the outputs of `encode` for samples by themselves are from those among others, relatively.

    Raises:
        UndecidedError: they cannot be compared.
    """
    number = min(count_samples(micro_batch), _MOST_ENCODED)
    half = number // 2
    if not half:
        message = "a micro-batch has one sample only"
        raise HarmlessError(message)
    with in_evaluation_mode(run.modules), torch.no_grad():
        draws = SharedDraws()
        whole = _rows(run, micro_batch, 0, number, draws)
        again = _rows(run, micro_batch, 0, number, draws, seed=1)
        if relative_difference(whole, again)[0] > run.rounding:
            message = "encode draws random numbers"
            raise HarmlessError(message)
        parts = [_rows(run, micro_batch, *ends, draws) for ends in ((0, half), (half, number))]
    together = [torch.cat(column) for column in zip(*parts, strict=True)]
    if [one.shape for one in together] != [one.shape for one in whole]:
        message = "encode returns other shapes for fewer samples"
        raise UndecidedError(message)
    return relative_difference(whole, together)[0]


@contextmanager
def in_evaluation_mode(modules: nn.Module) -> Iterator[None]:
    """Put what draws random numbers or normalises over samples into evaluation mode meanwhile; not its parents.

    A model as a whole stays in its mode: some return a loss in training mode only.
    """
    chosen = [one for one in modules.modules() if one.training and (_is_leaf(one) or isinstance(one, BatchNormBase))]
    for one in chosen:
        one.training = False
    try:
        yield
    finally:
        for one in chosen:
            one.training = True


def _is_leaf(module: nn.Module) -> bool:
    # Attention layers draw by themselves, and have a projection for a child.
    return isinstance(module, nn.MultiheadAttention) or next(module.children(), None) is None


def _gradient(
    run: CutRun,
    batch: Batch,
    counts: Sequence[float],
    divisors: Sequence[float],
    draws: AbstractContextManager[None],
    *,
    seed: int = 0,
) -> list[torch.Tensor | None]:
    parameters = [one for one in run.modules.parameters() if one.requires_grad]
    given = map_tensors(copied(batch), lambda tensor: tensor.to(run.device))
    run.generators.seed(seed)
    with torch.enable_grad(), draws, run.autocast():
        output = run.loss.function(run.model, given)
        terms = scaled(run.loss, output, factors_of(run.loss, counts, divisors, 1.0))
    value = torch.stack(terms).sum()
    if not value.requires_grad or not bool(torch.isfinite(value.detach())):
        message = "its gradient is not finite, or it has none"
        raise HarmlessError(message)
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    if all(one is None or not bool(one.any()) for one in found):
        message = "it does not depend on what the model returned"
        raise HarmlessError(message)
    return [one.to_dense() if one is not None and one.is_sparse else one for one in found]


def _rows(
    run: CutRun, micro_batch: Batch, start: int, stop: int, draws: SharedDraws, *, seed: int = 0
) -> list[torch.Tensor]:
    encode = run.loss.kind.encode
    assert encode is not None, "this is no loss across samples"
    piece = copied(slice_samples(micro_batch, start, stop))
    given = map_tensors(piece, lambda tensor: tensor.to(run.device))
    run.generators.seed(seed)
    with draws.of(start, stop), run.autocast():
        found = list(tensors_of(encode(run.model, given)))
    if any(not one.dim() or len(one) != stop - start for one in found):
        message = "encode does not return one row for each sample"  # which the step itself refuses
        raise UndecidedError(message)
    return [one for one in found if one.is_floating_point()]


def refused_cuts(error: float, cuts: RealCuts) -> LossError:
    """Return the error of micro-batches that do not add up."""
    sizes = " and ".join(map(str, cuts.sizes))
    return LossError(
        f"the loss is not what it was declared to be: gradients of micro-batches of {sizes} samples, each weighted by "
        f"its share of the count and added, are {error:.2g} (relatively) from the gradient of the same "
        f"{sum(cuts.sizes)} samples in one micro-batch, where rounding is below {ROUNDING:g}. {CURES}"
    )


CURES = (
    "Samples depend on each other (rows in pairs or groups that are cut apart, a loss or a layer over the whole "
    "micro-batch, advantages or weights that are normalised over it), or the loss is a mean over something else than "
    "was declared. Let what belongs together be one sample of the data set; compute what looks at the data of others "
    "for the effective batch beforehand (anybatch.data.OverEffectiveBatch(collate)); declare ab.mean_over(loss, "
    "count), or return ab.LossSum(total, count), with what the loss is divided by; or declare ab.joint(encode, loss) "
    "for a loss across samples."
)


def refused_rows(error: float) -> LossError:
    """Return the error of an `encode` whose rows depend on each other."""
    return LossError(
        f"the encode function of ab.joint gives samples other outputs in smaller micro-batches: the rows of some "
        f"samples are {error:.2g} (relatively) from those of the same samples among others, where rounding is below "
        f"{ROUNDING:g}, so the gradient would depend on the cut. Let encode work on each sample by itself, and move "
        "what looks across samples (centring, normalising over the batch, attention between samples) into the loss "
        "function, which gets the outputs of the whole effective batch."
    )
