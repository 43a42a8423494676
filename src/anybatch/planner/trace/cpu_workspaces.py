"""What a CPU kernel takes for itself and gives back before it returns: the kernel is run once, small, and watched.

oneDNN computes convolutions in layouts of its own, so that a convolution holds copies of its input, weight and output
which no operation returns. torch's CPU allocator hands them out, and tells a profiler so. Each operation of a list that
is met in a trace is run on zeros, at two numbers of samples. What it holds at each of its moments is a line in the
number of samples, and the most it ever holds is the maximum of these lines.
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
"""Operations to ask, and how many of their first arguments have samples along the first axis. Masks may, too."""


@dataclass(frozen=True, slots=True)
class LinearBytes:
    """A number of bytes that grows with the number of samples, `constant + slope n`."""

    constant: int
    slope: int

    def at(self, num_samples: int) -> int:
        """Return the bytes at a number of samples."""
        return self.constant + self.slope * num_samples


class KernelMemory:
    """Asks kernels what they take for themselves, each once: layers that are alike, and other sizes, have its answer.

    Args:
        most_bytes: what asking one kernel may take: its arguments, its results and what it takes for itself.
    """

    def __init__(self, *, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._answers: dict[_Question, tuple[LinearBytes, ...]] = {}
        self._too_large: dict[_Question, int] = {}
        self._refused: set[_Question] = set()

    @property
    def num_asked(self) -> int:
        """Return how many kernels were asked."""
        return len(self._answers) - len(self._too_large) - self.num_refused

    @property
    def num_refused(self) -> int:
        """Return how many kernels would not run on zeros of few samples."""
        return len(self._refused)

    @property
    def too_large(self) -> tuple[tuple[str, int], ...]:
        """Return the operations that were not asked, as that would take too much, the largest first.

        With each the bytes that a sample's arguments and results take.
        """
        rows = [(str(question.func), per_sample) for question, per_sample in self._too_large.items()]
        return tuple(sorted(rows, key=lambda row: row[1], reverse=True))

    @property
    def num_threads(self) -> tuple[int, ...]:
        """Return with how many threads kernels were asked, in order."""
        return tuple(sorted({question.num_threads for question in self._answers}))

    def moments(
        self,
        func: Any,  # noqa: ANN401 (torch's type has no name in public)
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,  # noqa: ANN401 (whatever the operation returned)
    ) -> tuple[int, ...]:
        """Return the bytes that a kernel holds at the moments that can be its highest, its results among them.

        Args:
            func: the operation, as a dispatch mode is given it.
            args: its arguments; tensors may be without data.
            kwargs: the same, by name.
            result: what it returned.

        Returns:
            Nothing for an operation that is not on the list, and for one that takes nothing for itself.
        """
        question, num_samples = _question(func, args, kwargs)
        if question is None:
            return ()
        answer = self._answers.get(question)
        if answer is None:
            per_sample = ceil_div(question.num_bytes(num_samples) + _bytes_of(result), num_samples)
            flops = operation_of(func, args, kwargs, result, phase="forward").flops
            answer = self._answers[question] = self._ask(question, per_sample, ceil_div(flops, num_samples))
        return tuple(line.at(num_samples) for line in answer)

    def _ask(self, question: "_Question", per_sample: int, flops: int) -> tuple[LinearBytes, ...]:
        """Return what a kernel holds, as lines; none if that cannot be asked for."""
        if 2 * _FEW * per_sample > self.most_bytes:  # a copy of everything, in another layout
            self._too_large[question] = per_sample
            return ()
        try:
            return self._run(question, flops)
        except Exception:  # noqa: BLE001 (whatever it is: the step to be planned has run without data)
            self._refused.add(question)
            return ()

    def _run(self, question: "_Question", flops: int) -> tuple[LinearBytes, ...]:
        """Return what a kernel holds that fits with a few samples."""
        first = question.held_bytes(_FEW)
        growth = ceil_div(question.num_bytes(_FEW) + max(first, default=0), _FEW)
        enough = max(_ENOUGH_SAMPLES, question.num_threads)
        high = min(enough, self.most_bytes // growth, max(_FEW + 1, _ENOUGH_FLOPS // max(1, flops)))
        if high <= _FEW:
            return lines_through(question.held_bytes(1), 1, first, _FEW)
        low = max(_FEW, high // 2)
        held = first if low == _FEW else question.held_bytes(low)
        return lines_through(held, low, question.held_bytes(high), high)


def lines_through(held_a: Sequence[int], n_a: int, held_b: Sequence[int], n_b: int) -> tuple[LinearBytes, ...]:
    """Return the lines whose maximum is the most that a kernel holds.

    Each moment is a line. Where the kernel does something else at `n_b`, its highest moments are taken for one and the
    same. Moments that are the highest at no number of samples are left out, and so is what is held in the end: these
    are the results.

    Args:
        held_a: bytes held at `n_a` samples, after each time the kernel took or gave back memory.
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
    """Return a line through what is held at `n_b`: that through both, unless it falls, or starts below zero."""
    slope = max(0, ceil_div(bytes_b - bytes_a, n_b - n_a))
    if slope * n_b > bytes_b:
        return LinearBytes(0, ceil_div(bytes_b, n_b))
    return LinearBytes(bytes_b - slope * n_b, slope)


def _highest(lines: Sequence[LinearBytes]) -> list[LinearBytes]:
    """Return the lines that are the highest somewhere from one sample on, the least steep first."""
    highest = [max(lines, key=lambda line: (line.at(1), line.slope))]
    while True:
        last = highest[-1]
        steeper = [line for line in lines if line.slope > last.slope]
        if not steeper:
            return highest
        meeting = {line: Fraction(last.constant - line.constant, line.slope - last.slope) for line in steeper}
        highest.append(min(steeper, key=lambda line: (meeting[line], -line.slope)))


def held_bytes(run: Callable[[], object]) -> tuple[int, ...]:
    """Return what torch's CPU allocator has handed out to this thread in a call, each time that changes, in bytes.

    What is returned is held in the end. torch's newer profiler tells the same, and writes to the terminal.
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
class _Question:
    """A kernel, and all that decides what it takes, but for the number of samples."""

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    num_threads: int

    def num_bytes(self, num_samples: int) -> int:
        """Return the bytes of its arguments."""
        shapes = [one for one in tree_leaves((self.args, dict(self.kwargs))) if isinstance(one, _Shape)]
        return sum(one.num_elements(num_samples) * one.dtype.itemsize for one in shapes)

    def held_bytes(self, num_samples: int) -> tuple[int, ...]:
        """Run the kernel; return what it held each time it had taken or given back memory.

        It runs in a thread of its own, where no mode, no autocast and no profiler of anybody else is entered.
        """
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._run, num_samples).result()

    def _run(self, num_samples: int) -> tuple[int, ...]:
        torch.set_num_threads(self.num_threads)  # oneDNN asks OpenMP, which has another answer for a new thread
        shapes = (self.args, dict(self.kwargs))
        args, kwargs = tree_map_only(_Shape, lambda one: one.made(num_samples), shapes)
        with torch.no_grad():
            return held_bytes(lambda: self.func(*args, **kwargs))


def _question(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[_Question | None, int]:  # noqa: ANN401 (torch's type)
    """Return what to ask for an operation, and for how many samples; None for one that cannot be asked."""
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
    question = _Question(func, _hashable((*first, *rest)), _hashable(sorted(named.items())), torch.get_num_threads())
    return question, num_samples


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
