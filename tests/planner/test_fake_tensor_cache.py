"""Cached results of operations on fake tensors match torch's own."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import anybatch as ab
from anybatch.memory.ledger import MemoryLedger
from anybatch.memory.torch_internals import FakeTensor, FakeTensorMode, tree_leaves
from anybatch.memory.trace import MemoryTrace, in_order
from anybatch.planner.envelopes import find_envelopes
from anybatch.planner.trace import fake_tensor_cache
from anybatch.planner.trace.cuda_emulation import Profile
from anybatch.planner.trace.fake_tensor_cache import (
    FakeLedger,
    ResultCache,
    fake_mode,
    metadata_of,
    storage_of,
)
from anybatch.planner.trace.refusals import HostReads
from anybatch.planner.trace.step_spec import StepSpec
from tests.planner.step_specs import step_spec

aten = torch.ops.aten

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "a new tensor": lambda x: x + 1,
    "a whole number": lambda x: x.long() + 1,
    "a broken number": lambda x: x.long() + 1.0,
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
    "results that are not there": lambda x: aten.native_layer_norm_backward(
        x, x, [6], x[:, :1], x[:, :1], None, None, [True, False, False]
    ),
    "another type": lambda x: x.to(torch.bfloat16),
    "made from nothing": lambda _: torch.zeros(3, 4),
    "like it": lambda x: torch.empty_like(x.t()),
    "numbers on a circle": lambda x: torch.polar(x, x).conj() * 2,
    "the other part of a circle": lambda x: torch.polar(x, x).conj().imag + 1,
    "turned, and turned the other way": lambda x: [torch.polar(x, x).t(), torch.polar(x, x).conj().t()],
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
def test_what_is_known_is_what_torch_answers(name: str) -> None:
    """A cached result has the shape, strides, dtype, dispatch keys, identity and storage of torch's own."""
    mode = FakeTensorMode()

    expected = seen(CALLS[name], ledger=None, mode=mode)

    assert seen(CALLS[name], ledger=FakeLedger(mode), mode=mode) == expected


def test_what_is_known_is_not_run_again() -> None:
    """An operation runs once for each shape."""
    mode = FakeTensorMode()
    below = MemoryLedger(on_operation=lambda func, *_: ran.append(str(func)))
    ran: list[str] = []
    with mode, below, FakeLedger(mode):
        rows = [torch.empty(4, width) for width in (6, 6, 6, 8)]
        ran.clear()
        for row in rows:
            row.exp()

    assert [name for name in ran if not name.startswith("prim")] == ["aten.exp.default"] * 2


OF_PARTS: dict[str, Callable[[Tensor], Any]] = {
    "a row": lambda x: x.select(0, 1),
    "the last row": lambda x: x.select(1, -1),
    "another row": lambda x: x.select(1, 2),
    "rows": lambda x: x[1:],
    "parts": lambda x: x.split(1),
    "turned": lambda x: x.t(),
    "one shape more": lambda x: x.unsqueeze(1).expand(3, 2, 4),
    "as integers": lambda x: x.view(torch.int16),
    "as complex numbers": lambda x: torch.view_as_complex(x.unflatten(1, (2, 2))),
    "as it lies": lambda x: x.as_strided((2, 2), (4, 1)),
    "as it lies from the start": lambda x: x.as_strided((2, 2), (4, 1), 3),
    "a copy as it lies": lambda x: aten.as_strided_copy(x, [2, 2], [4, 1]),
    "the gradient of a row": lambda x: aten.select_backward(x[0], [5, 4], 0, 3),
    "the gradient of another": lambda x: aten.select_backward(x[1], [5, 4], 0, -1),
    "a sum": lambda x: x + 1,
    "in place": lambda x: x.mul_(2),
}


@pytest.mark.parametrize("name", OF_PARTS)
def test_of_parts_of_a_tensor(name: str) -> None:
    """Results for views at other offsets are torch's own, independent of the first offset."""
    mode = FakeTensorMode()

    def made() -> list[object]:
        whole = torch.empty(20, 4)
        parts = [whole[begin : begin + 3] for begin in (0, 4, 8, 14)]
        return [
            (metadata_of(one), storage_of(one) == storage_of(whole))
            for part in parts
            for one in tree_leaves(OF_PARTS[name](part))
        ]

    with mode:
        expected = made()
        with FakeLedger(mode):
            assert made() == expected


