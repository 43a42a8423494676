"""Measure the speed of a device in a few seconds, by timing each operation of small programs.

The programs are common layers in various sizes. No user code runs.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from anybatch.core.torch_internals import is_in_backward
from anybatch.memory.torch_internals import TorchDispatchMode
from anybatch.memory.trace import Phase
from anybatch.planner.cost.calibration_programs import Program, programs, small_program
from anybatch.planner.cost.operations import operation_of
from anybatch.planner.cost.step_time import Operation, Rates, calibrated

Clock = Callable[[], float]
"""Seconds since any fixed time. On an accelerator, it must synchronize first."""

_NUM_SMALL_STEPS = 15
_MANY_BYTES = 1 << 18
_LEAST_SECONDS = 1e-7
_TIMES_AS_LARGE = 4  # on an accelerator: 30 GFLOP for the largest product
_LONG_SECONDS = 0.05  # longer programs vary less and are measured once
_COMPUTING: tuple[Phase, ...] = ("forward", "backward")


def measure_rates(name: str, clock: Clock, *, device: str = "cpu", num_rounds: int = 3) -> Rates:
    """Return the rates of a device, corrected by measured operations.

    Args:
        name: name of the device.
        clock: the clock to read; `time.thread_time` for one thread of a busy CPU.
        device: torch device to run on.
        num_rounds: number of measurements of each program, of which the median is used.
    """
    kind = torch.device(device).type
    on_cpu = kind == "cpu"
    forked = torch.random.fork_rng([]) if on_cpu else torch.random.fork_rng([device], device_type=kind)
    with forked, torch.device(device):
        torch.manual_seed(0)
        small = small_program()
        watching = _seconds_of_watching(small, clock)
        made = programs(1 if on_cpu else _TIMES_AS_LARGE)
        measured = [_measure(make(), clock, num_rounds, watching) for make in made]
        plain = replace(_plain_rates(name, [row for rows in measured for row in rows]), overlaps=not on_cpu)
        rates = calibrated(plain, measured)
        return _with_host_seconds(rates, small, clock, watching)


def _plain_rates(name: str, measured: list[tuple[Operation, float]]) -> Rates:
    """Return rates that only the fastest operations reach; corrections account for slower ones."""
    types = {one.dtype for one, _ in measured if one.flops}
    peaks = {
        dtype: _high(one.flops / seconds for one, seconds in measured if one.flops and one.dtype == dtype)
        for dtype in types
    }
    moving = [row for row in measured if row[0].kind == "other"]
    return Rates(
        name=name,
        flops_per_second=peaks,
        bytes_per_second=_high(one.num_bytes / seconds for one, seconds in moving if one.num_bytes > _MANY_BYTES),
        # The shortest operation does almost no work, so its time is the launch overhead.
        launch_seconds=min(seconds for _, seconds in moving),
        band=(1.0, 1.0),
    )


def _high(values: Iterable[float]) -> float:
    """Return the 90th percentile."""
    # Not the maximum, since one bad measurement would set the peak of all predictions.
    return statistics.quantiles(values, n=10)[-1]


class _Timing(TorchDispatchMode):
    """Times each operation, or records its cost, as it runs."""

    def __init__(self, clock: Clock, *, notes: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.seconds: list[float] = []
        self.phase: Phase | None = None
        self._clock = clock
        self._notes = notes

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 (torch's type has no name in public)
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (any result)
        """Run and time an operation."""
        del types
        kwargs = kwargs or {}
        begin = self._clock()
        result = func(*args, **kwargs)
        self.seconds.append(self._clock() - begin)
        if self._notes:
            phase = self.phase or ("backward" if is_in_backward() else "forward")
            self.operations.append(operation_of(func, args, kwargs, result, phase=phase))
        return result


def _measure(program: Program, clock: Clock, num_rounds: int, watching: float) -> list[tuple[Operation, float]]:
    """Return the distinct operations of a program with their median seconds."""
    operations = _noted(program)
    rounds = [_timed(program, clock)]
    if sum(rounds[0]) < _LONG_SECONDS:
        # Repeating long programs would take most of the calibration, and they vary little.
        rounds += [_timed(program, clock) for _ in range(num_rounds - 1)]
    alike: dict[tuple[object, ...], tuple[Operation, list[float]]] = {}
    for one, found in zip(operations, zip(*rounds, strict=True), strict=True):
        alike.setdefault((one.name, one.features, one.dtype), (one, []))[1].append(statistics.median(found))
    # Noise can make an operation seem shorter than the overhead of timing it.
    return [(one, max(_LEAST_SECONDS, statistics.median(found) - watching)) for one, found in alike.values()]


def _seconds_of_watching(program: Program, clock: Clock) -> float:
    """Return the overhead of timing an operation: the extra time of a small program if each operation is timed."""
    num_computing = sum(one.phase in _COMPUTING for one in _noted(program))
    rounds = [_timed(program, clock)[:num_computing] for _ in range(_NUM_SMALL_STEPS)]
    watched = statistics.median(map(sum, rounds))
    return max(0.0, watched - statistics.median(_unwatched(program, clock)[0])) / num_computing


def _unwatched(program: Program, clock: Clock) -> tuple[list[float], list[float]]:
    """Return repeated timings of forward and backward, and of the update."""
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
    """Return the rates with host overhead per operation: the time of a small program minus its operations, by phase."""
    rows = list(zip(_noted(program), _timed(program, clock), strict=True))
    phases: dict[Phase, float] = {}
    update: tuple[Phase, ...] = ("update",)
    for names, taken in zip((_COMPUTING, update), _unwatched(program, clock), strict=True):
        part = [max(_LEAST_SECONDS, seconds - watching) for one, seconds in rows if one.phase in names]
        phases |= dict.fromkeys(names, max(0.0, statistics.median(taken) - sum(part)) / max(1, len(part)))
    # The small program neither clips nor reduces; like the update, both loop over parameters.
    phases["clip"] = phases["reduce"] = phases["update"]
    return replace(rates, host_seconds=phases)


def _noted(program: Program) -> list[Operation]:
    """Run a program twice and return the operations of the second step; the first creates optimizer state."""
    _run(program, _Timing(lambda: 0.0, notes=False))
    return _run(program, _Timing(lambda: 0.0, notes=True)).operations


def _timed(program: Program, clock: Clock) -> list[float]:
    """Run a program once and return the seconds of each operation."""
    return _run(program, _Timing(clock, notes=False)).seconds


def _run(program: Program, timing: _Timing) -> _Timing:
    with timing:
        program.compute()
        timing.phase = "update"
        program.update()
        program.clear()
    return timing
