"""What a token budget leaves open, found on the first batch: what a micro-batch costs, and whether to pad or pack."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from anybatch.core.batch import lengths_of
from anybatch.core.token_budget import SampleLengths, TokenBudget
from anybatch.core.tree import Batch
from anybatch.engine.accumulation.accumulate import LoopContext
from anybatch.engine.loss_check.by_cuts import CutRun
from anybatch.engine.micro_batch_size.layout_choice import Load, sampled_units, seconds_of_steps, why_not_packed
from anybatch.engine.micro_batch_size.token_costs import TokenCosts, assumed, measured_costs, pieces_to_time
from anybatch.engine.micro_batch_size.trial_run import Execute, TrialRuns
from anybatch.engine.rng.per_sample_dropout import SampleRandomness
from anybatch.engine.side_effects import SeededGenerators, without_side_effects
from anybatch.engine.torch_internals import is_compiled
from anybatch.parallel.world import World

WORTH_TIMING = 1_000_000
"""Parameters times samples of a rank share from which on sizes are timed: below, a step is a matter of milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialParts:
    """Everything that trial runs of the first batch need.

    Attributes:
        context: what the loop uses.
        modules: the model.
        execute: runs micro-batches on this rank alone.
        clear: clears gradients.
        optimizer_is_new: the optimizer has no state yet.
        precision: name of the precision, for sizes to be known by.
        cut_run: function (generators) -> what runs the loss for gradients to be compared.
    """

    context: LoopContext
    modules: nn.Module
    execute: Execute
    clear: Callable[[], None]
    optimizer_is_new: bool
    precision: str
    cut_run: Callable[[SeededGenerators], CutRun]

    @property
    def num_parameters(self) -> int:
        """Numbers that are trained."""
        return sum(p.numel() for p in self.context.prepared.parameters.values())

    @property
    def why_clocks_do_not_count(self) -> str:
        """Why speed is not to decide anything in this run, a clause; nothing if it may."""
        if self.context.loss.kind.encode is not None:
            return "a loss across samples runs forwards twice once it is cut"
        if any(map(is_compiled, self.modules.modules())):
            return "the model would be compiled again for each size"
        if torch.are_deterministic_algorithms_enabled():
            return "torch.use_deterministic_algorithms is on, and clocks are not deterministic"
        return ""

    @contextmanager
    def undone(self, device: torch.device) -> Iterator[SeededGenerators]:
        """Put everything back that trial runs change."""
        functions = self.context.loss.functions.values()
        # Compiled modules run compiled, since the memory of their steps is what is looked for.
        with without_side_effects(self.modules, device, functions=functions, as_compiled=True) as generators:
            try:
                yield generators
            finally:
                self.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBudget:
    """What was found.

    Attributes:
        costs: what a micro-batch costs, in the layout that was taken.
        packed: whether to pack; None where there is no choice.
        layout: the choice in words; empty where there was none.
    """

    costs: TokenCosts
    packed: bool | None = None
    layout: str = ""


