"""Memory of sharded steps as planned without devices: against published figures, real ranks, and known limits.

1. torchtitan's own figures for Llama 3.1 8B on H100s: 8,192 tokens, two samples per device, selective checkpointing.
2. The engine on two and four gloo ranks on this machine, in the second step, on the rank with the highest peak, against
   the prediction of `ab.plan(device="cpu:64GiB", world_size=..., strategy=...)`. Two micro-batches a step. Tensors: the
   peak of the memory ledger. Allocated: the peak of torch's CPU allocator, by its profiler; apart from tensors these
   are workspaces of kernels, and copies in gloo's thread; neither is planned.
3. The fewest devices of 80 GiB that hold a step of a 70-billion-parameter model, whose weights at two bytes are 140 GB.

    python benchmarks/plan_sharded.py [--only-ranks] [--out benchmarks/results/NAME.md]
"""

import gc
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import llama
import report
import torch
from memory_accuracy import SAMPLES, TOKENS, Batch, Language, Named, adamw, images, pictures, sgd, text
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import anybatch as ab
from anybatch.engine.arguments import TrainSpec
from anybatch.memory.ledger import MemoryLedger
from anybatch.parallel.fsdp import FSDP
from anybatch.parallel.sharding import Sharding
from anybatch.parallel.strategy import Strategy
from anybatch.planner.caching_allocator import replay
from anybatch.planner.fake_ranks import recorded_resizes
from anybatch.planner.fit import smallest_world
from anybatch.planner.step_spec import NUM_MICRO_BATCHES
from anybatch.planner.step_trace import trace_step
from anybatch.testing import RankPool

GIBIBYTE, MEBIBYTE = 1 << 30, 1 << 20
PUBLISHED_GIB = {8: 82.4, 128: 67.0}
"""torchtitan's benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, FSDP without compilation; reserved."""
USABLE_GIB = 68
"""Of 80, with 15% headroom."""
SECOND_STEP = "second step"


@dataclass(frozen=True)
class Case:
    """A model to train, and the size of its micro-batches."""

    model: Callable[[], nn.Module]
    loss: object
    batch: Callable[[int], Batch]
    size: int
    optimizer: Callable[[Named], torch.optim.Optimizer] = adamw

    def spec(self) -> TrainSpec:
        """Return the training specification."""
        return TrainSpec(model=self.model(), optimizer=self.optimizer, loss=self.loss, check_loss=False)  # type: ignore[arg-type]


CASES = {
    "transformer, 4 x 256, 128 tokens, AdamW": Case(lambda: Language(4, 256), TOKENS, text(128), 8),
    "transformer, 6 x 512, 32 tokens, AdamW": Case(lambda: Language(6, 512), TOKENS, text(32), 4),
    "transformer, 6 x 512, checkpointing": Case(lambda: Language(6, 512, checkpointing=True), TOKENS, text(64), 8),
    "CNN, AdamW": Case(lambda: images(64, lambda _: nn.Identity()), SAMPLES, pictures, 16),
    "CNN with BatchNorm, SGD": Case(lambda: images(64, nn.BatchNorm2d), SAMPLES, pictures, 16, sgd),
}
STRATEGIES: dict[str, str | Callable[[], Strategy]] = {
    "ddp": "ddp",
    "all_reduce": "all_reduce",
    "zero1": "zero1",
    "fsdp": "fsdp",
    "fsdp, every micro-batch": lambda: FSDP(reduction="every_micro_batch"),
    "fsdp, 2 replicas, replicas last": lambda: FSDP(replicas=2, reduction="replicas_last"),
}


def in_bfloat16() -> Strategy:
    """Return FSDP2 as in torchtitan: weights gathered in bf16, gradients reduced in float32 in every micro-batch."""
    return FSDP(Sharding(param_dtype=torch.bfloat16), reduction="every_micro_batch")


def against_published() -> list[str]:
    """Return the table of planned and published figures."""
    lines = ["| devices | tensors | reserved, one pool | reserved | published | error |", "|--:|--:|--:|--:|--:|--:|"]
    shape = replace(llama.EIGHT, checkpointing="selective")
    for world_size, published in PUBLISHED_GIB.items():
        spec = replace(llama.spec(shape, world_size=world_size), strategy=in_bfloat16, num_micro_batches=1)
        trace = trace_step(spec, 2).steady
        sizes = [one.num_bytes for one in trace.allocations]
        one_pool, reserved = (
            replay(trace.events, sizes, pools=pools).peak_reserved_bytes / GIBIBYTE for pools in (None, trace.pools)
        )
        error = reserved / published - 1
        tensors = trace.peak_bytes / GIBIBYTE
        lines.append(f"| {world_size} | {tensors:.1f} | {one_pool:.1f} | {reserved:.1f} | {published} | {error:+.1%} |")
    return lines


