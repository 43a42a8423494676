"""Costs of operations match counts by hand, and are the same for real and fake tensors."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from anybatch.memory.ledger import MemoryLedger
from anybatch.memory.trace import Phase
from anybatch.planner.step_time import CostTrace, Operation, OperationRecorder


def recorded(run: "Run") -> CostTrace:
    """Return the operations of a run."""
    recorder = OperationRecorder()
    with MemoryLedger(on_operation=recorder) as ledger:
        run(ledger)
    ledger.forget()
    return recorder.trace()


class Run:
    """A step of a network with many kinds of layers; its tensors are created with it."""

    def __init__(self, num_micro_batches: int = 2) -> None:
        self.model = nn.Sequential(
            *(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Flatten()),
            *(nn.Linear(6 * 36, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 5)),
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        self.batches = [torch.ones(4, 3, 6, 6) for _ in range(num_micro_batches)]

    def __call__(self, ledger: MemoryLedger) -> None:
        """Run the step."""
        for batch in self.batches:
            self.model(batch).square().sum().backward()
        ledger.phase = "update"
        self.optimizer.step()
        ledger.phase = None


def one_of(name: str, *tensors: Tensor, phase: Phase = "forward") -> Operation:
    """Return the cost of an operation with these arguments."""
    recorder = OperationRecorder()
    with MemoryLedger(on_operation=recorder) as ledger:
        ledger.phase = phase
        getattr(torch.ops.aten, name)(*tensors)
    ledger.forget()
    return recorder.trace().operations[-1]


def test_products_by_hand() -> None:
    """A product of 4 x 6 and 6 x 5 takes 240 FLOPs, reads 54 values and writes 20."""
    mm = one_of("mm", torch.ones(4, 6), torch.ones(6, 5))
    assert (mm.kind, mm.flops, mm.num_bytes, mm.dims) == ("matmul", 240, 216 + 80, (1, 4, 5, 6))
    addmm = one_of("addmm", torch.ones(5), torch.ones(4, 6), torch.ones(6, 5))
    assert (addmm.flops, addmm.num_bytes, addmm.dims) == (240, 236 + 80, (1, 4, 5, 6))
    bmm = one_of("bmm", torch.ones(3, 4, 6), torch.ones(3, 6, 5))
    assert (bmm.flops, bmm.dims) == (720, (3, 4, 5, 6))
    mv = one_of("mv", torch.ones(4, 6), torch.ones(6))
    assert (mv.flops, mv.dims) == (48, (1, 4, 1, 6))


def test_traffic_by_hand() -> None:
    """Results are written, arguments read once (expanded ones by their storage), views are free, lookups read rows."""
    add = one_of("add", torch.ones(4, 6), torch.ones(6).expand(4, 6))
    assert (add.kind, add.num_bytes) == ("other", 96 + 24 + 96)
    in_place = one_of("add_", torch.ones(4, 6), torch.ones(4, 6))
    assert in_place.num_bytes == 192 + 96
    assert one_of("t", torch.ones(4, 6)).kind == "view"
    assert one_of("t", torch.ones(4, 6)).num_bytes == 0
    rows = one_of("embedding", torch.ones(1000, 6), torch.zeros(3, dtype=torch.int64))
    assert rows.num_bytes == 2 * 3 * 6 * 4 + 3 * 8
    half = one_of("add", torch.ones(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16))
    assert (half.dtype, half.num_bytes) == ("bf16", 24)


def test_allocations_move_no_bytes() -> None:
    """Allocating an empty tensor moves no bytes, and an `out=` tensor is not read."""
    assert one_of("empty_like", torch.ones(4, 6)).num_bytes == 0
    recorder = OperationRecorder()
    with MemoryLedger(on_operation=recorder) as ledger:
        into = torch.empty(4, 6)
        torch.add(torch.ones(4, 6), torch.ones(4, 6), out=into)
    ledger.forget()
    taken, add = recorder.trace().operations[0], recorder.trace().operations[-1]
    assert (taken.name, taken.num_bytes) == ("empty", 0)
    assert add.num_bytes == 3 * 96


def test_a_foreach_operation_counts_every_tensor() -> None:
    """A foreach operation counts, reads and writes every tensor of its list."""
    recorder = OperationRecorder()
    with MemoryLedger(on_operation=recorder) as ledger:
        torch._foreach_add_([torch.ones(3), torch.ones(5)], 1.0)
    ledger.forget()
    one = recorder.trace().operations[-1]
    assert (one.kind, one.num_tensors, one.num_bytes) == ("foreach", 2, 2 * 32)


def test_attention_counts_what_is_not_masked() -> None:
    """Attention takes two products forward and five backward, and half of each with a causal mask."""
    found = {}
    for is_causal in (False, True):
        query, key, value = (torch.ones(2, 3, 8, 4, requires_grad=True) for _ in range(3))
        recorder = OperationRecorder()
        with MemoryLedger(on_operation=recorder) as ledger:
            out = functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
            out.sum().backward()
        ledger.forget()
        found[is_causal] = {one.kind: one for one in recorder.trace().operations if one.kind.startswith("attention")}
    whole, half = found[False], found[True]

    assert whole["attention"].flops == 2 * 2 * 6 * 8 * 8 * 4
    assert whole["attention backward"].flops == 5 * 2 * 6 * 8 * 8 * 4
    assert all(half[kind].flops * 2 == whole[kind].flops for kind in ("attention", "attention backward"))


def test_flops_match_torch() -> None:
    """The FLOPs of products and convolutions in a step match torch's `FlopCounterMode`."""
    run = Run()
    with FlopCounterMode(display=False) as counter:
        run(MemoryLedger())
    assert sum(one.flops for one in recorded(Run()).operations) == counter.get_total_flops()