class BudgetTrials:
    """Trial runs under a token budget. All ranks run them, and rank 0's clock decides for all.

    Args:
        world: the ranks.
        trial: what trial runs need.
        budget: as it was named.
        clock: monotonic time in seconds.
    """

    def __init__(self, world: World, trial: TrialParts, budget: TokenBudget, clock: Callable[[], float]) -> None:
        self._world = world
        self._trial = trial
        self._budget = budget
        self._clock = clock

    def find(self, batch: Any, known: TokenCosts | None) -> FoundBudget:  # noqa: ANN401 (any nested batch)
        """Return what a micro-batch costs, and the layout, if the batch leaves it open.

        Args:
            batch: the first one.
            known: what a micro-batch costs, if that is named or from a checkpoint.
        """
        lengths = lengths_of(batch)
        if lengths is None:  # it is refused when it is planned
            return FoundBudget(costs=known or assumed("the batch has no lengths"))
        reason = self._why_not_timed(lengths)
        if not lengths.either:
            return FoundBudget(costs=known or self._costs(batch, lengths, reason))
        reason = self._why_padded() or reason
        if reason:
            padded, tokens = batch.in_layout(packed=False), lengths.in_layout(packed=False)
            costs = known or self._costs(padded, tokens, self._why_not_timed(lengths))
            return FoundBudget(costs=costs, packed=False, layout=f"padded, as {reason}")
        with self._trial.undone(self._world.device) as generators:
            # Loading may raise on one rank; together, all of them raise instead of waiting for it.
            found: FoundBudget = self._world.run_on_all_ranks(
                lambda: self._faster(batch, lengths, known, self._trial.cut_run(generators))
            )[0]
        return found

    def _why_padded(self) -> str:
        """Return why packed samples cannot be run, a clause; nothing if that is for a trial to say."""
        if not self._trial.context.loss.allows_other_rows:
            return "the loss is a mean over samples, and packed micro-batches have one row"
        if isinstance(self._trial.context.randomness, SampleRandomness):
            return "random numbers belong to samples (rng='per_sample'), and packed ones share a row"
        return ""

    def _why_not_timed(self, lengths: SampleLengths) -> str:
        waits = self._trial.context.strategy.capabilities.lockstep or self._world.has_model_groups
        if len(lengths.tokens) * self._trial.num_parameters < WORTH_TIMING:
            return "a step takes too little to be worth timing"
        if waits and (self._world.device.type != "cpu" or lengths.either):
            return "ranks run in lockstep, where none may run alone"
        return self._trial.why_clocks_do_not_count

    def _costs(self, batch: Any, lengths: SampleLengths, reason: str) -> TokenCosts:  # noqa: ANN401
        """Return rank 0's measurement in one layout, on all ranks; what is assumed where there is a reason not to."""
        if reason:
            return assumed(reason)
        with self._trial.undone(self._world.device):
            costs: TokenCosts = self._world.run_on_all_ranks(lambda: self._measured(batch, lengths))[0]
        return costs

    def _measured(self, batch: Any, lengths: SampleLengths) -> TokenCosts:  # noqa: ANN401
        pieces = pieces_to_time(lengths, self._budget)
        if pieces is None:
            return assumed("its samples make no two micro-batches of different sizes")
        runs = functools.partial(self._runs, len(lengths.tokens))
        return measured_costs(runs, _load_of(batch), pieces, lengths, self._budget)

    def _faster(self, batch: Any, lengths: SampleLengths, known: TokenCosts | None, run: CutRun) -> FoundBudget:  # noqa: ANN401
        """Time a step in both layouts, each cut as is best for it, and take the faster one."""
        layouts = {packed: lengths.in_layout(packed=packed) for packed in (False, True)}
        batches = {packed: batch.in_layout(packed=packed) for packed in layouts}
        loads = {packed: _load_of(one) for packed, one in batches.items()}
        padded_costs = known or self._measured(batches[False], layouts[False])
        reason = why_not_packed(run, loads, lengths)
        if reason:
            return FoundBudget(costs=padded_costs, packed=False, layout=f"padded, as {reason}")
        costs = {False: padded_costs, True: known or self._measured(batches[True], layouts[True])}
        units = {packed: sampled_units(one, costs[packed].settled(self._budget)) for packed, one in layouts.items()}
        seconds, failed = seconds_of_steps(functools.partial(self._runs, len(lengths.tokens)), loads, units)
        if failed:
            # Where padded fails too, the step itself says so.
            words = f"padded, as packed could not be timed ({failed[True]})" if True in failed else "padded"
            return FoundBudget(costs=padded_costs, packed=False, layout=words)
        packed = seconds[True] < seconds[False]
        words = f"{seconds[packed] * 1e3:.4g} ms for the micro-batches of a step of {len(lengths.tokens):,} samples"
        words = f"{'packed' if packed else 'padded'}, measured: {words}, and {seconds[not packed] * 1e3:.4g} ms "
        return FoundBudget(costs=costs[packed], packed=packed, layout=words + ("padded" if packed else "packed"))

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


def _load_of(batch: Any) -> Load:  # noqa: ANN401 (an effective batch)
    return lambda positions: next(batch.feed([positions]))
