"""Measures how fast the device at hand is: small programs, operation by operation, in a second or three.

The programs are layers as every network has them, at sizes of their own. Nothing of the user's is run.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch.core.cost_model import Operation, Rates, calibrated
from anybatch.core.memory_model import Phase
from anybatch.memory.calibration_programs import Program, programs, small_program
from anybatch.memory.operations import operation_of

Clock = Callable[[], float]
"""Seconds since whenever. For an accelerator it has to wait until the device is done."""

_NO_TASK = -1
_NUM_SMALL_STEPS = 15
_MANY_BYTES = 1 << 18
_LEAST_SECONDS = 1e-7
_LONG_SECONDS = 0.15  # what takes so long is measured once: it is less disturbed
_COMPUTING: tuple[Phase, ...] = ("forward", "backward")


def measure_rates(name: str, clock: Clock, *, device: str = "cpu", num_rounds: int = 3) -> Rates:
    """Return the rates of a device, corrected by what its operations were measured to take.

    Args:
        name: of the device.
        clock: what to read; `time.thread_time` for one thread of a CPU that others use too.
        device: where to run, as torch calls it.
        num_rounds: how often each program is measured, after one round that is not; medians are taken.
    """
    with torch.random.fork_rng(enabled=device == "cpu"):
        torch.manual_seed(0)
        small = small_program(device)
        watching = _seconds_of_watching(small, clock)
        measured = [row for program in programs(device) for row in _measure(program, clock, num_rounds, watching)]
        return _with_host_seconds(calibrated(_plain_rates(name, measured), measured), small, clock, watching)


def _plain_rates(name: str, measured: list[tuple[Operation, float]]) -> Rates:
    """Return rates that only the best operations reach; what others fall short by is in the corrections."""
    types = {one.stored_as for one, _ in measured if one.flops}
    peaks = {
        stored_as: _high(one.flops / seconds for one, seconds in measured if one.flops and one.stored_as == stored_as)
        for stored_as in types
    }
    moving = [row for row in measured if row[0].kind == "other"]
    return Rates(
        name=name,
        flops_per_second=peaks,
        bytes_per_second=_high(one.num_bytes / seconds for one, seconds in moving if one.num_bytes > _MANY_BYTES),
        launch_seconds=min(seconds for _, seconds in moving),
        band=(1.0, 1.0),
    )


def _high(values: Iterable[float]) -> float:
    """Return the value that nine of ten do not reach."""
    return statistics.quantiles(values, n=10)[-1]


class _Timing(TorchDispatchMode):
    """Times each operation where it is run."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: list[tuple[Operation, float]] = []
        self.phase: Phase | None = None
        self._clock = clock

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 (torch's type has no name in public)
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (whatever the operation returns)
        """Run an operation between two looks at the clock."""
        del types
        kwargs = kwargs or {}
        begin = self._clock()
        result = func(*args, **kwargs)
        seconds = self._clock() - begin
        is_forward = torch._C._current_graph_task_id() == _NO_TASK  # noqa: SLF001 (the ledger asks the same)
        phase = self.phase or ("forward" if is_forward else "backward")
        self.rows.append((operation_of(func, args, kwargs, result, phase=phase), seconds))
        return result


def _measure(program: Program, clock: Clock, num_rounds: int, watching: float) -> list[tuple[Operation, float]]:
    """Return the operations of a program and the median seconds of each; those that are alike count once."""
    begin = clock()
    _timed(program, clock)
    is_long = clock() - begin > _LONG_SECONDS
    rounds = [_timed(program, clock) for _ in range(1 if is_long else num_rounds)]
    alike: dict[tuple[object, ...], tuple[Operation, list[float]]] = {}
    for row in zip(*rounds, strict=True):
        one = row[0][0]
        seconds = statistics.median(elapsed for _, elapsed in row)
        alike.setdefault((one.name, one.features, one.stored_as), (one, []))[1].append(seconds)
    return [(one, max(_LEAST_SECONDS, statistics.median(found) - watching)) for one, found in alike.values()]


def _seconds_of_watching(program: Program, clock: Clock) -> float:
    """Return what it costs to time an operation: how much longer those of a small program take one by one."""
    _timed(program, clock)
    rounds = [[row for row in _timed(program, clock) if row[0].phase in _COMPUTING] for _ in range(_NUM_SMALL_STEPS)]
    watched = statistics.median(sum(seconds for _, seconds in rows) for rows in rounds)
    return max(0.0, watched - statistics.median(_unwatched(program, clock)[0])) / len(rounds[0])


def _unwatched(program: Program, clock: Clock) -> tuple[list[float], list[float]]:
    """Return how long forward and backward take, and the update, some times over."""
    computing, updating = [], []
    for _ in range(_NUM_SMALL_STEPS):
        begin = clock()
        program.compute()
        middle = clock()
        program.update()
        updating.append(clock() - middle)
        computing.append(middle - begin)
        program.clear()
    return computing, updating


def _with_host_seconds(rates: Rates, program: Program, clock: Clock, watching: float) -> Rates:
    """Return the rates with what a small program takes beyond its operations, spread over them by phase."""
    rows = _timed(program, clock)
    phases: dict[Phase, float] = {}
    update: tuple[Phase, ...] = ("update",)
    for names, taken in zip((_COMPUTING, update), _unwatched(program, clock), strict=True):
        part = [max(_LEAST_SECONDS, seconds - watching) for one, seconds in rows if one.phase in names]
        phases |= dict.fromkeys(names, max(0.0, statistics.median(taken) - sum(part)) / max(1, len(part)))
    phases["clip"] = phases["reduce"] = phases["update"]
    return replace(rates, host_seconds=phases)


def _timed(program: Program, clock: Clock) -> list[tuple[Operation, float]]:
    """Run a program once, and return its operations with the seconds of each."""
    timing = _Timing(clock)
    with timing:
        program.compute()
        timing.phase = "update"
        program.update()
        program.clear()
    return timing.rows
