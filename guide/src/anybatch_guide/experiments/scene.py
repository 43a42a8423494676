"""The animated scene: three optimizer steps on 64 digits, in several splits, with memory, gradients and losses."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from anybatch.memory.ledger import MemoryLedger
from anybatch.memory.trace import MemoryTrace, timeline
from anybatch.recipes.digits import Digits, Network
from anybatch_guide.claims.measuring import relative
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress
from anybatch_guide.lines import rounded, significant
from anybatch_guide.memory.small import isolated_random_state

BATCH_SIZE, NUM_STEPS, LEARNING_RATE = 64, 3, 3e-3
SPLITS: tuple[tuple[int, ...], ...] = ((64,), (32,) * 2, (16,) * 4, (8,) * 8, (24, 24, 16))
LIMIT_BYTES = int(2.5 * 2**20)
"""The memory limit at the start of the scene; the reader can change it."""
MIN_DRAWN_BYTES = 1024
"""Smaller allocations are not drawn."""
STACK_POSITIONS = {"gradients": 2, "inputs": 3, "activations": 3, "temporaries": 4}
"""Stack position of each category that is freed within a step; weights and optimizer state have positions 0 and 1."""
SHOWN_PER_DIGIT = 2


@dataclass(slots=True)
class StepMoments:
    """Indices of the ledger events at which the parts of the first step begin and end."""

    begin: int = 0
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    update: int = 0
    zero: int = 0
    end: int = 0


@dataclass(slots=True)
class SplitRun:
    """The results of three steps in one split."""

    moments: StepMoments = field(default_factory=StepMoments)
    layers: list[tuple[int, int]] = field(default_factory=list)  # (event index, block) when a forward enters a block
    returns: list[tuple[int, int]] = field(default_factory=list)  # (event index, block) when a backward enters a block
    sums: list[list[Tensor]] = field(default_factory=list)  # the gradient after each backward, per step
    weights: list[Tensor] = field(default_factory=list)  # the weights before the first step and after each step
    losses: list[float] = field(default_factory=list)
    trace: MemoryTrace | None = None


def run(emit: Emit) -> Data:
    """Train in each split, and return the data of the scene."""
    inputs, labels = first_digits()
    runs = []
    for done, sizes in enumerate(SPLITS):
        emit_progress(emit, done, len(SPLITS), " + ".join(map(str, sizes)))
        runs.append(train(sizes, inputs, labels))
    unsplit = runs[0]
    gradients = [sums[-1] for sums in unsplit.sums]
    shown = shown_entries(gradients[0])
    assert unsplit.trace is not None
    held = timeline(unsplit.trace).at(0)
    return {
        "limit": LIMIT_BYTES,
        "digits": packed(inputs),
        "weights": [rounded(vector[shown].tolist(), 3) for vector in unsplit.weights],
        "gradients": [thousandths(vector[shown]) for vector in gradients],
        "losses": [round(loss, 4) for loss in unsplit.losses],
        "state": [held["weights"], held["optimizer"]],
        "splits": [as_data(sizes, split_run, unsplit, shown) for sizes, split_run in zip(SPLITS, runs, strict=True)],
    }


def first_digits() -> tuple[Tensor, Tensor]:
    """Return the images and labels of three batches, drawn with a fixed seed."""
    samples = Digits("train")
    with isolated_random_state():
        order = torch.randperm(len(samples))[: BATCH_SIZE * NUM_STEPS].tolist()
    chosen = [samples[number] for number in order]
    return torch.stack([sample["image"] for sample in chosen]), torch.stack([sample["label"] for sample in chosen])


def train(sizes: Sequence[int], inputs: Tensor, labels: Tensor) -> SplitRun:
    """Take three steps of AdamW in micro-batches of these sizes, and record memory in the first."""
    model, optimizer = model_with_state()
    split_run, ledger = SplitRun(weights=[flat(model.parameters())]), MemoryLedger(device_type="cpu")
    ledger.categorize("weights", model.parameters())
    ledger.categorize("optimizer", [value for state in optimizer.state.values() for value in state.values()])
    watch_blocks(model, split_run, ledger)
    for step in range(NUM_STEPS):
        batch = slice(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
        # Split before the ledger records, because the data set does not count as memory of the step.
        micro_batches = list(zip(inputs[batch].split(list(sizes)), labels[batch].split(list(sizes)), strict=True))
        if step == 0:
            split_run.moments.begin = ledger.num_events
            with ledger:
                take_step(model, optimizer, micro_batches, split_run, ledger)
            split_run.moments.end = ledger.num_events
            split_run.trace = ledger.trace()
            ledger.forget()
        else:
            take_step(model, optimizer, micro_batches, split_run, None)
        split_run.weights.append(flat(model.parameters()))
    return split_run


def watch_blocks(model: nn.Module, split_run: SplitRun, ledger: MemoryLedger) -> None:
    """Record when forwards and backwards enter a block: a convolution with norm and activation, or the last layers."""
    for number, module in enumerate(model.children()):
        block = number // 3

        def enter(_module: nn.Module, _inputs: object, block: int = block) -> None:
            split_run.layers.append((ledger.num_events, block))

        def leave(_module: nn.Module, _inputs: object, output: Tensor, block: int = block) -> None:
            output.register_hook(lambda _gradient: split_run.returns.append((ledger.num_events, block)))

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    split_run: SplitRun,
    ledger: MemoryLedger | None,
) -> None:
    """Take one optimizer step in micro-batches, and add its gradient sums and loss to `split_run`."""
    sums, total = [], 0.0
    for x, y in micro_batches:
        if ledger is not None:
            split_run.moments.forward.append(ledger.num_events)
            x, y = x.clone(), y.clone()  # noqa: PLW2901 (like a copy to a device)
            ledger.categorize("inputs", (x, y))
        loss = cross_entropy(model(x), y) * (len(x) / BATCH_SIZE)
        if ledger is not None:
            split_run.moments.backward.append(ledger.num_events)
        loss.backward()
        total += loss.item()
        del loss
        if ledger is not None:
            ledger.categorize("gradients", gradients_of(model))
            split_run.moments.done.append(ledger.num_events)
            ledger.paused = True
        sums.append(flat(gradients_of(model)))
        if ledger is not None:
            ledger.paused = False
    if ledger is not None:
        del x, y
        split_run.moments.update, ledger.phase = ledger.num_events, "update"
    optimizer.step()
    if ledger is not None:
        split_run.moments.zero = ledger.num_events
    optimizer.zero_grad()
    split_run.sums.append(sums)
    split_run.losses.append(total)


def model_with_state() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a new network, and AdamW with allocated state, as in every step after the first."""
    with isolated_random_state():
        model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()
    optimizer.param_groups[0]["lr"] = LEARNING_RATE
    return model, optimizer


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Return the gradients of all parameters that have one."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return a copy of all tensors as one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def shown_entries(gradient: Tensor) -> Tensor:
    """Return the indices of the gradient elements to draw: for each digit, the largest of the last layer's weights."""
    weight, bias = list(Network().parameters())[-2:]
    first = len(gradient) - weight.numel() - bias.numel()
    rows = gradient[first : first + weight.numel()].abs().view_as(weight)
    columns = rows.topk(SHOWN_PER_DIGIT, dim=1).indices.sort(dim=1).values
    return (columns + torch.arange(len(weight))[:, None] * weight.shape[1]).flatten() + first


