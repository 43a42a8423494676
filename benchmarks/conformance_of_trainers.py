"""The conformance kit inside Trainer, Accelerate and Lightning: the host alone, and with anybatch, on 1 and 2 ranks.

Each figure is the largest relative error of a step's gradient in float64, over the micro-batch sizes of a case, against
the gradient of the same samples in one forward and backward. Gradients are read just before the optimizer's step.
For the host alone, a star marks steps that do not have the samples of the effective batches, each once.

    python benchmarks/conformance_of_trainers.py [--ranks 1 2] [--host NAME ...] [--out benchmarks/results/NAME.md]

It needs transformers, accelerate and lightning; a host that is not installed is left out.
"""

import contextlib
import importlib.util
import io
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import report
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

import anybatch as ab
from anybatch.core.tensors import Gradients, relative_error
from anybatch.errors import AnyBatchError
from anybatch.testing import run_ranks
from anybatch.testing.conformance import CASES, Case, SplitCase
from anybatch.testing.conformance.cases import OVER_SAMPLES, classifier, gradients_of, vectors

MAX_NORM = 0.05
BATCH_27 = Case(
    name="27 samples",
    model=classifier,
    samples=partial(vectors, 27),
    loss=OVER_SAMPLES,
    effective_batch_size=13,
    micro_batch_sizes=(13, 3),
)
CLIPPED = replace(CASES[0], name="clipping")
ALL_CASES = (*CASES, BATCH_27, CLIPPED)
Step = tuple[Gradients, list[int]]
"""A step's gradients, and the ids of the samples that this rank has used."""


class Task(nn.Module):
    """A model that returns its loss, and records the samples that it has trained on."""

    def __init__(self, split: SplitCase) -> None:
        super().__init__()
        self.inner = split.model()
        self._loss = split.loss
        self.seen: list[int] = []

    def forward(self, ids: Tensor, **samples: Tensor) -> dict[str, Tensor]:
        """Return the loss of a micro-batch."""
        if torch.is_grad_enabled() and self.training:
            self.seen += ids.tolist()
        means = self._loss.function(self.inner, samples)
        first, *others = [term.weight * means[term.name] for term in self._loss.terms]
        return {"loss": sum(others, first)}


@dataclass(frozen=True)
class Setup:
    """A case with a micro-batch size, on this rank; `is_exact` trains with anybatch."""

    split: SplitCase
    is_exact: bool

    @property
    def num_steps(self) -> int:
        """Micro-batches that the host alone accumulates."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return max(1, math.ceil(self.split.effective_batch_size / (self.split.micro_batch_size * ranks)))

    @property
    def is_clipped(self) -> bool:
        """Whether the host clips the gradient."""
        return self.split.case is CLIPPED

    @property
    def samples(self) -> list[dict[str, Tensor]]:
        """The samples, each with its id."""
        columns = self.split.samples()
        length = len(next(iter(columns.values())))
        return [{"ids": torch.tensor(n), **{key: column[n] for key, column in columns.items()}} for n in range(length)]

    @property
    def count(self) -> Callable[[Any], float] | None:
        """The count of class weights, which a user declares; other items are found."""
        term = self.split.loss.terms[0]
        return term.count if term.over == "class weights" else None

    def watched(self, task: Task) -> tuple[torch.optim.Optimizer, list[Step]]:
        """Return an optimizer that changes nothing, and the list of its steps."""
        optimizer, steps = without_changes(task), []  # type: ignore[var-annotated]
        optimizer.register_step_pre_hook(lambda *_: steps.append(step_of(task)))
        return optimizer, steps


def without_changes(task: Task) -> torch.optim.Optimizer:
    """Return an optimizer that changes nothing."""
    return torch.optim.SGD([parameter for parameter in task.parameters() if parameter.requires_grad], lr=0.0)


def step_of(task: Task) -> Step:
    """Return the gradients of a step, and its samples, which are then forgotten."""
    named = [(name, p.grad) for name, p in task.inner.named_parameters() if p.requires_grad]
    seen, task.seen = task.seen, []
    return {name: None if grad is None else grad.clone() for name, grad in named}, seen


def with_trainer(setup: Setup) -> list[Step]:
    """Train with transformers' Trainer."""
    import transformers  # noqa: PLC0415 (optional)

    split, task = setup.split, Task(setup.split)
    optimizer, steps = setup.watched(task)
    args = transformers.TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=split.micro_batch_size,
        gradient_accumulation_steps=setup.num_steps,
        num_train_epochs=1,
        max_grad_norm=MAX_NORM if setup.is_clipped else 0.0,
        use_cpu=True,
        remove_unused_columns=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        ddp_find_unused_parameters=True,
        **({"ddp_backend": "gloo"} if dist.is_initialized() else {}),
    )
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = transformers.Trainer(task, args, default_collate, setup.samples, optimizers=(optimizer, constant))
    if setup.is_exact:
        ab.exact(trainer, effective_batch_size=split.effective_batch_size, count=setup.count)
    trainer.train()
    return steps


