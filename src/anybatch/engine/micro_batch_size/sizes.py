"""The sizes of a run: named, found by trial runs on the first batch, or taken from a checkpoint."""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from anybatch.core.batch import Placement, Position, lengths_of
from anybatch.core.geometry import Sizes, resolve_sizes
from anybatch.core.size_choice import even_size
from anybatch.core.splitting import Cut, CutConstraints, Deal, plan_batch
from anybatch.core.token_budget import TokenBudget
from anybatch.core.tree import Batch, copied, count_samples, slice_samples, tensors_of
from anybatch.engine.accumulation.planned_batch import PlannedBatch, plan_effective_batch
from anybatch.engine.micro_batch_size.budget_trials import WORTH_TIMING, BudgetTrials, TrialParts
from anybatch.engine.micro_batch_size.search import Auto, FoundSize, Search
from anybatch.engine.micro_batch_size.token_costs import TokenCosts
from anybatch.engine.micro_batch_size.trial_run import TrialRuns
from anybatch.engine.telemetry.notifier import software_versions
from anybatch.errors import BatchSizeError, CompositionError, DataError, PlanError
from anybatch.memory.host_memory import HostRoom, device_name
from anybatch.parallel.world import World

MicroBatchSize = int | Literal["auto"] | Auto | TokenBudget | None
"""The values of `Engine(micro_batch_size=...)`."""


