"""The engine under FSDP2 and DDP against accumulation loops written by hand, and the memory that both take.

Steps alternate within one run, on the same model and data: a loop written by hand and the engine, under DDP (no_sync
until the last micro-batch, no search for unused parameters) and under FSDP2 (`fully_shard` on each block, set to sum,
gradients reduced in the last micro-batch or in every one). Figures are medians over rounds of the slowest rank's
seconds, and of the ratios of neighbouring steps, with the quartiles of these ratios. Memory is the peak of each rank's
tensors in a step, counted at each operation, under DDP, all_reduce and both kinds of FSDP2.

    python benchmarks/ddp_and_fsdp_by_hand.py [--out benchmarks/results/NAME.md]
"""

import statistics
from collections.abc import Callable, Mapping, Sequence

import report
import torch
import torch.distributed as dist
from all_reduce_against_ddp import InMemory, alternated, bare_ddp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import anybatch as ab
from anybatch.engine.arguments import TrainSpec
from anybatch.engine.notifier import num_bytes_of
from anybatch.parallel.ddp import DDP
from anybatch.parallel.fsdp import FSDP
from anybatch.planner.step_spec import StepSpec
from anybatch.planner.step_trace import trace_step
from anybatch.testing import RankPool

WIDTH, NUM_BLOCKS, SIZE = 512, 8, 8
REDUCTIONS = ("last_micro_batch", "every_micro_batch")
Batch = dict[str, torch.Tensor]


class Block(nn.Module):
    """A transformer layer without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input plus the layers' output."""
        out: torch.Tensor = hidden + self.narrow(functional.gelu(self.wide(self.norm(hidden))))
        return out


class Model(nn.Module):
    """A tower of blocks: 16.8 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        scores: torch.Tensor = self.last(hidden)
        return scores


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def adamw(named: object) -> torch.optim.Optimizer:
    """Return the optimizer."""
    return torch.optim.AdamW(named, lr=1e-4)  # type: ignore[arg-type]


def by_hand(reduction: str) -> Callable[[InMemory], object]:
    """Return a step of FSDP2 as a hand-written loop."""
    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    root = fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)
    optimizer = adamw(model.named_parameters())

    def step(whole: InMemory) -> None:
        num_samples = len(whole.sample_ids) // dist.get_world_size()
        own = dist.get_rank() * num_samples
        batch = {name: value[own : own + num_samples] for name, value in whole.batch.items()}
        for start in range(0, num_samples, SIZE):
            piece = {name: value[start : start + SIZE] for name, value in batch.items()}
            reduces = start + SIZE >= num_samples or reduction == "every_micro_batch"
            root.set_requires_gradient_sync(reduces)
            root.set_is_last_backward(reduces)
            value = loss(model, piece) * (len(piece["x"]) / len(whole.sample_ids))
            value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def by_engine(strategy: str | ab.Strategy) -> Callable[[InMemory], object]:
    """Return the engine's step under a strategy."""
    engine = ab.Engine(
        Model(),
        adamw,
        ab.mean_over_samples(loss),
        micro_batch_size=SIZE,
        strategy=strategy,
        measure_gradient_norm=False,
    )
    return engine.step


def batch_of(num_micro_batches: int) -> InMemory:
    """Return an effective batch."""
    num_samples = SIZE * num_micro_batches * dist.get_world_size()
    return InMemory({"x": torch.randn(num_samples, 16), "y": torch.randint(0, 10, (num_samples,))})


def ddp_by_hand() -> Callable[[InMemory], object]:
    """Return a step of DDP as a hand-written loop."""
    return bare_ddp(Model(), SIZE, find_unused_parameters=False, make_optimizer=adamw)


