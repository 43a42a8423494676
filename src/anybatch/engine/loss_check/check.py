"""The check of a loss's declaration: when it runs, on which samples, and the common verdict of all ranks."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import nn

from anybatch.core.batch import select_each
from anybatch.core.loss import Loss, LossSum
from anybatch.core.loss_kinds import COUNTED, ONE_NUMBER, LossFunction
from anybatch.core.tree import Batch, copied, count_samples, map_tensors, mark_and_count
from anybatch.engine.accumulate import LoopContext
from anybatch.engine.loss_check.comparison import FEW_SAMPLES, MAX_SAMPLES, SampleSource, Verdict, choose, judge
from anybatch.engine.loss_check.runs import LossParts, LossRuns
from anybatch.engine.micro_batches import PlannedBatch
from anybatch.engine.notifier import Notifier
from anybatch.engine.user_code import Model, SeededGenerators, without_side_effects
from anybatch.errors import LossError
from anybatch.parallel.strategy import Prepared, Strategy, Turn, caller_of
from anybatch.parallel.world import World

_AGAIN = frozenset({3, 7, 15})
"""Steps, counted from 0, in which the check is repeated, since other batches may show other faults."""
# Number of samples from which the check chooses; fewer if they must be loaded for the check.
_NUM_CANDIDATES, _NUM_LOADED_CANDIDATES = 64, 16
# Part of the format of checkpoints: `LossCheck.resume` compares with it.
_TAKEN = "taken as a mean over samples, because the check of the first step has found that it is one"
_HOLDS = "as declared, confirmed by the check of the first step"
_OTHERWISE = "If this is a false alarm, Engine(check_loss=False) skips the check."
_MAX_LETTERS = 200
_NOT_LAST = Turn(first=False, last=False)


class UndeclaredLoss:
    """A loss function without a declaration.

    If the check finds that it returns a mean over samples (`is_mean`), calls return a sum and a count of items.
    """

    def __init__(self, function: LossFunction, *, is_mean: bool = False) -> None:
        self.function = self.__wrapped__ = function
        self.is_mean = is_mean

    def __call__(self, model: Any, batch: Batch) -> Any:  # noqa: ANN401 (the user's model and loss)
        """Call the function; if `is_mean`, convert a scalar to a sum and a count."""
        value = self.function(model, batch)
        if self.is_mean and isinstance(value, torch.Tensor) and not value.dim():
            number = count_samples(batch)
            return LossSum(value * number, number)
        return value


@dataclass(eq=False, repr=False)
class LossCheck:
    """Compares a loss with its declaration in the first step, and again in steps 4, 8 and 16.

    Each rank checks samples of its share, and all ranks get the same verdict. With a strategy that runs ranks in
    lockstep, all ranks run the same samples, and exchange every number on which further runs depend.
    """

    declared: Loss
    model: Model
    modules: nn.Module
    world: World
    _: KW_ONLY
    strategy: Strategy
    prepared: Prepared
    decisions: dict[str, str]
    notifier: Notifier
    enabled: bool

    def __post_init__(self) -> None:
        declared = self.declared
        self._undeclared = UndeclaredLoss(declared.function) if declared.kind.returns_count and self.enabled else None
        # The loss that the loop calls.
        self.loss = declared if self._undeclared is None else dataclasses.replace(declared, function=self._undeclared)
        self.lockstep = self.strategy.capabilities.lockstep
        # The step of the newest check; set only when all ranks have the verdict, since a rank may fail before.
        self._newest: int | None = None
        self._is_settled = False
        self._undecided = ""

    def provisional(self, context: LoopContext) -> LoopContext:
        """Return a context for size trials before the check: in it, a scalar undeclared loss counts as a mean."""
        if self._undeclared is None:
            return context
        loss = dataclasses.replace(self.declared, function=UndeclaredLoss(self.declared.function, is_mean=True))
        return dataclasses.replace(context, loss=loss)

    def is_due(self, step: int) -> bool:
        """Return whether the batch of a step, counted from 0, is checked; the same on all ranks."""
        return self.enabled and (self._newest is None or (step in _AGAIN and step != self._newest))

    def is_over(self, step: int) -> bool:
        """Return whether no step after this one is checked."""
        return not self.enabled or (self._newest is not None and step >= max(_AGAIN))

    def warn_if_undecided(self) -> None:
        """Warn once if the loss could not be checked; called after the step, so that errors of the step come first."""
        if self._undecided:
            self.notifier.warn(
                "loss_not_checked",
                f"the loss could not be compared with its declaration: {self._undecided}. The declaration is used "
                "without a check. Compare one batch with ab.check(model, loss, batch), or pass "
                "Engine(check_loss=False) to silence this warning.",
            )
        self._undecided = ""

    def resume(self, decisions: Mapping[str, str]) -> None:
        """Restore the result of the check: an undeclared loss that was a mean over samples is still a mean."""
        if self._undeclared is not None and decisions.get("loss") == _TAKEN:
            self._undeclared.is_mean = True
            self._is_settled = True

    def check_declaration(
        self, planned: PlannedBatch, autocast: Callable[[], AbstractContextManager[object]], step: int
    ) -> None:
        """Check the loss on a few samples of the effective batch, which the step can still load and run."""
        source = self._source(planned)
        if self.lockstep and not planned.picks_any:
            source = self._shared_source(source)
        largest = max((unit.num_samples for share in planned.plan.shares for unit in share), default=0)
        # In lockstep an out-of-memory error ends the run, so the check runs only as many samples as a micro-batch has
        # (at least two).
        max_samples = min(MAX_SAMPLES, max(2 if self.lockstep else FEW_SAMPLES, largest))
        verdicts = self.world.run_on_all_ranks(lambda: self._verdict(source, autocast, max_samples))
        is_split = sum(map(len, planned.plan.shares)) > 1
        self._newest, self._undecided = step, ""
        self._combine(verdicts, is_split=is_split)

    def runs(self, autocast: Callable[[], AbstractContextManager[object]], generators: SeededGenerators) -> LossRuns:
        """Return an object that runs the loss on pieces (parts of a few samples), to compare their gradients."""
        names, parameters = list(self.prepared.parameters), list(self.prepared.parameters.values())
        leaves_of = (self.lockstep and self.prepared.gradient_leaves) or (lambda: parameters)
        parts = LossParts(
            loss=self.declared,
            model=self.model,
            modules=self.modules,
            device=self.world.device,
            autocast=autocast,
            # Without the strategy's wrapper, whose forward prepares a reduction.
            call=self._call_in_lockstep if self.lockstep else caller_of(self.model),
            leaves=lambda: dict(zip(names, leaves_of(), strict=True)),
            gather=self.prepared.layout.gather,
            can_widen=not self.lockstep,
        )
        return LossRuns(parts, generators)

    def _call_in_lockstep(self, function: LossFunction, batch: Batch) -> Any:  # noqa: ANN401 (the loss)
        with self.strategy.micro_batch(_NOT_LAST):
            return self.prepared.call(function, batch)

    def _source(self, planned: PlannedBatch) -> SampleSource:
        """Return the samples that this rank checks: its share, or in lockstep the whole effective batch if possible."""
        share = planned.units
        if self.lockstep and planned.picks_any:
            share = tuple(itertools.chain.from_iterable(planned.plan.shares))
        units = [range(unit.start, unit.stop) for unit in share if unit.weight]
        return SampleSource(
            positions=list(itertools.chain.from_iterable(units)),
            pick=planned.pick,
            num_candidates=_NUM_LOADED_CANDIDATES if planned.picks_any else _NUM_CANDIDATES,
            # None in lockstep: the first two micro-batches in one piece may not fit, which would end the run.
            real_units=() if self.lockstep else units,
            reads_again=planned.picks_any,
        )

    def _shared_source(self, source: SampleSource) -> SampleSource:
        """Return one rank's samples on all ranks; called if each rank has only its share."""

        def few() -> Batch:
            if len(source.positions) < 2:  # noqa: PLR2004 (a single sample cannot be split)
                return None
            return next(source.pick([choose(self.declared, source, MAX_SAMPLES)[0]]))

        shared = next((batch for batch in self.world.run_on_all_ranks(few) if batch is not None), None)
        batch, number = (None, 0) if shared is None else mark_and_count(shared)
        return SampleSource(range(number), functools.partial(select_each, batch), _NUM_CANDIDATES)

    def _verdict(
        self, source: SampleSource, autocast: Callable[[], AbstractContextManager[object]], max_samples: int
    ) -> Verdict:
        # `agree` gives all ranks the same number: in lockstep, the largest of their numbers.
        agree = (lambda number: max(self.world.gather_objects(number))) if self.lockstep else (lambda number: number)
        functions = self.declared.functions.values()
        # Layers that wait for other ranks would hang, since the other ranks may have no samples to run.
        synchronised = [m for m in self.modules.modules() if isinstance(m, nn.SyncBatchNorm) and m.training]
        for module in synchronised:
            module.training = False
        try:
            with without_side_effects(self.modules, self.world.device, functions=functions) as generators:
                runs = self.runs(autocast, generators)
                return self._described(runs, judge(runs, source, max_samples=max_samples, agree=agree))
        except torch.OutOfMemoryError:
            return Verdict(kind="undecided", reason="it ran out of memory")
        except Exception as error:  # noqa: BLE001 (the step itself raises errors of the batch)
            return Verdict(kind="undecided", reason=f"{type(error).__name__}: {error}"[:_MAX_LETTERS])
        finally:
            for module in synchronised:
                module.training = True
            if self.lockstep:  # after an error, sharded modules may still be gathered
                self.strategy.clear_gradients()

    def _described(self, runs: LossRuns, verdict: Verdict) -> Verdict:
        """Return the verdict to send to other ranks: without samples, with the message for a wrong declaration."""
        sent = dataclasses.replace(verdict, pieces=(), is_scalar=runs.returned_number)
        if verdict.kind != "broken":
            return sent
        from anybatch.engine.loss_check.diagnosis import describe, diagnose  # noqa: PLC0415 (only for a wrong loss)

        diagnosis = diagnose(runs, verdict, in_lockstep=self.lockstep)
        message = describe(self.declared, verdict, diagnosis, returned_number=runs.returned_number)
        if diagnosis.cause != "form":
            message = f"{message} {diagnosis.remedy} {_OTHERWISE}"
        return dataclasses.replace(sent, message=message, cause=diagnosis.cause, term=diagnosis.term)

    def _combine(self, verdicts: Sequence[Verdict], *, is_split: bool) -> None:
        """Combine the ranks' verdicts into one, the same on each rank."""
        is_number = self._undeclared is not None and any(verdict.is_scalar for verdict in verdicts)
        broken = next((verdict for verdict in verdicts if verdict.kind == "broken"), None)
        if broken is not None:
            message = broken.message
            if is_number and broken.cause != "form":
                message = f"{ONE_NUMBER} Checked on the first step: {message}"
            # An undeclared loss has no items.
            unit = None if is_number or broken.term is None else self.declared.kind.terms[broken.term].items.name
            raise LossError(message, term=broken.term, unit=unit, cause=broken.cause)
        undecided = next(
            (verdict for verdict in verdicts if verdict.kind == "undecided" and not verdict.is_harmless), None
        )
        if self._is_settled:
            return
        if undecided is None and any(verdict.kind == "holds" for verdict in verdicts):
            self._is_settled = True
            self.decisions["loss"] = _TAKEN if is_number else _HOLDS
            if self._undeclared is not None and is_number:
                self._undeclared.is_mean = True
                self.notifier.diagnosis("loss_taken_as_mean_over_samples", f"the loss is {_TAKEN}.")
            return
        reason = verdicts[0].reason if undecided is None else undecided.reason
        if is_number:
            message = f"{ONE_NUMBER} (The check of the first step is undecided: {reason}.)"
            raise LossError(message)
        self.decisions["loss"] = f"as declared, unchecked: {reason}"
        if is_split and undecided is not None:
            self._undecided = reason


