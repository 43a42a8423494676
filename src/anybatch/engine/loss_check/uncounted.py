"""Losses of micro-batches with a count of 0: a sum that belongs to the batch, or a mean over nothing."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from anybatch.core.loss import Loss, LossSum
from anybatch.core.loss_kinds import COUNTED
from anybatch.core.tree import Batch, copied, map_tensors
from anybatch.engine.inputs import Model
from anybatch.engine.side_effects import without_side_effects
from anybatch.errors import LossError
from anybatch.parallel.world import World


class UncountedSums:
    """Detects, once for each term, whether it returns sums, which add up even if a micro-batch has a count of 0.

    For example, a focal loss over anchors is divided by the number of positives, and background alone has a loss too.
    A single forward of the first micro-batch with a count of 0 shows it, without side effects. Terms over targets are
    not checked, since they are 0 without targets.
    """

    def __init__(
        self,
        loss: Loss,
        model: Model,
        modules: nn.Module,
        world: World,
        *,
        autocast: Callable[[], AbstractContextManager[object]],
        lockstep: bool,
    ) -> None:
        self._loss = loss
        self._model = model
        self._modules = modules
        self._world = world
        self._autocast = autocast
        self._lockstep = lockstep
        self._places = {
            # By name: a declaration that was copied or unpickled has equal, not identical items.
            name: place
            for place, (name, term) in enumerate(loss.kind.terms.items())
            if term.items.name == COUNTED.name
        }
        self._adds: dict[str, bool] = {}

    @property
    def names(self) -> Collection[str]:
        """The terms known to return sums."""
        return {name for name, adds in self._adds.items() if adds}

    def is_needed(self, counts: Sequence[tuple[float, ...]]) -> bool:
        """Return whether an unknown term has a count of 0 in one of these micro-batches."""
        return any(not count[place] for place in self._unknown().values() for count in counts)

    def probe(self, micro_batches: Sequence[Batch], counts: Sequence[tuple[float, ...]]) -> None:
        """Run the loss on the first micro-batch with a count of 0.

        Raises:
            LossError: it returned a finite mean there, whose weight is unknown.
        """
        unknown = self._unknown()
        empty = next((n for n, count in enumerate(counts) if not all(count[p] for p in unknown.values())), 0)
        values = self._values(micro_batches[empty]) if micro_batches else {}
        found = {
            name: self._is_sum(name, values[name], counts[empty][place])
            for name, place in unknown.items()
            if name in values and (self._lockstep or not counts[empty][place])
        }
        if self._lockstep:  # ranks must agree, since the result determines how often the model runs
            all_found = self._world.gather_objects(found)
            found = {name: any(rank_found.get(name, False) for rank_found in all_found) for name in unknown}
        self._adds.update(found)

    def _unknown(self) -> dict[str, int]:
        return {name: place for name, place in self._places.items() if name not in self._adds}

    def _values(self, micro_batch: Batch) -> Mapping[str, object]:
        """Return the values of the loss function by term; empty if it fails on this micro-batch."""
        device = self._world.device
        batch = map_tensors(copied(micro_batch), lambda tensor: tensor.to(device))
        try:
            functions = self._loss.functions.values()
            with without_side_effects(self._modules, device, functions=functions), self._autocast():
                output = self._loss.function(self._model, batch)
        except Exception:  # noqa: BLE001 (the step itself raises it, if it runs the micro-batch at all)
            return {}
        if self._loss.kind.named:
            return output if isinstance(output, Mapping) else {}
        return dict.fromkeys(self._loss.names, output)

    def _is_sum(self, name: str, value: object, count: float) -> bool:
        if isinstance(value, LossSum):
            value = value.total
        elif isinstance(value, torch.Tensor) and not value.dim():
            self._refuse_mean(name, float(value.detach()), count)
            return False
        # A mean over nothing, multiplied by its count, is NaN too.
        return isinstance(value, torch.Tensor) and bool(torch.isfinite(value).all())

    def _refuse_mean(self, name: str, value: float, count: float) -> None:
        if count or not value or not math.isfinite(value):
            return
        message = (
            f"the loss function returned {value:.4g} for term {name!r} on a micro-batch with a count of 0. Its divisor "
            "is not the count (max(count, 1)?), so its share in the loss of the effective batch is unknown. Return "
            "ab.LossSum(total, count), with the sum before any division."
        )
        raise LossError(message, term=name, unit=self._loss.kind.terms[name].items.name)
