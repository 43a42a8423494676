"""Measurements of claims that the accumulated gradient equals the gradient of the unsplit batch."""

import difflib
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

import anybatch as ab
from anybatch.diagnostics.loop_check.check_loop import check_loop
from anybatch_guide.claims import loops
from anybatch_guide.claims.claim import Numbers
from anybatch_guide.claims.measuring import (
    cut,
    equal_weights,
    first_batch,
    flat_gradients,
    measure_cases,
    new_model,
    relative,
    step_memory,
    weighted_gradient,
    weights_by_items,
)
from anybatch_guide.demo.run import changed_lines
from anybatch_guide.experiment import Emit, emit_progress
from anybatch_guide.tasks.task import PlaygroundTask, cross_entropy, load

EVEN, UNEVEN, SMALL = [16] * 4, [24, 24, 16], [4] * 16


def equivalent(emit: Emit) -> Numbers:
    """Return the gradient error for equal micro-batches, and for each case that breaks equality."""
    digits, text = load("digits"), load("text")
    normed = load("shapes", norm="batch")
    cases: dict[str, Callable[[], float]] = {
        "even_error": partial(error_of, digits, EVEN),
        "even_error_fp64": partial(error_of, digits, EVEN, dtype=torch.float64),
        "uneven_error": partial(error_of, digits, UNEVEN),
        "token_error": partial(error_of, text, SMALL),
        "batch_norm_error": partial(error_of, normed, EVEN),
        "dropout_error": partial(error_of, replace(digits, model=partial(_with_dropout, digits)), EVEN),
    }
    return measure_cases(emit, cases)


def error_of(
    task: PlaygroundTask, sizes: list[int], *, by_share: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0
) -> float:
    """Return the relative error of the accumulated gradient, compared with the unsplit batch."""
    model = new_model(task, seed).to(dtype)
    inputs, targets = first_batch(task, sum(sizes), seed)
    batch = (inputs.to(dtype) if inputs.is_floating_point() else inputs), targets
    parts = cut(batch, sizes)
    # Use the same seed for both gradients, so that dropout differs only because of the split.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        accumulated = weighted_gradient(model, parts, weights_by_items(parts) if by_share else equal_weights(parts))
        torch.default_generator.manual_seed(seed)
        expected = weighted_gradient(model, [batch], [1.0])
    return relative(accumulated, expected)


def divide_by_n(emit: Emit) -> Numbers:
    """Compare dividing by N with weighting by items: equal sizes, unequal sizes, and sentences of unequal length."""
    digits, text = load("digits"), load("text")
    cases: dict[str, Callable[[], float]] = {
        "even_error": partial(error_of, digits, EVEN),
        "uneven_error": partial(error_of, digits, UNEVEN),
        "token_error": partial(error_of, text, SMALL),
        "uneven_error_by_items": partial(error_of, digits, UNEVEN, by_share=True),
        "token_error_by_items": partial(error_of, text, SMALL, by_share=True),
    }
    return measure_cases(emit, cases)


def stale(emit: Emit, steps: int = 20) -> Numbers:
    """Return how much parameters change within windows while Adam trains, and with a step after every micro-batch."""
    task = load("digits")
    model, stepped_model = new_model(task), new_model(task)
    engine = ab.Engine(model, torch.optim.AdamW(model.parameters(), lr=0.003), task.loss, micro_batch_size=16)
    change, errors, changes_if_stepped = 0.0, [], []
    optimizer = torch.optim.AdamW(stepped_model.parameters(), lr=0.003)
    for done, batch in enumerate(ab.batches(task.rows, effective_batch_size=64, steps=steps)):
        emit_progress(emit, done, steps, "steps")
        all_samples = first_batch(task, 64, seed=done)
        parts = cut(all_samples, EVEN)
        before = _vector(model)
        accumulated = weighted_gradient(model, parts, weights_by_items(parts))
        change = max(change, float((_vector(model) - before).abs().max()))
        errors.append(relative(accumulated, weighted_gradient(model, [all_samples], [1.0])))
        model.zero_grad()  # the compared gradient does not belong to the engine's step
        before = _vector(stepped_model)
        for inputs, targets in parts:
            optimizer.zero_grad()
            cross_entropy(stepped_model(inputs), targets).backward()
            optimizer.step()
        changes_if_stepped.append(relative(_vector(stepped_model), before))
        engine.step(batch)
    engine.close()
    return {
        "moved": change,
        "gradient_error": max(errors),
        "moved_if_stepped": sum(changes_if_stepped) / len(changes_if_stepped),
    }


