"""The batch sizes of a run: given, found by trial runs on the first batch, reduced, or restored from a checkpoint."""

import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from anybatch.core.batch import Placement, Position, lengths_of
from anybatch.core.geometry import Sizes, ceil_div, even_size, resolve_sizes
from anybatch.core.splitting import BatchPlan, Deal, SplitConstraints, SplitOptions, plan_batch
from anybatch.core.token_budget import TokenBudget
from anybatch.core.tree import Batch, copied, count_samples, slice_samples
from anybatch.engine.micro_batch_size.search import WORTH_TIMING, Auto, FoundSize, Search, TrialParts, TrialRuns
from anybatch.engine.micro_batches import plan_effective_batch
from anybatch.engine.notifier import Notifier
from anybatch.errors import BatchSizeError, CompositionError, DataError, PlanError
from anybatch.memory.device_memory import HostHeadroom
from anybatch.parallel.world import World

MicroBatchSize = int | Literal["auto"] | Auto | TokenBudget | None
"""The values of `Engine(micro_batch_size=...)`."""


class RunSizes:
    """The batch sizes of a run on the ranks of a world; `searches` is whether trial runs must still choose a size."""

    def __init__(
        self,
        world: World,
        *,
        effective_batch_size: int | None,
        micro_batch_size: MicroBatchSize,
        accumulation_steps: int | None,
        deal: Deal,
        constraints: SplitConstraints = SplitConstraints(),  # noqa: B008 (a frozen value)
    ) -> None:
        self.is_auto = micro_batch_size == "auto" or isinstance(micro_batch_size, Auto)
        self.auto = micro_batch_size if isinstance(micro_batch_size, Auto) else Auto()
        self._budget = micro_batch_size if isinstance(micro_batch_size, TokenBudget) else None
        if self._budget is not None and accumulation_steps is not None:
            message = (
                f"micro_batch_size=token_budget({self._budget.tokens}) cannot be combined with "
                f"{accumulation_steps=}: the lengths determine the number of micro-batches. Leave one of them out."
            )
            raise BatchSizeError(message, code="budget_and_steps")
        sizes = resolve_sizes(
            world_size=world.size,
            effective_batch_size=effective_batch_size,
            micro_batch_size=None if self.is_auto or self._budget is not None else micro_batch_size,  # type: ignore[arg-type]  # then it is a number
            accumulation_steps=accumulation_steps,
        )
        if self._budget is not None:
            tokens, fixed = self._budget.tokens, self._budget.fixed_tokens
            sizes = dataclasses.replace(sizes, budget_tokens=tokens, micro_batch_tokens=tokens, fixed_tokens=fixed)
        self.searches = self.is_auto and accumulation_steps is None and constraints.searchable
        if self._budget is not None:
            self.searches = True  # the first batch determines whether samples are padded or packed
        # A CPU raises no out-of-memory error: the operating system kills the process.
        self.raises_out_of_memory = world.device.type != "cpu"
        self._deal = deal
        self._world = world
        self.constraints = constraints
        self._before: Sizes | None = None  # the sizes before the first reduction
        self.why_not_smaller = ""
        self._use(sizes)

    def _use(self, sizes: Sizes) -> None:
        """Plan batches with these sizes from now on."""
        micro_batch_size, accumulation_steps = sizes.micro_batch_size, sizes.accumulation_steps
        if self.constraints.whole:
            micro_batch_size = accumulation_steps = None
        split = SplitOptions(
            micro_batch_size=micro_batch_size,
            # A split uses only one of these sizes; `resolve_sizes` has checked that they agree if both are given.
            accumulation_steps=accumulation_steps if micro_batch_size is None else None,
            deal=self._deal,
            lockstep=self.constraints.allows_empty_ranks,
            group=self.constraints.group,
            min_samples=self.constraints.min_samples,
        )
        budget = self._budget
        if budget is not None:
            budget = dataclasses.replace(
                budget, current_tokens=sizes.micro_batch_tokens, fixed_tokens=sizes.fixed_tokens
            )
        self.sizes = sizes
        self.placement = Placement(split, self._world.size, self._world.rank, budget, packed=bool(sizes.packed))

    def check_batch_size(self, num_samples: int) -> None:
        """Raise a `BatchSizeError` if a batch has more samples than `Engine(effective_batch_size=...)`."""
        limit = self.sizes.effective_batch_size
        if limit is not None and num_samples > limit:
            sizes = self.sizes
            change = (
                f"omit accumulation_steps={sizes.accumulation_steps}, which follows from the batch"
                if sizes.product
                else f"set Engine(effective_batch_size={num_samples}) or omit it"
            )
            message = (
                f"the batch has {num_samples} samples over all ranks, but effective_batch_size={limit}"
                f"{sizes.product}. Pass batches of {limit}, or {change}."
            )
            raise BatchSizeError(message, effective_batch_size=limit, world_size=self._world.size)

    def check_splittable(self, sizes: Iterable[int]) -> None:
        """Raise a `BatchSizeError` for the first effective batch size that is too large or cannot be split."""
        for size in sizes:
            self.check_batch_size(size)
            plan_batch(size, self._world.size, self.placement.split)

    def settle(self, batch: Any, trial: TrialParts, position: Position) -> FoundSize:  # noqa: ANN401
        """Choose the sizes that are "auto" by trial runs on the first batch, and undo every change of these runs."""
        self.searches = False
        if self._budget is not None:
            return self._settle_budget(batch, self._budget, trial)
        choice = self._choose(batch, trial, position)
        self._use(dataclasses.replace(self.sizes, micro_batch_size=choice.size))
        return choice

    def restore(self, saved: Mapping[str, Any], decisions: Mapping[str, str]) -> dict[str, str]:
        """Restore the sizes that the saved run has found, and return the descriptions of these decisions, by name."""
        if not self.searches:
            return {}
        if self._budget is not None:
            return self._restore_budget(saved, decisions, self._budget)
        if "micro_batch_size" not in decisions:
            return {}
        self.searches = False
        size = saved["micro_batch_size"]
        self._use(dataclasses.replace(self.sizes, micro_batch_size=size))
        text = "the whole rank share" if size is None else f"{size}"
        return {"micro_batch_size": f"{text}, as in the checkpoint"}

    def _restore_budget(
        self, saved: Mapping[str, Any], decisions: Mapping[str, str], budget: TokenBudget
    ) -> dict[str, str]:
        """Restore the fixed cost of a micro-batch; if the budget is the same, also its current limit and the layout."""
        tokens, restored = budget.tokens, {}
        is_same = saved.get("budget_tokens") == tokens
        if is_same and saved.get("packed") is not None:
            self._use(dataclasses.replace(self.sizes, packed=saved["packed"]))
            restored["layout"] = f"{'packed' if saved['packed'] else 'padded'}, as in the checkpoint"
        if self.sizes.fixed_tokens is None and "micro_batch_size" in decisions:
            fixed = saved.get("fixed_tokens")
            current = (saved.get("micro_batch_tokens") if is_same else None) or tokens
            self._use(dataclasses.replace(self.sizes, fixed_tokens=fixed, micro_batch_tokens=current))
            restored["micro_batch_size"] = (
                f"at most {tokens:,} tokens, currently {current:,}; the fixed cost of a micro-batch equals "
                f"{fixed or 0:,.0f} tokens, as in the checkpoint"
            )
        return restored

    def _settle_budget(self, batch: Any, budget: TokenBudget, trial: TrialParts) -> FoundSize:  # noqa: ANN401
        """Measure the fixed cost of a micro-batch and choose the layout, padded or packed, unless they are given."""
        from anybatch.engine.micro_batch_size.budget_trials import BudgetTrials  # noqa: PLC0415 (rarely used)

        sizes, lengths = self.sizes, lengths_of(batch)
        is_known = sizes.fixed_tokens is not None
        if lengths is None or (is_known and (not lengths.has_both_layouts or sizes.packed is not None)):
            return FoundSize(None, "")  # the planner refuses a batch without lengths
        if sizes.packed is not None:
            batch, lengths = self.placement.choose_layout(batch)
        assert lengths is not None
        cap = sizes.micro_batch_tokens if is_known else None
        budget = dataclasses.replace(budget, fixed_tokens=sizes.fixed_tokens, current_tokens=cap)
        result = BudgetTrials(self._world, trial, budget, self.auto.clock).find(batch, lengths)
        self._use(
            dataclasses.replace(
                sizes,
                fixed_tokens=result.fixed_tokens,
                micro_batch_tokens=result.cap or sizes.micro_batch_tokens,
                packed=sizes.packed if result.packed is None else result.packed,
            )
        )
        text = "" if is_known else f"at most {budget.tokens:,} tokens; {result.description}"
        return FoundSize(None, text, layout=result.layout)

    @property
    def original(self) -> Sizes:
        """The sizes before the first reduction."""
        return self._before or self.sizes

    @property
    def description(self) -> str:
        """The limit of a micro-batch, as text."""
        if self.sizes.micro_batch_tokens is not None:
            return f"at most {self.sizes.micro_batch_tokens:,} tokens"
        if self.sizes.micro_batch_size is not None:
            return f"at most {self.sizes.micro_batch_size} samples"
        return f"{self.sizes.accumulation_steps} accumulation steps"

    def shrink(self, plan: BatchPlan) -> tuple[int, int | None]:
        """Reduce the sizes from now on, the same on all ranks; return the largest micro-batch before and after.

        From then on, the run equals, bit for bit, a run with the smaller sizes. If no smaller size is possible, the
        second number is None.
        """
        smaller, after = self.smaller_sizes(plan)
        if smaller is not None:
            self._before = self.original
            self._use(smaller)
        return max(unit.num_samples for unit in plan.units), after

    def smaller_sizes(self, plan: BatchPlan) -> tuple[Sizes | None, int | None]:
        """Return sizes for twice as many micro-batches of nearly equal sizes, and the size of the largest of them.

        Return (None, None) if no smaller size is possible; then `why_not_smaller` is the reason.
        """
        before, group, sizes = max(unit.num_samples for unit in plan.units), plan.split.group, self.sizes
        if self.constraints.whole:
            self.why_not_smaller = "norms=Exact(method='checkpoint') runs each rank share as one micro-batch"
            return None, None
        if before <= min(group or 1, before) + (group is not None):  # a group may hold one sample more
            smallest = "one sample" if group is None else f"a group of {group}"
            self.why_not_smaller = f"they cannot be smaller than {smallest}"
            return None, None
        if sizes.micro_batch_tokens is not None:
            # A sample longer than this runs alone. The number of samples that fit depends on their lengths, so the
            # returned half of it is an estimate.
            tokens = ceil_div(sizes.micro_batch_tokens, 2)
            return dataclasses.replace(sizes, micro_batch_tokens=tokens), ceil_div(before, 2)
        # All ranks use the same size, so the rank with the most micro-batches determines it.
        share = max(plan.shares, key=lambda units: sum(unit.weight for unit in units))
        counting = [unit.num_samples for unit in share if unit.weight]
        if sizes.micro_batch_size is None and sizes.accumulation_steps is not None:
            steps = 2 * sizes.accumulation_steps
            largest = max(sum(unit.num_samples for unit in units if unit.weight) for units in plan.shares)
            return dataclasses.replace(sizes, accumulation_steps=steps), ceil_div(largest, steps)
        after = ceil_div(sum(counting), 2 * len(counting))
        if group is not None:
            after = max(group, after // group * group)
        # At most `before - 1`, because rounding up, or to whole groups, may return the size that did not fit.
        after = min(after, before - 1)
        return dataclasses.replace(sizes, micro_batch_size=after, accumulation_steps=None), after

    def resized(self) -> dict[str, Any] | None:
        """Return the state of a reduction for a resumed run; None if no size was reduced."""
        if self._before is None:
            return None
        return {"sizes": dataclasses.asdict(self.sizes), "formers": [dataclasses.asdict(self._before)]}

    def resume(self, state: Mapping[str, Any], decisions: dict[str, str], notifier: Notifier) -> None:
        """Restore sizes that the saved run has found or reduced, and report other differences from the saved sizes."""
        saved: Mapping[str, int | None] = state["sizes"]
        decisions.update(self.restore(saved, state["decisions"]))
        # Older checkpoints may lack a size.
        changed = ", ".join(
            f"{name} {saved.get(name)} -> {value}"
            for name, value in dataclasses.asdict(self.sizes).items()
            if saved.get(name) != value
        )
        if changed:
            decisions["resumed with changes"] = changed
            notifier.diagnosis("resumed_with_changes", f"resumed with changes: {changed}")
        if self.sizes.effective_batch_size != saved["effective_batch_size"]:
            warnings.warn(f"resumed with changes: {changed}", stacklevel=3)
        reduced = state.get("resized")
        if reduced is not None and Sizes(**reduced["formers"][0]) == self.original:  # not if other sizes were given
            self._before = self.original
            self._use(Sizes(**reduced["sizes"]))
            decisions["micro_batch_size"] = f"{self.description}, as in the checkpoint, because more ran out of memory"

    def _choose(self, batch: Any, trial: TrialParts, position: Position) -> FoundSize:  # noqa: ANN401
        """Return the size to use: all samples of a rank's share, the largest that fit, or the fastest size."""
        first = _FirstBatch(batch, self._world, position)
        self.check_batch_size(first.num_in_batch)
        lockstep = trial.context.strategy.capabilities.lockstep
        is_whole = lockstep and not self.raises_out_of_memory
        reason = "ranks run in lockstep" if is_whole else self._why_not_timed(trial, first)
        if (reason and not self.raises_out_of_memory) or first.share < 2:  # noqa: PLR2004 (one sample cannot be split)
            return FoundSize(None, f"the whole rank share, because {reason or 'there is only one sample'}")
        # If loading fails on one rank, all ranks raise an error here instead of waiting for the rank in a trial run.
        can_be_sliced = all(self._world.run_on_all_ranks(first.load))
        if lockstep and self.raises_out_of_memory:
            return self._planned_in_lockstep(trial, first)
        if not can_be_sliced:  # a step that runs out of memory will be repeated with smaller micro-batches
            return FoundSize(None, "the whole rank share, because its samples are not along the first axis")
        runs = TrialRuns(
            trial,
            first.pieces,
            first.num_samples,
            num_in_batch=first.num_in_batch,
            device=self._world.device,
            clock=self.auto.clock,
        )
        with trial.restoring_state(self._world.device):
            planned, why_not_planned = self._planned(first)
            search = Search(
                runs,
                self._world,
                share=first.share,
                auto=self.auto,
                room=None if self.raises_out_of_memory else HostHeadroom(num_sharing=self._world.size),
                group=self.constraints.group or 1,
                optimizer_is_new=not trial.optimizer.state,
                planned=planned,
                why_not_planned=why_not_planned,
            )
            return search.largest(str(self._world.device)) if reason else search.fastest()

    def _planned_in_lockstep(self, trial: TrialParts, first: "_FirstBatch") -> FoundSize:
        """Return the size that the planner expects to fit, without trial runs; raise `CompositionError` if unknown."""
        planned, reason = self._planned(first)
        if planned is not None:
            # Equal parts need at most the memory of the planned size, and avoid a smaller last micro-batch.
            size = even_size(first.share, min(planned, first.share), group=self.constraints.group or 1)
            return FoundSize(size, f"{size}, as planned; not tried, because ranks run in lockstep")
        name = trial.context.strategy.capabilities.name
        message = (
            f"micro_batch_size='auto' cannot try sizes on accelerators with strategy {name!r}. If a rank ran out of "
            f"memory, other ranks would hang. Memory was not planned either{reason and f' ({reason})'}. "
            "Set micro_batch_size, or plan it: anybatch.sizes.Auto(largest=planned_largest(...))."
        )
        raise CompositionError(message)

    def _why_not_timed(self, trial: TrialParts, first: "_FirstBatch") -> str:
        """Return why sizes are not timed, as a clause; empty if they are. The same on all ranks and in every run."""
        if reason := trial.why_not_timed:
            return reason
        if first.share * trial.num_parameters < WORTH_TIMING:
            return "a step is too short to be worth timing"
        return self.constraints.why_largest

    def _planned(self, first: "_FirstBatch") -> tuple[int | None, str]:
        """Return (the smallest of the ranks' planned sizes, why there is no plan); the size is None without a plan."""
        plan = self.auto.largest
        if plan is None:
            return None, ""

        def ask() -> int | str | None:
            try:
                return None if first.loaded is None else plan(first.loaded, first.share)
            except PlanError as error:
                return str(error)

        # Shares may differ between ranks, and so may plans; the smallest size fits on all ranks.
        plans = self._world.run_on_all_ranks(ask)
        reason = next((answer for answer in plans if isinstance(answer, str)), "")
        return min((answer for answer in plans if isinstance(answer, int)), default=None), reason


@dataclass(eq=False, repr=False)
class _FirstBatch:
    """The first effective batch, planned as one micro-batch per rank, and this rank's share of it."""

    batch: Any
    world: World
    position: Position

    def __post_init__(self) -> None:
        placement = Placement(SplitOptions(), self.world.size, self.world.rank)
        planned = plan_effective_batch(self.batch, placement, self.world, self.position)
        self._loading = planned.micro_batches
        self.num_in_batch = planned.plan.num_samples
        self.num_samples = planned.units[0].num_samples if planned.units else 0
        shares = [sum(unit.num_samples for unit in units) for units in planned.plan.shares]
        self.share = max(shares)
        self.loaded: Batch | None = None

    def load(self) -> bool:
        """Load this rank's share; return whether it can be sliced."""
        self.loaded = next(self._loading, None)
        try:
            return self.loaded is None or count_samples(self.loaded) == self.num_samples
        except DataError:  # a collate function may return any structure
            return False

    def pieces(self, size: int, max_number: int) -> Iterable[Batch]:
        """Return the first micro-batches of `size` samples, at most `max_number`."""
        starts = range(0, self.num_samples, size)[:max_number]
        # Copies, since a loss may change its batch in place, and the same samples run again.
        return [copied(slice_samples(self.loaded, start, start + size)) for start in starts]