def with_accelerate(setup: Setup, *, whole_windows: bool = False) -> list[Step]:
    """Train in a script of Accelerate; with `whole_windows`, anybatch runs the micro-batches of a window."""
    import accelerate  # noqa: PLC0415 (optional)
    from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: PLC0415

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()  # noqa: SLF001 (an Accelerator shares its state with the one before)
    split, task = setup.split, Task(setup.split)
    optimizer, steps = setup.watched(task)
    unused = accelerate.DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=setup.num_steps, kwargs_handlers=[unused]
    )
    loader = DataLoader(setup.samples, batch_size=split.micro_batch_size)  # type: ignore[arg-type]
    model, prepared = accelerator.prepare(task, optimizer)

    def update() -> None:
        if setup.is_clipped and accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        prepared.step()
        prepared.zero_grad()

    if not setup.is_exact:
        for batch in accelerator.prepare(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                update()
        return steps
    size = split.effective_batch_size
    for window in ab.windows(accelerator, loader, effective_batch_size=size, count=setup.count):
        if whole_windows:
            window.backward(lambda batch: model(**batch)["loss"], model)
            update()
            continue
        for batch in window.micro_batches(model):
            accelerator.backward(window.scale(model(**batch)["loss"], batch))
            update()
    return steps


def with_lightning(setup: Setup) -> list[Step]:
    """Train with Lightning's Trainer."""
    import lightning.pytorch as pl  # noqa: PLC0415 (optional)
    from lightning.pytorch.plugins.environments import LightningEnvironment  # noqa: PLC0415

    split, task = setup.split, Task(setup.split)
    steps: list[Step] = []

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.task = task

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            loss: Tensor = self.task(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return without_changes(self.task)

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:  # noqa: ANN401
            super().configure_gradient_clipping(optimizer, *args, **options)
            steps.append(step_of(self.task))  # the optimizer runs the forward within its step

    several = dist.is_initialized()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if several else 1,
        max_epochs=1,
        accumulate_grad_batches=1 if setup.is_exact else setup.num_steps,
        gradient_clip_val=MAX_NORM if setup.is_clipped else None,
        callbacks=[ab.exact(effective_batch_size=split.effective_batch_size, count=setup.count)] * setup.is_exact,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"strategy": "ddp_find_unused_parameters_true", "plugins": [LightningEnvironment()]} if several else {}),
    )
    trainer.fit(Module(), DataLoader(setup.samples, batch_size=split.micro_batch_size))  # type: ignore[arg-type]
    return steps


HOSTS: dict[str, tuple[str, Callable[[Setup], list[Step]]]] = {
    "Trainer": ("transformers", with_trainer),
    "Accelerate, loop": ("accelerate", with_accelerate),
    "Accelerate, backward": ("accelerate", partial(with_accelerate, whole_windows=True)),
    "Lightning": ("lightning", with_lightning),
}


def clipped(gradients: Gradients) -> Gradients:
    """Return gradients after clipping by their norm."""
    present = [gradient for gradient in gradients.values() if gradient is not None]
    factor = min(1.0, MAX_NORM / (float(torch.stack([g.norm() for g in present]).norm()) + 1e-6))  # as torch clips
    return {name: None if gradient is None else gradient * factor for name, gradient in gradients.items()}


