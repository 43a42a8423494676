"""Faults planted into one run, with each action of the spike watch: none, warn, lower the rate, or roll back."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anybatch.core.spikes import SpikeAction
from anybatch.errors import AnyBatchWarning, NonFiniteError
from anybatch.records import DiagnosisRecord, Record
from anybatch_guide.experiment import Data, Emit, Experiment
from anybatch_guide.lines import significant
from anybatch_guide.study import BETAS, Batch, StudyRun, engine_of, evaluate_held_out, new_model, steps_of

RUN = StudyRun(task="digits", optimizer="SGD", batch_size=16, learning_rate=0.02, epochs=4, betas=BETAS["SGD"])
START, BAD_BATCHES, CORRUPTED_STEPS = 150, 20, 3
STEPS_BEFORE = 30
ACTIONS: tuple[SpikeAction | None, ...] = (None, "warn", "lower", "roll_back")
CODES = ("spike", "rate_lowered", "rolled_back")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault planted into a run."""

    description: str  # description for the page
    # function (age, batch) -> the batch to train on; the age is the number of steps since the fault began
    batch: Callable[[int, Batch], Batch] = lambda _, batch: batch
    rate: Callable[[int], float] = lambda _: 1.0  # function (age) -> factor of the learning rate
    # function (age, gradient of a parameter) -> the gradient to use
    gradient: Callable[[int, Tensor], Tensor] = lambda _, gradient: gradient


def bad_batch(age: int, batch: Batch) -> Batch:
    """Return a bad batch during the fault: inputs times 15, and the same label for all samples."""
    if not 0 <= age < BAD_BATCHES:
        return batch
    return {"inputs": 15 * batch["inputs"], "targets": torch.full_like(batch["targets"], 3)}


def corrupted(age: int, gradient: Tensor) -> Tensor:
    """Return the gradient plus noise of 300 times its norm during the fault."""
    if not 0 <= age < CORRUPTED_STEPS:
        return gradient
    noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(age)) / math.sqrt(gradient.numel())
    noisy: Tensor = gradient + 300 * gradient.norm() * noise
    return noisy


FAULTS = {
    "none": Fault("nothing"),
    "bad_batches": Fault(f"{BAD_BATCHES} batches with inputs times 15 and the same label for all", batch=bad_batch),
    "rate_too_high": Fault("40 times the learning rate from then on", rate=lambda age: 40.0 if age >= 0 else 1.0),
    "corrupted_gradients": Fault(
        f"gradients plus noise of 300 times their norm, in {CORRUPTED_STEPS} steps", gradient=corrupted
    ),
}


class _SpikeRecords:
    """An observer that stores the records of the spike watch."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def observe(self, record: Record) -> None:
        """Store a record of the spike watch."""
        if isinstance(record, DiagnosisRecord) and record.code in CODES:
            self.records.append({"step": record.step, "code": record.code, "message": record.message})


def run(emit: Emit) -> Data:
    """Train without and with each fault, without the spike watch and with each of its actions."""
    runs = []
    for name, fault in FAULTS.items():
        unwatched: dict[str, Any] = {}
        for action in ACTIONS:
            emit({"kind": "guide.progress", "what": f"{name}, {action}"})
            result = run_watched(fault, action)
            is_same = result["losses"] == unwatched.get("losses")
            unwatched = unwatched or result
            # Before the fault, all runs equal the healthy run, so only the healthy run is recorded completely.
            first_step = 0 if name == "none" else START - STEPS_BEFORE
            runs.append(
                {
                    "plant": name,
                    "planted": fault.description,
                    "action": action,
                    "first_step": first_step,
                    **result,
                    "losses": None if is_same else result["losses"][first_step:],
                }
            )
    return {"planted_at": START, "runs": runs}


def run_watched(fault: Fault, action: SpikeAction | None) -> dict[str, Any]:
    """Train once; return the losses, the records of the spike watch, and final metrics."""
    model, spike_records = new_model(RUN), _SpikeRecords()
    losses, age = list[float](), -START
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: fault.gradient(age, gradient))
    with (
        warnings.catch_warnings(),
        engine_of(RUN, model, measure_gradient_norm=True, spikes=action, observer=spike_records) as engine,
    ):
        warnings.simplefilter("ignore", AnyBatchWarning)
        try:
            for age, batch in enumerate(steps_of(RUN), start=-START):
                # The scheduler recomputes rates after each step, so the factor does not accumulate.
                for group in engine.optimizer.param_groups:
                    group["lr"] *= fault.rate(age)
                report = engine.step(fault.batch(age, batch))
                losses.append(significant(report.loss, 4))
        except NonFiniteError as error:
            spike_records.records.append({"step": age + START, "code": "ended", "message": type(error).__name__})
            return {"losses": losses, "told": spike_records.records, "held_out": math.inf, "accuracy": math.nan}
    loss, accuracy = evaluate_held_out(model, RUN)
    return {"losses": losses, "told": spike_records.records, "held_out": loss, "accuracy": accuracy}


EXPERIMENT = Experiment(
    name="spikes",
    question="What happens in a run that diverges, and which action helps?",
    run=run,
    seconds=30,
    tolerance=0.1,
    noisy=("message",),
)