@pytest.mark.parametrize(
    ("make", "num_groups", "forward"),
    [
        # Positions of the output (transposed: of the input) times weights: 2 images of 6 x 6.
        (lambda: nn.Conv2d(4, 8, 3, padding=1), 1, 2 * 2 * 36 * (8 * 4 * 9)),
        (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4), 4, 2 * 2 * 36 * (4 * 1 * 9)),
        (lambda: nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2), 2, 2 * 2 * 9 * (8 * 2 * 9)),
        (lambda: nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2), 2, 2 * 2 * 36 * (4 * 3 * 4)),
    ],
    ids=["dense", "depthwise", "groups", "transposed"],
)
def test_convolutions_by_hand(make: Callable[[], nn.Module], num_groups: int, forward: int) -> None:
    """A convolution multiplies each position by the weights of its group; each of its two gradients costs the same.

    Torch's counter agrees for dense ones; for others it counts the weight gradient as dense.
    """
    recorder = OperationRecorder()
    with FlopCounterMode(display=False) as counter, MemoryLedger(on_operation=recorder) as ledger:
        make()(torch.ones(2, 4, 6, 6, requires_grad=True)).sum().backward()
    ledger.forget()
    found = {one.kind: one for one in recorder.trace().operations}

    assert found["convolution"].flops == forward
    assert found["convolution backward"].flops == 2 * forward
    if num_groups == 1:
        assert counter.get_total_flops() == 3 * forward


def test_micro_batches_are_distinguished() -> None:
    """Each micro-batch has its own forward and backward, later ones add to gradients, and the update runs once."""
    trace = recorded(Run(3))
    parts = [trace.micro_batch(number) for number in range(3)]
    names = [[one.name for one in part] for part in parts]

    assert trace.num_micro_batches == 3
    assert names[1] == names[2]
    assert sorted(set(names[1])) == sorted({*names[0], "add_"})
    assert [one.phase for one in parts[1]] == sorted((one.phase for one in parts[1]), reverse=True)
    assert {one.phase for one in trace.per_step} == {"update"}
    assert sum(map(len, parts)) + len(trace.per_step) == len(trace.operations)


def test_fake_tensors_cost_the_same() -> None:
    """A step on fake tensors has the same cost for each operation as a real one."""
    real = recorded(Run())
    with FakeTensorMode():
        fake = recorded(Run())

    assert fake == real
