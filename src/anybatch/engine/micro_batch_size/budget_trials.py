"""Trial runs under a token budget on the first batch: the cost of a micro-batch, its cap, and padded or packed."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from anybatch.core.batch import lengths_of
from anybatch.core.token_budget import SampleLengths, TokenBudget
from anybatch.core.tree import Batch
from anybatch.engine.accumulation.accumulate import LoopContext
from anybatch.engine.loss_check.runs import LossRuns
from anybatch.engine.micro_batch_size.cut_choice import (
    Load,
    Way,
    best_cap,
    seconds_of_steps,
    units_by_cut,
    why_not_packed,
)
from anybatch.engine.micro_batch_size.token_costs import TokenCosts, assumed, measured_costs, micro_batches_to_time
from anybatch.engine.micro_batch_size.trial_run import Execute, TrialRuns
from anybatch.engine.rng.per_sample_dropout import SampleRandomness
from anybatch.engine.side_effects import SeededGenerators, without_side_effects
from anybatch.engine.torch_internals import is_compiled
from anybatch.parallel.world import World

WORTH_TIMING = 1_000_000
"""Minimum of parameters times samples of a rank share for timing sizes; below it, a step takes milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialParts:
    """The parts for trial runs of the first batch.

    Attributes:
        context: the parts that the loop uses.
        modules: the model.
        execute: runs micro-batches on this rank alone.
        clear: clears gradients.
        optimizer_is_new: the optimizer has no state yet.
        precision: name of the precision, part of the key of a cached size.
        loss_runs: function (generators) -> runs of the loss, to compare gradients.
    """

    context: LoopContext
    modules: nn.Module
    execute: Execute
    clear: Callable[[], None]
    optimizer_is_new: bool
    precision: str
    loss_runs: Callable[[SeededGenerators], LossRuns]

    @property
    def num_parameters(self) -> int:
        """Number of trained parameter elements."""
        return sum(p.numel() for p in self.context.prepared.parameters.values())

    @property
    def why_clocks_do_not_count(self) -> str:
        """Why speed must not decide anything in this run, as a clause; empty if it may."""
        if self.context.loss.kind.encode is not None:
            return "a loss across samples runs each forward twice if it is cut"
        if any(map(is_compiled, self.modules.modules())):
            return "torch.compile would recompile the model for each size"
        if torch.are_deterministic_algorithms_enabled():
            return "torch.use_deterministic_algorithms is on, and timings are not deterministic"
        return ""

    @contextmanager
    def undone(self, device: torch.device) -> Iterator[SeededGenerators]:
        """Restore everything that trial runs change, on exit."""
        functions = self.context.loss.functions.values()
        # Compiled modules run compiled, to measure the memory of real steps.
        with without_side_effects(self.modules, device, functions=functions, as_compiled=True) as generators:
            try:
                yield generators
            finally:
                self.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBudget:
    """The result of the trial runs.

    Attributes:
        costs: cost of a micro-batch and its cap, in the chosen layout.
        packed: whether to pack; None without a choice.
        layout: the choice in words; empty without a choice.
    """

    costs: TokenCosts
    packed: bool | None = None
    layout: str = ""