def on_cpus(emit: Emit) -> Numbers:
    """Compare the gradient and memory of an accumulated step with the unsplit batch, on this CPU."""
    task = load("digits")
    emit_progress(emit, 0, 2, "gradient")
    error = error_of(task, EVEN)
    emit_progress(emit, 1, 2, "memory")
    unsplit = step_memory(task, micro_batch_size=64, effective_batch_size=64)["peak"]
    parts = step_memory(task, micro_batch_size=4, effective_batch_size=64)["peak"]
    return {"gradient_error": error, "memory_ratio": sum(parts.values()) / sum(unsplit.values())}


def three_lines(emit: Emit) -> Numbers:
    """Count the lines that each loop changes, and run `anybatch check --loop` on the loops."""
    emit_progress(emit, 0, 2, "lines")
    usual = check_loop(loops.three_lines)
    right = check_loop(loops.right)
    emit_progress(emit, 1, 2, "checked")
    return {
        "changed_lines": changed(loops.whole_batch, loops.three_lines),
        "findings": len(usual.findings),
        "changed_lines_right": changed(loops.whole_batch, loops.right),
        "findings_right": len(right.findings),
        "changed_lines_engine": sum(line.startswith("+") for line in changed_lines()),
    }


def changed(before: Callable[..., None], after: Callable[..., None]) -> int:
    """Return the number of lines in the second function's body that the first lacks, ignoring indentation."""
    former, latter = (
        # Start at the docstring, to leave out the signatures.
        [line.strip() for line in inspect.getsource(function).partition('"""')[2].splitlines()]
        for function in (before, after)
    )
    return sum(line.startswith("+ ") for line in difflib.ndiff(former, latter))


def sync_batch_norm(emit: Emit) -> Numbers:
    """Return the gradient error of BatchNorm, SyncBatchNorm and exact BatchNorm in a step of four micro-batches.

    For one rank, SyncBatchNorm runs. For two and four ranks, BatchNorm runs on the concatenated micro-batches of all
    ranks, because SyncBatchNorm computes the same statistics.
    """
    task = load("shapes", norm="batch")
    emit_progress(emit, 0, 3, "plain and synchronised")
    inputs, targets = first_batch(task, 64)
    expected = weighted_gradient(new_model(task), [(inputs, targets)], [1.0])
    synced: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(new_model(task))
    parts = cut((inputs, targets), EVEN)
    errors = {
        "plain_error": relative(weighted_gradient(new_model(task), parts, weights_by_items(parts)), expected),
        "sync_error": relative(weighted_gradient(synced, parts, weights_by_items(parts)), expected),
    }
    for done, ranks in enumerate((2, 4), start=1):
        emit_progress(emit, done, 3, f"{ranks} ranks")
        together = cut((inputs, targets), [16 * ranks] * (4 // ranks))
        error = relative(weighted_gradient(new_model(task), together, weights_by_items(together)), expected)
        errors[f"sync_error_{ranks}_ranks"] = error
    return {**errors, "exact_error": relative(_by_exact_engine(task, inputs, targets), expected)}


def _by_exact_engine(task: PlaygroundTask, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    model = new_model(task)
    # Any optimizer works, because `gradients` makes no update.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with ab.Engine(model, optimizer, task.loss, micro_batch_size=16, norms="exact") as engine:
        gradients = engine.gradients({"inputs": inputs, "targets": targets})
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    return flat_gradients(model)


def _vector(model: nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().double()


def _with_dropout(task: PlaygroundTask) -> nn.Module:
    """Return the task's network with 10% dropout after its first three layers, and before the last one."""
    layers = list(task.model().children())
    return nn.Sequential(*layers[:3], nn.Dropout(0.1), *layers[3:-1], nn.Dropout(0.1), layers[-1])
