"""Measure the speed of a device in a few seconds, by timing each operation of small programs.

The programs are common layers in various sizes. No user code runs. The result is a few figures: two peaks, a bandwidth,
the time to launch an operation, the host's time, and the share of the roofline that each kind of operation reaches.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from anybatch.core.torch_internals import is_in_backward
from anybatch.memory.torch_internals import TorchDispatchMode
from anybatch.memory.trace import Phase
from anybatch.planner.operations import operation_of
from anybatch.planner.step_time import CALIBRATED_BAND, Operation, Rates

Clock = Callable[[], float]
"""Seconds since any fixed time. On an accelerator, it must synchronize first."""
Row = tuple[Operation, float]
"""An operation and its seconds."""

_NUM_SMALL_STEPS = 15
_MANY_BYTES = 1 << 18
_LEAST_SECONDS = 1e-7
_TIMES_AS_LARGE = 4  # on an accelerator: 30 GFLOP for the largest product
_LONG_SECONDS = 0.05  # longer programs vary less and are measured once
_COMPUTING: tuple[Phase, ...] = ("forward", "backward")
_LEARNING_RATE = 1e-9  # weights hardly change, so that nothing underflows, which is slow on CPUs
_COLUMNS = 1000  # in the tensors of elementwise programs

_LINEARS = ((24, 96, 40), (48, 1500, 1500), (200, 320, 320), (200, 320, 1300), (1500, 192, 700), (250, 900, 2200))
"""(rows, inputs, outputs)."""
_CONVOLUTIONS = (
    *((12, 3, 24, 3, 1, 28, 1), (12, 24, 48, 3, 2, 28, 1), (24, 48, 48, 3, 1, 14, 1), (48, 12, 12, 3, 1, 24, 1)),
    *((20, 3, 48, 7, 2, 56, 1), (8, 128, 256, 1, 1, 14, 1), (8, 48, 48, 3, 1, 28, 48), (6, 280, 280, 5, 1, 12, 280)),
    *((5, 640, 640, 3, 1, 7, 640), (6, 60, 60, 3, 1, 28, 5)),
)
"""(images, channels in, channels out, kernel, stride, height and width, groups)."""
_ATTENTIONS = ((3, 96, 192, 4), (2, 160, 320, 5), (40, 72, 96, 3))
"""(sequences, length, width, heads)."""
_HEADS = ((60, 96, 700), (1500, 96, 900), (600, 200, 6000))
"""(tokens, width, vocabulary)."""
_POINTWISE_ROWS = (4, 64, 1000, 10_000)
"""Sizes of the elementwise programs, in thousands of elements; every tensor of the largest is new memory."""
_PARAMETERS = ((2, 64), (2, 3000), (16, 100_000), (3, 1_200_000))
"""(tensors, numbers in each) to update; too many for a CPU cache, as in a real network."""


@dataclass(frozen=True, slots=True)
class Program:
    """A step of a small program: forward, backward, update."""

    loss: Callable[[], Tensor]
    parameters: tuple[Tensor, ...] = ()
    optimizer: torch.optim.Optimizer | None = None

    def compute(self) -> None:
        """Run forward and backward."""
        self.loss().backward()

    def update(self) -> None:
        """Run the update."""
        if self.optimizer is not None:
            self.optimizer.step()

    def clear(self) -> None:
        """Set all gradients to None."""
        for parameter in self.parameters:
            parameter.grad = None


def measure_rates(name: str, clock: Clock, *, device: str = "cpu", num_rounds: int = 3) -> Rates:
    """Return the measured rates of a device.

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
        rows = [row for make in made for row in _measure(make(), clock, num_rounds, watching)]
        rates = rates_from(name, rows, overlaps=not on_cpu)
        return replace(rates, host_seconds=_host_seconds(small, clock, watching))


def rates_from(name: str, rows: Iterable[Row], *, overlaps: bool = False) -> Rates:
    """Return the rates of a device from timed operations.

    Only the fastest operations reach the peaks. The efficiency of a kind is the mean of its operations, weighted by the
    square root of their rooflines: a compromise between many small ones and few large ones, which exceed the cache.
    """
    rows = list(rows)
    moving = [row for row in rows if row[0].kind == "other"]
    types = {one.dtype for one, _ in rows if one.flops}
    rates = Rates(
        name=name,
        flops_per_second={
            dtype: _high(one.flops / seconds for one, seconds in rows if one.flops and one.dtype == dtype)
            for dtype in types
        },
        bytes_per_second=_high(one.num_bytes / seconds for one, seconds in moving if one.num_bytes > _MANY_BYTES),
        # The shortest operation does almost no work, so its time is the launch overhead.
        launch_seconds=min(seconds for _, seconds in moving),
        overlaps=overlaps,
        is_calibrated=True,
        band=CALIBRATED_BAND,
    )
    sums: dict[Any, tuple[float, float]] = {}
    for one, seconds in rows:
        roofline, (reached, weights) = rates.roofline_seconds(one), sums.get(one.kind, (0.0, 0.0))
        weight = math.sqrt(roofline)
        sums[one.kind] = reached + weight * roofline / seconds, weights + weight
    return replace(rates, efficiency={kind: reached / weights for kind, (reached, weights) in sums.items()})


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


def _measure(program: Program, clock: Clock, num_rounds: int, watching: float) -> list[Row]:
    """Return the operations of a program with their median seconds."""
    operations = _noted(program)
    rounds = [_timed(program, clock)]
    if sum(rounds[0]) < _LONG_SECONDS:
        # Repeating long programs would take most of the calibration, and they vary little.
        rounds += [_timed(program, clock) for _ in range(num_rounds - 1)]
    medians = map(statistics.median, zip(*rounds, strict=True))
    # Noise can make an operation seem shorter than the overhead of timing it.
    return [(one, max(_LEAST_SECONDS, found - watching)) for one, found in zip(operations, medians, strict=True)]


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