def test_results_serve_other_traces() -> None:
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


def test_equal_numbers_of_other_types_are_other_questions() -> None:
    """`1`, `1.0` and `True` are equal in Python, but are cached as different arguments."""
    mode = FakeTensorMode()
    with mode, FakeLedger(mode):
        x = torch.zeros(3, dtype=torch.bool)
        types = [(x + number).dtype for number in (1, 1.0, True)]

    assert types == [torch.int64, torch.float32, torch.bool]


def test_a_number_that_is_known_stays_known() -> None:
    """A value that the program wrote is known and no read, also after the same operation ran on unknown values."""
    mode = FakeTensorMode()
    reads = HostReads(lambda: "forward")
    with mode, reads, FakeLedger(mode):
        unknown = torch.empty((), dtype=torch.long)
        sums = [unknown + unknown, torch.tensor(2) + torch.tensor(3)]
        read = [sums[1].item(), bool(sums[1] > 4)]

    assert read == [5, True]
    assert not reads.numbers


def test_reads_are_seen_each_time() -> None:
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
    assert (reads.numbers["forward"], reads.truths["forward"]) == (2, 3)


def test_a_draw_is_near_1_or_near_0_until_it_is_changed() -> None:
    """Comparisons with a value from `torch.rand` are consistent with it; values computed from it are unknown."""
    answers = []
    for other in (False, True):
        mode = FakeTensorMode()
        reads = HostReads(lambda: "forward", other=other)
        with mode, reads, FakeLedger(mode):
            draw = torch.rand(1)
            known = [bool(draw > 0), bool(draw >= 0.5), bool(draw <= 1), bool(torch.rand([]) < 0.5), draw.item() > 0]
            unknown = [torch.equal(draw, draw), bool(torch.rand(2).sum() > 0), bool(draw.add_(1) > 0)]
        answers.append((known, unknown))
        assert (reads.numbers["forward"], reads.truths["forward"]) == (1, 7)

    assert answers[0] == ([True, True, True, False, True], [False, False, False])
    assert answers[1] == ([True, False, True, True, True], [True, True, True])


class Odd:
    """A fake operation that counts its calls and returns results torch never does: see `ODD`."""

    namespace, tags = "aten", ()

    def __init__(self, run: Callable[[Tensor, Tensor], Any]) -> None:
        self.num_calls = 0
        self.overloadpacket = SimpleNamespace(__name__="odd")
        self._schema = SimpleNamespace(is_mutable=False, returns=())
        self._run = run

    def __call__(self, x: Tensor, y: Tensor) -> Any:
        """Count the call and return its result."""
        self.num_calls += 1
        return self._run(x, y)


ODD: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a part of new memory": lambda *_: torch.empty(6)[1:3],
    "new memory twice": lambda *_: (torch.empty(3),) * 2,
    "memory of two arguments": lambda x, _: x[1:],
    "a dictionary": lambda x, _: {"x": x},
}


@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_made_again_is_run_each_time(name: str) -> None:
    """Results that share storage in unusual ways, or are not tensors, are not cached."""
    mode = FakeTensorMode()
    results = FakeLedger(mode)._result  # noqa: SLF001 (without the ledger's books)
    odd, plain = Odd(ODD[name]), Odd(lambda x, _: x + 1)
    with mode:
        x = torch.empty(4)
        for _ in range(2):
            results(odd, (x, x[:]), {})
            results(plain, (x, x[:]), {})

    assert (odd.num_calls, plain.num_calls) == (2, 1)


def test_an_argument_is_returned_as_it_is() -> None:
    """If an operation returns one of its arguments, the cache returns the same object."""
    mode = FakeTensorMode()
    results = FakeLedger(mode)._result  # noqa: SLF001 (without the ledger's books)
    second = Odd(lambda _, y: y)
    with mode:
        pairs = [(torch.empty(3), torch.empty(3)) for _ in range(2)]

    assert [results(second, pair, {}) is pair[1] for pair in pairs] == [True, True]
    assert second.num_calls == 1


