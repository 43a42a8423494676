"""The sizes of a run: given, found by trial runs on the first batch, or restored from a checkpoint."""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from anybatch.core.batch import Placement, Position, lengths_of
from anybatch.core.geometry import Sizes, even_size, resolve_sizes
from anybatch.core.splitting import Cut, CutConstraints, Deal, plan_batch
from anybatch.core.token_budget import TokenBudget
from anybatch.core.tree import Batch, copied, count_samples, slice_samples, tensors_of
from anybatch.engine.micro_batch_size.search import WORTH_TIMING, Auto, FoundSize, Search, TrialParts, TrialRuns
from anybatch.engine.micro_batches import PlannedBatch, plan_effective_batch
from anybatch.engine.notifier import software_versions
from anybatch.errors import BatchSizeError, CompositionError, DataError, PlanError
from anybatch.memory.device_memory import HostRoom, device_name
from anybatch.parallel.world import World

MicroBatchSize = int | Literal["auto"] | Auto | TokenBudget | None
"""The values of `Engine(micro_batch_size=...)`."""


class RunSizes:
    """The sizes of a run on one world, and whether the micro-batch size is still unknown.

    Raises:
        BatchSizeError: a size is below 1, or the three contradict each other.
    """

    def __init__(
        self,
        world: World,
        *,
        effective_batch_size: int | None,
        micro_batch_size: MicroBatchSize,
        accumulation_steps: int | None,
        deal: Deal,
        constraints: CutConstraints = CutConstraints(),  # noqa: B008 (a frozen value)
    ) -> None:
        self.is_auto = micro_batch_size == "auto" or isinstance(micro_batch_size, Auto)
        self.auto = micro_batch_size if isinstance(micro_batch_size, Auto) else Auto()
        self._budget = micro_batch_size if isinstance(micro_batch_size, TokenBudget) else None
        if self._budget is not None and accumulation_steps is not None:
            message = (
                f"micro_batch_size=token_budget({self._budget.tokens}) excludes {accumulation_steps=}: the lengths "
                "determine the number of micro-batches. Leave one of them out."
            )
            raise BatchSizeError(message, code="budget_and_steps")
        self.sizes = resolve_sizes(
            world_size=world.size,
            effective_batch_size=effective_batch_size,
            micro_batch_size=None if self.is_auto or self._budget is not None else micro_batch_size,  # type: ignore[arg-type]  # then it is a number
            accumulation_steps=accumulation_steps,
        )
        if self._budget is not None:
            tokens, fixed = self._budget.tokens, self._budget.fixed_tokens
            self.sizes = dataclasses.replace(
                self.sizes, budget_tokens=tokens, micro_batch_tokens=tokens, fixed_tokens=fixed
            )
        self.searches = self.is_auto and accumulation_steps is None and constraints.searchable
        if self._budget is not None:
            self.searches = True  # the first batch determines whether samples are padded or packed
        # On a CPU the system kills a process that runs out of memory, so a search could not catch an error.
        self.may_run_out = world.device.type != "cpu"
        self._deal = deal
        self._world = world
        self.constraints = constraints
        self._placed: tuple[Sizes, Placement] | None = None

    @property
    def placement(self) -> Placement:
        """The current cut and deal of batches, and this rank."""
        # Sizes are frozen and replaced as a whole, so an identity check detects a change.
        if self._placed is None or self._placed[0] is not self.sizes:
            self._placed = self.sizes, self._placement()
        return self._placed[1]

    def _placement(self) -> Placement:
        micro_batch_size, accumulation_steps = self.sizes.micro_batch_size, self.sizes.accumulation_steps
        if self.constraints.whole:
            micro_batch_size = accumulation_steps = None
        cut = Cut(
            micro_batch_size=micro_batch_size,
            # A cut uses one of the two; `resolve_sizes` has checked that they agree if both are given.
            accumulation_steps=accumulation_steps if micro_batch_size is None else None,
            deal=self._deal,
            lockstep=self.constraints.fills_up,
            group=self.constraints.group,
            least_samples=self.constraints.least_samples,
        )
        budget = self._budget
        if budget is not None:
            sizes = self.sizes
            budget = dataclasses.replace(budget, cut_at=sizes.micro_batch_tokens, fixed_tokens=sizes.fixed_tokens)
        return Placement(cut, self._world.size, self._world.rank, budget, packed=bool(self.sizes.packed))

    def refuse_larger(self, num_samples: int) -> None:
        """Raise a `BatchSizeError` if a batch has more samples than the given effective batch size."""
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

    def refuse_uncuttable(self, sizes: Iterable[int]) -> None:
        """Raise a `BatchSizeError` for the first effective batch size that cannot be cut or exceeds the given one."""
        for size in sizes:
            self.refuse_larger(size)
            plan_batch(size, self._world.size, self.placement.cut)

    def settle(self, batch: Any, trial: TrialParts, position: Position) -> FoundSize:  # noqa: ANN401
        """Resolve "auto" on the first batch, and restore everything that the trial runs change.

        Raises:
            BatchSizeError: not even one sample fits, or the batch is larger than the effective batch size.
            CompositionError: ranks run in lockstep on accelerators, where a single rank must not run out of memory.
        """
        self.searches = False
        if self._budget is not None:
            return self._settled_budget(batch, self._budget, trial)
        found = self._found(batch, trial, position)
        self.sizes = dataclasses.replace(self.sizes, micro_batch_size=found.size)
        return found

    def take(self, saved: Mapping[str, Any], decisions: Mapping[str, str]) -> dict[str, str]:
        """Restore the sizes found before a resume, and return these decisions in words, by name."""
        if not self.searches:
            return {}
        if self._budget is not None:
            return self._taken_budget(saved, decisions, self._budget)
        if "micro_batch_size" not in decisions:
            return {}
        self.searches = False
        size = saved["micro_batch_size"]
        self.sizes = dataclasses.replace(self.sizes, micro_batch_size=size)
        words = "the whole rank share" if size is None else f"{size}"
        return {"micro_batch_size": f"{words}, as in the checkpoint"}

    def _taken_budget(
        self, saved: Mapping[str, Any], decisions: Mapping[str, str], budget: TokenBudget
    ) -> dict[str, str]:
        """Restore the cost of a micro-batch and, if the budget is the same, its cap and layout."""
        tokens, words = budget.tokens, {}
        is_same = saved.get("budget_tokens") == tokens
        if is_same and saved.get("packed") is not None:
            self.sizes = dataclasses.replace(self.sizes, packed=saved["packed"])
            words["layout"] = f"{'packed' if saved['packed'] else 'padded'}, as in the checkpoint"
        if self.sizes.fixed_tokens is None and "micro_batch_size" in decisions:
            fixed = saved.get("fixed_tokens")
            cut_at = saved.get("micro_batch_tokens") if is_same else None
            self.sizes = dataclasses.replace(self.sizes, fixed_tokens=fixed, micro_batch_tokens=cut_at or tokens)
            words["micro_batch_size"] = (
                f"at most {tokens:,} tokens, cut at {cut_at or tokens:,}; a micro-batch costs {fixed or 0:,.0f} "
                "tokens, as in the checkpoint"
            )
        return words

    def _settled_budget(self, batch: Any, budget: TokenBudget, trial: TrialParts) -> FoundSize:  # noqa: ANN401
        """Determine the cost of a micro-batch and the layout, padded or packed, unless they are given."""
        from anybatch.engine.micro_batch_size.budget_trials import BudgetTrials, TokenCosts  # noqa: PLC0415 (rarely used)

        sizes, lengths = self.sizes, lengths_of(batch)
        known = None
        if sizes.fixed_tokens is not None:
            known = TokenCosts(fixed_tokens=sizes.fixed_tokens, cut_at=sizes.micro_batch_tokens, words="")
            if lengths is None or not lengths.either or sizes.packed is not None:
                return FoundSize(None, "")
        if sizes.packed is not None:
            batch, _ = self.placement.laid_out(batch)
        found = BudgetTrials(self._world, trial, budget, self.auto.clock).find(batch, known)
        self.sizes = dataclasses.replace(
            sizes,
            fixed_tokens=found.costs.fixed_tokens,
            micro_batch_tokens=found.costs.cut_at or sizes.micro_batch_tokens,
            packed=sizes.packed if found.packed is None else found.packed,
        )
        words = "" if known is not None else f"at most {budget.tokens:,} tokens; {found.costs.words}"
        return FoundSize(None, words, layout=found.layout)

    def changes(self, saved: Mapping[str, int | None]) -> str:
        """Return the differences from the saved sizes: `"micro_batch_size 16 -> 8"`."""
        sizes = dataclasses.asdict(self.sizes)
        # Older checkpoints may lack a size.
        return ", ".join(
            f"{name} {saved.get(name)} -> {value}" for name, value in sizes.items() if saved.get(name) != value
        )

    def _found(self, batch: Any, trial: TrialParts, position: Position) -> FoundSize:  # noqa: ANN401
        """Return the size to use: the whole share, the largest that fits, or the fastest."""
        first = _FirstBatch(batch, self._world, position)
        self.refuse_larger(first.num_in_batch)
        # The processes of a model group wait for each other in every forward, like ranks in lockstep.
        lockstep = trial.context.strategy.capabilities.lockstep or self._world.has_model_groups
        reason = self._why_not_timed(trial, first, lockstep=lockstep)
        if (reason and not self.may_run_out) or first.share < 2:  # noqa: PLR2004 (one sample cannot be cut)
            return FoundSize(None, f"the whole rank share, because {reason or 'there is only one sample'}")
        # Loading may raise on one rank; then all ranks raise instead of waiting for it in a trial run.
        self._world.run_on_all_ranks(first.load)
        if lockstep and self.may_run_out:
            return self._planned_in_lockstep(trial, first)
        runs = TrialRuns(
            trial,
            first.pieces,
            first.num_samples,
            num_in_batch=first.num_in_batch,
            num_in_lockstep=first.share if lockstep else None,
            device=self._world.device,
            clock=self.auto.clock,
        )
        search = Search(
            runs,
            self._world,
            share=first.share,
            num_in_batch=first.num_in_batch,
            auto=self.auto,
            room=None if self.may_run_out else HostRoom(num_sharing=self._world.num_processes),
            group=self.constraints.group or 1,
            optimizer_is_new=trial.optimizer_is_new,
        )
        with trial.undone(self._world.device):
            if not reason:
                return self._fastest(search, trial, first)
            search.plan(*self._planned(first))
            return search.largest(str(self._world.device))

    def _planned_in_lockstep(self, trial: TrialParts, first: "_FirstBatch") -> FoundSize:
        """Return the size that is planned to fit, without a trial run; raise a `CompositionError` without a plan."""
        planned, reason = self._planned(first)
        if planned is not None:
            # Equal parts need no more memory than the planned size and avoid a short micro-batch.
            size = even_size(first.share, min(planned, first.share), group=self.constraints.group or 1)
            return FoundSize(size, f"{size}, as planned; not tried, because ranks run in lockstep")
        name = trial.context.strategy.capabilities.name
        message = (
            f"micro_batch_size='auto' cannot try sizes on accelerators with strategy {name!r}. A rank that runs out of "
            f"memory would leave the others waiting in a collective, and there is no plan{reason and f' ({reason})'}. "
            "Set micro_batch_size, or plan it: anybatch.sizes.Auto(largest=planned_largest(...))."
        )
        raise CompositionError(message)

    def _fastest(self, search: Search, trial: TrialParts, first: "_FirstBatch") -> FoundSize:
        """Return the fastest size from the cache, or measure it and save it there."""
        if self.auto.known is None:
            search.plan(*self._planned(first))
            return search.fastest()
        memory, on_first = self.auto.known, self._world.is_first
        circumstances = self._circumstances(trial, first)
        # Only rank 0's cache counts: caches of hosts may differ, and all ranks must use the same size.
        known = self._world.gather_objects(memory.find(circumstances) if on_first else None)[0]
        # The process that measured it may have had more memory, so it is tried first.
        if known is not None and known.size <= first.share and (not self.may_run_out or search.fits(known.size)):
            words = f"{known.size}, as measured on {known.date} ({known.samples_per_second:,.0f} samples/s)"
            return FoundSize(known.size, words, known.samples_per_second)
        search.plan(*self._planned(first))
        found = search.fastest()
        if found.size is None or found.rate is None:
            return found
        # Gathered, since the text of a decision must be the same on all ranks.
        saved = self._world.gather_objects(on_first and memory.keep(circumstances, found.size, found.rate))[0]
        if saved:
            return found
        return dataclasses.replace(found, words=f"{found.words}; it could not be saved for later runs")

    def _why_not_timed(self, trial: TrialParts, first: "_FirstBatch", *, lockstep: bool) -> str:
        """Return why sizes are not timed, or "" if they are. Deterministic, and the same on all ranks."""
        if reason := trial.why_clocks_do_not_count:
            return reason
        if lockstep and not first.smallest_share:
            return "ranks run in lockstep, and one of them has no samples"
        if first.share * trial.num_parameters < WORTH_TIMING:
            return "a step is too short to be worth timing"
        return self.constraints.largest_fitting

    def _planned(self, first: "_FirstBatch") -> tuple[int | None, str]:
        """Return the smallest of the ranks' planned sizes, or None, and why there is no plan."""
        plan = self.auto.largest
        if plan is None:
            return None, ""

        def ask() -> int | str | None:
            try:
                return None if first.whole is None else plan(first.whole, first.share)
            except PlanError as error:
                return str(error)

        # Shares and therefore plans may differ between ranks; the smallest size fits on all of them.
        plans = self._world.run_on_all_ranks(ask)
        reason = next((found for found in plans if isinstance(found, str)), "")
        return min((found for found in plans if isinstance(found, int)), default=None), reason

    def _circumstances(self, trial: TrialParts, first: "_FirstBatch") -> dict[str, Any]:
        """Return everything that is known to affect which size is the fastest."""
        context = trial.context
        parameters = [
            (name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in trial.modules.named_parameters()
        ]
        loss = getattr(context.loss.function, "__qualname__", type(context.loss.function).__qualname__)
        group = self.constraints.group or 1
        structure = f"{trial.modules}{parameters}{loss}{type(context.randomness).__name__}{group}{self._deal}"
        return {
            "model": hashlib.sha256(structure.encode()).hexdigest(),
            "samples": [(str(t.dtype), *t.shape[1:]) for t in tensors_of(first.whole)],
            "share": first.share,
            "device": device_name(self._world.device),
            "precision": trial.precision,
            "strategy": context.strategy.capabilities.name,
            "world_size": self._world.size,
            **software_versions(),
        }


@dataclass(eq=False, repr=False)
class _FirstBatch:
    """The first effective batch, planned without a cut, and this rank's share of it."""

    batch: Any
    world: World
    position: Position

    def __post_init__(self) -> None:
        planned = self._open(None)
        self._loading = planned.micro_batches
        self._is_cut_when_fed = hasattr(self.batch, "feed")
        self._can_be_sliced = True
        self.num_in_batch = planned.plan.num_samples
        self.num_samples = planned.units[0].num_samples if planned.units else 0
        shares = [sum(unit.num_samples for unit in units) for units in planned.plan.shares]
        self.share, self.smallest_share = max(shares), min(shares)
        self.whole: Batch | None = None

    def _open(self, size: int | None) -> PlannedBatch:
        placement = Placement(Cut(micro_batch_size=size), self.world.size, self.world.rank)
        return plan_effective_batch(self.batch, placement, self.world, self.position)

    def load(self) -> None:
        """Load this rank's share."""
        self.whole = next(self._loading, None)
        try:
            self._can_be_sliced = self.whole is None or count_samples(self.whole) == self.num_samples
        except DataError:  # a collate function may return any structure
            self._can_be_sliced = False

    def pieces(self, size: int, most: int) -> Iterable[Batch]:
        """Return the first micro-batches of `size`, sliced from the loaded share, or loaded if it cannot be sliced."""
        if self._can_be_sliced or not self._is_cut_when_fed:
            starts = range(0, self.num_samples, size)[:most]
            # Copies, since a loss may change its batch in place, and the same samples run again.
            return [copied(slice_samples(self.whole, start, start + size)) for start in starts]
        return itertools.islice(self._open(size).micro_batches, most)
