"""Workspaces of CPU kernels, which are freed before the kernel returns: each kernel is run once, small, and measured.

oneDNN computes convolutions in layouts of its own, so that a convolution holds copies of its input, weight and output
which no operation returns. torch's CPU allocator reports them to a profiler. Each operation of a list that is met in a
trace is run on zeros, at two numbers of samples. Its memory at each moment is linear in that number, and its peak is
the maximum of these lines.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

import torch

from anybatch.core.geometry import ceil_div
from anybatch.memory.torch_internals import tree_leaves, tree_map_only
from anybatch.planner.cost.operations import operation_of
from anybatch.planner.torch_internals import cpu_allocations

MOST_BYTES = 128 << 20
_ENOUGH_SAMPLES = 32
"""With less than 16 samples torch leaves some convolutions to other kernels, and threads have nothing to share."""
# Bounds the arithmetic of one measurement, so that a plan does not wait for large kernels.
_ENOUGH_FLOPS = 1_000_000_000
_FEW = 2
"""A single sample is special."""

SAMPLES_FIRST: Mapping[str, int] = {
    "convolution": 1,
    "convolution_backward": 2,
    "upsample_nearest1d": 1,
    "upsample_nearest2d": 1,
    "upsample_nearest3d": 1,
    "_upsample_nearest_exact2d": 1,
    "upsample_linear1d": 1,
    "upsample_bilinear2d": 1,
    "_upsample_bilinear2d_aa": 1,
    "upsample_bicubic2d": 1,
    "upsample_trilinear3d": 1,
    "im2col": 1,
    "_scaled_dot_product_flash_attention_for_cpu": 3,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 6,
}
"""Operations to measure, and how many of their first arguments have samples along the first axis. Masks may, too."""


@dataclass(frozen=True, slots=True)
class LinearBytes:
    """A number of bytes that grows with the number of samples, `constant + slope n`."""

    constant: int
    slope: int

    def at(self, num_samples: int) -> int:
        """Return the bytes at a number of samples."""
        return self.constant + self.slope * num_samples


class KernelMemory:
    """Measures the workspaces of kernels, each once; equal layers, and other numbers of samples, reuse the result.

    Args:
        most_bytes: largest memory that measuring one kernel may take: its arguments, results and workspaces.
    """

    def __init__(self, *, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._answers: dict[_KernelCall, tuple[LinearBytes, ...]] = {}
        self._too_large: dict[_KernelCall, int] = {}
        self._refused: set[_KernelCall] = set()

    @property
    def num_asked(self) -> int:
        """Number of kernels that were measured."""
        return len(self._answers) - len(self._too_large) - self.num_refused

    @property
    def num_refused(self) -> int:
        """Number of kernels that would not run on zeros of few samples."""
        return len(self._refused)

    @property
    def too_large(self) -> tuple[tuple[str, int], ...]:
        """The operations that were not measured, as that would take too much memory, the largest first.

        With each the bytes that a sample's arguments and results take.
        """
        rows = [(str(call.func), per_sample) for call, per_sample in self._too_large.items()]
        return tuple(sorted(rows, key=lambda row: row[1], reverse=True))

    @property
    def num_threads(self) -> tuple[int, ...]:
        """The numbers of threads that kernels were measured with, rising."""
        return tuple(sorted({call.num_threads for call in self._answers}))

    def moments(
        self,
        func: Any,  # noqa: ANN401 (torch's type has no name in public)
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,  # noqa: ANN401 (whatever the operation returned)
    ) -> tuple[int, ...]:
        """Return the bytes that a kernel holds at the moments that can be its peak, its results included.

        Args:
            func: the operation, as a dispatch mode gets it.
            args: its arguments; tensors may be without data.
            kwargs: the same, by name.
            result: its result.

        Returns:
            Empty for an operation that is not on the list, and for one without workspaces.
        """
        call, num_samples = _kernel_call(func, args, kwargs)
        if call is None:
            return ()
        answer = self._answers.get(call)
        if answer is None:
            per_sample = ceil_div(call.num_bytes(num_samples) + _bytes_of(result), num_samples)
            flops = operation_of(func, args, kwargs, result, phase="forward").flops
            answer = self._answers[call] = self._ask(call, per_sample, ceil_div(flops, num_samples))
        return tuple(line.at(num_samples) for line in answer)

    def _ask(self, call: "_KernelCall", per_sample: int, flops: int) -> tuple[LinearBytes, ...]:
        """Return the memory of a kernel, as lines; none if it cannot be measured."""
        # A convolution may copy everything into another layout, hence twice.
        if 2 * _FEW * per_sample > self.most_bytes:
            self._too_large[call] = per_sample
            return ()
        try:
            return self._run(call, flops)
        except Exception:  # noqa: BLE001 (whatever it is: the step to be planned has run without data)
            self._refused.add(call)
            return ()

    def _run(self, call: "_KernelCall", flops: int) -> tuple[LinearBytes, ...]:
        """Return the memory of a kernel that fits with a few samples."""
        first = call.held_bytes(_FEW)
        growth = ceil_div(call.num_bytes(_FEW) + max(first, default=0), _FEW)
        enough = max(_ENOUGH_SAMPLES, call.num_threads)
        # As many samples as fit the memory and time limits: kernels choose another algorithm for small batches.
        high = min(enough, self.most_bytes // growth, max(_FEW + 1, _ENOUGH_FLOPS // max(1, flops)))
        if high <= _FEW:
            # Nothing larger fits the limits, so the line has to go through a single sample after all.
            return lines_through(call.held_bytes(1), 1, first, _FEW)
        low = max(_FEW, high // 2)
        held = first if low == _FEW else call.held_bytes(low)
        return lines_through(held, low, call.held_bytes(high), high)


def lines_through(held_a: Sequence[int], n_a: int, held_b: Sequence[int], n_b: int) -> tuple[LinearBytes, ...]:
    """Return the lines whose maximum is the peak of a kernel.

    Each moment is a line. Where the kernel does something else at `n_b`, its highest moments are taken for one and the
    same. Moments that are the highest at no number of samples are left out, and so is what is allocated at the end:
    these are the results.

    Args:
        held_a: bytes allocated at `n_a` samples, after each allocation and each free of the kernel.
        n_a: fewer samples.
        held_b: the same at `n_b` samples.
        n_b: more samples.
    """
    if not held_a or not held_b:
        return ()
    moments = [(max(held_a), max(held_b))]
    if len(held_a) == len(held_b):
        moments = list(zip(held_a, held_b, strict=True))
    results = _line(held_a[-1], n_a, held_b[-1], n_b)
    lines = [results, *(_line(a, n_a, b, n_b) for a, b in moments)]
    return tuple(line for line in _highest(lines) if line != results)


def _line(bytes_a: int, n_a: int, bytes_b: int, n_b: int) -> LinearBytes:
    """Return the line through both points; where it would fall or start below zero, one through the second point."""
    slope = max(0, ceil_div(bytes_b - bytes_a, n_b - n_a))
    # A line below zero at no samples is no size; the steepest one through the origin stands in for it.
    if slope * n_b > bytes_b:
        return LinearBytes(0, ceil_div(bytes_b, n_b))
    return LinearBytes(bytes_b - slope * n_b, slope)


def _highest(lines: Sequence[LinearBytes]) -> list[LinearBytes]:
    """Return the lines that are the highest somewhere from one sample on, the least steep first."""
    # The upper envelope of the lines, walked from one sample upwards.
    highest = [max(lines, key=lambda line: (line.at(1), line.slope))]
    while True:
        last = highest[-1]
        steeper = [line for line in lines if line.slope > last.slope]
        if not steeper:
            return highest
        # Exact: with rounded quotients, lines that meet in one point could change places.
        meeting = {line: Fraction(last.constant - line.constant, line.slope - last.slope) for line in steeper}
        highest.append(min(steeper, key=lambda line: (meeting[line], -line.slope)))


def held_bytes(run: Callable[[], object]) -> tuple[int, ...]:
    """Return the bytes that this thread has allocated on the CPU during a call, after each change.

    The last entry is the size of the result. torch's newer profiler tells the same, and writes to the terminal.
    """
    return tuple(accumulate(cpu_allocations(run)))


@dataclass(frozen=True, slots=True)
class _Shape:
    """A tensor argument; the length of its first axis is left out if it is the number of samples."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    samples_first: bool

    def num_elements(self, num_samples: int) -> int:
        """Return how many elements it spans in memory."""
        size = self._size(num_samples)
        return 1 + sum((n - 1) * step for n, step in zip(size, self.stride, strict=True)) if all(size) else 0

    def made(self, num_samples: int) -> torch.Tensor:
        """Return zeros of this shape."""
        zeros = torch.zeros(self.num_elements(num_samples), dtype=self.dtype, device="cpu")
        return zeros.as_strided(self._size(num_samples), self.stride)

    def _size(self, num_samples: int) -> tuple[int, ...]:
        return (num_samples, *self.size) if self.samples_first else self.size