def planned_peak(name: str, strategy: str, num_ranks: int) -> int:
    """Return the planned bytes per rank for a CPU."""
    case = CASES[name]
    plan = ab.plan(
        case.spec,
        sample=case.batch(1),
        device="cpu:64GiB",
        effective_batch_size=NUM_MICRO_BATCHES * case.size * num_ranks,
        world_size=num_ranks,
        strategy=STRATEGIES[strategy],
        proposals=False,
    )
    return plan.baseline.envelope.peak_bytes(case.size)


def real_peaks(name: str, strategy: str) -> tuple[int, int]:
    """Run on every rank: return the peaks of tensor memory and of allocated memory in the second step."""
    torch.set_num_threads(1)
    case, how = CASES[name], STRATEGIES[strategy]
    gc.collect()
    ledger = MemoryLedger()
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with warnings.catch_warnings(), profiler as seen, recorded_resizes(ledger), ledger:
        warnings.simplefilter("ignore")  # DDP on the search for unused parameters
        torch.manual_seed(0)
        spec = case.spec()
        with ab.World.from_environment(device="cpu") as world:
            engine = ab.Engine(
                spec.model,
                spec.optimizer,
                spec.loss,
                micro_batch_size=case.size,
                strategy=how if isinstance(how, str) else how(),
                check_loss=False,
                world=world,
            )
            torch.manual_seed(world.rank)  # each rank has different samples
            batch = case.batch(NUM_MICRO_BATCHES * case.size)
            engine.step(batch)
            start = ledger.num_events
            with record_function(SECOND_STEP):
                engine.step(batch)
            engine.close()
    events = seen.profiler.kineto_results.events()
    step = next(event for event in events if event.name() == SECOND_STEP)
    held = most = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda one: one.start_ns()):
        held += event.nbytes()
        if step.start_ns() <= event.start_ns() <= step.end_ns():
            most = max(most, held)
    tensors = ledger.trace(start).peak_bytes
    ledger.forget()
    return tensors, most


def against_real_ranks() -> list[str]:
    """Return the table of planned and real peaks."""
    lines = [
        "| model | ranks | strategy | planned, MiB | tensors, MiB | error | allocated, MiB | error |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for num_ranks in (2, 4):
        with RankPool(num_ranks, timeout_seconds=300) as pool:
            for name in CASES:
                for strategy in STRATEGIES:
                    planned = planned_peak(name, strategy, num_ranks)
                    real = (max(one) for one in zip(*pool.run(real_peaks, name, strategy), strict=True))
                    figures = " | ".join(f"{one / MEBIBYTE:.2f} | {planned / one - 1:+.2%}" for one in real)
                    lines.append(f"| {name} | {num_ranks} | {strategy} | {planned / MEBIBYTE:.2f} | {figures} |")
                    print(lines[-1], flush=True)
    return lines


def fewest_devices() -> list[str]:
    """Return the table of the smallest numbers of devices."""
    spec = replace(llama.spec(replace(llama.SEVENTY, checkpointing="full")), strategy=in_bfloat16)
    begun = time.perf_counter()
    found = smallest_world(spec, USABLE_GIB * GIBIBYTE)
    seconds = time.perf_counter() - begun
    return [
        "| weights | memory to use | fewest devices | seconds |",
        "|---|--:|--:|--:|",
        f"| float32, gathered in bfloat16 | {USABLE_GIB} GiB | {found} | {seconds:.0f} |",
    ]


def main() -> None:
    """Print the tables, and write them to a file if asked."""
    parser = report.parser(__doc__)
    parser.add_argument("--only-ranks", action="store_true", help="leave out the models of 8 and 70 billion parameters")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["The engine on gloo ranks on a CPU:", "", *against_real_ranks(), ""]
    if not options.only_ranks:
        lines += ["Llama 3.1 8B, GiB:", "", *against_published(), ""]
        lines += ["70 billion parameters, 8,192 tokens, one sample per device:", "", *fewest_devices()]
    report.publish(
        lines,
        title="Memory of sharded steps, planned without devices",
        command="python benchmarks/plan_sharded.py" + (" --only-ranks" if options.only_ranks else ""),
        setting="one thread",
        out=options.out,
    )


if __name__ == "__main__":
    main()