class BudgetTrials:
    """Trial runs under a token budget. All ranks run them, and rank 0's clock decides for all.

    Args:
        world: the ranks.
        trial: the parts for trial runs.
        budget: the user's budget.
        clock: monotonic time in seconds.
    """

    def __init__(self, world: World, trial: TrialParts, budget: TokenBudget, clock: Callable[[], float]) -> None:
        self._world = world
        self._trial = trial
        self._budget = budget
        self._clock = clock

    def find(self, batch: Any, known: TokenCosts | None) -> FoundBudget:  # noqa: ANN401 (any nested batch)
        """Return the cost of a micro-batch, and the layout if the batch allows both.

        Args:
            batch: the first batch.
            known: the cost of a micro-batch, if given by the user or a checkpoint.
        """
        lengths = lengths_of(batch)
        if lengths is None:  # the planner refuses it
            return FoundBudget(costs=known or assumed("the batch has no lengths"))
        reason = self._why_not_timed(lengths)
        if not lengths.either:
            return self._of_layout(batch, lengths, known, reason)
        why_padded = self._why_padded() or reason
        if why_padded:
            found = self._of_layout(batch.in_layout(packed=False), lengths.in_layout(packed=False), known, reason)
            return dataclasses.replace(found, packed=False, layout=f"padded, because {why_padded}")
        return self._on_all_ranks(lambda generators: self._faster(batch, lengths, known, generators))

    def _of_layout(
        self,
        batch: Any,  # noqa: ANN401 (any nested batch)
        lengths: SampleLengths,
        known: TokenCosts | None,
        reason: str,
    ) -> FoundBudget:
        """Return the result for one layout; assumed costs if there is a reason not to time."""
        if known is not None or reason:
            return FoundBudget(costs=known or assumed(reason))
        layouts = {lengths.packed: _Layout(lengths, _load_of(batch))}
        return self._on_all_ranks(lambda _: self._timed(layouts, None))

    def _on_all_ranks(self, find: Callable[[SeededGenerators], FoundBudget]) -> FoundBudget:
        """Return rank 0's result, and restore everything that the trials change."""
        with self._trial.undone(self._world.device) as generators:
            # Loading may raise on one rank; then all ranks raise instead of waiting for it.
            found: FoundBudget = self._world.run_on_all_ranks(lambda: find(generators))[0]
        return found

    def _why_padded(self) -> str:
        """Return why samples cannot be packed, as a clause; empty if a trial must decide."""
        if not self._trial.context.loss.allows_other_rows:
            return "the loss is a mean over samples, and packed micro-batches have one row"
        if isinstance(self._trial.context.randomness, SampleRandomness):
            return "random numbers belong to samples (rng='per_sample'), and packed ones share a row"
        return ""

    @property
    def _waits(self) -> bool:
        """Whether ranks wait for each other in each forward."""
        return self._trial.context.strategy.capabilities.lockstep or self._world.has_model_groups

    def _why_not_timed(self, lengths: SampleLengths) -> str:
        if len(lengths.tokens) * self._trial.num_parameters < WORTH_TIMING:
            return "a step is too short to be worth timing"
        if self._waits and (self._world.device.type != "cpu" or lengths.either):
            return "ranks run in lockstep and cannot run alone"
        return self._trial.why_clocks_do_not_count

    def _faster(
        self,
        batch: Any,  # noqa: ANN401 (any nested batch)
        lengths: SampleLengths,
        known: TokenCosts | None,
        generators: SeededGenerators,
    ) -> FoundBudget:
        """Time steps in both layouts, if the model accepts packed samples, and choose the fastest way."""
        layouts = {
            packed: _Layout(lengths.in_layout(packed=packed), _load_of(batch.in_layout(packed=packed)))
            for packed in (False, True)
        }
        loads = {packed: layout.load for packed, layout in layouts.items()}
        reason = why_not_packed(self._trial.loss_runs(generators), loads, lengths)
        if not reason:
            return self._timed(layouts, known)
        found = self._timed({False: layouts[False]}, known)
        return dataclasses.replace(found, packed=False, layout=f"padded, because {reason}")

    def _timed(self, layouts: Mapping[bool, "_Layout"], known: TokenCosts | None) -> FoundBudget:
        """Time a step in each layout, cut at the budget and at halvings of it, and choose the fastest way."""
        costs = {packed: known or self._costs(layout) for packed, layout in layouts.items()}
        lengths = {packed: layout.lengths for packed, layout in layouts.items()}
        units = units_by_cut(lengths, costs, self._budget)
        if len(units) == 1:  # there is only one way to cut
            return FoundBudget(costs=next(iter(costs.values())))
        num_samples = len(next(iter(lengths.values())).tokens)
        loads = {way: layouts[way.packed].load for way in units}
        runs = functools.partial(self._runs, num_samples)
        seconds, failed = seconds_of_steps(runs, loads, units, drops_slow=not self._waits)
        best = {packed: way for packed in layouts if (way := best_cap(seconds, packed=packed)) is not None}
        is_open = len(layouts) > 1
        if not best:  # the step itself raises the error
            words = "padded, because no micro-batch could be timed" if is_open else ""
            return FoundBudget(costs=costs[min(costs)], packed=False if is_open else None, layout=words)
        chosen = min(best.values(), key=seconds.__getitem__)
        found = _cut_at(chosen, costs[chosen.packed], seconds, self._budget)
        if not is_open:
            return FoundBudget(costs=found)
        name, other = ("packed", "padded") if chosen.packed else ("padded", "packed")
        slower = best.get(not chosen.packed)
        if slower is None:
            why = next(reason for way, reason in failed.items() if way.packed != chosen.packed)
            words = f"{name}, because {other} could not be timed ({why})"
        else:
            words = f"{seconds[chosen] * 1e3:.4g} ms for the micro-batches of a step of {num_samples:,} samples"
            words = f"{name}, measured: {words}, and {seconds[slower] * 1e3:.4g} ms {other}"
        return FoundBudget(costs=found, packed=chosen.packed, layout=words)

    def _costs(self, layout: "_Layout") -> TokenCosts:
        pieces = micro_batches_to_time(layout.lengths, self._budget)
        if pieces is None:
            return assumed("the batch has no two micro-batches of clearly different sizes")
        runs = functools.partial(self._runs, len(layout.lengths.tokens))
        return measured_costs(runs, layout.load, pieces, layout.lengths, self._budget)

    def _runs(self, num_in_batch: int, make: Callable[[int, int], Iterable[Batch]], num_samples: int) -> TrialRuns:
        trial = self._trial
        return TrialRuns(
            trial.context,
            trial.modules,
            make,
            num_samples,
            num_in_batch=num_in_batch,
            execute=trial.execute,
            clear=trial.clear,
            device=self._world.device,
            clock=self._clock,
        )


@dataclass(frozen=True, slots=True)
class _Layout:
    """A batch in one layout, padded or packed: the lengths of its samples, and a function to load them."""

    lengths: SampleLengths
    load: Load


def _cut_at(chosen: Way, costs: TokenCosts, seconds: Mapping[Way, float], budget: TokenBudget) -> TokenCosts:
    """Return the costs with the chosen cap, and with the time that it saves if it is below the budget."""
    found = dataclasses.replace(costs, cut_at=chosen.cap)
    if chosen.cap == budget.tokens or costs.cut_at is not None:
        return found
    whole = seconds.get(Way(chosen.packed, budget.tokens))
    why = "larger ones do not run" if whole is None else f"a step then takes {1 - seconds[chosen] / whole:.0%} less"
    return dataclasses.replace(found, words=f"{costs.words}; cut at {chosen.cap:,}, because {why}")


def _load_of(batch: Any) -> Load:  # noqa: ANN401 (an effective batch)
    return lambda positions: next(batch.feed([positions]))
