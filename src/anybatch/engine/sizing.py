"""How large micro-batches are, for as long as an engine lives: named, found by a search, or taken again on resume."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import nn

from anybatch.core.batch import Placement, Position
from anybatch.core.geometry import resolve_sizes
from anybatch.core.splitting import Cut, Deal
from anybatch.engine.accumulate import Machine
from anybatch.engine.auto_size import search_micro_batch_size
from anybatch.engine.feeding import open_batch
from anybatch.errors import BatchSizeError
from anybatch.parallel.world import World


class Sizing:
    """The sizes of a run on one world, and whether the micro-batch size is still to be found.

    Args:
        world: the ranks.
        effective_batch_size: see `Engine`; so are the others.
        micro_batch_size: "auto" on an accelerator is found by a search on the first batch.
        accumulation_steps: micro-batches per rank and step.
        deal: "balanced" or "fixed".

    Raises:
        BatchSizeError: a size below 1, or three that contradict.
    """

    def __init__(
        self,
        world: World,
        *,
        effective_batch_size: int | None,
        micro_batch_size: "int | Literal['auto'] | None",
        accumulation_steps: int | None,
        deal: Deal,
    ) -> None:
        self.sizes = resolve_sizes(
            world_size=world.size,
            effective_batch_size=effective_batch_size,
            micro_batch_size=None if micro_batch_size == "auto" else micro_batch_size,
            accumulation_steps=accumulation_steps,
        )
        self.searches = micro_batch_size == "auto" and accumulation_steps is None and world.device.type != "cpu"
        self.deal = deal
        self._world = world

    def placement(self, *, lockstep: bool) -> Placement:
        """Return how batches are cut and dealt, and which rank this one is."""
        cut = Cut(
            micro_batch_size=self.sizes.micro_batch_size,
            accumulation_steps=self.sizes.accumulation_steps if self.sizes.micro_batch_size is None else None,
            deal=self.deal,
            lockstep=lockstep,
        )
        return Placement(cut, self._world.size, self._world.rank)

    def refuse_larger(self, num_samples: int) -> None:
        """Refuse a batch that holds more than the effective batch size that was named.

        Raises:
            BatchSizeError: with both sizes.
        """
        limit = self.sizes.effective_batch_size
        if limit is not None and num_samples > limit:
            message = (
                f"the batch holds {num_samples} samples over all ranks, but effective_batch_size={limit}"
                f"{self.sizes.product}. Name the same number in both places."
            )
            raise BatchSizeError(message)

    def search(
        self,
        batch: Any,  # noqa: ANN401 (any nested batch)
        machine: Machine,
        modules: nn.Module,
        position: Position,
        *,
        clear: Callable[[], None],
        optimizer_is_new: bool,
    ) -> str:
        """Settle what "auto" is on an accelerator, once, on the first batch; everything else is left as it was.

        Returns:
            The decision, in words.
        """
        self.searches = False
        opened = open_batch(batch, Placement(Cut(), self._world.size, self._world.rank), self._world, position)
        size = search_micro_batch_size(
            machine, opened, self._world, modules, clear=clear, optimizer_is_new=optimizer_is_new
        )
        self.sizes = dataclasses.replace(self.sizes, micro_batch_size=size)
        return f"{size}, by a doubling search on {self._world.device}"

    def take(self, saved: Mapping[str, int | None]) -> str | None:
        """Take a micro-batch size that a search had found before a resume; return that decision in words, if any."""
        if not self.searches or saved["micro_batch_size"] is None:
            return None
        self.searches = False
        self.sizes = dataclasses.replace(self.sizes, micro_batch_size=saved["micro_batch_size"])
        return f"{saved['micro_batch_size']}, as in the checkpoint"

    def changes(self, saved: Mapping[str, int | None]) -> str:
        """Return what is not as it was saved: `"micro_batch_size 16 -> 8"`."""
        own = dataclasses.asdict(self.sizes)
        return ", ".join(f"{name} {saved[name]} -> {value}" for name, value in own.items() if saved[name] != value)