def _host_seconds(program: Program, clock: Clock, watching: float) -> dict[Phase, float]:
    """Return the host's time per operation by phase: the time of a small program minus that of its operations."""
    rows = list(zip(_noted(program), _timed(program, clock), strict=True))
    phases: dict[Phase, float] = {}
    update: tuple[Phase, ...] = ("update",)
    for names, taken in zip((_COMPUTING, update), _unwatched(program, clock), strict=True):
        part = [max(_LEAST_SECONDS, seconds - watching) for one, seconds in rows if one.phase in names]
        phases |= dict.fromkeys(names, max(0.0, statistics.median(taken) - sum(part)) / max(1, len(part)))
    # The small program neither clips nor reduces; like the update, both loop over parameters.
    return {**phases, "clip": phases["update"], "reduce": phases["update"]}


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


def programs(times: int = 1) -> list[Callable[[], Program]]:
    """Return functions that create the programs on torch's default device."""
    linears = [(rows * times**2, inputs * times, outputs * times) for rows, inputs, outputs in _LINEARS]
    convolutions = [_enlarged(sizes, times) for sizes in _CONVOLUTIONS]
    attentions = [tuple(times * length for length in sizes) for sizes in _ATTENTIONS]
    heads = [tuple(times * length for length in sizes) for sizes in _HEADS]
    rows = [times**2 * num for num in _POINTWISE_ROWS[:-1]] + [times * _POINTWISE_ROWS[-1]]
    layers: list[Callable[[], Program]] = [
        *(partial(_linear, *sizes) for sizes in linears),
        *(partial(_convolution, *sizes) for sizes in convolutions),
        *(partial(_attention, *sizes) for sizes in attentions),
        *(partial(_head, *sizes) for sizes in heads),
    ]
    return [
        *layers,
        *(partial(_autocast, make) for make in layers[1::3]),
        *(partial(_pointwise, num) for num in rows),
        *(partial(_pointwise, num, torch.bfloat16) for num in rows[1:3]),
        *(partial(_update, make, num, times**2 * length) for make in _OPTIMIZERS for num, length in _PARAMETERS),
    ]


def _enlarged(sizes: tuple[int, ...], times: int) -> tuple[int, ...]:
    images, inputs, outputs, kernel, stride, side, groups = sizes
    # A depthwise convolution keeps one group for each channel.
    groups = groups * times if groups == inputs else groups
    return images * times, inputs * times, outputs * times, kernel, stride, side, groups


def small_program() -> Program:
    """Return a program of tiny operations, dominated by launch overhead."""
    layers = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    return replace(_of_module(model, torch.randn(4, 16)), optimizer=optimizer)


def _of_module(module: nn.Module, x: Tensor) -> Program:
    x = x.requires_grad_()  # as in the middle of a network

    def loss() -> Tensor:
        out: Tensor = module(x)
        return out.sum()

    return Program(loss, (x, *module.parameters()))


def _linear(rows: int, inputs: int, outputs: int) -> Program:
    there, back = nn.Linear(inputs, outputs), nn.Linear(outputs, inputs, bias=False)
    return _of_module(nn.Sequential(there, nn.GELU(), back, nn.ReLU()), torch.randn(rows, inputs))


def _convolution(*sizes: int) -> Program:
    images, inputs, outputs, kernel, stride, side, groups = sizes
    convolution = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=groups > 1)
    module = nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))
    return _of_module(module, torch.randn(images, inputs, side, side))


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inwards = nn.Linear(width, 3 * width)
        self.outwards = nn.Linear(width, width)
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inwards(self.norm(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = x + self.outwards(mixed.transpose(1, 2).flatten(2))
        return out


def _attention(num_sequences: int, length: int, width: int, num_heads: int) -> Program:
    return _of_module(_Attention(width, num_heads), torch.randn(num_sequences, length, width))


def _head(num_tokens: int, width: int, vocabulary: int) -> Program:
    table, head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
    tokens = torch.randint(0, vocabulary, (num_tokens,))
    both = nn.Sequential(table, head)
    return Program(lambda: functional.cross_entropy(both(tokens), tokens), tuple(both.parameters()))


def _pointwise(rows: int, dtype: torch.dtype = torch.float32) -> Program:
    smooth = (nn.GELU(), nn.Tanh(), nn.SiLU(), nn.Sigmoid())
    module = nn.Sequential(*smooth, nn.Dropout(0.1), nn.LayerNorm(_COLUMNS, dtype=dtype), nn.ReLU())
    return _of_module(module, torch.randn(rows, _COLUMNS, dtype=dtype))


def _autocast(make: Callable[[], Program]) -> Program:
    """Return a program with its forward under bf16 autocast, like the engine's."""
    program, device = make(), torch.get_default_device().type

    def loss() -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return program.loss()

    return replace(program, loss=loss)


_OPTIMIZERS: tuple[Callable[[list[Tensor]], torch.optim.Optimizer], ...] = (
    partial(torch.optim.AdamW, lr=_LEARNING_RATE, foreach=False),
    partial(torch.optim.AdamW, lr=_LEARNING_RATE, foreach=True),
    partial(torch.optim.AdamW, lr=_LEARNING_RATE, fused=True),
    partial(torch.optim.SGD, lr=_LEARNING_RATE, momentum=0.9),
)


def _update(make: Callable[[list[Tensor]], torch.optim.Optimizer], num_tensors: int, num: int) -> Program:
    tensors = [torch.randn(num).requires_grad_() for _ in range(num_tensors)]
    return Program(lambda: torch.stack([one.sum() for one in tensors]).sum(), tuple(tensors), make(tensors))
