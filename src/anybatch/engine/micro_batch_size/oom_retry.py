"""Out of memory in the middle of a step: agree, go back to its beginning, and run it again in smaller micro-batches.

Redoing the failed micro-batch alone would be wrong without a word: a backward that fails half-way has added to some
gradients already. So everything a step has changed goes back, on all ranks, and the whole effective batch is run again,
as if it had been cut so from the start.
"""

import functools
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Protocol, TypeVar

import torch
from torch import nn

from anybatch.core.buffers import BufferKeeper
from anybatch.core.records import PhaseName
from anybatch.engine.accumulation.accumulate import Randomness
from anybatch.engine.accumulation.planned_batch import Workload
from anybatch.engine.batch_norm.runner import Normalisation
from anybatch.engine.holdings import Holdings
from anybatch.engine.micro_batch_size.backoff import Resizing
from anybatch.engine.micro_batch_size.oom_halving import let_go, make_room
from anybatch.engine.telemetry.notifier import Watch
from anybatch.errors import CannotRedoError, DoesNotFitError, HalfUpdatedError
from anybatch.parallel.step_agreement import AbandonedError
from anybatch.parallel.strategy import Capabilities, Prepared
from anybatch.parallel.world import World

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shortage:
    """Memory ran out on this rank.

    Attributes:
        phase: where in the step.
        message: what torch said.
    """

    phase: PhaseName
    message: str


class GivesUp(Protocol):
    """Runs the micro-batches of an effective batch, and knows how to leave in the middle."""

    def give_up(self) -> None:
        """Serve the collectives that other ranks wait in, and tell them; see `Prepared.give_up`."""
        ...


