"""What kernels take for themselves: asked of small ones, against large ones that are watched."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.profiler import profile

from anybatch.memory.ledger import INSIDE, MemoryLedger
from anybatch.planner.trace.cpu_workspaces import KernelMemory, LinearBytes, held_bytes, lines_through

Arguments = tuple[Any, ...]
CONVOLVE, CONVOLVE_BACK = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
ENLARGE = torch.ops.aten.upsample_bilinear2d.default
ATTEND = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001 (its only name)
HELD_OUT = (3, 8, 17, 64)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """How much a kernel takes depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def convolution(num_samples: int, *, dtype: torch.dtype = torch.float32, stride: int = 1, groups: int = 1) -> Arguments:
    """Return the arguments of a convolution of 3 x 3."""
    image = torch.zeros(num_samples, 32, 16, 16, dtype=dtype)
    weight, bias = torch.zeros(48, 32 // groups, 3, 3, dtype=dtype), torch.zeros(48, dtype=dtype)
    return image, weight, bias, [stride] * 2, [1, 1], [1, 1], False, [0, 0], groups


def backward(num_samples: int, **options: Any) -> Arguments:
    """Return the arguments of its backward."""
    image, weight, _, *rest = convolution(num_samples, **options)
    gradient = torch.zeros_like(CONVOLVE(image, weight, None, *rest))
    return gradient, image, weight, [48], *rest, [True, True, True]


def attention(num_samples: int) -> Arguments:
    """Return the arguments of an attention with a mask of its own for each sample, the same for all heads."""
    queries, keys, values = torch.zeros(num_samples, 64, 3, 4, 16).permute(2, 0, 3, 1, 4)
    mask = torch.zeros(num_samples, 1, 64, 64).expand(num_samples, 4, 64, 64)
    return queries, keys, values, 0.0, False, mask


def enlarging(num_samples: int) -> Arguments:
    """Return the arguments of an interpolation."""
    return torch.zeros(num_samples, 8, 12, 12), [24, 24], False, 2.0, 2.0


CASES: dict[str, tuple[Any, Callable[[int], Arguments]]] = {
    "forward": (CONVOLVE, convolution),
    "forward, bf16": (CONVOLVE, lambda n: convolution(n, dtype=torch.bfloat16)),
    "forward, float64": (CONVOLVE, lambda n: convolution(n, dtype=torch.float64)),
    "backward": (CONVOLVE_BACK, backward),
    "backward, bf16": (CONVOLVE_BACK, lambda n: backward(n, dtype=torch.bfloat16)),
    "backward, strides": (CONVOLVE_BACK, lambda n: backward(n, stride=2)),
    "backward, groups": (CONVOLVE_BACK, lambda n: backward(n, groups=4)),
    "interpolation": (ENLARGE, enlarging),
    "attention": (ATTEND, attention),
}


@pytest.mark.parametrize("name", CASES)
def test_a_small_kernel_tells_what_a_large_one_takes(name: str) -> None:
    """The most that a kernel holds at sizes it was not asked at is the largest of its moments, to the byte."""
    func, arguments = CASES[name]
    kernels = KernelMemory()

    for num_samples in HELD_OUT:
        args = arguments(num_samples)
        named = {"attn_mask": args[5]} if func is ATTEND else {}
        args = args[:5] if func is ATTEND else args
        result = func(*args, **named)
        results = sum(one.nbytes for one in ([result] if isinstance(result, torch.Tensor) else result))

        told = kernels.moments(func, args, named, result)

        assert max(*told, results) == max(held_bytes(partial(func, *args, **named)))
    assert kernels.num_asked == 1


def test_threads_count() -> None:
    """A kernel is asked with the threads that it will run with: each sums up gradients of its own."""
    kernels = KernelMemory()
    image, weight = torch.zeros(16, 3, 8, 8), torch.zeros(8, 3, 3, 3)
    args = (torch.zeros(16, 8, 6, 6), image, weight, [8], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, True])
    told = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        results = CONVOLVE_BACK(*args)
        told.append(kernels.moments(CONVOLVE_BACK, args, {}, results))
        assert max(told[-1]) == max(held_bytes(lambda: CONVOLVE_BACK(*args)))

    assert told[0] != told[1]
    assert kernels.num_threads == (1, 2)


def test_what_is_asked_has_data_and_is_seen_by_nobody() -> None:
    """Within modes, autocast and another profiler, kernels are asked as they are outside; no mode sees that."""
    args = backward(5)
    expected = KernelMemory().moments(CONVOLVE_BACK, args, {}, CONVOLVE_BACK(*args))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    kernels = KernelMemory()
    with mode:
        made = backward(5)
    with MemoryLedger() as ledger, mode, torch.autocast("cpu"), profile(use_kineto=False, profile_memory=True):
        told = kernels.moments(CONVOLVE_BACK, made, {}, CONVOLVE_BACK(*made))

    assert told == expected
    assert ledger.peak_bytes == sum(one.nbytes for one in CONVOLVE_BACK(*args))


