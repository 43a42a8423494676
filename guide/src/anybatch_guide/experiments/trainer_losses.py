"""Losses and gradient errors of transformers' unmodified `Trainer`, compared with all samples of each step."""

import importlib
import importlib.util
import inspect
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.errors import UserError
from anybatch_guide.claims.measuring import flat_gradients, measure_cases, new_model, relative
from anybatch_guide.experiment import Data, Emit, Experiment
from anybatch_guide.tasks.task import IGNORED, PlaygroundTask, cross_entropy, load


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of an epoch and its split; the last step may have fewer micro-batches."""

    num_samples: int
    micro_batch_size: int
    accumulation_steps: int


PACKAGES = ("transformers", "accelerate")
SENTENCES, DIGITS = Shape(64, 4, 16), Shape(85, 16, 4)
Row = dict[str, Tensor]


def run(emit: Emit) -> Data:
    """Run each case with the Trainer, and compare the gradient of each step with the unsplit samples."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        message = f"{' and '.join(missing)} must be installed to run a Trainer: pip install 'anybatch[peers]'"
        raise UserError(message)
    transformers = importlib.import_module("transformers")
    trainer = transformers.Trainer
    custom, undivided = with_custom_loss(trainer), with_undivided_loss(trainer)
    cases: dict[str, Callable[[], dict[str, list[float]]]] = {
        "own_model": lambda: train(trainer, language(transformers), shifted(), SENTENCES),
        "module": lambda: train(trainer, Averaging(load("text")), rows_of("text"), SENTENCES),
        "module_ragged": lambda: train(trainer, Averaging(load("digits")), rows_of("digits"), DIGITS),
        "module_items": lambda: train(trainer, ByItems(load("text")), rows_of("text"), SENTENCES),
        "module_items_ragged": lambda: train(trainer, ByItems(load("digits")), rows_of("digits"), DIGITS),
        "compute_loss": lambda: train(custom, language(transformers), shifted(), SENTENCES),
        "compute_loss_said": lambda: train(undivided, language(transformers), shifted(), SENTENCES),
    }
    if "compute_loss_func" in inspect.signature(trainer).parameters:  # older versions do not accept it
        extra = {"compute_loss_func": summed_loss}
        cases["compute_loss_func"] = lambda: train(trainer, language(transformers), shifted(), SENTENCES, **extra)
    with _quiet():
        measured = measure_cases(emit, cases)
    errors = {name: each.pop("errors") for name, each in measured.items()}
    return {"errors": errors, "losses": measured}


class Averaging(nn.Module):
    """A network whose forward returns the mean loss of its micro-batch, and does not accept `num_items_in_batch`."""

    def __init__(self, task: PlaygroundTask) -> None:
        super().__init__()
        self.network = new_model(task).double()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Row:
        """Return the loss and the logits."""
        logits = self.network(input_ids)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class ByItems(Averaging):
    """A network whose loss is the sum over targets, divided by `num_items_in_batch` if the Trainer passes it."""

    def forward(self, input_ids: Tensor, labels: Tensor, **extra: Tensor) -> Row:
        """Return the loss and the logits."""
        output, num_targets = super().forward(input_ids, labels), labels.ne(IGNORED).sum()
        return {**output, "loss": output["loss"] * num_targets / extra.get("num_items_in_batch", num_targets)}


