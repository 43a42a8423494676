"""The declaration of a loss is checked on the first step: on which samples, what ranks agree on, what is reported.

How a loss is looked at is in `additivity.py`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from anybatch.core.dtypes import is_low_precision
from anybatch.core.loss import Loss, LossSum
from anybatch.core.loss_kinds import ONE_NUMBER, LossFunction
from anybatch.core.tree import Batch, count_samples, map_tensors
from anybatch.engine.accumulation.accumulate import LoopContext
from anybatch.engine.accumulation.planned_batch import PlannedBatch
from anybatch.engine.inputs import Model
from anybatch.engine.loss_check.additivity import checked_samples, findings
from anybatch.engine.loss_check.messages import broken, explained
from anybatch.engine.loss_check.recorded_model import UndecidedError
from anybatch.engine.loss_check.sample_choice import joined
from anybatch.engine.side_effects import SeededGenerators, without_side_effects
from anybatch.engine.telemetry.decisions import Decisions
from anybatch.engine.telemetry.notifier import Notifier
from anybatch.errors import LossError
from anybatch.parallel.world import World

_MOST_STEPS = 8
"""Number of steps after which an inconclusive check is given up."""
_TAKEN = "taken as a mean over samples, because the check of the first step has found that it is one"
_OTHERWISE = "If this is a false alarm, Engine(check_loss=False) leaves the check out."


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """The verdict of one rank: "holds", "broken", "inconclusive", or "idle" without a sample to look at.

    Attributes:
        kind: which.
        words: what is wrong, a whole message; or why nothing can be said, a clause.
        is_scalar: whether the loss function returned one number.
        term: name of the term that is not what it was declared to be; None where nothing is broken.
    """

    kind: Literal["holds", "broken", "inconclusive", "idle"]
    words: str = ""
    is_scalar: bool = False
    term: str | None = None


class BareLoss:
    """A loss function that was passed as it is: if it turns out to be a mean over samples, it says so from then on."""

    def __init__(self, function: LossFunction, *, is_mean: bool = False) -> None:
        self.function = self.__wrapped__ = function
        self.is_mean = is_mean

    def __call__(self, model: Any, batch: Batch) -> Any:  # noqa: ANN401 (the user's model, and what the loss returns)
        """Return what the function returns; one number, once it is known to be a mean, as a sum and a count."""
        value = self.function(model, batch)
        if self.is_mean and isinstance(value, torch.Tensor) and not value.dim():
            number = count_samples(batch)
            return LossSum(value * number, number)
        return value


class LossCheck:
    """Compares a loss with its declaration on the first step, and on later ones while nothing can be said.

    Args:
        loss: as it was declared, or bare.
        model: what the loss function is called with.
        modules: everything that may change in a forward.
        world: the ranks.
        decisions: the verdict is added to them.
        notifier: reports what the user should know.
        enabled: whether to check at all. A bare function that returns one number is refused then.
        lockstep: every rank must run the model equally often; all of them check one rank's samples then.

    Attributes:
        loss: what the loop calls: the declared loss, or the bare function that may turn out to be a mean.
        pending: whether the next batch is to be looked at.
    """

    def __init__(
        self,
        loss: Loss,
        model: Model,
        modules: nn.Module,
        world: World,
        *,
        decisions: Decisions,
        notifier: Notifier,
        enabled: bool,
        lockstep: bool,
    ) -> None:
        self._declared = loss
        self._bare = BareLoss(loss.function) if loss.kind.brings_count and enabled else None
        self.loss = loss if self._bare is None else dataclasses.replace(loss, function=self._bare)
        self._model = model
        self._modules = modules
        self._world = world
        self._decisions = decisions
        self._notifier = notifier
        self._lockstep = lockstep
        self._num_tries = 0
        self.pending = enabled and loss.kind.encode is None  # a loss across samples is never cut

    def provisional(self, context: LoopContext) -> LoopContext:
        """Return a context to try sizes with, before the check: a bare function's number is taken as a mean."""
        if self._bare is None:
            return context
        loss = dataclasses.replace(self._declared, function=BareLoss(self._declared.function, is_mean=True))
        return dataclasses.replace(context, loss=loss)

    def resume(self, decisions: Mapping[str, str]) -> None:
        """Take what was found before a resume: a function that was a mean over samples then is one now."""
        if self._bare is not None and decisions.get("loss") == _TAKEN:
            self._bare.is_mean = True
            self.pending = False

    def check_declaration(
        self, planned: PlannedBatch, autocast: Callable[[], AbstractContextManager[object]]
    ) -> PlannedBatch:
        """Look at the loss on some samples of this rank's first micro-batches; return the batch, nothing used up.

        Args:
            planned: the effective batch.
            autocast: makes the autocast context of a forward.

        Raises:
            LossError: on every rank: the loss is not what was declared, or is one number and not declared at all.
            RankFailedError: another rank could not load its samples.
        """
        # One sample cannot be cut, so a few single ones are joined.
        num_needed = 1 if not planned.units or planned.units[0].num_samples > 1 else 3
        loaded: list[Batch] = []

        def load() -> CheckVerdict | None:
            loaded.extend(itertools.islice(planned.micro_batches, num_needed))
            return None if self._lockstep else self._verdict(_few_samples(loaded), autocast)

        verdicts = self._world.run_on_all_ranks(load)
        if self._lockstep:
            # The same samples on every rank: then all of them run the model equally often, whatever is found.
            chosen = self._world.gather_objects(_few_samples(loaded))
            of_one_rank = next((few for few in chosen if few.batch is not None), chosen[0])
            verdicts = self._world.run_on_all_ranks(lambda: self._verdict(of_one_rank, autocast))
        self._combine(verdicts)
        return dataclasses.replace(planned, micro_batches=itertools.chain(loaded, planned.micro_batches))

    def _combine(self, verdicts: Sequence[CheckVerdict]) -> None:
        """Come to one verdict from those of all ranks, the same on each."""
        bare = self._bare is not None and any(one.is_scalar for one in verdicts)
        broken = next((one for one in verdicts if one.kind == "broken"), None)
        if broken is not None:
            message = f"{ONE_NUMBER} Checked on the first step: {broken.words}" if bare else broken.words
            # Of a bare function no items were declared, so there are none to name.
            unit = None if bare or broken.term is None else self._declared.kind.terms[broken.term].items.name
            raise LossError(message, term=broken.term, unit=unit)
        if any(one.kind == "holds" for one in verdicts):
            self.pending = False
            holds = "as declared: the check of the first step has found that it holds"
            self._decisions.add("loss", _TAKEN if bare else holds)
            if bare and self._bare is not None:
                self._bare.is_mean = True
                self._notifier.diagnosis("loss_taken_as_mean_over_samples", f"the loss is {_TAKEN}.")
            return
        reason = next((one.words for one in verdicts if one.kind == "inconclusive"), "no rank has a sample to look at")
        if bare:
            message = f"{ONE_NUMBER} (The check of the first step cannot tell: {reason}.)"
            raise LossError(message)
        self._num_tries += 1
        self.pending = self._num_tries < _MOST_STEPS
        self._decisions.add("loss", f"as declared, unchecked: {reason}")
        if self._num_tries == 1:
            self._notifier.diagnosis(
                "loss_not_checked",
                f"the check of the loss's declaration cannot tell from this batch: {reason}. The loss is taken as "
                f"declared; the check is tried again on the next {_MOST_STEPS - 1} batches.",
            )

    def _verdict(self, few: "_FewSamples", autocast: Callable[[], AbstractContextManager[object]]) -> CheckVerdict:
        """Judge from a few samples."""
        if few.batch is None:
            return CheckVerdict("inconclusive", few.reason) if few.reason else CheckVerdict("idle")
        try:
            functions = self._declared.functions.values()
            with without_side_effects(self._modules, self._world.device, functions=functions) as generators:
                self._leave_other_ranks_alone()
                return self._judged(few.batch, autocast, generators)
        except UndecidedError as error:
            return CheckVerdict("inconclusive", str(error))
        except torch.OutOfMemoryError:
            pass
        except Exception as error:  # noqa: BLE001 (the step itself raises what is wrong with the batch)
            return CheckVerdict("inconclusive", f"it cannot be looked at ({type(error).__name__})")
        if self._world.device.type == "cuda":  # outside of the handler: the failed frames hold no memory any more
            torch.cuda.empty_cache()
        return CheckVerdict("inconclusive", "it ran out of memory")

    def _leave_other_ranks_alone(self) -> None:
        """Let no SyncBatchNorm wait for other ranks, which may not look at any sample. Undone afterwards."""
        for module in self._modules.modules():
            if isinstance(module, nn.SyncBatchNorm):
                module.training = False

    def _judged(
        self, whole: Batch, autocast: Callable[[], AbstractContextManager[object]], generators: SeededGenerators
    ) -> CheckVerdict:
        # The precision is known as a context alone; inside of it torch says whether it is a low one.
        with autocast():
            is_low = torch.is_autocast_enabled(self._world.device.type)
        checked, doubtful = checked_samples(
            self._declared,
            self._model,
            map_tensors(whole, lambda tensor: tensor.to(self._world.device)),
            autocast=autocast,
            is_low=is_low or any(map(is_low_precision, self._modules.parameters())),
            generators=generators,
        )
        found = findings(checked)
        is_scalar = any(one.is_scalar for one in found.values())
        for name, one in found.items():
            if one.explanation:
                loss = self._declared
                words = f"{broken(loss, name, one)} {explained(name, one, named=loss.kind.named)} {_OTHERWISE}"
                return CheckVerdict("broken", words, is_scalar=is_scalar, term=name)
        for name, one in found.items():
            if doubtful[name] and not one.adds_up:
                return CheckVerdict("inconclusive", doubtful[name], is_scalar=is_scalar)
        return CheckVerdict("holds", is_scalar=is_scalar)


@dataclass(frozen=True, slots=True)
class _FewSamples:
    """A micro-batch of at least two samples; or None and why there is none, empty for a rank without samples."""

    batch: Batch | None
    reason: str = ""


def _few_samples(loaded: Sequence[Batch]) -> _FewSamples:
    if not loaded:
        return _FewSamples(None)
    try:
        whole = loaded[0] if len(loaded) == 1 else joined(loaded)
        if whole is not None and count_samples(whole) > 1:  # one sample cannot be cut
            return _FewSamples(whole)
    except Exception as error:  # noqa: BLE001 (the step itself raises what is wrong with the batch)
        return _FewSamples(None, f"it cannot be looked at ({type(error).__name__})")
    return _FewSamples(None, "a micro-batch has one sample only")