class Block(nn.Module):
    """Attention, dropout, a norm with running averages, and in-place operations."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        self.norm, self.wide = nn.BatchNorm1d(16), nn.Linear(16, 32)
        self.narrow = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.norm(x.flatten(0, 1)).view_as(x)
        narrow: Tensor = self.narrow(functional.dropout(functional.relu_(self.wide(x)), 0.2))
        return narrow.add_(x)


def booked(make: Callable[[FakeTensorMode], MemoryLedger]) -> MemoryTrace:
    """Return the trace of a training loop on fake tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    ledger = make(mode)
    with mode, ledger:
        model = nn.Sequential(nn.Embedding(50, 16), *(Block() for _ in range(3)), nn.Linear(16, 50))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for length in (7, 7, 5):
            ids = torch.zeros(4, length, dtype=torch.long)
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    trace = ledger.trace()
    ledger.forget()
    return in_order(trace)


@pytest.mark.slow
def test_a_training_loop_is_booked_as_without() -> None:
    """The allocations and events of a training loop are the same with and without the cache."""
    expected = booked(lambda _: MemoryLedger())

    assert booked(FakeLedger) == expected
    assert len(expected.events) > 1000


def test_another_mode_is_left_alone() -> None:
    """Tensors of another fake mode keep their mode, also if the result is cached."""
    mode, other = FakeTensorMode(), FakeTensorMode()
    with mode:
        mine = torch.empty(3)
    with other:
        foreign = torch.empty(3)

    with FakeLedger(mode):
        made = [mine + 1, foreign + 1]

    assert [one.fake_mode for one in made if isinstance(one, FakeTensor)] == [mode, other]


def test_without_remembering_operations_are_run() -> None:
    """Without torch's private helpers every operation runs each time, with the same results."""
    mode = fake_mode()
    runs_all, remembers = (FakeLedger(mode, cache=ResultCache(enabled=on)) for on in (False, True))
    with mode:
        x = torch.empty(4, 6)
        for _ in range(2):
            one, other = (each._result(aten.add.Tensor, (x, x), {}) for each in (runs_all, remembers))  # noqa: SLF001
            assert metadata_of(one) == metadata_of(other)

    assert runs_all.entry is None
    assert remembers.entry is not None


def deep() -> nn.Module:
    """Return a network with convolutions, BatchNorm and dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(8 * 36, 4)
    )


def spec(profile: Profile, *, enabled: bool) -> StepSpec:
    """Return a step of the network in bf16, clipped, with an average, planned with or without the cache."""
    return step_spec(
        deep,
        optimizer=torch.optim.AdamW,
        loss=ab.mean_over_samples(lambda model, batch: model(batch).square().mean()),
        sample=torch.zeros(1, 3, 8, 8),
        precision="bf16",
        clip=1.0,
        average_decay=0.9,
        profile=profile,
        cache=ResultCache(enabled=enabled),
    )


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_the_plan_is_the_same_without_the_cache(profile: Profile) -> None:
    """The allocations and costs of a planned step are the same with the cache off."""
    found, plain = (find_envelopes(spec(profile, enabled=on), 2**24, most_samples=64) for on in (True, False))

    assert (found.steady.trace, found.first.trace) == (plain.steady.trace, plain.first.trace)
    assert [found.peak_bytes(m) for m in (1, 7, 64)] == [plain.peak_bytes(m) for m in (1, 7, 64)]
    assert found.costs == plain.costs
    assert (found.verdict, found.checked_at) == (plain.verdict, plain.checked_at)


@pytest.mark.parametrize("wrong", ["is missing", "refuses", "makes another"])
def test_a_private_name_that_does_something_else_is_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch's private helper is missing, raises or returns another tensor, the operation runs each time."""

    def make(*_: Any, **__: Any) -> Any:
        if wrong == "refuses":
            message = "unexpected keyword argument"
            raise TypeError(message)
        with FakeTensorMode():
            return torch.empty(1)

    monkeypatch.setattr(fake_tensor_cache, "subclass_of", None if wrong == "is missing" else make)
    mode = fake_mode()
    ledger = FakeLedger(mode)
    with mode:
        x = torch.empty(4, 6)
        for _ in range(2):
            assert metadata_of(ledger._result(aten.add.Tensor, (x, x), {})) == metadata_of(x + x)  # noqa: SLF001
            assert ledger.entry is None