@dataclass(eq=False, repr=False)
class UncountedSums:
    """Detects the terms that return sums, so that a micro-batch with a count of 0 may contribute to the loss.

    For example, a focal loss over anchors is divided by the number of positives, but background alone has a loss too.
    To detect this, the loss runs once on the first micro-batch with a count of 0, without side effects. Terms over
    targets are not checked, since they are 0 without targets.
    """

    check: LossCheck
    autocast: Callable[[], AbstractContextManager[object]]

    def __post_init__(self) -> None:
        terms = self.check.declared.kind.terms.items()
        # Compare names: the items of a declaration that was copied or unpickled are equal, but not the same objects.
        self._unknown = {name: index for index, (name, term) in enumerate(terms) if term.items.name == COUNTED.name}
        self.names: set[str] = set()
        """The terms known to return sums."""

    def is_needed(self, counts: Sequence[tuple[float, ...]]) -> bool:
        """Return whether an unknown term has a count of 0 in one of these micro-batches."""
        return any(not count[index] for index in self._unknown.values() for count in counts)

    def probe(self, micro_batches: Sequence[Batch], counts: Sequence[tuple[float, ...]]) -> None:
        """Run the loss on the first micro-batch with a count of 0."""
        indices, lockstep = self._unknown, self.check.lockstep
        empty = next((n for n, count in enumerate(counts) if not all(count[i] for i in indices.values())), 0)
        values = self._values(micro_batches[empty]) if micro_batches else {}
        are_sums = {
            name: self._is_sum(name, values[name], counts[empty][index])
            for name, index in indices.items()
            if name in values and (lockstep or not counts[empty][index])
        }
        if lockstep:  # ranks must agree, since the result determines how often the model runs
            on_ranks = self.check.world.gather_objects(are_sums)
            are_sums = {name: any(on_rank.get(name, False) for on_rank in on_ranks) for name in indices}
        self.names |= {name for name, is_sum in are_sums.items() if is_sum}
        self._unknown = {name: index for name, index in indices.items() if name not in are_sums}

    def _values(self, micro_batch: Batch) -> Mapping[str, object]:
        """Return the values of the loss function by term; empty if it fails on this micro-batch."""
        device, loss = self.check.world.device, self.check.declared
        batch = map_tensors(copied(micro_batch), lambda tensor: tensor.to(device))
        try:
            with without_side_effects(self.check.modules, device, functions=loss.functions.values()), self.autocast():
                output = loss.function(self.check.model, batch)
        except Exception:  # noqa: BLE001 (the step itself raises it, if it runs the micro-batch at all)
            return {}
        if loss.kind.named:
            return output if isinstance(output, Mapping) else {}
        return dict.fromkeys(loss.names, output)

    def _is_sum(self, name: str, value: object, count: float) -> bool:
        if isinstance(value, LossSum):
            value = value.total
        elif isinstance(value, torch.Tensor) and not value.dim():
            mean = float(value.detach())
            if mean and not count and math.isfinite(mean):
                self._check_not_mean(name, mean)
            return False
        # A mean over no items, multiplied by its count of 0, is NaN too.
        return isinstance(value, torch.Tensor) and bool(torch.isfinite(value).all())

    def _check_not_mean(self, name: str, value: float) -> None:
        message = (
            f"the loss function returned {value:.4g} for term {name!r} on a micro-batch without items (count 0). A "
            "mean over no items is NaN, so it is divided by something else, such as max(count, 1), and its weight in "
            "the effective batch is unknown. Return ab.LossSum(total, count), with the sum before any division."
        )
        raise LossError(message, term=name, unit=COUNTED.name, code="mean_over_nothing")
