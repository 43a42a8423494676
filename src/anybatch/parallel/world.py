"""The ranks of a run and their control plane.

Gradients are sent in torch's default process group. Counts, votes and errors are sent in a small separate gloo group
(the control plane), so that a control message can never be received as a gradient.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from anybatch.core.geometry import checked_int, require
from anybatch.errors import RankFailedError, WorldError
from anybatch.parallel.call_tracker import CallTracker
from anybatch.parallel.control import (
    ControlGroup,
    Message,
    count_open_worlds,
    end_default_group,
    join_default_group,
)
from anybatch.parallel.launchers import Launch, find_launch
from anybatch.parallel.rank_failure import RankFailure

_NULL_CONTEXT = nullcontext()
_STOPS_STEP = "stops this step too: no rank has updated its parameters. Start all ranks again from a checkpoint."


@dataclass(frozen=True, slots=True)
class World:
    """The rank of this process, the number of ranks, and the device that it computes on.

    Create it with `World.from_environment()`, as the engine does by default. A world of several ranks that is created
    directly has no control group: its other ranks are simulated copies of this rank (for planning).

    The control group of a world has threads and sockets. Close the world, with `close` or as a context manager;
    otherwise the group ends when the world is garbage-collected. Closing does not wait for other ranks.

    Attributes:
        rank: number of this rank, from 0.
        size: number of ranks.
        device: device of this process.
        device_bytes: memory in bytes that each rank may use on its device, the minimum over ranks; None on a device
            without a limit, such as a CPU, and before an engine sets it.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    device_bytes: int | None = None
    _control: ControlGroup | None = field(default=None, repr=False, compare=False)
    # Detects ranks that are in different calls; None without other real ranks. Cached, since each step reads it often.
    call_tracker: CallTracker | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse values of a wrong type or size."""
        size = checked_int("size", self.size, error=WorldError)
        if checked_int("rank", self.rank, minimum=0, error=WorldError) >= size:
            message = f"rank={self.rank} must be below {size=}: ranks are numbered from 0."
            raise WorldError(message)
        require(isinstance(self.device, torch.device), "device", self.device, "a torch.device", WorldError)
        if self.device_bytes is not None:
            checked_int("device_bytes", self.device_bytes, minimum=0, error=WorldError)
        call_tracker = None if self._control is None or size == 1 else self._control.call_tracker
        object.__setattr__(self, "call_tracker", call_tracker)

    @classmethod
    def from_environment(cls, *, device: "str | torch.device | None" = None, timeout_seconds: float = 600.0) -> "World":
        """Join the ranks that a launcher started; without a launcher, return a world of one rank.

        An initialised `torch.distributed` is used unchanged. Otherwise RANK and WORLD_SIZE, which torchrun and
        Kubernetes operators set, or the variables of srun or mpirun determine whether there are other ranks, and the
        process group is started.

        Args:
            device: device to compute on; None uses this rank's accelerator if there is one, else the CPU.
            timeout_seconds: how long a rank waits for other ranks before it raises an error.

        Raises:
            WorldError: RANK without WORLD_SIZE or the reverse, values that contradict each other, or mpirun without a
                rendezvous address; or another rank has not joined before the timeout.
            RankFailedError: another rank has ended while the ranks connected to each other.
            RanksDifferError: the other ranks wait in a call of a different World, and will never join this world.
        """
        launch = find_launch(joined=dist.is_initialized())
        chosen = _default_device(launch) if device is None else torch.device(device)
        if chosen.type == "cuda":
            # Before the process group starts: NCCL uses the current device of the process.
            torch.cuda.set_device(chosen)
        timeout = timedelta(seconds=timeout_seconds)
        if not dist.is_initialized():
            if launch is None:
                return cls(device=chosen)
            join_default_group(_backend(chosen, launch.local_size), launch, timeout)
        is_ours = count_open_worlds(0) is not None
        control = ControlGroup(timeout, owns_default_group=is_ours)
        count_open_worlds(+1)
        return cls(dist.get_rank(), dist.get_world_size(), chosen, _control=control)

    def close(self, error: BaseException | None = None) -> None:
        """End the control group. A second call does nothing; later calls that need other ranks raise `WorldError`.

        The default group ends too, if `from_environment` has started it and this is the last open world of the process.
        `from_environment` can then join the ranks again. So close worlds at the same point of the program on every
        rank. A world that is garbage-collected without `close` leaves the default group open.

        Args:
            error: the error that ended this rank's work, if any. NCCL ends a group only together with all ranks, so
                after an error a default group that uses NCCL stays open.
        """
        # A second call ends here: the number of open worlds has been reduced already.
        if self._control is None or not self._control.close():
            return
        try:
            num_open = count_open_worlds(-1)
        except (RuntimeError, ValueError):  # the store's host ended, or the user has destroyed the groups
            return
        if num_open == 0 and (error is None or dist.get_backend() == "gloo"):
            end_default_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)

    @property
    def connected(self) -> bool:
        """Whether torch.distributed is initialised, as under a launcher, even for a single rank."""
        return self._control is not None or self.size > 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the files and messages of the run."""
        return self.rank == 0

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank, in rank order. All ranks must pass equally many numbers."""
        if self.call_tracker is None or self._control is None:
            return [list(numbers) for _ in range(self.size)]
        return [list(memoryview(row).cast("d")) for row in self._control.gather(array("d", numbers).tobytes())]

    def gather_objects(self, value: Any) -> list[Any]:  # noqa: ANN401 (small values of any type)
        """Return the values of every rank, in rank order. For small values outside the hot loop: they are pickled."""
        if self.call_tracker is None or self._control is None:
            return [value] * self.size
        return self._control.gather_objects(value)

    def run_on_all_ranks(self, function: Callable[[], Any] | None) -> list[Any]:
        """Run `function` on every rank that has one, and return the results of all ranks; results are pickled.

        If a function raises an error, its rank raises this error, and all other ranks raise a `RankFailedError`.
        """
        value, error = None, None
        try:
            value = None if function is None else function()
        except Exception as caught:  # noqa: BLE001 (raised again after all ranks are informed)
            error = caught
            if self.call_tracker is not None and self.call_tracker.is_inside:
                # Other ranks may wait for this rank in a collective of the function.
                self.publish_failure(error, self.call_tracker.position.step)
                self.call_tracker.fail()
        # A rank that has failed takes part too, since other ranks wait for its message.
        failed = None if error is None else RankFailure.of(error, self.rank, None)
        outcomes = self.gather_objects((value, failed))
        failures = [failure for _, failure in outcomes if failure is not None]
        if error is not None:
            raise error
        for failure in failures:
            message = f"rank {failure.rank} failed: {failure.error_type}: {failure.reason}"
            raise failure.error(message)
        return [value for value, _ in outcomes]

    def start_gather(self, row: bytes) -> Message | None:
        """Start a gather of `row`, equally long on all ranks; return its message, or None on one rank."""
        return None if self._control is None or self.call_tracker is None else self._control.start(row)

    def finish_gather(self, message: Message) -> list[bytes]:
        """Return the bytes of every rank, in rank order."""
        assert self._control is not None
        return self._control.finish(message)

    def gather_from(self, function: Callable[[], Sequence[float]], width: int) -> list[list[float]]:
        """Return the `width` numbers of each rank's function, in rank order; if one function raises, all ranks do."""
        if self.call_tracker is None:  # most worlds are one rank, and this runs in every step
            return self.gather_numbers(function())
        numbers, error = [0.0] * width, None
        try:
            numbers = list(function())
        except BaseException as caught:  # noqa: BLE001 (raised again after all ranks are informed)
            error = caught
            self.publish_failure(error, self.call_tracker.position.step)
        # A rank that has failed takes part too, since other ranks wait for its message.
        rows = self.gather_numbers([float(error is not None), *numbers])
        if error is not None:
            raise error
        if any(row[0] for row in rows):
            raise self._error_of_failed_rank()
        return [row[1:] for row in rows]

    def wait(self, work: "dist.Work") -> None:
        """Wait for a collective in the default group; raise a `WorldError` if another rank will not join in."""
        # On an accelerator, this does not block the host: it only orders later work after the collective.
        if self.device.type == "cpu" and self.call_tracker is not None:
            self.call_tracker.wait(work)
        else:
            work.wait()

    def collective(self) -> AbstractContextManager[None]:
        """Convert torch's error about a broken collective into a `WorldError` about the failed or late rank."""
        return _NULL_CONTEXT if self.call_tracker is None else self._failures_explained()

    @contextmanager
    def _failures_explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            # An out-of-memory error of this rank is a RuntimeError of torch too, but breaks no collective; a WorldError
            # already describes the problem between ranks.
            if isinstance(error, (torch.OutOfMemoryError, WorldError)):
                raise
            assert self.call_tracker is not None
            raise self.call_tracker.cause_of(error) from error

    def publish_failure(self, error: BaseException, step: int | None, *, ahead: bool = False) -> bool:
        """Publish this rank's error for ranks that will only see a broken connection; return whether it is the first.

        `step` is the number of the step in which this rank failed, from 0 on; None between steps. Set `ahead` if the
        other ranks have already completed this step, and will wait for this rank in the next step.
        """
        # A `RankFailedError` only repeats the published failure of the first failed rank.
        if self.call_tracker is None or isinstance(error, RankFailedError):
            return self.published_failure() is None
        try:
            return self.call_tracker.publish(RankFailure.of(error, self.rank, step), ahead=ahead)
        except (RuntimeError, ValueError):  # the store's host ended: no rank is left to inform
            return True

    def fail_between_calls(self, error: BaseException, step: int) -> None:
        """Publish an error that this rank raised in or before a step, for ranks that wait for this rank in a call."""
        if self.call_tracker is not None and self.publish_failure(error, step):
            self.call_tracker.fail(ahead=True)

    def published_failure(self) -> RankFailure | None:
        """Return the failure that another rank has published, if any."""
        failure = None if self.call_tracker is None else self.call_tracker.published()
        return None if failure is None or failure.rank == self.rank else failure

    def _error_of_failed_rank(self) -> RankFailedError:
        """Return the error to raise on a rank that another rank has informed of its failure."""
        failure = self.published_failure()
        if failure is None:
            return RankFailedError(f"another rank failed. Rank {self.rank} {_STOPS_STEP}")
        where = f"The cause is in the traceback of rank {failure.rank}, even if the launcher names another rank first."
        return failure.error(f"{failure}. Rank {self.rank} {_STOPS_STEP} {where}")


def _default_device(launch: Launch | None) -> torch.device:
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    # Ranks may outnumber accelerators, and then share them.
    local_rank = 0 if launch is None else launch.local_rank
    return torch.device(kind.type, local_rank % torch.accelerator.device_count())


def _backend(device: torch.device, local_size: int) -> str:
    """Return the backend: NCCL if each rank has a GPU; gloo on CPUs, or if ranks share a GPU."""
    if device.type == "cuda" and local_size <= torch.cuda.device_count():
        return "cuda:nccl,cpu:gloo"
    return "gloo"
