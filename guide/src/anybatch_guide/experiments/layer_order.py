"""Communication and memory with sharded weights, if a step runs one micro-batch at a time or one layer at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import functional_call

from anybatch.testing import RankPool
from anybatch_guide.claims.measuring import flat_gradients, relative
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress
from anybatch_guide.experiments.rank_memory import NUM_BLOCKS, WIDTH, loss, network

NUM_RANKS, SHARE, MICRO_BATCHES = 2, 64, (1, 2, 4, 8)
"""Number of ranks, samples per rank, and numbers of micro-batches."""
Order = Literal["micro_batches", "layers"]
Visit = tuple[Literal["forward", "backward"], int, int]
"""The work of one block on one micro-batch: phase, block, micro-batch."""


def run(emit: Emit) -> Data:
    """Run one step in each order, for each number of micro-batches, on two ranks."""
    emit_progress(emit, 0, 1, f"{NUM_RANKS} ranks")
    with RankPool(NUM_RANKS) as pool:
        steps = pool.run(measure_orders, MICRO_BATCHES)[0]
    return {"num_ranks": NUM_RANKS, "blocks": NUM_BLOCKS, "steps": steps}


def visits(order: Order, num_micro_batches: int) -> Iterator[Visit]:
    """Yield the visits of a step in execution order."""
    up, down = range(NUM_BLOCKS), range(NUM_BLOCKS)[::-1]
    if order == "micro_batches":
        for number in range(num_micro_batches):
            yield from (("forward", block, number) for block in up)
            yield from (("backward", block, number) for block in down)
    else:
        yield from (("forward", block, number) for block in up for number in range(num_micro_batches))
        yield from (("backward", block, number) for block in down for number in range(num_micro_batches))


@dataclass(slots=True)
class Shards:
    """A sharded network that gathers one block at a time, and counts bytes of communication and memory."""

    full_model: torch.nn.Sequential
    shards: list[Tensor] = field(init=False)
    gathered_bytes: int = 0  # bytes of gathered weights
    reduced_bytes: int = 0  # bytes of gradients that one rank reduces
    kept_bytes: int = 0  # peak bytes of outputs between blocks
    waiting_bytes: int = 0  # peak bytes of full, unreduced gradients
    # phase, block, micro-batch, and whether the block was gathered for this visit
    visits: list[tuple[str, int, int, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shards = [torch.cat([p.detach().flatten() for p in block.parameters()]) for block in self.full_model]
        self.shards = [flat.chunk(dist.get_world_size())[dist.get_rank()].clone() for flat in self.shards]

    def step(self, order: Order, samples: Tensor, num_micro_batches: int) -> list[Tensor]:
        """Return this rank's shards of the gradient, one per block. The loss is the mean over samples of all ranks."""
        outputs = list(samples.chunk(num_micro_batches))
        number_of_outputs = samples.numel() * dist.get_world_size()
        order_of_visits = list(visits(order, num_micro_batches))
        last = {block: index for index, (phase, block, _) in enumerate(order_of_visits) if phase == "backward"}
        inputs: dict[tuple[int, int], Tensor] = {}
        waiting: dict[int, Tensor] = {}
        reduced: dict[int, Tensor] = {}
        gathered_block, weights = -1, torch.empty(0)
        for index, (phase, block, number) in enumerate(order_of_visits):
            self.visits.append((phase, block, number, block != gathered_block))
            if block != gathered_block:
                gathered_block, weights = block, self._gather(block)
            if phase == "forward":
                inputs[block, number] = outputs[number]
                with torch.no_grad():
                    outputs[number] = self._forward(block, weights, outputs[number])
                self.kept_bytes = max(self.kept_bytes, _num_bytes([*inputs.values()]))
                if block == NUM_BLOCKS - 1:
                    # From here on, `outputs` contains gradients of the loss (the mean square).
                    outputs[number] = 2 * outputs[number] / number_of_outputs
                continue
            block_inputs = inputs.pop((block, number)).requires_grad_()
            output = self._forward(block, weights, block_inputs)
            gradient, outputs[number] = torch.autograd.grad(output, (weights, block_inputs), outputs[number])
            waiting[block] = waiting[block] + gradient if block in waiting else gradient
            self.waiting_bytes = max(self.waiting_bytes, _num_bytes([*waiting.values()]))
            if index == last[block]:
                reduced[block] = self._reduce(block, waiting.pop(block))
        return [reduced[block] for block in range(NUM_BLOCKS)]

    def _gather(self, block: int) -> Tensor:
        shard = self.shards[block]
        weights = gathered(shard)
        self.gathered_bytes += _num_bytes([weights])
        return weights.requires_grad_()

    def _reduce(self, block: int, gradient: Tensor) -> Tensor:
        shard = torch.empty_like(self.shards[block])
        dist.reduce_scatter(shard, list(gradient.chunk(dist.get_world_size())))
        self.reduced_bytes += _num_bytes([gradient])
        return shard

    def _forward(self, block: int, weights: Tensor, inputs: Tensor) -> Tensor:
        parameters = dict(self.full_model[block].named_parameters())
        parts = weights.split([p.numel() for p in parameters.values()])
        views = {name: part.view_as(p) for (name, p), part in zip(parameters.items(), parts, strict=True)}
        output: Tensor = functional_call(self.full_model[block], views, (inputs,))
        return output


def measure_orders(micro_batch_counts: Sequence[int]) -> list[dict[str, Any]]:
    """Return communication, memory and gradient error of a step in each order and split. Runs on every rank."""
    samples = torch.randn(NUM_RANKS * SHARE, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = network().double()
    loss(model, samples).backward()
    expected = flat_gradients(model)
    steps = []
    for number in micro_batch_counts:
        for order in ("micro_batches", "layers"):
            shards = Shards(network().double())
            gradient_shards = shards.step(order, samples.chunk(NUM_RANKS)[dist.get_rank()], number)
            steps.append(
                {
                    "order": order,
                    "num_micro_batches": number,
                    "gathered_bytes": shards.gathered_bytes,
                    "reduced_bytes": shards.reduced_bytes,
                    "kept_bytes": shards.kept_bytes,
                    "waiting_bytes": shards.waiting_bytes,
                    "gradient_error": relative(torch.cat([gathered(shard) for shard in gradient_shards]), expected),
                    "visits": shards.visits,
                }
            )
    return steps


def gathered(shard: Tensor) -> Tensor:
    """Return the concatenated shards of all ranks."""
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard)
    return torch.cat(parts)


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


EXPERIMENT = Experiment(
    name="layer_order",
    question="With sharded weights, what does a step send and store if it runs one layer or one micro-batch at a time?",
    run=run,
    seconds=10,
    runs_here=False,
    noisy=("gradient_error",),
)
