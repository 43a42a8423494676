"""One data-parallel step, number by number: broadcast, gradients of micro-batches, an all-reduce in a ring, an update.

All numbers are small integers until the update, so a sum is exact in any order.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from anybatch.testing import RankPool
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress
from anybatch_guide.tasks.task import load

NUM_RANKS, NUM_MICRO_BATCHES, MICRO_BATCH = 4, 2, 4
NUM_WEIGHTS, RATE = 8, 0.5
EFFECTIVE_BATCH = NUM_RANKS * NUM_MICRO_BATCHES * MICRO_BATCH


def run(emit: Emit) -> Data:
    """Make one step on four ranks, and compare its sum with torch's all-reduce and with one pass over all samples."""
    emit_progress(emit, 0, 1, f"{NUM_RANKS} ranks")
    with RankPool(NUM_RANKS) as pool:
        ranks = pool.run(make_step)
    full_batch = nn.Linear(NUM_WEIGHTS, 1, bias=False)
    full_batch.weight.data.copy_(torch.tensor(ranks[0]["broadcast"]))
    add_gradient(full_batch, *samples())
    return {
        "num_micro_batches": NUM_MICRO_BATCHES,
        "micro_batch_size": MICRO_BATCH,
        "item_bytes": full_batch.weight.itemsize,
        "ranks": ranks,
        "full_batch": integers(gradient_of(full_batch)),
        "sampler": epochs_of_sampler(),
    }


def samples() -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of the effective batch, all with integer values."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(-1, 2, (EFFECTIVE_BATCH, NUM_WEIGHTS), generator=generator).float()
    return inputs, inputs @ torch.randint(-2, 3, (NUM_WEIGHTS,), generator=generator).float()


def add_gradient(model: nn.Linear, inputs: Tensor, targets: Tensor) -> None:
    """Add the gradient of the summed loss of these samples."""
    (0.5 * (model(inputs)[:, 0] - targets).square().sum()).backward()


def gradient_of(model: nn.Linear) -> Tensor:
    """Return the accumulated gradient as a vector."""
    assert model.weight.grad is not None
    return model.weight.grad[0]


def make_step() -> dict[str, Any]:
    """Return this rank's numbers after each part of the step. Runs on every rank."""
    model = nn.Linear(NUM_WEIGHTS, 1, bias=False)
    weights = model.weight.detach()[0]
    weights.copy_(torch.randint(-3, 4, (NUM_WEIGHTS,), generator=torch.Generator().manual_seed(dist.get_rank())))
    numbers: dict[str, Any] = {"initial": integers(weights)}
    dist.broadcast(weights, src=0)
    numbers["broadcast"] = integers(weights)
    share = [part.chunk(NUM_RANKS)[dist.get_rank()].split(MICRO_BATCH) for part in samples()]
    numbers["gradients"] = []
    for inputs, targets in zip(*share, strict=True):
        add_gradient(model, inputs, targets)
        numbers["gradients"].append(integers(gradient_of(model)))
    gradient = gradient_of(model)
    dist.all_reduce(expected := gradient.clone())
    numbers["hops"] = list(ring_all_reduce(gradient))
    numbers["all_reduce"] = integers(expected)
    torch.optim.SGD(model.parameters(), lr=RATE / EFFECTIVE_BATCH).step()
    return {**numbers, "updated": weights.tolist()}


def ring_all_reduce(vector: Tensor) -> Iterator[dict[str, Any]]:
    """Sum a vector over all ranks in place; yield the chunk that this rank sends in each hop, and the vector after it.

    The first hops are a reduce-scatter: each rank adds the received chunk to its own. The others are an all-gather:
    complete chunks replace the rank's own.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    chunks = vector.chunk(num_ranks)
    for hop in range(2 * (num_ranks - 1)):
        number = (rank - hop) % num_ranks
        sent, own = chunks[number].clone(), chunks[number - 1]
        sending = dist.isend(sent, (rank + 1) % num_ranks)
        assert sending is not None
        received = torch.empty_like(own)
        dist.recv(received, (rank - 1) % num_ranks)
        sending.wait()
        own.copy_(own + received if hop < num_ranks - 1 else received)
        yield {"chunk": number, "sent": integers(sent), "bytes": sent.nbytes, "after": integers(vector)}


def integers(vector: Tensor) -> list[int]:
    """Return the numbers of a vector, which must be integers."""
    assert torch.equal(vector, vector.round())
    return [int(value) for value in vector.tolist()]


def epochs_of_sampler() -> dict[str, int]:
    """Count how many samples of rank 0 have the same position in two epochs, with `set_epoch` and without."""
    sampler: DistributedSampler[Any] = DistributedSampler(load("digits").rows, num_replicas=NUM_RANKS, rank=0)
    first, without = list(sampler), list(sampler)
    sampler.set_epoch(1)
    return {
        "share": len(first),
        "same_without": sum(a == b for a, b in zip(first, without, strict=True)),
        "same_with": sum(a == b for a, b in zip(first, sampler, strict=True)),
    }


EXPERIMENT = Experiment(
    name="ddp_step",
    question="Which numbers travel between four ranks in one data-parallel step?",
    run=run,
    seconds=5,
    runs_here=False,
)
