"""Memory of FSDP2 as it is planned without devices: against published figures, real ranks, and known limits.

1. torchtitan's own figures for Llama 3.1 8B on H100s: 8,192 tokens, two samples per device, selective checkpointing.
2. Two real ranks on this machine: what torch's profiler saw the CPU's allocator hand out, and what was planned. gloo
   reduces copies of what it is given, in a thread that lets go when it comes to it: neither is planned.
3. The fewest devices of 80 GiB that hold a step of a 70-billion-parameter model, whose weights at two bytes are 140 GB.

    python benchmarks/plan_sharded.py [--out benchmarks/results/NAME.md]
"""

import gc
import time
from dataclasses import replace
from functools import partial

import llama
import report
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from anybatch.memory.ledger import MemoryLedger
from anybatch.planner.cost.caching_allocator import replay
from anybatch.planner.proposals.more_ranks import smallest_world
from anybatch.planner.trace.fsdp_trace import ShardedLoop, Sharding, shard, trace_sharded
from anybatch.testing import RankPool

GIBIBYTE = 1 << 30
PUBLISHED_GIB = {8: 82.4, 128: 67.0}
"""torchtitan's benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, FSDP without compilation; reserved."""
TINY = llama.Shape(num_layers=3, width=96, num_heads=4, num_key_heads=2, hidden=250, vocabulary=1001, num_tokens=128)
MICRO_BATCH_SIZE = 64
USABLE_GIB = 68
"""Of 80, with 15% headroom."""
SHARDINGS = {
    "gathered again": Sharding(),
    "kept after forward": Sharding(reshard_after_forward=False),
    "reduced once": Sharding(defer=True),
    "in float32": Sharding(param_dtype=None, reduce_dtype=None),
}


def against_published() -> list[str]:
    """Return the table of planned and published figures."""
    lines = ["| devices | tensors | reserved, one pool | reserved | published | error |", "|--:|--:|--:|--:|--:|--:|"]
    shape = replace(llama.EIGHT, checkpointing="selective")
    sharding = Sharding(accumulation_steps=1, reshard_last_block=False)
    for world_size, published in PUBLISHED_GIB.items():
        trace = trace_sharded(llama.spec(shape, world_size=world_size), 2, sharding)
        sizes = [one.num_bytes for one in trace.memory.allocations]
        one_pool, reserved = (
            replay(trace.memory.events, sizes, pools=pools).peak_reserved_bytes / GIBIBYTE
            for pools in (None, trace.pools)
        )
        tensors = trace.memory.peak_bytes / GIBIBYTE
        error = reserved / published - 1
        lines.append(f"| {world_size} | {tensors:.1f} | {one_pool:.1f} | {reserved:.1f} | {published} | {error:+.1%} |")
    return lines


def batch() -> llama.Tokens:
    """Make a micro-batch."""
    size = MICRO_BATCH_SIZE, TINY.num_tokens
    return torch.empty(size, dtype=torch.long).zero_(), torch.empty(size, dtype=torch.long).zero_()


def real_peak(checkpointing: str, sharding: Sharding) -> int:
    """Run on every rank: return the most that a step holds, by the profiler, beside what was there before."""
    model: nn.Module = llama.Llama(replace(TINY, checkpointing=checkpointing))
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)), sharding)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    loop = ShardedLoop(model, optimizer, llama.loss, batch, sharding)
    loop.begin()
    there = loop.trace(MemoryLedger()).memory
    held = largest = sum(one.num_bytes for one in there.allocations if one.phase == "setup")
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        loop.step(MemoryLedger())
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            largest = max(largest, held)
    return largest


def against_real_ranks() -> list[str]:
    """Return the table of planned and real peaks."""
    lines = ["| blocks | weights | planned, MiB | real, MiB | error |", "|---|---|--:|--:|--:|"]
    with RankPool(2, timeout_seconds=300) as pool:
        for checkpointing in ("none", "selective", "full"):
            for words, sharding in SHARDINGS.items():
                spec = llama.spec(replace(TINY, checkpointing=checkpointing), world_size=2, profile="cpu")
                planned = trace_sharded(spec, MICRO_BATCH_SIZE, sharding).memory.peak_bytes
                real = pool.run(real_peak, checkpointing, sharding)[0]
                sizes = f"{planned / 2**20:.2f} | {real / 2**20:.2f} | {planned / real - 1:+.2%}"
                lines.append(f"| checkpointing: {checkpointing} | {words} | {sizes} |")
    return lines


def bfloat16_llama(shape: llama.Shape) -> nn.Module:
    """Return a model whose weights have two bytes."""
    return llama.Llama(shape).to(torch.bfloat16)


def fewest_devices() -> list[str]:
    """Return the table of the smallest numbers of devices."""
    shape = replace(llama.SEVENTY, checkpointing="full")
    mixed, half = llama.spec(shape), llama.spec(shape, model=partial(bfloat16_llama, shape))
    head = "| weights | memory to use | fewest devices | traced: tensors, GiB | seconds |"
    lines = [head, "|---|--:|--:|---|--:|"]
    whole = Sharding(param_dtype=None, reduce_dtype=None)
    for words, spec, sharding in (
        ("float32, gathered in bfloat16", mixed, Sharding()),
        ("bfloat16, and so is AdamW's state", half, whole),
    ):
        begun = time.perf_counter()
        found = smallest_world(spec, USABLE_GIB * GIBIBYTE, sharding=sharding)
        seconds = time.perf_counter() - begun
        tried = ", ".join(f"{one.world_size}: {one.peak_bytes / GIBIBYTE:.1f}" for one in found.tried)
        lines.append(f"| {words} | {USABLE_GIB} GiB | {found.world_size} | {tried} | {seconds:.0f} |")
    return lines


def main() -> None:
    """Print the tables, and write them to a file if asked."""
    out = report.parser(__doc__).parse_args().out
    torch.set_num_threads(1)
    lines = ["Llama 3.1 8B, GiB:", "", *against_published(), ""]
    lines += ["Two gloo ranks on a CPU, by torch's profiler on the first of them:", "", *against_real_ranks(), ""]
    lines += ["70 billion parameters, 8,192 tokens, one sample per device:", "", *fewest_devices()]
    report.publish(
        lines,
        title="Memory under FSDP2, planned without devices",
        command="python benchmarks/plan_sharded.py",
        setting="one thread",
        out=out,
    )


if __name__ == "__main__":
    main()
