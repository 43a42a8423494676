"""Cached results of operations on fake tensors match torch's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import anybatch as ab
from anybatch.errors import CannotPlanError
from anybatch.memory.ledger import MemoryLedger
from anybatch.memory.torch_internals import FakeTensor, FakeTensorMode
from anybatch.planner.envelopes import find_envelopes
from anybatch.planner.fake_tensor_cache import (
    FakeLedger,
    ResultCache,
    fake_mode,
    metadata_of,
    storage_of,
)
from anybatch.planner.refusals import HostReads
from anybatch.planner.step_spec import StepSpec
from tests.planner.step_specs import step_spec

aten = torch.ops.aten

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "a new tensor": lambda x: x + 1,
    "a whole number": lambda x: x.long() + 1,
    "a fraction": lambda x: x.long() + 1.0,
    "a view": lambda x: x.transpose(0, 1),
    "a part": lambda x: x[1:, 2],
    "a view of a view": lambda x: x.t()[1:].unsqueeze(-1),
    "parts": lambda x: x.split(2, 1),
    "rows": lambda x: x.unbind(),
    "in place": lambda x: x.add_(1),
    "in place, with itself": lambda x: x.add_(x),
    "many in place": lambda x: aten._foreach_add_.Scalar([x, x.clone()], 1.0),
    "many": lambda x: aten._foreach_mul.Scalar([x, x.t()], 2.0),  # noqa: SLF001 (its only name)
    "two results": lambda x: x.max(1),
    "missing results": lambda x: aten.native_layer_norm_backward(
        x, x, [6], x[:, :1], x[:, :1], None, None, [True, False, False]
    ),
    "another type": lambda x: x.to(torch.bfloat16),
    "created without inputs": lambda _: torch.zeros(3, 4),
    "like it": lambda x: torch.empty_like(x.t()),
    "numbers on a circle": lambda x: torch.polar(x, x).conj() * 2,
    "the other part of a circle": lambda x: torch.polar(x, x).conj().imag + 1,
    "transposed, and transposed back": lambda x: [torch.polar(x, x).t(), torch.polar(x, x).conj().t()],
    "chosen rows": lambda x: x[torch.zeros(5, dtype=torch.long)],
    "random": lambda x: functional.dropout(x, 0.5),
    "another shape in place": lambda x: x.clone().resize_(2, 3).t_(),
}


def seen(call: Callable[[Tensor], Any], *, ledger: MemoryLedger | None, mode: FakeTensorMode) -> list[object]:
    """Return the metadata of the results of three calls, and of the tensor they are called on."""
    found: list[object] = []
    with mode:
        for width in (6, 6, 8):  # the second is cached, the third is not
            x = torch.empty(4, width)
            if ledger is None:
                result = call(x)
            else:
                with ledger:
                    result = call(x)
            parts = [one for one in (result if isinstance(result, tuple | list) else [result]) if one is not None]
            found.append([metadata_of(one) for one in parts])
            found.append([storage_of(one) == storage_of(x) for one in parts])
            found.append([one is x for one in parts])
            found.append([type(result), x.shape])
    return found


@pytest.mark.parametrize("name", CALLS)
def test_cached_results_match_torch(name: str) -> None:
    """A cached result has the shape, strides, dtype, dispatch keys, identity and storage of torch's own."""
    mode = FakeTensorMode()

    expected = seen(CALLS[name], ledger=None, mode=mode)

    assert seen(CALLS[name], ledger=FakeLedger(mode), mode=mode) == expected


def test_results_are_reused_in_other_traces() -> None:
    """Results cached by one ledger serve another, with tensors of the right mode."""
    cache = ResultCache()
    ran: list[list[str]] = []
    made: list[object] = []
    for mode in (fake_mode(), fake_mode()):
        names: list[str] = []
        below = MemoryLedger(on_operation=lambda func, *_, names=names: names.append(str(func)))
        with mode, below, FakeLedger(mode, cache=cache):
            x = torch.empty(3)
            result = x.exp()[1:]
        ran.append([name for name in names if not name.startswith("prim")])
        assert isinstance(result, FakeTensor)
        assert result.fake_mode is mode
        made.append(metadata_of(result)[:-1])

    assert len(ran[0]) > 2
    assert ran[1] == []
    assert made[0] == made[1]


def test_equal_numbers_of_other_types_are_different_arguments() -> None:
    """`1`, `1.0` and `True` are equal in Python, but have separate cached results."""
    mode = FakeTensorMode()
    with mode, FakeLedger(mode):
        x = torch.zeros(3, dtype=torch.bool)
        types = [(x + number).dtype for number in (1, 1.0, True)]

    assert types == [torch.int64, torch.float32, torch.bool]


