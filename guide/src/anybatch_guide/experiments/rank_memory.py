"""Memory per rank with replicas, sharded optimizer states, and fully sharded parameters."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import anybatch as ab
from anybatch.diagnostics.memory_report import record_memory
from anybatch.testing import RankPool
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress

WIDTH, NUM_BLOCKS, BATCH, MICRO_BATCH = 128, 4, 64, 8
WAYS = (
    ("single", 1),
    ("data_parallel", 1),
    ("ddp", 2),
    ("ddp", 4),
    ("zero1", 2),
    ("zero1", 4),
    ("fsdp", 2),
    ("fsdp", 4),
)
_EVENTS = ("all_gather", "post_backward_reshard", "post_backward_reduce", "pre_forward", "pre_backward")
_LABEL, _OWN_ROOT = "FSDP::", "modules_to_train."


def run(emit: Emit) -> Data:
    """Run a step with each strategy and number of ranks, and return the memory of every process."""
    ways = []
    for done, (strategy, num_ranks) in enumerate(WAYS):
        emit_progress(emit, done, len(WAYS), f"{strategy}, {num_ranks} ranks")
        with RankPool(num_ranks) as pool:
            ranks = pool.run(measure_rank, strategy)
        ways.append({"strategy": strategy, "num_ranks": num_ranks, "ranks": ranks})
    return {"ways": ways}


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus the output of the layers."""
        out: Tensor = x + self.narrow(torch.tanh(self.wide(x)))
        return out


def network() -> nn.Sequential:
    """Return a network of residual blocks."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean square of the output."""
    loss: Tensor = model(batch).square().mean()
    return loss


def measure_rank(strategy: str) -> dict[str, Any]:
    """Return this rank's memory between steps and at the peak, and the calls of FSDP2. Runs on every rank.

    With FSDP2, gathered weights and full gradients count as activations or temporaries.
    """
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(3 * BATCH, WIDTH, generator=generator)
    model = network()
    with ab.Engine(
        model,
        lambda named: torch.optim.AdamW(named, lr=1e-3),
        ab.mean_over_samples(loss),
        micro_batch_size=MICRO_BATCH,
        strategy=strategy,
        check_loss=False,
    ) as engine:
        first, second, third = ab.batches(data, effective_batch_size=BATCH, steps=3, shuffle=False)
        engine.step(first)
        with record_memory(engine) as recording:
            engine.step(second)
        calls: Sequence[str] = ()
        if strategy == "fsdp":
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                engine.step(third)
            calls = _calls(profiler)
        timeline = recording.report.timeline
        return {"peak": timeline.at(timeline.peak_moment), "between": timeline.at(0), "calls": list(calls)}


def _calls(profiler: Any) -> list[str]:  # noqa: ANN401 (torch's profile)
    """Return the calls of FSDP2 in a step, in order: `all_gather (1)`, `post_backward_reduce (1)`, ..."""
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    labels = [event.name.removeprefix(_LABEL) for event in events if event.name.startswith(_LABEL)]
    names = [label.replace(_OWN_ROOT, "") for label in labels]
    return [name for name in names if name.split(" ")[0] in _EVENTS]


EXPERIMENT = Experiment(
    name="rank_memory",
    question="How much memory does each process need on one device, with replicas, and with sharded states or weights?",
    run=run,
    seconds=40,
    runs_here=False,
)
