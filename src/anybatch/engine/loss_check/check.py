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
from anybatch.engine.loss_check.by_cuts import (
    CURES,
    CutRun,
    RealCuts,
    difference_of_cuts,
    difference_of_rows,
    real_cuts,
    refused_cuts,
    refused_rows,
)
from anybatch.engine.loss_check.messages import broken, explained
from anybatch.engine.loss_check.recorded_model import HarmlessError, UndecidedError
from anybatch.engine.loss_check.replay import WrongCountError
from anybatch.engine.loss_check.sample_choice import joined
from anybatch.engine.side_effects import SeededGenerators, without_side_effects
from anybatch.engine.telemetry.decisions import Decisions
from anybatch.engine.telemetry.notifier import Notifier
from anybatch.errors import LossError
from anybatch.parallel.world import World

_MOST_STEPS = 8
"""Number of first steps in each of which a check that could not tell is tried again."""
_TAKEN = "taken as a mean over samples, because the check of the first step has found that it is one"
_OTHERWISE = "If this is a false alarm, Engine(check_loss=False) leaves the check out."


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """The verdict of one rank: "holds", "broken", "unsettled", "inconclusive", or "idle" without a sample to look at.

    Attributes:
        kind: which; "unsettled": what was declared is right on these samples, and so would other declarations be.
        words: what is wrong, a whole message; or why nothing more can be said, a clause.
        is_scalar: whether the loss function returned one number.
        term: name of the term that is not what it was declared to be; None where nothing is broken.
    """

    kind: Literal["holds", "broken", "unsettled", "inconclusive", "idle"]
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
    """Compares a loss with its declaration on the first step, while nothing can be said, and at times later on.

    It looks again in steps 4, 8, 16, 32 and so on, since what tells may not be in the first batches (a mask that varies
    later). A look takes a forward of at most eight samples; where that cannot tell, forward and backward of two
    micro-batches, by themselves and together.

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
        self._enabled = enabled
        # Changed where all ranks come to one verdict, and only there: a rank may have failed before it got so far.
        self._num_looks = 0
        self._newest: int | None = None
        self._is_settled = False
        self._untold = ""

    def provisional(self, context: LoopContext) -> LoopContext:
        """Return a context to try sizes with, before the check: a bare function's number is taken as a mean."""
        if self._bare is None:
            return context
        loss = dataclasses.replace(self._declared, function=BareLoss(self._declared.function, is_mean=True))
        return dataclasses.replace(context, loss=loss)

    def is_due(self, step: int) -> bool:
        """Return whether the batch of a step, counted from 0, is to be looked at: the same on all ranks."""
        if not self._enabled:
            return False
        tries_again = not self._is_settled and self._num_looks < _MOST_STEPS
        # The 1st, 4th, 8th, 16th and so on; not the 2nd, which tools measure as the first that is like all others.
        return tries_again or ((step + 1) & step == 0 and step not in (1, self._newest))

    def warn_of_untold(self) -> None:
        """Warn that the loss could not be checked, once its step has run: an error of the user's is said by itself."""
        if self._untold:
            self._notifier.warn(
                "loss_not_checked",
                f"whether the loss is what it was declared to be cannot be told: {self._untold}. It is taken as "
                "declared. Compare one batch by hand with ab.check(model, loss, batch); if it holds, "
                f"Engine(check_loss=False) says that you know. {CURES}",
            )
            self._untold = ""

    def resume(self, decisions: Mapping[str, str]) -> None:
        """Take what was found before a resume: a function that was a mean over samples then is one now."""
        if self._bare is not None and decisions.get("loss") == _TAKEN:
            self._bare.is_mean = True
            self._is_settled = True

    def check_declaration(
        self, planned: PlannedBatch, autocast: Callable[[], AbstractContextManager[object]], step: int
    ) -> PlannedBatch:
        """Look at the loss on some samples of this rank's first micro-batches; return the batch, nothing used up.

        Args:
            planned: the effective batch.
            autocast: makes the autocast context of a forward.
            step: its number, from 0.

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

        verdicts: Sequence[Any] = self._world.run_on_all_ranks(load)
        if self._lockstep:
            # The same samples on every rank: then all of them run the model equally often, whatever is found.
            chosen = self._world.gather_objects(_few_samples(loaded))
            of_one_rank = next((few for few in chosen if few.batch is not None), chosen[0])
            verdicts = self._world.run_on_all_ranks(lambda: self._verdict(of_one_rank, autocast))
        is_cut = sum(map(len, planned.plan.shares)) > 1
        if is_cut and _is_open(verdicts):
            verdicts = self._by_cuts(planned, loaded, autocast, verdicts)
        self._num_looks, self._newest, self._untold = self._num_looks + 1, step, ""
        self._raise_if_any_rank_refuses(verdicts, is_cut=is_cut)
        return planned._replace(micro_batches=itertools.chain(loaded, planned.micro_batches))

    def _by_cuts(
        self,
        planned: PlannedBatch,
        loaded: list[Batch],
        autocast: Callable[[], AbstractContextManager[object]],
        before: Sequence[CheckVerdict],
    ) -> Sequence[CheckVerdict]:
        """Let real micro-batches tell what pieces of one could not; without a verdict the one before stands."""

        def cut() -> RealCuts | None:
            loaded.extend(itertools.islice(planned.micro_batches, max(0, 2 - len(loaded))))
            return None if self._declared.kind.encode is not None else real_cuts(planned, loaded)

        own = before[self._world.rank]
        found = self._world.run_on_all_ranks(
            lambda: cut() if self._lockstep else self._cut_verdict(cut(), autocast, own)
        )
        if not self._lockstep:
            return found
        of_one_rank = next((one for one in found if one is not None), None)
        return self._world.run_on_all_ranks(lambda: self._cut_verdict(of_one_rank, autocast, own))

    def _raise_if_any_rank_refuses(self, verdicts: Sequence[CheckVerdict], *, is_cut: bool) -> None:
        """Come to one verdict from those of all ranks, the same on each."""
        bare = self._bare is not None and any(one.is_scalar for one in verdicts)
        broken = next((one for one in verdicts if one.kind == "broken"), None)
        if broken is not None:
            message = f"{ONE_NUMBER} Checked on the first step: {broken.words}" if bare else broken.words
            # Of a bare function no items were declared, so there are none to name.
            unit = None if bare or broken.term is None else self._declared.kind.terms[broken.term].items.name
            raise LossError(message, term=broken.term, unit=unit)
        if any(one.kind == "holds" for one in verdicts):
            if self._is_settled:
                return
            self._is_settled = True
            holds = "as declared: the check of the first step has found that it holds"
            self._decisions.add("loss", _TAKEN if bare else holds)
            if bare and self._bare is not None:
                self._bare.is_mean = True
                self._notifier.diagnosis("loss_taken_as_mean_over_samples", f"the loss is {_TAKEN}.")
            return
        if self._is_settled:
            return
        unsettled = next((one.words for one in verdicts if one.kind == "unsettled"), None)
        open_ones = (one.words for one in verdicts if one.kind == "inconclusive")
        reason = unsettled or next(open_ones, "no rank has a sample to look at")
        if bare:
            message = f"{ONE_NUMBER} (The check of the first step cannot tell: {reason}.)"
            raise LossError(message)
        self._decisions.add("loss", f"as declared, unchecked: {reason}")
        if is_cut and _is_open(verdicts):
            self._untold = reason

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
            return _undecided(error)
        except torch.OutOfMemoryError:
            pass
        except Exception as error:  # noqa: BLE001 (the step itself raises what is wrong with the batch)
            return CheckVerdict("inconclusive", f"it cannot be looked at ({type(error).__name__})")
        return self._out_of_memory()

    def _out_of_memory(self) -> CheckVerdict:
        if self._world.device.type == "cuda":  # outside of the handler: the failed frames hold no memory any more
            torch.cuda.empty_cache()
        return CheckVerdict("inconclusive", "it ran out of memory")

    def _leave_other_ranks_alone(self) -> None:
        """Let no SyncBatchNorm wait for other ranks, which may not look at any sample. Undone afterwards."""
        for module in self._modules.modules():
            if isinstance(module, nn.SyncBatchNorm):
                module.training = False

    def _cut_verdict(
        self, cuts: RealCuts | None, autocast: Callable[[], AbstractContextManager[object]], before: CheckVerdict
    ) -> CheckVerdict:
        """Judge by real micro-batches; a difference is a fault if it is beyond doubt, and otherwise no proof."""
        if before.kind not in ("inconclusive", "idle"):
            return before
        if cuts is None:  # nothing that could be cut: one sample, or the outputs of the whole batch
            is_one = before.kind == "inconclusive" and self._declared.kind.encode is None
            return CheckVerdict("unsettled", before.words) if is_one else before
        try:
            error, run = self._cut_error(cuts, autocast)
        except HarmlessError as failed:
            return CheckVerdict("unsettled", str(failed))
        except torch.OutOfMemoryError:
            return self._out_of_memory()
        except Exception:  # noqa: BLE001 (the step itself raises what is wrong with the batch)
            return before
        kind: Literal["holds", "broken", "inconclusive"] = "holds"
        words = ""
        if error >= run.beyond_doubt and cuts.are_real:
            kind, words = "broken", f"{refused_cuts(error, cuts)} {_OTHERWISE}"
        elif error > run.rounding:
            apart = f"gradients of micro-batches, added up, are {error:.1e} from that of all in one"
            kind, words = "inconclusive", f"{before.words}; {apart}"
        return CheckVerdict(kind, words, is_scalar=before.is_scalar or self._bare is not None)

    def _cut_error(
        self, cuts: RealCuts, autocast: Callable[[], AbstractContextManager[object]]
    ) -> tuple[float, CutRun]:
        functions = self._declared.functions.values()
        with without_side_effects(self._modules, self._world.device, functions=functions) as generators:
            self._leave_other_ranks_alone()
            run = self.cut_run(autocast, generators)
            return difference_of_cuts(run, cuts), run

    def cut_run(self, autocast: Callable[[], AbstractContextManager[object]], generators: SeededGenerators) -> CutRun:
        """Return what runs the loss for gradients of micro-batches to be compared.

        Args:
            autocast: makes the autocast context of a forward.
            generators: those that a model or a loss may draw from.
        """
        loss = self._declared
        if self._bare is not None:  # one number is taken as a mean over samples, which is what is asked here
            loss = dataclasses.replace(loss, function=BareLoss(loss.function, is_mean=True))
        return CutRun(
            loss=loss,
            model=self._model,
            modules=self._modules,
            autocast=autocast,
            generators=generators,
            device=self._world.device,
            is_low=self._is_low(autocast),
        )

    def _is_low(self, autocast: Callable[[], AbstractContextManager[object]]) -> bool:
        # The precision is known as a context alone; inside of it torch says whether it is a low one.
        with autocast():
            enabled = torch.is_autocast_enabled(self._world.device.type)
        return enabled or any(map(is_low_precision, self._modules.parameters()))

    def _judged(
        self, whole: Batch, autocast: Callable[[], AbstractContextManager[object]], generators: SeededGenerators
    ) -> CheckVerdict:
        if self._declared.kind.encode is not None:
            return self._judged_rows(whole, self.cut_run(autocast, generators))
        checked, doubtful = checked_samples(
            self._declared,
            self._model,
            map_tensors(whole, lambda tensor: tensor.to(self._world.device)),
            autocast=autocast,
            is_low=self._is_low(autocast),
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
                return CheckVerdict("unsettled", doubtful[name], is_scalar=is_scalar)
        return CheckVerdict("holds", is_scalar=is_scalar)

    def _judged_rows(self, micro_batch: Batch, run: CutRun) -> CheckVerdict:
        """Judge the encode function of a loss across samples, which is never cut itself."""
        error = difference_of_rows(run, micro_batch)
        if error <= run.rounding:
            return CheckVerdict("holds")
        if error >= run.beyond_doubt:
            return CheckVerdict("broken", f"{refused_rows(error)} {_OTHERWISE}")
        return CheckVerdict("inconclusive", f"rows of encode differ by {error:.1e} in smaller micro-batches")


def _undecided(error: UndecidedError) -> CheckVerdict:
    if isinstance(error, WrongCountError):
        return CheckVerdict("broken", str(error))
    return CheckVerdict("unsettled" if isinstance(error, HarmlessError) else "inconclusive", str(error))


def _is_open(verdicts: Sequence[CheckVerdict]) -> bool:
    """Whether some rank could not tell, and none could."""
    kinds = {one.kind for one in verdicts}
    return "inconclusive" in kinds and not kinds & {"holds", "broken", "unsettled"}


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
