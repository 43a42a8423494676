"""Runs of a Trainer with a small model, whose steps are compared with their samples in one batch."""

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from anybatch.core.tensors import relative_error
from anybatch.data.indexed import sample_order
from tests.integrations.heads import Head, Sample, collate, hf, samples_of

NUM_SAMPLES = 29
MICRO_BATCH_SIZE = 3
STEPS = 4
Gradients = dict[str, torch.Tensor]


def join_ranks() -> None:
    """Let accelerate use the process group of this rank, and models compute in float64."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # accelerate asks for them, but the group exists
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    warnings.simplefilter("ignore")  # of accelerate and DDP


def gradients(model: nn.Module) -> Gradients:
    """Return copies of all gradients."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Run:
    """A training run of a small model, with the gradients of its steps and the samples it has seen."""

    def __init__(
        self,
        head: Head,
        folder: Path,
        trainer_class: type[Any] | None = None,
        num_samples: int = NUM_SAMPLES,
        **options: Any,
    ) -> None:
        torch.manual_seed(1)
        self.head, self.model = head, head.model().double()
        self.initial = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.samples, self.seen, self.steps = samples_of(head, num_samples), [], []  # type: ignore[var-annotated]
        optimizer = torch.optim.SGD(self.model.parameters(), lr=options.get("learning_rate", 0.0), momentum=0.9)
        optimizer.register_step_pre_hook(lambda *_: self.steps.append(gradients(self.model)))
        arguments = {
            "per_device_train_batch_size": MICRO_BATCH_SIZE,
            "gradient_accumulation_steps": STEPS,
            "num_train_epochs": 1,
            "use_cpu": True,
            "max_grad_norm": 0.0,
            "remove_unused_columns": False,
            "report_to": [],
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
        }
        of_trainer = {
            key: options.pop(key) for key in ("compute_loss_func", "callbacks", "eval_dataset") if key in options
        }
        self.trainer = (trainer_class or hf.Trainer)(
            self.model,
            hf.TrainingArguments(str(folder), **{**arguments, **options}),
            partial(collate, seen=self.seen),
            self.samples,
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
            **of_trainer,
        )

    def losses(self) -> list[float]:
        """Return the logged losses."""
        return [entry["loss"] for entry in self.trainer.state.log_history if "loss" in entry]

    def effective_batches(self, size: int, *, epochs: int = 1, shuffle: bool = True) -> list[list[Sample]]:
        """Return the samples of each effective batch, from the order of `ab.batches` with the trainer's seed."""
        orders = [
            sample_order(len(self.samples), seed=self.trainer.args.seed, epoch=epoch, shuffle=shuffle).tolist()
            for epoch in range(epochs)
        ]
        return [
            [self.samples[number] for number in order[start : start + size]]
            for order in orders
            for start in range(0, len(order), size)
        ]

    def losses_of(self, windows: list[list[Sample]]) -> list[float]:
        """Return the losses of the initial model on samples in one batch."""
        model = self.head.model().double().eval()
        model.load_state_dict(self.initial)
        with torch.no_grad():
            return [float(model(**collate(window)).loss) for window in windows]

    def weights(self) -> torch.Tensor:
        """Return all parameters and buffers in one vector."""
        return torch.cat([value.detach().double().flatten() for value in self.model.state_dict().values()])

    def windows(self) -> list[list[Sample]]:
        """Return the samples of each step."""
        numbers, args = self.seen, self.trainer.args
        assert args.world_size > 1 or sorted(numbers) == list(range(len(self.samples)))
        size = args.per_device_train_batch_size * args.gradient_accumulation_steps
        mine = [[self.samples[one] for one in numbers[start : start + size]] for start in range(0, len(numbers), size)]
        if args.world_size == 1:
            return mine
        of_ranks: list[Any] = [None] * args.world_size
        dist.all_gather_object(of_ranks, mine)
        return [[sample for window in windows for sample in window] for windows in zip(*of_ranks, strict=True)]

    def worst_error(
        self,
        loss: Callable[[nn.Module, Sample], torch.Tensor] | None = None,
        windows: list[list[Sample]] | None = None,
    ) -> float:
        """Return the largest relative error of a step's gradient against its samples in one batch."""
        errors = []
        for found, window in zip(self.steps, windows or self.windows(), strict=True):
            model = self.head.model().double().train()
            model.load_state_dict(self.initial)
            batch = collate(window)
            (loss(model, batch) if loss else model(**batch).loss).backward()
            errors.append(relative_error(found, gradients(model)))
        return max(errors)