class Recovery(Generic[T]):
    """Runs an effective batch until it fits.

    Args:
        modules: everything that a forward may change.
        randomness: goes back too.
        world: the ranks.
        resizing: finds the smaller size.
        watch: is told.
        holdings: what is held beside activations, for the error where nothing helps.
        clear: clears gradients.
        cannot: why a step cannot be begun anew, a clause; None if it can.
    """

    def __init__(
        self,
        *,
        modules: nn.Module,
        randomness: Randomness,
        world: World,
        resizing: Resizing,
        watch: Watch,
        holdings: Holdings,
        clear: Callable[[], None],
        cannot: str | None,
    ) -> None:
        self.phase: PhaseName = "forward_backward"
        self.too_large: tuple[int, ...] = ()
        self._buffers = BufferKeeper(modules)
        self._randomness = randomness
        self._world = world
        self._resizing = resizing
        self._watch = watch
        self._holdings = holdings
        self._clear = clear
        self._cannot = cannot
        self._step = 0
        said = f"a step that runs out of memory ends the run, because {cannot}"
        self.decisions = {} if cannot is None else {"out_of_memory": said}
        # Around clipping, where nothing depends on the cut any more, and the update, which cannot be taken back.
        self.clipping = _TooLate(functools.partial(self._explain, "clip"))
        self.updating = _TooLate(functools.partial(self._explain, "update"))

    def run(
        self,
        step: int,
        plan: Callable[[], Workload],
        run: Callable[[Workload], T],
        executor: GivesUp,
        decisions: MutableMapping[str, str],
    ) -> tuple[Workload, T]:
        """Return what `run` makes of the effective batch in the first cut that fits on every rank, and that cut.

        Args:
            step: its number.
            plan: cuts the effective batch with the sizes of the moment; `too_large` is not empty from the second time
                on. All ranks plan equally often.
            run: adds up the gradients; sets `phase`.
            executor: what it uses.
            decisions: the size that has been found is noted here.

        Raises:
            DoesNotFitError: the smallest micro-batches do not fit on this rank; parameters are as before.
            RankFailedError: they do not fit on another one.
            CannotRedoError: the ranks cannot begin this step anew.
        """
        self.too_large, self._step = (), step
        self._buffers.keep()
        self._resizing.begin(step, self._watch, decisions)
        while True:
            self.phase = "forward_backward"
            shortage: Shortage | None = None
            workload = plan()
            try:
                return workload, run(workload)
            except AbandonedError as error:
                let_go(error)
            except torch.OutOfMemoryError as error:
                shortage = Shortage(self.phase, str(error))
                let_go(error)
            # Outside of the handler: the failed frames, and all that they held, are gone.
            cut = workload.opened.plan
            del workload
            make_room(self._world.device)
            if shortage is not None:
                self._give_up(executor, shortage, step)
            self._go_back()
            before, after = self._resizing.shrink(cut, step, decisions)
            self.too_large += (before,)
            phase, message = (None, None) if shortage is None else (shortage.phase, shortage.message)
            self._watch.out_of_memory(phase, message, before, after)
            if after is None:
                self._refuse(shortage, before, step)

    def _explain(self, phase: PhaseName, error: torch.OutOfMemoryError) -> None:
        """Say what it means that memory ran out where nothing is begun anew.

        Raises:
            DoesNotFitError: before the update; parameters are as before.
            HalfUpdatedError: inside of it.
        """
        said = f"out of memory in phase {phase!r} of step {self._step} (counted from 0): {_first_line(error)}"
        if phase == "update":
            message = (
                f"{said} The update was under way, so parameters and optimizer may be half updated, and running on "
                f"would train on with them. Go back to the last checkpoint (engine.load). {self._holdings.remedy()}"
            )
            raise HalfUpdatedError(message) from error
        self._buffers.restore()
        message = f"{said} Parameters and optimizer are as before the step. {self._holdings.remedy()}"
        raise DoesNotFitError(message) from error

    def _give_up(self, executor: GivesUp, shortage: Shortage, step: int) -> None:
        reason = self._cannot
        if reason is None:
            try:
                executor.give_up()
            except CannotRedoError as error:
                reason = str(error)
        if reason is not None:
            message = (
                f"out of memory in step {step} (counted from 0), which cannot be begun anew in smaller micro-batches, "
                f"because {reason}. Resume from the last checkpoint with a smaller micro_batch_size. "
                f"torch says: {shortage.message}"
            )
            raise CannotRedoError(message)

    def _go_back(self) -> None:
        """Undo what the step has done."""
        self._clear()
        self._buffers.restore()
        self._randomness.rewind()

    def _refuse(self, shortage: Shortage | None, before: int, step: int) -> None:
        """Raise, on all ranks.

        Raises:
            DoesNotFitError: on ranks that ran out of memory.
            RankFailedError: on the others.
        """

        def refuse() -> None:
            if shortage is None:
                return
            message = (
                f"out of memory in phase {shortage.phase!r} of step {step} (counted from 0), at micro-batches of "
                f"{before} sample{'s' * (before != 1)}, and {self._resizing.why_not_smaller}. Parameters and optimizer "
                f"are as before the step. {self._holdings.remedy()} torch says: {shortage.message}"
            )
            raise DoesNotFitError(message)

        self._world.together(refuse)


def why_not_anew(prepared: Prepared, capabilities: Capabilities, norms: Normalisation, world: World) -> str | None:
    """Return why a step cannot be begun anew once a rank has run out of memory in it, a clause; None if it can."""
    if prepared.give_up is None:
        return f"strategy {capabilities.name!r} cannot leave a step half-way (strategy='all_reduce' can)"
    if world.size > 1 and norms.joins_ranks:
        return (
            "BatchNorm layers that are normalised over ranks wait for each other in the middle of each forward (under "
            "norms='keep' or Ghost(group_size) they do not)"
        )
    return None


class _TooLate:
    """A context that explains an out-of-memory error. A class, because a generator takes several times as long."""

    def __init__(self, explain: Callable[[torch.OutOfMemoryError], None]) -> None:
        self._explain = explain

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            self._explain(error)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
