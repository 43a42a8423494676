"""Trial runs of micro-batches of the first effective batch: whether they fit, and their time."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from anybatch.core.geometry import ceil_div
from anybatch.core.loss import factors_of, unit_counts
from anybatch.core.randomness import BatchKey
from anybatch.core.splitting import Unit
from anybatch.core.tree import Batch, copied
from anybatch.engine.accumulation.accumulate import LoopContext, MicroBatch, Sums
from anybatch.engine.accumulation.planned_batch import to_device
from anybatch.engine.two_pass import run_trial
from anybatch.parallel.strategy import Turn

Execute = Callable[[LoopContext, Iterable[tuple[MicroBatch, Batch]]], Sums]
"""Adds up the gradient of micro-batches."""
# Neither first nor last: a last micro-batch would start a reduction, and other ranks may run fewer.
_NEITHER = Turn(first=False, last=False)


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of a trial run."""

    outcome: Literal["ran", "out_of_memory", "failed"]
    seconds: tuple[float, ...] = ()
    error: str = ""


class TrialRuns:
    """Runs the first micro-batches of this rank's share, of any size, without a reduction or an update.

    Gradients are cleared before and after; the caller restores buffers, attributes and random numbers.
    """

    def __init__(
        self,
        context: LoopContext,
        modules: nn.Module,
        pieces: Callable[[int, int], Iterable[Batch]],
        num_samples: int,
        *,
        num_in_batch: int,
        num_in_lockstep: int | None = None,
        execute: Execute,
        clear: Callable[[], None],
        device: torch.device,
        clock: Callable[[], float],
    ) -> None:
        self._marks: list[float] = []
        self._context = dataclasses.replace(
            context, before=(lambda _: self._mark(),), after=(lambda _item, _terms: self._mark(),), audience=None
        )
        self._modules = modules
        self._pieces = pieces
        self.num_samples = num_samples
        self._num_in_batch = num_in_batch
        self._num_in_lockstep = num_in_lockstep
        self._execute = execute
        self.clear = clear
        self._device = device
        self.clock = clock

    def run(self, size: int, most: int) -> TrialResult:
        """Run the first micro-batches of `size`, at most `most`; a share without samples runs none."""
        self.clear()
        self._context.strategy.place_gradients()
        self._marks.clear()
        outcome: Literal["out_of_memory", "failed"]
        error = ""
        try:
            self._run(size, most)
            return TrialResult(
                "ran", tuple(end - start for start, end in zip(self._marks[::2], self._marks[1::2], strict=True))
            )
        except torch.OutOfMemoryError:
            outcome = "out_of_memory"
        except Exception as caught:  # noqa: BLE001 (the step itself raises it)
            outcome, error = "failed", f"{type(caught).__name__}: {caught}"
        # Outside the handlers, so that the failed frames and their tensors are freed before the next run.
        self.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return TrialResult(outcome, (), error)

    def _run(self, size: int, most: int) -> None:
        lined_up = []
        pieces = to_device(iter(self._pieces(size, most)), self._device)
        # Not strict: there are at most `most` pieces.
        for start, piece in zip(range(0, self.num_samples, size), pieces, strict=False):
            stop = min(start + size, self.num_samples)
            # Divided by the micro-batch's count: without an update, the count of the whole batch is not needed.
            counts = unit_counts(self._context.loss, piece, stop - start)
            if self._num_in_lockstep is not None:  # all ranks run all of them; the loss of a trial does not matter
                counts = tuple(count or 1.0 for count in counts)
            factors = factors_of(self._context.loss, counts, counts, 1.0)
            if any(counts):
                # The key is arbitrary: no result depends on it.
                key = BatchKey(0, 0, range(stop))
                lined_up.append((MicroBatch(Unit(0, start, stop), factors, _NEITHER, 0, key), piece))
        if self._num_in_lockstep is not None:  # the rank with the largest share may have one more
            missing = min(most, ceil_div(self._num_in_lockstep, size)) - len(lined_up)
            last, batch = lined_up[-1]
            lined_up += [(last, copied(batch)) for _ in range(missing)]
        with self._context.randomness:
            if self._context.loss.kind.encode is None:
                self._execute(self._context, lined_up)
            else:
                run_trial(self._context, self._modules, lined_up, self._num_in_batch)

    def _mark(self) -> None:
        """Record the time after the device has finished all work."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        self._marks.append(self.clock())
