"""The demonstration of `anybatch demo`; every number that it prints is measured."""

import difflib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch.utils.data import DataLoader

import anybatch as ab
from anybatch.core.units import in_bytes
from anybatch.recipes.text import Transformer, loss, text
from anybatch.testing import memory_budget, relative_error
from anybatch_guide.demo import plain, three_lines

BUDGET_BYTES: Final = 160 * 2**20
BATCH_SIZE: Final = 64
NUM_STEPS: Final = 5
_LEARNING_RATE: Final = 3e-3

Write = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """The results of both loops under a memory budget."""

    budget_bytes: int  # enforced for the tensors of each loop
    effective_batch_size: int  # samples per step of both loops
    plain_loop_ran_out_of_memory: bool
    peak_bytes: int  # of the loop with the engine
    num_steps: int  # of the loop with the engine
    gradient_error: float  # of the accumulated gradient, relative to the unsplit batch, in float64

    @property
    def is_as_intended(self) -> bool:
        """Whether only the plain loop ran out of memory, and the gradient is exact."""
        is_exact = self.gradient_error < 1e-12  # noqa: PLR2004 (the first of the five promises)
        return self.plain_loop_ran_out_of_memory and self.num_steps == NUM_STEPS and is_exact


def demonstrate(write: Write = sys.stdout.write) -> DemoReport:
    """Run both loops under a memory budget, and compare the gradients."""
    model = _fresh_model()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    write(
        f"A transformer of {num_parameters:,} parameters learns to write from the source code of this Python, "
        f"{BATCH_SIZE} samples per step.\nMemory budget: {in_bytes(BUDGET_BYTES)}, enforced by counting.\n\n"
    )
    write("1. A usual training loop\n\n")
    ran_out_of_memory = _run_plain(write)
    write("\n2. The same loop with three changed lines\n\n")
    write("".join(f"   {line}\n" for line in changed_lines()))
    write("\n")
    peak_bytes, num_steps = _run_changed(write)
    write("\n3. The gradient against the one of the unsplit batch\n\n")
    return DemoReport(
        budget_bytes=BUDGET_BYTES,
        effective_batch_size=BATCH_SIZE,
        plain_loop_ran_out_of_memory=ran_out_of_memory,
        peak_bytes=peak_bytes,
        num_steps=num_steps,
        gradient_error=_compare(write),
    )


def changed_lines() -> list[str]:
    """Return the difference between the two loops, as a diff of the functions that run."""
    before, after = (inspect.getsource(module.train).splitlines() for module in (plain, three_lines))
    # Skip the three header lines of a diff.
    lines = itertools.islice(difflib.unified_diff(before, after, n=1, lineterm=""), 3, None)
    return [line for line in lines if not line.startswith("@@")]


def _run_plain(write: Write) -> bool:
    """Return whether the plain loop ran out of memory, as intended."""
    model, optimizer = _fresh()
    try:
        with memory_budget(BUDGET_BYTES, model):
            plain.train(model, optimizer, loss, _batches(), _step_printer(write))
    except torch.OutOfMemoryError as error:
        write(f"   {type(error).__name__}: {error}\n")
        return True
    write("   It fitted: this machine counts memory differently from the one this was written on.\n")
    return False


def _run_changed(write: Write) -> tuple[int, int]:
    """Return the peak memory, and the number of steps made within the budget."""
    model, optimizer = _fresh()
    printer = _step_printer(write)
    with memory_budget(BUDGET_BYTES, model) as budget:
        three_lines.train(model, optimizer, loss, _batches(), printer)
    write(f"   Peak memory: {in_bytes(budget.peak_bytes, BUDGET_BYTES)}.\n")
    return budget.peak_bytes, printer.num_steps


def _compare(write: Write) -> float:
    """Return the error of the accumulated gradient, in float64 and without a memory budget."""
    model = _fresh_model().double()
    batch = next(iter(_batches()))
    loss(model, batch).backward()
    expected = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    engine = ab.Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), ab.mean_over_samples(loss), micro_batch_size=16
    )
    error = relative_error(engine.gradients(batch), expected)
    write(f"   Relative error of the accumulated gradient, in float64: {error:.1e}.\n")
    return error


class _StepPrinter:
    """Writes a line for each step."""

    def __init__(self, write: Write) -> None:
        self.num_steps = 0
        self._write = write

    def __call__(self, value: float, plan: object = "") -> None:
        self.num_steps += 1
        self._write(f"   step {self.num_steps}  loss {value:.3f}  {plan}\n")


def _step_printer(write: Write) -> _StepPrinter:
    return _StepPrinter(write)


def _fresh_model() -> Transformer:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return Transformer(width=128, num_layers=4, num_heads=4)


def _fresh() -> tuple[Transformer, torch.optim.Optimizer]:
    model = _fresh_model()
    return model, torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)


def _batches() -> Iterable[dict[str, torch.Tensor]]:
    """Return the first batches of the recipe `text`."""
    # Unshuffled, so that every part of the demonstration gets the same batches.
    loader: Iterable[dict[str, torch.Tensor]] = DataLoader(text().dataset(), batch_size=BATCH_SIZE)
    return itertools.islice(loader, NUM_STEPS)