def error_of(host: Callable[[Setup], list[Step]], setup: Setup) -> float | str:
    """Return the largest error of a step, or the reason for its absence."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            steps = host(setup)
    except AnyBatchError as error:
        return f"refused: {error.code or type(error).__name__}"
    ids = [step[1] for step in steps]
    if dist.is_initialized():
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, ids)
        ids = [[one for share in shares for one in share] for shares in zip(*everywhere, strict=True)]
    case = setup.split.case
    samples, size = case.samples(), case.effective_batch_size
    numbers = range(len(next(iter(samples.values()))))
    expected_ids = [list(numbers[start : start + size]) for start in numbers[::size]]
    # A filler repeats samples with weight 0, so samples are compared as sets; a repeated sample changes the gradient.
    used = [sorted(set(one)) for one in ids]
    if setup.is_exact and used != expected_ids:
        return "other samples"
    errors = []
    for (found, _), numbers in zip(steps, used, strict=True):
        part = {name: column[numbers] for name, column in samples.items()}
        expected = gradients_of(case.model(), partial(case.loss.whole_batch_loss, samples=part))
        errors.append(relative_error(found, clipped(expected) if setup.is_clipped else expected))
    largest = worst(errors)
    return largest if used == expected_ids else f"{shown(largest)}*"


def errors_of(names: Sequence[str]) -> dict[tuple[str, str, bool], float | str]:
    """Return the worst error of each host and case, alone and exact, on this rank."""
    if dist.is_initialized():
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "NODE_RANK": "0"}  # the group exists
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found = {}
    for name in names:
        for case in ALL_CASES:
            for is_exact in (False, True):
                setups = [Setup(SplitCase(case, size), is_exact) for size in case.micro_batch_sizes]
                found[name, case.name, is_exact] = worst([error_of(HOSTS[name][1], setup) for setup in setups])
    return found


def worst(errors: Sequence[float | str]) -> float | str:
    """Return the first reason, or the largest error."""
    reasons = [error for error in errors if isinstance(error, str) and not error.endswith("*")]
    numbers = [float(error.strip("*")) if isinstance(error, str) else error for error in errors if error not in reasons]
    if reasons:
        return reasons[0]
    largest = max(numbers, key=lambda error: math.inf if math.isnan(error) else error)
    return f"{shown(largest)}*" if any(isinstance(error, str) for error in errors) else largest


def shown(error: float | str) -> str:
    """Return an error as text."""
    return error if isinstance(error, str) else f"{error:.0e}"


def rows(found: dict[tuple[str, str, bool], float | str], names: Sequence[str]) -> Iterator[str]:
    """Yield the table."""
    yield f"| case | {' | '.join(f'{name}: alone | exact' for name in names)} |"
    yield f"|---|{'--:|' * 2 * len(names)}"
    for case in ALL_CASES:
        cells = [shown(found[name, case.name, is_exact]) for name in names for is_exact in (False, True)]
        yield f"| {case.name} | {' | '.join(cells)} |"


def main() -> None:
    """Run the command."""
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--host", nargs="+", choices=list(HOSTS), default=list(HOSTS))
    arguments = parser.parse_args()
    names = [name for name in arguments.host if importlib.util.find_spec(HOSTS[name][0])]
    lines: list[str] = []
    for num_ranks in arguments.ranks:
        outcomes = run_ranks(num_ranks, errors_of, names, timeout_seconds=900.0) if num_ranks > 1 else []
        failed = [outcome.error for outcome in outcomes if outcome.error]
        if failed:
            raise SystemExit(failed[0])
        values = outcomes[0].value if outcomes else errors_of(names)
        lines += [f"## {num_ranks} rank{'s' * (num_ranks > 1)}", "", *rows(values, names), ""]
    report.publish(
        lines,
        title="The conformance kit inside other trainers",
        command="python benchmarks/conformance_of_trainers.py",
        setting="float64, gloo",
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