@dataclass(frozen=True, slots=True)
class _KernelCall:
    """A kernel, and everything its workspaces depend on except the number of samples."""

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    num_threads: int

    def num_bytes(self, num_samples: int) -> int:
        """Return the bytes of its arguments."""
        shapes = [one for one in tree_leaves((self.args, dict(self.kwargs))) if isinstance(one, _Shape)]
        return sum(one.num_elements(num_samples) * one.dtype.itemsize for one in shapes)

    def held_bytes(self, num_samples: int) -> tuple[int, ...]:
        """Run the kernel; return the bytes that it had allocated after each of its allocations and frees.

        It runs in a thread of its own, where no mode, no autocast and no profiler of another caller is entered.
        """
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._run, num_samples).result()

    def _run(self, num_samples: int) -> tuple[int, ...]:
        torch.set_num_threads(self.num_threads)  # oneDNN asks OpenMP, which has another answer for a new thread
        shapes = (self.args, dict(self.kwargs))
        args, kwargs = tree_map_only(_Shape, lambda one: one.made(num_samples), shapes)
        with torch.no_grad():
            return held_bytes(lambda: self.func(*args, **kwargs))


def _kernel_call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[_KernelCall | None, int]:  # noqa: ANN401 (torch's type)
    """Return a kernel and its number of samples; None for one that cannot be measured."""
    count = SAMPLES_FIRST.get(func.overloadpacket.__name__) if func.namespace == "aten" else None
    if count is None or not all(isinstance(one, torch.Tensor) and one.dim() for one in args[:count]):
        return None, 0
    lengths = {len(one) for one in args[:count]}
    if len(lengths) != 1 or not all(map(_is_outermost, args[:count])) or 0 in lengths:
        return None, 0
    (num_samples,) = lengths

    def shape(tensor: torch.Tensor, *, samples_first: bool) -> _Shape:
        size = tuple(tensor.shape[1:] if samples_first else tensor.shape)
        return _Shape(size, tensor.stride(), tensor.dtype, samples_first)

    first = [shape(one, samples_first=True) for one in args[:count]]
    rest = tree_map_only(torch.Tensor, lambda one: shape(one, samples_first=False), args[count:])
    named = {name: _named(one, args[0], shape) for name, one in kwargs.items()}
    # Sorted, so that the order in which arguments are named makes no other key.
    call = _KernelCall(func, _hashable((*first, *rest)), _hashable(sorted(named.items())), torch.get_num_threads())
    return call, num_samples


def _named(value: Any, first: torch.Tensor, shape: Callable[..., _Shape]) -> Any:  # noqa: ANN401 (any argument)
    """Return a named argument, which is a mask if it is a tensor: it has samples, or it is the same for all."""
    if not isinstance(value, torch.Tensor):
        return value
    return shape(value, samples_first=value.dim() == first.dim() and len(value) == len(first) and _is_outermost(value))


def _is_outermost(tensor: torch.Tensor) -> bool:
    """Return whether samples follow one after the other, or are all the same one."""
    rest = 1 + sum((n - 1) * step for n, step in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    return tensor.stride(0) == 0 or tensor.stride(0) >= rest


def _hashable(value: Any) -> Any:  # noqa: ANN401 (arguments of any operation)
    """Return arguments with tuples in the place of lists."""
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def _bytes_of(result: object) -> int:
    return sum(one.nbytes for one in tree_leaves(result) if isinstance(one, torch.Tensor))