def test_tensors_keep_their_fake_mode() -> None:
    """The result of an operation on tensors of another fake mode has that mode, also if the result is cached."""
    mode, other = FakeTensorMode(), FakeTensorMode()
    with mode:
        mine = torch.empty(3)
    with other:
        foreign = torch.empty(3)

    with FakeLedger(mode):
        results = [mine + 1, foreign + 1]

    assert [result.fake_mode for result in results if isinstance(result, FakeTensor)] == [mode, other]


def test_known_values_stay_known() -> None:
    """A value that the program wrote is known and no read, also after the same operation ran on unknown values."""
    mode = FakeTensorMode()
    reads = HostReads(lambda: "forward")
    with mode, reads, FakeLedger(mode):
        unknown = torch.empty((), dtype=torch.long)
        sums = [unknown + unknown, torch.tensor(2) + torch.tensor(3)]
        read = [sums[1].item(), bool(sums[1] > 4)]

    assert read == [5, True]
    assert reads.at is None


def test_every_read_is_detected() -> None:
    """`HostReads` sees every read, and every overflow check, which it answers with no."""
    mode = FakeTensorMode()
    reads = HostReads(lambda: "forward")
    with mode, reads, FakeLedger(mode):
        x = torch.empty(3).sum()
        read = [x.item(), (x + 1).item(), bool(x > 0), torch.equal(x, x), torch.equal(x, x)]
        overflows = [torch.zeros(()) + x for _ in range(2)]
        for overflow in overflows:
            aten._amp_foreach_non_finite_check_and_unscale_([x], overflow, x)
        read += [overflow.item() for overflow in overflows]

    assert read == [0.5, 0.5, False, False, False, 0.0, 0.0]
    assert reads.at is not None


def test_a_draw_is_near_1() -> None:
    """A number from `torch.rand` is known, and numbers computed from it; values of larger tensors are unknown."""
    mode = FakeTensorMode()
    reads = HostReads(lambda: "forward", refuses=True)
    with mode, reads, FakeLedger(mode):
        draw = torch.rand(1)
        known = [bool(draw > 0), bool(draw <= 1), bool(torch.rand([]) < 0.5), draw.item() > 0.9, bool(draw.add_(1) > 1)]
        with pytest.raises(CannotPlanError, match="reads the value of a tensor"):
            bool(torch.rand(2).sum() > 0)

    assert known == [True, True, False, True, True]


@pytest.mark.parametrize("values", [(2, 8, 6), (2, 8, 6, 6)])
def test_norms_give_results_as_real_kernels_do(values: tuple[int, ...]) -> None:
    """BatchNorm of transposed values is contiguous, and GroupNorm's gradient has the type of its values."""

    def run() -> list[torch.Tensor]:
        x, weight = torch.randn(values, dtype=torch.bfloat16).transpose(1, -1), torch.ones(values[-1])
        normed = torch.native_batch_norm(x.float(), weight, weight, weight.clone(), weight.clone(), True, 0.1, 1e-5)
        y = x.contiguous().requires_grad_()
        torch.nn.functional.group_norm(y, 2, weight, weight).sum().backward()
        assert y.grad is not None
        return [normed[0], y.grad]

    mode = FakeTensorMode()
    with mode, FakeLedger(mode):
        fake = run()

    assert [(one.dtype, one.stride()) for one in fake] == [(one.dtype, one.stride()) for one in run()]


def deep() -> nn.Module:
    """Return a network with convolutions, BatchNorm and dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(8 * 36, 4)
    )


def spec() -> StepSpec:
    """Return a step of the network in bf16, clipped, with an average."""
    return step_spec(
        deep,
        optimizer=torch.optim.AdamW,
        loss=ab.mean_over_samples(lambda model, batch: model(batch).square().mean()),
        sample=torch.zeros(1, 3, 8, 8),
        precision="bf16",
        clip=1.0,
        average_decay=0.9,
    )


@pytest.mark.slow
def test_the_plan_is_the_same_without_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocations and costs of a planned step are the same without the cache."""
    found = find_envelopes(spec(), 2**24, max_samples=64)
    monkeypatch.setattr(ResultCache, "accepts", lambda *_: False)
    plain = find_envelopes(spec(), 2**24, max_samples=64)

    assert (found.steady.trace, found.first.trace) == (plain.steady.trace, plain.first.trace)
    assert [found.peak_bytes(m) for m in (1, 7, 64)] == [plain.peak_bytes(m) for m in (1, 7, 64)]
    assert found.costs == plain.costs