def test_a_ledger_books_what_kernels_take_where_they_run() -> None:
    """The ledger's peak of a step is what the allocator hands out, and nothing of it is held afterwards."""
    weight = torch.randn(48, 32, 3, 3, requires_grad=True)

    def step() -> None:
        images = torch.zeros(9, 32, 16, 16)
        (weight.grad,) = torch.autograd.grad(F.conv2d(images, weight).sum(), weight)

    def booked(kernels: KernelMemory | None) -> MemoryLedger:
        with MemoryLedger(kernels=None if kernels is None else kernels.moments) as ledger:
            step()
        return ledger

    most = max(held_bytes(step))

    without = booked(None)
    ledger = booked(KernelMemory())

    assert without.peak_bytes < most
    assert ledger.peak_bytes == most
    assert ledger.held_bytes == weight.nbytes
    inside = [one for one in ledger.trace().allocations if one.operation.startswith(INSIDE)]
    assert {one.phase for one in inside} == {"forward", "backward"}
    assert {one.category for one in inside} == {"temporaries"}


def test_what_is_too_large_is_not_asked_and_told() -> None:
    """A kernel whose two samples do not fit into what may be taken is left alone, and named."""
    args = convolution(3)
    kernels = KernelMemory(most_bytes=1 << 16)

    assert kernels.moments(CONVOLVE, args, {}, CONVOLVE(*args)) == ()
    assert kernels.num_asked == 0
    assert kernels.too_large == (("aten.convolution.default", -(-(sum(t.nbytes for t in args[:3]) + 3 * 49152) // 3)),)


@pytest.mark.parametrize("most_bytes", [1 << 21, 1 << 22, 1 << 24])
def test_asking_takes_no_more_than_it_may(most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments and all that a kernel takes stay below the limit, however many samples would be enough."""
    taken: list[int] = []

    def watched(run: Callable[[], object]) -> tuple[int, ...]:
        held = held_bytes(run)
        taken.append(max(held))
        return held

    monkeypatch.setattr("anybatch.planner.trace.cpu_workspaces.held_bytes", watched)
    args = backward(3)
    given = sum(one.nbytes for one in args[:2]) // 3

    told = KernelMemory(most_bytes=most_bytes).moments(CONVOLVE_BACK, args, {}, CONVOLVE_BACK(*args))

    assert told
    assert max(taken) + 2 * given <= most_bytes


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (torch.ops.aten.relu.default, (torch.zeros(4, 8),)),
        (CONVOLVE, (torch.zeros(32, 4, 16, 16).transpose(0, 1), *convolution(4)[1:])),
        (CONVOLVE, (torch.zeros(0, 32, 16, 16), *convolution(4)[1:])),
    ],
)
def test_what_cannot_be_asked(func: Any, args: Arguments) -> None:
    """Operations that are not listed, and samples that do not follow one after the other, are left alone."""
    kernels = KernelMemory()

    assert kernels.moments(func, args, {}, func(*args)) == ()
    assert kernels.num_asked == 0


def test_a_kernel_that_refuses_is_counted_and_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel raises while it is asked stays within, and it is not asked again."""
    runs: list[int] = []

    def fail(run: Callable[[], object]) -> tuple[int, ...]:
        runs.append(1)
        raise RuntimeError(run)

    monkeypatch.setattr("anybatch.planner.trace.cpu_workspaces.held_bytes", fail)
    kernels = KernelMemory()
    args = convolution(3)

    for _ in range(2):
        assert kernels.moments(CONVOLVE, args, {}, CONVOLVE(*args)) == ()
    assert (kernels.num_refused, kernels.num_asked, len(runs)) == (1, 0, 1)


def test_moments_are_lines() -> None:
    """Each moment has its line; those that are the highest nowhere, and what is returned, are left out."""
    found = lines_through((10, 30, 25, 20), 2, (20, 50, 35, 40), 4)

    assert found == (LinearBytes(10, 10),)
    assert [max(line.at(n) for line in found) for n in (2, 4, 100)] == [30, 50, 1010]
    assert lines_through((100, 10, 5), 2, (100, 20, 10), 4) == (LinearBytes(100, 0), LinearBytes(0, 5))


def test_a_kernel_that_does_something_else_is_as_it_was_at_the_larger_size() -> None:
    """Where moments differ in number the highest ones are taken; what falls with the size stays as it was last."""
    assert lines_through((10, 4), 2, (30, 20, 8), 4) == (LinearBytes(0, 8),)
    assert lines_through((90, 0), 2, (60, 0), 4) == (LinearBytes(60, 0),)
    assert lines_through((), 2, (), 4) == ()