class RunSizes:
    """The sizes of a run on one world, and whether the micro-batch size is still to be found.

    Args:
        world: the ranks.
        effective_batch_size: see `Engine`; so are the others.
        micro_batch_size: "auto", or an `Auto`, is settled on the first batch.
        accumulation_steps: micro-batches per rank and step.
        deal: "balanced" or "fixed".
        constraints: what a policy about BatchNorm and the strategy demand of cuts.

    Attributes:
        constraints: the same.
        sizes: the sizes, as far as they are settled.
        searches: whether a size is still to be found.
        is_auto: whether the micro-batch size is left to the engine.
        may_run_out: whether a size has to be found even where it is not timed, since memory is short.

    Raises:
        BatchSizeError: a size below 1, or three that contradict.
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
                f"micro_batch_size=token_budget({self._budget.tokens}) makes as many micro-batches as lengths ask for, "
                f"and {accumulation_steps=} names their number. Leave one of them out."
            )
            raise BatchSizeError(message)
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
            self.searches = True  # whether samples are padded or packed is for the first batch to say
        # On a CPU the system ends the process where memory runs out; nothing is raised that a search could catch.
        self.may_run_out = world.device.type != "cpu"
        self._deal = deal
        self._world = world
        self.constraints = constraints
        self._placed: tuple[Sizes, Placement] | None = None

    @property
    def placement(self) -> Placement:
        """How batches are cut and dealt with the sizes of the moment, and which rank this one is."""
        # Sizes are frozen and replaced as a whole, so that identity tells whether they have changed.
        if self._placed is None or self._placed[0] is not self.sizes:
            self._placed = self.sizes, self._placement()
        return self._placed[1]

    def _placement(self) -> Placement:
        micro_batch_size, accumulation_steps = self.sizes.micro_batch_size, self.sizes.accumulation_steps
        if self.constraints.whole:
            micro_batch_size = accumulation_steps = None
        cut = Cut(
            micro_batch_size=micro_batch_size,
            # A cut follows one of the two. Where the user has given both they agree, as `resolve_sizes` has checked.
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
        """Refuse a batch that holds more than the effective batch size that was named.

        Raises:
            BatchSizeError: with both sizes.
        """
        limit = self.sizes.effective_batch_size
        if limit is not None and num_samples > limit:
            sizes = self.sizes
            # Where it was not named, it follows from what was.
            change = (
                f"leave accumulation_steps={sizes.accumulation_steps} out, since it follows from the batch"
                if sizes.product
                else f"name the same number in Engine(effective_batch_size={num_samples}), or leave it out there"
            )
            message = (
                f"the batch holds {num_samples} samples over all ranks, but effective_batch_size={limit}"
                f"{sizes.product}. Give batches of {limit}, or {change}."
            )
            raise BatchSizeError(message, effective_batch_size=limit, world_size=self._world.size)

    def refuse_uncuttable(self, sizes: Iterable[int]) -> None:
        """Refuse effective batch sizes of steps to come that cannot be cut, or are larger than was named.

        Raises:
            BatchSizeError: with the first of them.
        """
        for size in sizes:
            self.refuse_larger(size)
            plan_batch(size, self._world.size, self.placement.cut)

    def settle(self, batch: Any, trial: TrialParts, position: Position) -> FoundSize:  # noqa: ANN401
        """Settle what "auto" is, once, on the first batch; everything else is left as it was.

        Args:
            batch: any nested batch, or an effective batch.
            trial: what trial runs need.
            position: where the data stands.

        Returns:
            The size and why.

        Raises:
            BatchSizeError: not even one sample fits, or the batch is larger than the effective batch size.
            CompositionError: ranks run in lockstep on accelerators, where one may not run out of memory alone.
        """
        self.searches = False
        if self._budget is not None:
            return self._settled_budget(batch, self._budget, trial)
        found = self._found(batch, trial, position)
        self.sizes = dataclasses.replace(self.sizes, micro_batch_size=found.size)
        return found

    def take(self, saved: Mapping[str, Any], decisions: Mapping[str, str]) -> dict[str, str]:
        """Take what was found before a resume; return those decisions in words, by name."""
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
        """Take what a micro-batch costs, and under the same budget where it is cut and how samples are laid out."""
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
                f"{tokens:,} tokens at most, cut at {cut_at or tokens:,}; a micro-batch costs {fixed or 0:,.0f}, as in "
                "the checkpoint"
            )
        return words

    def _settled_budget(self, batch: Any, budget: TokenBudget, trial: TrialParts) -> FoundSize:  # noqa: ANN401
        """Settle what a micro-batch costs and whether samples are padded or packed, as far as both are open."""
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
        words = "" if known is not None else f"{budget.tokens:,} tokens at most; {found.costs.words}"
        return FoundSize(None, words, layout=found.layout)

    def changes(self, saved: Mapping[str, int | None]) -> str:
        """Return what is not as it was saved: `"micro_batch_size 16 -> 8"`."""
        own = dataclasses.asdict(self.sizes)
        # A checkpoint that was written before a size could be named was written without it.
        return ", ".join(
            f"{name} {saved.get(name)} -> {value}" for name, value in own.items() if saved.get(name) != value
        )

    def _found(self, batch: Any, trial: TrialParts, position: Position) -> FoundSize:  # noqa: ANN401
        """Return the size that is to be taken: the whole share, the largest that fits, or the fastest."""
        first = _FirstBatch(batch, self._world, position)
        self.refuse_larger(first.num_in_batch)
        # The processes that are one rank wait for each other in every forward, as ranks in lockstep do.
        lockstep = trial.context.strategy.capabilities.lockstep or self._world.has_model_groups
        reason = self._why_not_timed(trial, first, lockstep=lockstep)
        if (reason and not self.may_run_out) or first.share < 2:  # noqa: PLR2004 (one sample cannot be cut)
            return FoundSize(None, f"the whole rank share, as {reason or 'there is only one sample'}")
        # Loading may raise on one rank; together, all of them raise instead of waiting for it in a trial run.
        self._world.run_on_all_ranks(first.load)
        if lockstep and self.may_run_out:
            return self._planned_in_lockstep(trial, first)
        runs = TrialRuns(
            trial.context,
            trial.modules,
            first.pieces,
            first.num_samples,
            num_in_batch=first.num_in_batch,
            num_in_lockstep=first.share if lockstep else None,
            execute=trial.execute,
            clear=trial.clear,
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
        """Return the size that is planned to fit, without a trial run.

        Raises:
            CompositionError: there is no plan, and a rank that runs out of memory would leave the others waiting.
        """
        planned, reason = self._planned(first)
        if planned is not None:
            # Parts as equal as can be need no more memory than the planned size and waste no short micro-batch.
            size = even_size(first.share, min(planned, first.share), group=self.constraints.group or 1)
            return FoundSize(size, f"{size}, as planned; nothing was tried, because ranks run in lockstep")
        name = trial.context.strategy.capabilities.name
        message = (
            f"micro_batch_size='auto' cannot try sizes on accelerators under strategy {name!r}: a rank that runs out "
            f"of memory would leave the others waiting in a collective, and there is no plan{reason and f' ({reason})'}"
            ". Name a micro_batch_size, or have it planned: anybatch.sizes.Auto(largest=planned_largest(...))."
        )
        raise CompositionError(message)

    def _fastest(self, search: Search, trial: TrialParts, first: "_FirstBatch") -> FoundSize:
        """Return the fastest size: as it is known, or else as it is planned and measured, and then known."""
        if self.auto.known is None:
            search.plan(*self._planned(first))
            return search.fastest()
        memory, on_first = self.auto.known, self._world.is_first
        circumstances = self._circumstances(trial, first)
        # Rank 0's memory alone decides: hosts may remember different sizes, and all ranks must take the same.
        known = self._world.gather_objects(memory.find(circumstances) if on_first else None)[0]
        # It may come from a process that had more memory to itself.
        if known is not None and known.size <= first.share and (not self.may_run_out or search.fits(known.size)):
            words = f"{known.size}, as measured on {known.date} ({known.samples_per_second:,.0f} samples/s)"
            return FoundSize(known.size, words, known.samples_per_second)
        search.plan(*self._planned(first))
        found = search.fastest()
        if found.size is None or found.rate is None:
            return found
        # All ranks learn whether it was kept, since the decision is worded alike on all of them.
        kept = self._world.gather_objects(on_first and memory.keep(circumstances, found.size, found.rate))[0]
        return found if kept else dataclasses.replace(found, words=f"{found.words}; it could not be kept for later")

    def _why_not_timed(self, trial: TrialParts, first: "_FirstBatch", *, lockstep: bool) -> str:
        """Return why speed is not to decide; nothing if it is. The same on all ranks, and at any time."""
        if reason := trial.why_clocks_do_not_count:
            return reason
        if lockstep and not first.smallest_share:
            return "ranks run in lockstep, and one of them has no sample to run"
        if first.share * trial.num_parameters < WORTH_TIMING:
            return "a step takes too little to be worth timing"
        return self.constraints.largest_fitting

    def _planned(self, first: "_FirstBatch") -> tuple[int | None, str]:
        """Return the smallest of the sizes that are planned to fit on the ranks, or None and why there is no plan."""
        plan = self.auto.largest
        if plan is None:
            return None, ""

        def ask() -> int | str | None:
            try:
                return None if first.whole is None else plan(first.whole, first.share)
            except PlanError as error:
                return str(error)

        # Shares differ between ranks, and so may plans; the smallest size fits everywhere.
        plans = self._world.run_on_all_ranks(ask)
        reason = next((found for found in plans if isinstance(found, str)), "")
        return min((found for found in plans if isinstance(found, int)), default=None), reason

    def _circumstances(self, trial: TrialParts, first: "_FirstBatch") -> dict[str, Any]:
        """Return all that is known to decide which size is the fastest."""
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


class _FirstBatch:
    """The first effective batch, planned uncut: how many samples each rank has, and this rank's, once they are loaded.

    Args:
        batch: the batch.
        world: the ranks.
        position: where the data stands.
    """

    def __init__(self, batch: Any, world: World, position: Position) -> None:  # noqa: ANN401 (any nested batch)
        self._batch = batch
        self._world = world
        self._position = position
        planned = self._open(None)
        self._loading = planned.micro_batches
        self._is_cut_when_fed = hasattr(batch, "feed")
        self._can_be_sliced = True
        self.num_in_batch = planned.plan.num_samples
        self.num_samples = planned.units[0].num_samples if planned.units else 0
        shares = [sum(unit.num_samples for unit in units) for units in planned.plan.shares]
        self.share, self.smallest_share = max(shares), min(shares)
        self.whole: Batch | None = None

    def _open(self, size: int | None) -> PlannedBatch:
        placement = Placement(Cut(micro_batch_size=size), self._world.size, self._world.rank)
        return plan_effective_batch(self._batch, placement, self._world, self._position)

    def load(self) -> None:
        """Load this rank's share."""
        self.whole = next(self._loading, None)
        try:
            self._can_be_sliced = self.whole is None or count_samples(self.whole) == self.num_samples
        except DataError:  # a collate function may make of samples whatever it likes
            self._can_be_sliced = False

    def pieces(self, size: int, most: int) -> Iterable[Batch]:
        """Return the first micro-batches of `size`: cut from the loaded share, or loaded one by one where it cannot."""
        if self._can_be_sliced or not self._is_cut_when_fed:
            starts = range(0, self.num_samples, size)[:most]
            # Copies: a loss may change what it is given, and the same samples are run again.
            return [copied(slice_samples(self.whole, start, start + size)) for start in starts]
        return itertools.islice(self._open(size).micro_batches, most)
