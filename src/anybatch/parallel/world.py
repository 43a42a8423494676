"""The ranks of a run and their control plane. The only file that reads the launcher's environment.

Gradients travel in torch's default process group, the data group. Counts, votes and errors travel in a small gloo
group beside it, so that no control message can ever pair with a gradient.
"""

import os
import pickle
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from anybatch.errors import RankFailedError, WorldError
from anybatch.parallel.process_groups import (
    ControlGroup,
    PendingMessage,
    count_open_worlds,
    end_default_group,
    join_default_group,
)
from anybatch.parallel.rank_failure import RankFailure
from anybatch.parallel.roll_call import RollCall


@dataclass(frozen=True, slots=True)
class World:
    """Which rank this process is, of how many, and on which device it computes.

    Make it with `World.from_environment()`; the engine does so when it is given none. A world of several ranks that is
    made by hand has no control group: its other ranks are imagined, and say whatever this one says (for planning).

    A world holds a process group with threads and sockets. Close it, with `close` or as a context manager; one that is
    dropped ends its own group when it is collected. Closing waits for no other rank.

    Attributes:
        rank: number of this process, from 0.
        size: number of ranks.
        device: where this rank computes.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    _control: ControlGroup | None = field(default=None, repr=False, compare=False)

    @classmethod
    def from_environment(cls, *, device: "str | torch.device | None" = None, timeout_seconds: float = 600.0) -> "World":
        """Join the ranks that a launcher started, or be the only one.

        An initialised `torch.distributed` is used as it is. Otherwise RANK and WORLD_SIZE, which torchrun, SLURM
        wrappers and Kubernetes operators set, say whether there are other ranks, and the process group is started.

        Args:
            device: where to compute; None takes this rank's accelerator where there is one, else the CPU.
            timeout_seconds: how long a rank waits for the others before it gives up.

        Raises:
            WorldError: RANK without WORLD_SIZE or the reverse, or values that do not fit together.
        """
        _check_launcher()
        chosen = _own_accelerator() if device is None else torch.device(device)
        if chosen.type == "cuda":
            # Before the process group is started: NCCL takes the current device of the process.
            torch.cuda.set_device(chosen)
        if not dist.is_initialized() and not has_launcher():
            return cls(device=chosen)
        timeout = timedelta(seconds=timeout_seconds)
        if not dist.is_initialized():
            join_default_group(_backend(chosen), timeout)
        count_open_worlds(+1)
        return cls(dist.get_rank(), dist.get_world_size(), chosen, ControlGroup(timeout))

    def close(self, error: BaseException | None = None) -> None:
        """End the control group. Doing it again changes nothing; whatever needs other ranks raises `WorldError` then.

        The default group ends too, if `from_environment` has started it and this is the last open world of the process.
        After that `from_environment` joins the ranks once more. Close worlds at the same place of the program on every
        rank, therefore; a world that is only dropped leaves the default group as it is.

        Args:
            error: what has ended the work of this rank, if anything. NCCL ends a group only together with all ranks,
                so a default group that uses it is left alone then.
        """
        # A second call ends here: the number of open worlds has been reduced already.
        if self._control is None or not self._control.close():
            return
        try:
            num_open = count_open_worlds(-1)
        except (RuntimeError, ValueError):  # the store went with its rank, or the user has destroyed the groups
            return
        if num_open == 0 and (error is None or dist.get_backend() == "gloo"):
            end_default_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)

    @property
    def connected(self) -> bool:
        """Whether torch.distributed is there: with a launcher, also for a single rank."""
        return self._control is not None or self.size > 1

    @property
    def _silent(self) -> bool:
        """Whether there is no other process to talk to: this is the only rank, or the other ranks are imagined."""
        return self._control is None or self.size == 1

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return what every rank passed, in rank order. All ranks must pass equally many numbers."""
        if self._silent:
            return [list(numbers) for _ in range(self.size)]
        row = array("d", numbers).tobytes()
        return [_plain(gathered, torch.float64).tolist() for gathered in self._gather_bytes(row, len(row))]

    def gather_objects(self, value: Any) -> list[Any]:  # noqa: ANN401 (small values of any type)
        """Return what every rank passed, in rank order. For small values outside the hot loop: they are pickled."""
        if self._silent:
            return [value] * self.size
        # torch's all_gather_object needs numpy, which torch does not bring along.
        written = pickle.dumps(value)
        sizes = [int(row[0]) for row in self.gather_numbers([float(len(written))])]
        gathered = self._gather_bytes(written, max(sizes))
        # What our own ranks have written is as trustworthy as this process.
        return [pickle.loads(row[:size]) for row, size in zip(gathered, sizes, strict=True)]  # noqa: S301

    def run_on_all_ranks(self, function: Callable[[], Any] | None) -> list[Any]:
        """Run `function` on every rank that has one, and return what every rank's returned; if one raises, all raise.

        Args:
            function: what it returns is pickled, so keep it small; None for a rank that only waits for the others.

        Raises:
            RankFailedError: on the ranks whose function did not raise.
        """
        value, error = None, None
        try:
            value = None if function is None else function()
        except Exception as caught:  # noqa: BLE001 (raised again once all ranks know)
            error = caught
        # A rank that has failed takes part as well, since the others wait for its answer.
        outcomes = self.gather_objects((value, None if error is None else RankFailure.of(error, self.rank, None)))
        failures = [failure for _, failure in outcomes if failure is not None]
        if failures and self.roll_call is not None:
            self.roll_call.num_told += 1
        if error is not None:
            raise error
        for failure in failures:
            message = f"rank {failure.rank} failed: {failure.error_type}: {failure.reason}"
            raise failure.error(message)
        return [value for value, _ in outcomes]

    def start_sum(self, numbers: torch.Tensor) -> PendingMessage | None:
        """Start replacing `numbers`, a CPU tensor, by their sum over ranks; wait for what is returned."""
        return None if self._control is None or self.size == 1 else self._control.start_sum(numbers)

    def gather_from(self, function: Callable[[], Sequence[float]], width: int) -> list[list[float]]:
        """Return the `width` numbers that every rank's function returned, in rank order; if one raises, all raise.

        Raises:
            RankFailedError: on the ranks whose function did not raise.
        """
        numbers, error = [0.0] * width, None
        try:
            numbers = list(function())
        except BaseException as caught:  # noqa: BLE001 (raised again once all ranks know)
            error = caught
            self.publish_failure(error, None if self.roll_call is None else self.roll_call.here.step)
        # A rank that has failed takes part as well, since the others wait for its answer.
        rows = self.gather_numbers([float(error is not None), *numbers])
        failed = [rank for rank, row in enumerate(rows) if row[0]]
        if failed and self.roll_call is not None:
            self.roll_call.num_told += 1
        if error is not None:
            raise error
        if failed:
            raise self.left_by_failure()
        return [row[1:] for row in rows]

    @property
    def roll_call(self) -> RollCall | None:
        """Where the ranks stand; None where there is no other process to talk to."""
        return None if self._control is None or self.size == 1 else self._control.roll_call

    def wait(self, work: "dist.Work") -> None:
        """Wait for a collective in the data group.

        Raises:
            RankFailedError, RanksDifferError: another rank is not going to join it.
        """
        # Waiting for an accelerator's collective only orders it before what comes next there.
        if self.device.type == "cpu" and self.roll_call is not None:
            self.roll_call.wait(work)
        else:
            work.wait()

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Turn what torch raises when a collective breaks into the error of the rank that broke it.

        Raises:
            RankFailedError: another rank ended while this one was waiting for it.
        """
        try:
            yield
        except RuntimeError as error:
            # Memory that ran out on this rank is a RuntimeError for torch too, and breaks no collective; a WorldError
            # says already what is wrong between the ranks.
            if self._silent or isinstance(error, (torch.OutOfMemoryError, WorldError)):
                raise
            raise self.first_failure(error) from error

    def publish_failure(self, error: BaseException, step: int | None, *, ahead: bool = False) -> bool:
        """Publish this rank's error for ranks that will only see a broken connection. The first one published stays.

        Args:
            error: what has ended the work of this rank.
            step: number of the step it failed in, from 0 on; None for what failed between steps.
            ahead: the others have come through this step, and will wait in the next one.

        Returns:
            Whether it is up to this rank to inform the user: no other rank has published an error before.
        """
        # That error repeats what the rank that failed first has published.
        if self._silent or isinstance(error, RankFailedError):
            return self.published_failure() is None
        try:
            return self.roll_call is None or self.roll_call.publish(RankFailure.of(error, self.rank, step), ahead=ahead)
        except (RuntimeError, ValueError):  # the store went with its rank: there is no rank left to inform
            return True

    def published_failure(self) -> RankFailure | None:
        """Return what another rank has published about its error; None if nothing."""
        if self.roll_call is None:
            return None
        try:
            found = self.roll_call.published()
        except (RuntimeError, ValueError):  # the store went with its rank
            return None
        return None if found is None or found.rank == self.rank else found

    def _gather_bytes(self, written: bytes, size: int) -> list[bytearray]:
        """Return what every rank has written, each filled up to `size` bytes.

        Tensors are made around plain bytes: what watches, or limits, the memory of tensors is for training, and must
        not come between two ranks that talk to each other.
        """
        assert self._control is not None
        rows = [bytearray(size) for _ in range(self.size)]
        with self.collective():
            mine = _plain(bytearray(written.ljust(size, b"\0")), torch.uint8)
            self._control.gather([_plain(row, torch.uint8) for row in rows], mine)
        return rows

    def left_by_failure(self) -> RankFailedError:
        """Return the error to raise on a rank that another one has told, in time, that it has failed."""
        failure = self.published_failure()
        message = (
            f"{failure or 'another rank failed'}. Rank {self.rank} stops too: nothing has been updated, and all ranks "
            "are in the same place."
        )
        return RankFailedError(message) if failure is None else failure.error(message)

    def enter(self, name: str, step: int | None, *, meets: bool = False) -> None:
        """Begin what every rank has to call; see `RollCall.enter` and `RollCall.meet`, which comes next.

        Args:
            name: of what was called, such as "engine.save".
            step: number of the engine's step; None between steps.
            meets: wait for all ranks before anything else.

        Raises:
            WorldError: the world is closed.
        """
        if self._control is not None and self.size > 1:
            _ = self._control.group  # raises where the world is closed
            self._control.roll_call.enter(name, step, meets=meets)

    def first_failure(self, error: BaseException) -> RankFailedError:
        """Return the error to raise on a rank whose collective broke: it carries the first failed rank's own error."""
        failure = self.published_failure()
        reason = failure or (
            "another rank ended without a word: it was killed, or its loop was over before this one's (loaders of "
            "different lengths: wrap them in ab.shares), or the rank that keeps the store is gone"
        )
        message = f"{reason}. Rank {self.rank} stops too: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        return RankFailedError(message) if failure is None else failure.error(message)


def _plain(memory: bytearray, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that shows these bytes."""
    return torch.frombuffer(memory, dtype=dtype)


def has_launcher() -> bool:
    """Return whether a launcher, such as torchrun, has started this process as one of its ranks."""
    return "RANK" in os.environ


def _check_launcher() -> None:
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if dist.is_initialized() or (rank is None and size is None):
        return
    if rank is None or size is None:
        message = (
            f"RANK={rank} and WORLD_SIZE={size}: a launcher sets both. "
            "Start with torchrun, or unset both to run as a single rank."
        )
        raise WorldError(message)
    if not 0 <= int(rank) < int(size):
        message = f"RANK={rank} must be at least 0 and below WORLD_SIZE={size}. Check the launcher's settings."
        raise WorldError(message)


def _own_accelerator() -> torch.device:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    # Ranks may share an accelerator where there are more of them than of these.
    return torch.device(kind.type, local_rank % torch.accelerator.device_count())


def _backend(device: torch.device) -> str:
    """NCCL wants a GPU of its own per rank; ranks that share one, and CPUs, use gloo."""
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda" and local_size <= torch.cuda.device_count():
        return "cuda:nccl,cpu:gloo"
    return "gloo"