def compare(kind: str, num_micro_batches: int, rounds: int) -> dict[str, list[float]]:
    """Run on every rank: return the seconds of each kind of step."""
    if kind == "ddp":  # both search for unused parameters, or neither does
        steps = {"by hand": ddp_by_hand(), "engine": by_engine(DDP(find_unused_parameters=False))}
    else:
        steps = {"by hand": by_hand(kind), "engine": by_engine(FSDP(reduction=kind))}  # type: ignore[arg-type]
    return alternated(steps, batch_of(num_micro_batches), rounds)


def resident_and_peak(kind: str) -> tuple[int, int]:
    """Run on every rank: return the bytes of tensors between steps, and at the peak of a step."""
    strategy = FSDP(reduction=kind) if kind in REDUCTIONS else kind  # type: ignore[arg-type]
    model = Model()
    engine = ab.Engine(model, adamw, ab.mean_over_samples(loss), micro_batch_size=SIZE, strategy=strategy)
    batch = batch_of(2)
    for _ in range(2):
        engine.step(batch)
    # The engine's report counts these too.
    resident = sum(map(num_bytes_of, engine.resident_tensors().values()))
    if kind == "ddp":  # its buckets are created in the first steps, and are not in any tensor list
        resident += sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    # A single step: gloo's threads free memory without a record, which would add up.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        engine.step(batch)
    held = largest = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            largest = max(largest, held)
    return resident, resident + largest


def planned(kind: str, num_ranks: int) -> str:
    """Return the peak that the planner predicts for a rank, in MiB."""
    sample = {"x": torch.zeros(1, 16), "y": torch.zeros(1, dtype=torch.long)}
    train = TrainSpec(model=Model(), optimizer=adamw, loss=ab.mean_over_samples(loss))
    how = (lambda: FSDP(reduction=kind)) if kind in REDUCTIONS else kind  # type: ignore[arg-type]
    spec = StepSpec(train=train, sample=sample, strategy=how, world_size=num_ranks, profile="cpu")
    return f"{trace_step(spec, SIZE).steady.peak_bytes / 2**20:.1f}"


def row_of(ranks: Sequence[Mapping[str, Sequence[float]]]) -> str:
    """Return the medians of both kinds of step and of their ratios, from the seconds on each rank."""
    hand, own = ([max(one) for one in zip(*(r[name] for r in ranks), strict=True)] for name in ("by hand", "engine"))
    lower, middle, upper = statistics.quantiles([b / a for a, b in zip(hand, own, strict=True)], n=4)
    medians = " | ".join(f"{statistics.median(values) * 1e3:.2f}" for values in (hand, own))
    return f"{medians} | {middle:.3f} | {lower:.3f} to {upper:.3f}"


def main() -> None:
    """Print the tables, and write them to a file if asked."""
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args()
    lines = [
        "| ranks | ddp, or fsdp that reduces | accumulation steps | by hand, ms | engine, ms | ratio | quartiles |",
        "|--:|---|--:|--:|--:|--:|---|",
    ]
    memory = ["| ranks | strategy | between steps, MiB | at the peak, MiB | planned, MiB |", "|--:|---|--:|--:|--:|"]
    for num_ranks in arguments.ranks:
        with RankPool(num_ranks) as pool:
            for kind in ("ddp", *REDUCTIONS):
                for number in (1, 4):
                    ranks = pool.run(compare, kind, number, arguments.rounds)
                    lines.append(f"| {num_ranks} | {kind} | {number} | {row_of(ranks)} |")
        for kind in ("ddp", "all_reduce", *REDUCTIONS):
            with RankPool(num_ranks) as pool:
                resident, peak = (max(one) / 2**20 for one in zip(*pool.run(resident_and_peak, kind), strict=True))
            figures = f"{resident:.1f} | {peak:.1f} | {planned(kind, num_ranks)}"
            memory.append(f"| {num_ranks} | {kind} | {figures} |")
    report.publish(
        [*lines, "", *memory],
        title="DDP and FSDP2 by the engine and by hand",
        command="python benchmarks/ddp_and_fsdp_by_hand.py",
        setting="ranks over gloo, 1 thread each, medians of alternating steps, the slowest rank",
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