def as_data(sizes: Sequence[int], split_run: SplitRun, unsplit: SplitRun, shown: Tensor) -> dict[str, Any]:
    """Return the data of a split for the page; events are renumbered, counting only the drawn allocations."""
    assert split_run.trace is not None
    moments, memory_timeline = split_run.moments, timeline(split_run.trace)
    pieces = pieces_of(split_run.trace, moments.begin, split_run.layers)
    kept = sorted({moment for piece in pieces for moment in piece[2:4] if moment >= 0})

    def new(moment: int) -> int:
        return sum(other < moment for other in kept)

    return {
        "sizes": list(sizes),
        "pieces": [
            [size, fill, new(allocated), new(freed) if freed >= 0 else -1, layer]
            for size, fill, allocated, freed, layer in pieces
        ],
        **{name: [new(moment) for moment in getattr(moments, name)] for name in ("forward", "backward", "done")},
        **{name: new(getattr(moments, name)) for name in ("update", "zero", "end")},
        "returns": [[new(event) for event in first_in_block(split_run.returns, span)] for span in backwards(moments)],
        "peak": memory_timeline.peak_bytes,
        "at_peak": [memory_timeline.at(memory_timeline.peak_moment).get(name, 0) for name in ("activations", "inputs")],
        "sums": [[thousandths(vector[shown]) for vector in sums] for sums in split_run.sums],
        "losses": [round(loss, 4) for loss in split_run.losses],
        "gradient_error": significant(relative(split_run.sums[0][-1], unsplit.sums[0][-1]), 2),
    }


def backwards(moments: StepMoments) -> list[tuple[int, int]]:
    """Return the first and the last event of each backward."""
    return list(zip(moments.backward, moments.done, strict=True))


def first_in_block(places: Sequence[tuple[int, int]], span: tuple[int, int]) -> list[int]:
    """Return the first event at which each block is entered within a span of events."""
    begin, end = span
    blocks = sorted({block for _, block in places})
    return [min(event for event, at in places if at == block and begin <= event <= end) for block in blocks]


def pieces_of(
    trace: MemoryTrace, begin: int, layers: Sequence[tuple[int, int]]
) -> list[tuple[int, int, int, int, int]]:
    """Return (bytes, stack position, event of the allocation, of the free or -1, block or -1) per allocation."""
    allocated: dict[int, int] = {}
    freed: dict[int, int] = {}
    for moment, event in enumerate(trace.events):
        (allocated if event > 0 else freed)[abs(event) - 1] = moment
    found = []
    for number, moment in sorted(allocated.items(), key=lambda item: item[1]):
        allocation = trace.allocations[number]
        if moment < begin or allocation.num_bytes < MIN_DRAWN_BYTES or allocation.category not in STACK_POSITIONS:
            continue
        entered = [block for event, block in layers if event <= moment]
        block = entered[-1] if entered and allocation.category == "activations" else -1
        found.append((allocation.num_bytes, STACK_POSITIONS[allocation.category], moment, freed.get(number, -1), block))
    return found


def packed(images: Tensor) -> str:
    """Return images of 8 x 8 pixels as text, with one digit from 0 (dark) to 7 for each pixel."""
    values = (images.flatten() * 8).to(torch.int64).clamp(0, 7)
    return "".join(map(str, values.tolist()))


def thousandths(values: Tensor) -> list[int]:
    """Return numbers as integers, in units of 0.001."""
    return [round(1000 * value) for value in values.tolist()]


EXPERIMENT = Experiment(
    name="scene",
    question="What happens in memory, gradients and loss if a batch of 64 is split into micro-batches?",
    run=run,
    seconds=5,
    tolerance=1e-2,
    noisy=("gradient_error",),
)