def language(transformers: Any) -> nn.Module:  # noqa: ANN401 (a package without types here)
    """Return a small language model of transformers, whose loss accepts `num_items_in_batch`."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes)
        model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.double()


def with_custom_loss(trainer: type[Any]) -> type[Any]:
    """Return a Trainer with a typical custom loss: the mean over the targets of a micro-batch."""

    class CustomLoss(trainer):  # type: ignore[misc]  # has no types here
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:  # noqa: ANN401, FBT001, FBT002 (as transformers has it)
            outputs = model(**inputs)
            loss = summed_loss(outputs, inputs["labels"], None)
            return (loss, outputs) if return_outputs else loss

    return CustomLoss


def with_undivided_loss(trainer: type[Any]) -> type[Any]:
    """Return a Trainer with the same custom loss that declares that the loss is not divided yet."""
    undivided: type[Any] = type("UndividedLoss", (with_custom_loss(trainer),), {"loss_is_scaled_for_ga": False})
    return undivided


def summed_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None) -> Tensor:  # noqa: ANN401 (transformers')
    """Return the sum over targets, divided by `num_items_in_batch`, or by the number of targets if it is None."""
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return total / (targets.ne(IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)


def rows_of(name: str) -> list[Row]:
    """Return the samples of a task with the key names of the Trainer."""
    rows = load(name).rows
    inputs = rows.inputs.double() if rows.inputs.is_floating_point() else rows.inputs
    return [{"input_ids": row, "labels": labels} for row, labels in zip(inputs, rows.targets, strict=True)]


def shifted() -> list[Row]:
    """Return sentences for a model that shifts labels: the input, with padding ignored."""
    return [{**row, "labels": row["input_ids"].where(row["labels"] != IGNORED, IGNORED)} for row in rows_of("text")]


def train(
    trainer: type[Any],
    model: nn.Module,
    rows: list[Row],
    shape: Shape,
    **extra: Any,  # noqa: ANN401 (the Trainer's model)
) -> dict[str, list[float]]:
    """Return each step's gradient error and logged loss in an epoch, and the loss of all its samples in one pass."""
    arguments_of = importlib.import_module("transformers").TrainingArguments
    optimizer = ComparingOptimizer(model)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = arguments_of(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=shape.micro_batch_size,
            gradient_accumulation_steps=shape.accumulation_steps,
            max_grad_norm=0.0,
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
        )
        instance = recording_inputs(trainer, optimizer)(
            model=model,
            args=arguments,
            train_dataset=rows[: shape.num_samples],
            optimizers=(optimizer, schedule),
            **extra,
        )
        instance.remove_callback(importlib.import_module("transformers").PrinterCallback)
        instance.train()
    logged = [entry["loss"] for entry in instance.state.log_history if "loss" in entry]
    return {"errors": optimizer.errors, "with": logged, "without": optimizer.losses}


@dataclass(eq=False)
class ComparingOptimizer(torch.optim.SGD):
    """An optimizer without updates; `step` compares the gradient with the gradient of all samples of the step."""

    model: nn.Module
    seen: list[Row] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.model.parameters(), lr=0.1)

    @torch.enable_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ANN401, ARG002 (as torch has it)
        """Record the gradient error and the loss of all samples of this step, and forget them."""
        accumulated = flat_gradients(self.model)
        batch = {name: torch.cat([inputs[name] for inputs in self.seen]) for name in self.seen[0]}
        self.model.zero_grad()
        loss = self.model(**batch)["loss"]
        loss.backward()
        self.errors.append(relative(accumulated, flat_gradients(self.model)))
        self.losses.append(loss.item())
        self.seen.clear()


def recording_inputs(trainer: type[Any], optimizer: ComparingOptimizer) -> type[Any]:
    """Return a Trainer that records the inputs of each micro-batch before running it."""

    class RecordingInputs(trainer):  # type: ignore[misc]  # has no types here
        def training_step(self, model: nn.Module, inputs: Row, *rest: Any) -> Any:  # noqa: ANN401 (the Trainer's)
            optimizer.seen.append(dict(inputs))
            return super().training_step(model, inputs, *rest)

    return RecordingInputs


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the progress output of the Trainer, and restore torch's random state."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        logger.setLevel(before)


EXPERIMENT = Experiment(
    name="trainer_losses",
    question="How large is the gradient error of a step of transformers' Trainer?",
    run=run,
    seconds=30,
    runs_here=False,
    tolerance=1e-6,
    noisy=("own_model", "module_items", "module_items_ragged", "compute_loss_func"),
    packages=PACKAGES,
)
