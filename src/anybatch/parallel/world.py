"""The ranks of a run and their control plane.

Gradients travel in the data group: torch's default process group, or the group of one dimension of a mesh. Counts,
votes and errors travel in a small separate gloo group of all processes, so that no control message can ever pair with a
gradient.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from anybatch.core.geometry import checked_int, refuse_unless
from anybatch.errors import CannotRedoError, RankFailedError, RanksDifferError, WorldError
from anybatch.parallel.control import (
    ControlGroup,
    PendingMessage,
    count_open_worlds,
    end_default_group,
    join_default_group,
)
from anybatch.parallel.launchers import Launch, find_launch
from anybatch.parallel.rank_failure import RankFailure
from anybatch.parallel.roll_call import RollCall

_T = TypeVar("_T")
_NOTHING = nullcontext()
_LEAVES_STEP = "leaves the step too: no rank has updated its parameters, and all may continue with the next batch."


@dataclass(frozen=True, slots=True)
class RankGrid:
    """The assignment of processes to data-parallel ranks.

    Under tensor parallelism the processes of a *model group* run one model together, on the same samples: they are one
    data-parallel rank. The processes that hold the same part of the model, one of each model group, are a *data group*:
    gradients are summed over it. `model_groups` are by rank, and `data_group` is the index of this process's one.

    ```text
                     model group of rank 0    of rank 1
    data group 0     process 0                process 2
    data group 1     process 1                process 3
    ```
    """

    process: int
    mesh: DeviceMesh
    model_groups: tuple[tuple[int, ...], ...]
    data_group: int


@dataclass(frozen=True, slots=True)
class World:
    """The rank of this process, the number of ranks, and the device that it computes on.

    Make it with `World.from_environment()`, as the engine does by default. A world of several ranks that is constructed
    directly has no control group: its other ranks are simulated copies of this one (for planning).

    A world holds a process group with threads and sockets. Close it, with `close` or as a context manager; a dropped
    world ends its own group when it is garbage-collected. Closing does not wait for other ranks.

    Ranks are data-parallel ranks: batches are dealt to them, and gradients summed over them. With a model that several
    processes run together, by tensor parallelism, each such group of processes is one rank, see `of_mesh`.

    Attributes:
        rank: number of this data-parallel rank, from 0.
        size: number of data-parallel ranks.
        device: device of this process.
        device_bytes: memory that every rank may use on its device, the minimum over ranks; None if no device limits it,
            as on a CPU, and until an engine sets it.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    device_bytes: int | None = None
    _control: ControlGroup | None = field(default=None, repr=False, compare=False)
    _grid: RankGrid | None = field(default=None, repr=False, compare=False)
    # Cached, because each step reads them several times.
    _silent: bool = field(init=False, repr=False, compare=False)
    roll_call: RollCall | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse values of a wrong type or size."""
        size = checked_int("size", self.size, error=WorldError)
        if checked_int("rank", self.rank, least=0, error=WorldError) >= size:
            message = f"rank={self.rank} must be below {size=}: ranks are numbered from 0."
            raise WorldError(message)
        refuse_unless(isinstance(self.device, torch.device), "device", self.device, "a torch.device", WorldError)
        if self.device_bytes is not None:
            checked_int("device_bytes", self.device_bytes, least=0, error=WorldError)
        silent = self._control is None or self.num_processes == 1
        object.__setattr__(self, "_silent", silent)
        object.__setattr__(self, "roll_call", None if silent or self._control is None else self._control.roll_call)

    @classmethod
    def from_environment(cls, *, device: "str | torch.device | None" = None, timeout_seconds: float = 600.0) -> "World":
        """Join the ranks that a launcher started, or be the only one.

        An initialised `torch.distributed` is used unchanged. Otherwise RANK and WORLD_SIZE, which torchrun and
        Kubernetes operators set, or the variables of srun or mpirun determine whether there are other ranks, and the
        process group is started.

        Args:
            device: device to compute on; None uses this rank's accelerator if there is one, else the CPU.
            timeout_seconds: how long a rank waits for the others before it gives up.

        Raises:
            WorldError: RANK without WORLD_SIZE or the reverse, values that contradict each other, or mpirun without a
                rendezvous address; or another rank has not come before the timeout.
            RankFailedError: another rank has ended while the ranks connected to each other.
            RanksDifferError: other ranks wait in a call of another world, so they will not make this one.
        """
        launch = find_launch(joined=dist.is_initialized())
        chosen = _own_accelerator(launch) if device is None else torch.device(device)
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

    @classmethod
    def of_mesh(
        cls, mesh: DeviceMesh, *, device: "str | torch.device | None" = None, timeout_seconds: float = 600.0
    ) -> "World":
        """Return the ranks along the data-parallel dimension of a mesh, for a model that is parallel along the others.

        `World.of_mesh(mesh["dp"])`, where `mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "tp"))`: four
        ranks of two processes each. The processes of a rank get the same samples, draw the same random numbers, and
        each sums gradients with the processes that hold the same part of the model. Every process of the run calls it.

        Args:
            mesh: one dimension of a mesh over all processes.
            device: device to compute on; None uses this process's accelerator if there is one, else the CPU.
            timeout_seconds: how long a process waits for the others before it gives up.

        Raises:
            WorldError: the mesh has several dimensions, or processes are left out of it.
        """
        own = data_dimension(mesh)
        everyone = cls.from_environment(device=device, timeout_seconds=timeout_seconds)
        try:
            grid = make_grid(everyone.rank, mesh, everyone.gather_objects(own))
        except BaseException as error:
            everyone.close(error)
            raise
        return replace(everyone, rank=own[0], size=len(own[1]), _grid=grid)

    def close(self, error: BaseException | None = None) -> None:
        """End the control group. A second call does nothing; later calls that need other ranks raise `WorldError`.

        The default group ends too, if `from_environment` has started it and this is the last open world of the process.
        `from_environment` can then join the ranks again. Therefore close worlds at the same point of the program on
        every rank; a world that is only dropped leaves the default group open.

        Args:
            error: the error that ended this rank's work, if any. NCCL ends a group only together with all ranks, so a
                default group that uses it stays open then.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)

    @property
    def connected(self) -> bool:
        """Whether torch.distributed is initialised, as under a launcher, even for a single rank."""
        return self._control is not None or self.size > 1

    @property
    def process(self) -> int:
        """Number of this process in the default group; the rank, unless a rank is several processes."""
        return self.rank if self._grid is None else self._grid.process

    @property
    def num_processes(self) -> int:
        """Number of processes; the number of ranks, unless a rank is several processes."""
        return self.size if self._grid is None else sum(map(len, self._grid.model_groups))

    @property
    def has_model_groups(self) -> bool:
        """Whether several processes run one model together, and wait for each other in its forward and backward."""
        return self.num_processes > self.size

    @property
    def speaks(self) -> bool:
        """Whether this process represents its rank: the first of the rank's processes."""
        return self._grid is None or self.process == self._grid.model_groups[self.rank][0]

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and messages of the whole run: it represents rank 0."""
        return self.rank == 0 and self.speaks

    @property
    def first_process(self) -> int:
        """Number of the process that `is_first` is true for."""
        return self.model_groups[0][0]

    @property
    def group(self) -> "dist.ProcessGroup | None":
        """The data group, over which gradients are summed; None for the default group."""
        return None if self._grid is None else self._grid.mesh.get_group()

    @property
    def mesh(self) -> DeviceMesh | None:
        """The data-parallel dimension of this world; None for a world of all processes."""
        return None if self._grid is None else self._grid.mesh

    @property
    def model_groups(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, its processes, one of each data group: a single one, unless a rank is several processes."""
        return tuple((rank,) for rank in range(self.size)) if self._grid is None else self._grid.model_groups

    @property
    def data_groups(self) -> tuple[tuple[int, ...], ...]:
        """The processes of each data group, in rank order: one group of all, unless a rank is several processes."""
        return tuple(zip(*self.model_groups, strict=True))

    @property
    def data_group(self) -> int:
        """Number of this process's data group."""
        return 0 if self._grid is None else self._grid.data_group

    def process_of(self, rank: int) -> int:
        """Return the process of another rank that is in this process's data group."""
        return self.data_groups[self.data_group][rank]

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank, in rank order. All ranks must pass the same number of numbers.

        If a rank is several processes, the first one's numbers count: all processes get the same.
        """
        return self.of_ranks(self._gather_rows(numbers))

    def gather_objects(self, value: Any) -> list[Any]:  # noqa: ANN401 (small values of any type)
        """Return the values of every rank, in rank order. For small values outside the hot loop: they are pickled.

        If a rank is several processes, the first one's value counts: all processes get the same.
        """
        return self.of_ranks(self.gather_from_processes(value))

    def gather_from_processes(self, value: Any) -> list[Any]:  # noqa: ANN401 (small values of any type)
        """Return the values of every process, in the order of the default group; a rank may be several processes."""
        if self._silent or self._control is None:
            return [value] * self.size
        written = self._control.write(value)
        with self.collective():
            gathered = self._control.gather_bytes(written)
        return [self._control.read(one) for one in gathered]

    def run_on_all_ranks(self, function: Callable[[], Any] | None) -> list[Any]:
        """Run `function` on every rank that has one, and return every rank's result, which is pickled.

        If one raises, all raise: a `RankFailedError` on the ranks whose function did not.
        """
        return self.of_ranks(self.run_on_all_processes(function))

    def run_on_all_processes(self, function: Callable[[], Any] | None) -> list[Any]:
        """Like `run_on_all_ranks`, with the result of every process."""
        value, error = None, None
        try:
            value = None if function is None else function()
        except Exception as caught:  # noqa: BLE001 (raised again once all ranks know)
            error = caught
            if self.roll_call is not None and self.roll_call.is_inside:
                # Others may wait for this rank in a collective of the function.
                self.publish_failure(error, self.roll_call.here.step)
                self.roll_call.fail()
        # A rank that has failed takes part as well, since the others wait for its answer.
        failed = None if error is None else RankFailure.of(error, self.process, None)
        outcomes = self.gather_from_processes((value, failed))
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
        """Start replacing `numbers`, a CPU tensor, by their sum over ranks; wait for the returned message."""
        return None if self._control is None or self._silent else self._control.start_sum(numbers)

    def gather_from(self, function: Callable[[], Sequence[float]], width: int) -> list[list[float]]:
        """Return the `width` numbers that every rank's function returned, in rank order; if one raises, all raise.

        Raise a `RanksDifferError` if processes of one rank return different numbers: they have different samples.
        """
        if self._silent:  # most worlds are one rank, and this runs in every step
            return self.gather_numbers(function())
        numbers, error = [0.0] * width, None
        try:
            numbers = list(function())
        except BaseException as caught:  # noqa: BLE001 (raised again once all ranks know)
            error = caught
            self.publish_failure(error, None if self.roll_call is None else self.roll_call.here.step)
        # A rank that has failed takes part as well, since the others wait for its answer.
        rows = self._gather_rows([float(error is not None), *numbers])
        failed = any(row[0] for row in rows)
        if failed and self.roll_call is not None:
            self.roll_call.num_told += 1
        if error is not None:
            raise error
        if failed:
            raise self.error_of_failed_rank()
        self._refuse_differing(rows)
        return [row[1:] for row in self.of_ranks(rows)]

    def wait(self, work: "dist.Work") -> None:
        """Wait for a collective in the data group; raise a `WorldError` if another rank will not join it."""
        # On an accelerator, this does not block the host: it only orders later work after the collective.
        if self.device.type == "cpu" and self.roll_call is not None:
            self.roll_call.wait(work)
        else:
            work.wait()

    def collective(self) -> AbstractContextManager[None]:
        """Convert torch's error about a broken collective into the `WorldError` of the failed or late rank."""
        return _NOTHING if self._silent else self._named_failures()

    @contextmanager
    def _named_failures(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            # An out-of-memory error of this rank is a RuntimeError of torch too, but breaks no collective; a WorldError
            # already describes the problem between ranks.
            if isinstance(error, (torch.OutOfMemoryError, WorldError)):
                raise
            assert self.roll_call is not None
            raise self.roll_call.cause_of(error) from error

    def publish_failure(self, error: BaseException, step: int | None, *, ahead: bool = False) -> bool:
        """Publish this rank's error for ranks that will only see a broken connection; return whether it is the first.

        `step` is the number of the step in which it failed, from 0 on, None between steps. With `ahead`, the others
        have completed this step, and will wait in the next one.
        """
        # That error repeats the published failure of the first failed rank.
        if self._silent or isinstance(error, RankFailedError):
            return self.published_failure() is None
        try:
            failure = RankFailure.of(error, self.process, step)
            return self.roll_call is None or self.roll_call.publish(failure, ahead=ahead)
        except (RuntimeError, ValueError):  # the store's host ended: no rank is left to inform
            return True

    def fail_between_calls(self, error: BaseException, step: int) -> None:
        """Publish this rank's error in or before a step, once, for ranks that wait for it in the next call."""
        if self.roll_call is not None and self.publish_failure(error, step):
            self.roll_call.fail(ahead=True)

    def published_failure(self) -> RankFailure | None:
        """Return the failure that another rank has published, if any."""
        if self.roll_call is None:
            return None
        try:
            found = self.roll_call.published()
        except (RuntimeError, ValueError):  # the store's host ended
            return None
        return None if found is None or found.rank == self.process else found

    def leave_together(self) -> None:
        """Wait until all processes of this rank leave the effective batch; raise a `CannotRedoError` if one does not.

        It waits for this process in the middle of a forward or backward, where nothing can reach it.
        """
        if not self.has_model_groups or self.roll_call is None:
            return
        if missing := self.roll_call.leave_with(self.model_groups[self.rank]):
            message = (
                f"processes {', '.join(map(str, missing))}, which run the model of this rank together with process "
                f"{self.process}, have not left it, and wait in the middle of a forward or backward"
            )
            raise CannotRedoError(message, rank=self.process)

    def of_ranks(self, rows: Sequence[_T]) -> list[_T]:
        """Return, from the values of all processes, the values of the processes that represent ranks."""
        return list(rows) if self._grid is None else [rows[group[0]] for group in self._grid.model_groups]

    def _gather_rows(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every process."""
        if self._silent or self._control is None:
            return [list(numbers) for _ in range(self.size)]
        with self.collective():
            return [list(memoryview(row).cast("d")) for row in self._control.gather(array("d", numbers).tobytes())]

    def _refuse_differing(self, rows: Sequence[Sequence[float]]) -> None:
        """Refuse numbers that depend on samples but differ between processes of one rank."""
        for group in self.model_groups:
            for process in group:
                if rows[process] != rows[group[0]]:
                    message = (
                        f"processes {group[0]} and {process} run one model together but got different samples: they "
                        f"counted {rows[group[0]][1:]} and {rows[process][1:]}. Give both the same batch: use "
                        "ab.batches, ab.shares(loader, world=engine.world), or a sampler with "
                        "num_replicas=engine.world.size and rank=engine.world.rank."
                    )
                    raise RanksDifferError(message)

    def error_of_failed_rank(self) -> RankFailedError:
        """Return the error to raise on a rank that another rank has informed of its failure."""
        failure = self.published_failure()
        if failure is None:
            return RankFailedError(f"another rank failed. Rank {self.process} {_LEAVES_STEP}")
        where = f"The cause is in the traceback of rank {failure.rank}, even if the launcher names another rank first."
        return failure.error(f"{failure}. Rank {self.process} {_LEAVES_STEP} {where}")

    def enter(self, name: str, step: int | None, *, barrier: bool = False) -> None:
        """Begin a call that every rank must make; see `RollCall.enter`, and then `RollCall.wait_at_barrier`."""
        if self._control is not None and not self._silent:
            self._control.refuse_if_closed()
            self._control.roll_call.enter(name, step, barrier=barrier)


def _own_accelerator(launch: Launch | None) -> torch.device:
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    # Ranks may outnumber accelerators, and then share them.
    local_rank = 0 if launch is None else launch.local_rank
    return torch.device(kind.type, local_rank % torch.accelerator.device_count())


def _backend(device: torch.device, local_size: int) -> str:
    """Return the backend: NCCL needs one GPU per rank; ranks that share one, and CPUs, use gloo."""
    if device.type == "cuda" and local_size <= torch.cuda.device_count():
        return "cuda:nccl,cpu:gloo"
    return "gloo"


def data_dimension(mesh: DeviceMesh) -> tuple[int, tuple[int, ...]]:
    """Return this process's index in the one dimension of a mesh, and the processes along it."""
    if mesh.ndim != 1:
        message = (
            f"the mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names or '(without names)'}, but batches are dealt "
            "over one of them. Pass that one: World.of_mesh(mesh['dp'])."
        )
        raise WorldError(message)
    return mesh.get_local_rank(), tuple(dist.get_process_group_ranks(mesh.get_group()))


def make_grid(process: int, mesh: DeviceMesh, told: Sequence[tuple[int, tuple[int, ...]]]) -> RankGrid:
    """Return the grid of a run, from the results of `data_dimension` on each process of the default group, in order.

    Raises a `WorldError` if the processes' data-parallel dimensions are not slices of one mesh over all of them.
    """
    # Data groups are ordered by their first process, and processes within them by rank.
    lines = sorted({line for _, line in told})
    stands = [told[process] == (rank, line) for line in lines for rank, process in enumerate(line)]
    if len({len(line) for line in lines}) > 1 or len(stands) != len(told) or not all(stands):
        listed = "; ".join(str(list(line)) for line in lines)
        message = (
            f"the data-parallel dimensions of the {len(told)} ranks are not slices of one mesh over all ranks: "
            f"{listed}. Make one mesh (init_device_mesh('cuda', (num_replicas, num_parts), mesh_dim_names=('dp', "
            "'tp'))), and pass the same dimension of it on every rank."
        )
        raise WorldError(message)
    return RankGrid(process, mesh, tuple(zip(*lines, strict=True)), lines.index(told[process][1]))
