"""Memory and number of operations of an accumulated step, by optimizer, precision and checkpointing."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

import anybatch as ab
from anybatch.core.compatibility import PrecisionName
from anybatch.core.torch_internals import TorchDispatchMode
from anybatch.diagnostics.memory_report import record_memory
from anybatch.memory.trace import MemoryTimeline
from anybatch.parallel.gradient_buckets import gradient_bytes
from anybatch_guide.memory.small import SmallModel, isolated_random_state

OptimizerName = Literal["adamw", "sgd"]
_OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationConfig:
    """Options of a step, except its micro-batch size."""

    optimizer: OptimizerName  # SGD without momentum, or AdamW
    precision: PrecisionName  # number formats of forward and backward
    checkpointing: bool  # whether each block is recomputed in the backward instead of keeping its activations


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredStep:
    """The memory and the work of a measured step."""

    timeline: MemoryTimeline  # memory by category, over the step
    gradient_bytes: int  # bytes of one copy of the gradients
    num_operations: int  # tensor operations except views: on a GPU, each starts at least one kernel


class OperationCounter(TorchDispatchMode):
    """Counts the operations on tensors, except views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 (torch's)
        """Count an operation, and run it."""
        self.num_operations += not func.is_view
        return func(*args, **(kwargs or {}))


def measure_accumulated(
    small_model: SmallModel, config: AccumulationConfig, *, effective_batch_size: int, micro_batch_size: int
) -> MeasuredStep:
    """Measure the engine's second step; the first step, with a single micro-batch, creates the optimizer state."""
    batch = small_model.batch(effective_batch_size)
    with engine_of(small_model, config, micro_batch_size=micro_batch_size) as engine:
        engine.step(small_model.batch(micro_batch_size))
        with record_memory(engine) as recording, OperationCounter() as counter:
            engine.step(batch)
        model = engine.model
    assert isinstance(model, nn.Module)
    return MeasuredStep(
        timeline=recording.report.timeline,
        gradient_bytes=gradient_bytes(model.parameters()),
        num_operations=counter.num_operations,
    )


def engine_of(small_model: SmallModel, config: AccumulationConfig, *, micro_batch_size: int) -> ab.Engine:
    """Return an engine with a new model."""
    make = small_model.checkpointed if config.checkpointing else small_model.make
    assert make is not None, f"{small_model.name} has no blocks"
    with isolated_random_state():
        model = make()
    return ab.Engine(
        model,
        _OPTIMIZERS[config.optimizer](model.parameters(), lr=1e-3),
        ab.mean_over_samples(small_model.loss),
        micro_batch_size=micro_batch_size,
        precision=config.precision,
        measure_gradient_norm=False,
        check_loss=False,  # the check would run in the second step, too, and allocate memory
    )


def all_configs() -> tuple[AccumulationConfig, ...]:
    """Return every combination of options; the first is AdamW in float32 without checkpointing."""
    optimizers: tuple[OptimizerName, ...] = ("adamw", "sgd")
    precisions: tuple[PrecisionName, ...] = ("fp32", "bf16")
    return tuple(
        AccumulationConfig(optimizer=optimizer, precision=precision, checkpointing=checkpointing)
        for optimizer in optimizers
        for precision in precisions
        for checkpointing in (False, True)
    )
