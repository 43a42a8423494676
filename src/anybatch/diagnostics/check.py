"""Compare the gradient of an unsplit batch with the sum over its micro-batches, and find the cause of a difference."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from anybatch.core.geometry import checked_int, require
from anybatch.core.loss import Loss, declared, mean_over_samples
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.tensors import errors_by_parameter, relative_error
from anybatch.core.torch_internals import BatchNormBase
from anybatch.core.tree import Batch, count_samples
from anybatch.diagnostics.check_report import (
    TOLERANCES,
    CheckFinding,
    CheckReport,
    SplitResult,
    describe_sizes,
    verdict_of,
)
from anybatch.diagnostics.gradient_runs import GradientRuns, RepeatedDraws, copied_runs
from anybatch.diagnostics.trainer_check import check_trainer
from anybatch.engine.loss_check.diagnosis import describe
from anybatch.engine.user_code import Model
from anybatch.errors import BatchSizeError
from anybatch.norms import Policy, PolicyName

MIN_SAMPLES = 4
_CODES = {"joint": "joint_loss", "encode": "joint_loss", "inputs": "couples_samples", "module": "couples_samples"}
"""Cause of a diagnosis -> code of the finding; the code is "loss_declaration" for any other cause."""


def find_causes(runs: GradientRuns, coupling_modules: Sequence[str], tolerance: float) -> Iterator[CheckFinding]:
    """Yield every reason why micro-batches do not add up to the gradient of the batch.

    As a side effect, coupling modules (their output for a sample depends on other samples) stay in evaluation mode.
    """
    state = _check_state(runs, tolerance)
    owner = f"{state.where.rpartition('.')[0]}." if state is not None and state.where else None
    by_name = dict(runs.modules.named_modules())
    runs.in_evaluation |= {by_name[name] for name in coupling_modules}
    in_both_modes = [name for name in runs.forward_traits().coupling_modules if name in coupling_modules]
    # A module that reads the state that it has just updated couples samples by it.
    by_state = [name for name in coupling_modules if owner is not None and f"{name}.".startswith(owner)]
    in_training = [name for name in coupling_modules if name not in (*in_both_modes, *by_state)]
    if in_training:
        yield _coupling_finding([by_name[name] for name in in_training], in_training, "in training mode only")
    # Evaluation mode does not stop these modules from coupling samples, so the loss cannot be checked alone.
    if in_both_modes:
        yield _coupling_finding([by_name[name] for name in in_both_modes], in_both_modes, "in evaluation mode too")
        return
    found = [finding for finding in (_check_loss(runs), state) if finding is not None]
    yield from found
    if not (found or in_training):
        yield CheckFinding(
            code="unexplained",
            observation="the cause is unknown: it is not in the layers, the random numbers, state kept by modules, the "
            "model's inputs or the loss.",
            change=(
                "look at the parameter that differs most, and at uses of the batch size in the forward; if the loss "
                "joins neighbouring samples, such as pairs, let each group be one sample."
            ),
        )


def find_obstacle(runs: GradientRuns, tolerance: float, *, is_equal: bool) -> CheckFinding | None:
    """Return the finding that prevents a comparison of the gradients; None if they can be compared."""
    if is_equal:
        if any(gradient is not None and bool(gradient.any()) for gradient in runs.unsplit_gradient().values()):
            return None
        return CheckFinding(
            code="no_gradient",
            observation="the gradient of these samples is zero or missing, so the gradients cannot be compared.",
            change="check a batch that has a gradient.",
        )
    difference = relative_error(runs.unsplit_gradient(), runs.unsplit_gradient())
    if not difference <= tolerance:
        return CheckFinding(
            code="unrepeatable",
            observation=f"two runs of the same samples differ by {difference:.1e}: the model or the loss draws from a "
            "generator that cannot be seeded here, or computes with numbers that it keeps outside of modules.",
            change="draw from torch, or from the global generators of Python or numpy; keep numbers in buffers.",
        )
    sources = sorted(runs.draws.torch.unknown) if runs.draws is not None else []
    if runs.draws is not None and runs.draws.by_host:
        sources.append("Python's or numpy's generator")
    if sources:
        return CheckFinding(
            code="draws_by_sample",
            observation=f"random numbers ({', '.join(sources)}) cannot be fixed so that a sample "
            "gets the same numbers in every split, and gradients differ.",
            change="draw these numbers from torch, or in the data set, or leave them out, and check again.",
        )
    return None


def _coupling_finding(modules: Sequence[nn.Module], names: Sequence[str], mode: str) -> CheckFinding:
    """Return the finding that these modules combine samples, in this mode."""
    kinds = ", ".join(sorted({type(module).__name__ for module in modules}))
    which = f"{len(names)} module{'s' * (len(names) > 1)} ({kinds}; first {names[0] or 'the model'!r})"
    is_batch_norm = all(isinstance(module, BatchNormBase) for module in modules)
    if is_batch_norm:
        observation = f"{which} normalised each micro-batch by its own statistics, {mode}."
        change = (
            "norms='exact' normalises over the whole effective batch, norms=Ghost(group_size=...) over groups that no "
            "split changes (both need running statistics); or use GroupNorm (anybatch.norms.replaced)."
        )
    else:
        observation = f"the output of {which} for one sample depends on the other samples of the micro-batch, {mode}."
        change = (
            "process samples independently, like GroupNorm and LayerNorm; use evaluation mode if samples are "
            "independent in it; or move the part that combines samples into ab.joint(encode, fn), where fn receives "
            "the outputs of the whole effective batch."
        )
    code = "batch_norm" if is_batch_norm or "training" in mode else "couples_samples"
    return CheckFinding(code=code, where=names[0], observation=observation, change=change)


def _check_loss(runs: GradientRuns) -> CheckFinding | None:
    """Check the declaration of the loss as the engine's first step does."""
    found = runs.diagnosis()
    if found is None:
        return None
    verdict, diagnosis = found
    return CheckFinding(
        code=_CODES.get(diagnosis.cause, "loss_declaration"),
        where=diagnosis.where or diagnosis.term or "",
        observation=describe(runs.loss, verdict, diagnosis),
        change=diagnosis.remedy,
    )


def _check_state(runs: GradientRuns, tolerance: float) -> CheckFinding | None:
    """Return a finding if a forward changes state that the next forward uses, as spectral norm and codebooks do."""
    changed = runs.changed_by_forward(tolerance)
    if changed is None:
        return None
    outside = "something outside of modules (a global variable, or an object of the loss function?)"
    what = f"{changed[0]!r}{f' and {len(changed) - 1} more' if len(changed) > 1 else ''}" if changed else outside
    return CheckFinding(
        code="state",
        where=changed[0] if changed else "",
        observation=f"a forward changes {what} that the next forward uses, so micro-batches run on different models.",
        change="update it once per optimizer step: by Engine(buffers=...), or outside of the forward.",
    )


def check(
    model: Any,  # noqa: ANN401 (a `Model`, or a trainer of an optional package)
    loss: Loss | LossFunction | None = None,
    batch: Batch | None = None,
    *,
    micro_batch_sizes: Sequence[int] | None = None,
    norms: Policy | PolicyName | None = None,
    seed: int = 0,
) -> CheckReport:
    """Compare the gradient of a batch with the sum over its micro-batches, on copies of the model.

    The gradient of `loss(model, batch).backward()` is compared with the engine's accumulation, in float64 on the CPU.
    A model that cannot run in float64 keeps its dtype, with the tolerance of that dtype.

    ```python
    report = ab.check(model, ab.mean_over_samples(loss), batch)
    print(report)
    assert report.equal
    ```

    `ab.check(trainer)` runs a full step and a shorter step of a transformers `Trainer`, without and with `ab.exact`,
    and compares each step's gradient with that of one batch of all its samples. A model that calls `logits.float()` has
    the rounding errors of float32. The trainer does not change, and no other arguments are needed.

    Args:
        model: a module or a dict of named modules, in training mode; or a trainer.
        loss: a declared loss, or a function of (model, batch), as the engine takes it.
        batch: any nested batch of at least 4 samples; a dozen is enough.
        micro_batch_sizes: sizes to try; None: 1, and two sizes that leave a smaller last micro-batch.
        norms: the BatchNorm policy, as for `Engine`; the unsplit batch runs under it too.
        seed: seed of random numbers.

    Raises:
        UserError: the trainer runs on several ranks, or draws random numbers to collate samples.
        BatchSizeError: the batch is too small to be split unevenly.
        CompositionError: the model uses reentrant checkpointing.
        Exception: any error of the model or the loss on the unsplit batch.
    """
    if loss is None or batch is None:
        return check_trainer(model)
    num_samples = count_samples(batch)
    checked_int("seed", seed, minimum=None)
    require(norms is None or isinstance(norms, str | Policy), "norms", norms, "the name of a policy, or a policy")
    is_valid = micro_batch_sizes is None or isinstance(micro_batch_sizes, Sequence)
    require(is_valid, "micro_batch_sizes", micro_batch_sizes, "a list of sizes, or None")
    for size in micro_batch_sizes or ():
        checked_int("micro_batch_sizes", size, error=BatchSizeError)
    if num_samples < MIN_SAMPLES:
        message = f"the batch has {num_samples} samples; a check needs at least {MIN_SAMPLES} to split it unevenly."
        raise BatchSizeError(message, code="too_few_samples", effective_batch_size=num_samples)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # small micro-batches may cause warnings that training does not
        return _check(*_gradient_runs(model, declared(loss), batch, seed=seed, norms=norms), micro_batch_sizes)


def _check(runs: GradientRuns, precision: str, micro_batch_sizes: Sequence[int] | None) -> CheckReport:
    num_samples = runs.num_samples
    traits = runs.forward_traits()
    # Autocast inside of the model may compute in fewer bits than its parameters have.
    narrowest = min((d for d in (runs.dtype, traits.narrowest_dtype) if d), key=lambda dtype: torch.finfo(dtype).bits)
    # A type that is not listed, such as float8, has the widest tolerance.
    tolerance = TOLERANCES.get(narrowest, max(TOLERANCES.values()))
    findings = []
    repeaters: Sequence[RepeatedDraws | None] = (None,)
    if (randomness := _randomness(runs, traits.random_modules, tolerance)) is not None:
        findings.append(randomness)
        # If samples are not on the first axis, or a loop over samples draws numbers, only constant draws are equal.
        repeaters = (RepeatedDraws(), RepeatedDraws(constant=True))
    # Uneven splits, because an even split hides faults that divide by the number of micro-batches.
    sizes = micro_batch_sizes or sorted({1, round(num_samples * 0.4), round(num_samples * 0.6)})
    splits = _measure_all(runs, sizes, tolerance, repeaters)
    failing = [split for split in splits if split.verdict == "not equal"]
    obstacle = find_obstacle(runs, tolerance, is_equal=not failing)
    if obstacle is not None:
        findings.append(obstacle)
        undecided = failing or splits
        splits = tuple(replace(split, verdict="undecided") if split in undecided else split for split in splits)
    elif failing:
        causes = list(find_causes(runs, traits.coupling_modules, tolerance))
        if all(cause.code == "unexplained" for cause in causes):
            change = "use larger micro-batches, or a model that runs on few samples."
            texts = [f"{describe_sizes(each.sizes)} cannot be run: {each.failure}" for each in failing if each.failure]
            errors = [
                CheckFinding(code="cannot_run", observation=f"micro-batches of {t}", change=change) for t in texts
            ]
            causes = errors if len(errors) == len(failing) else causes + errors
        findings += causes
    return CheckReport(
        num_samples=num_samples, precision=precision, tolerance=tolerance, splits=splits, findings=tuple(findings)
    )


def _gradient_runs(
    model: Model, loss: Loss, batch: Batch, *, seed: int, norms: Policy | PolicyName | None
) -> tuple[GradientRuns, str]:
    """Return gradient runs, in float64 if the model can run in it, else in its own dtype; and the dtype as text."""

    def make_runs(dtype: torch.dtype | None) -> GradientRuns:
        runs = copied_runs(model, loss, batch, dtype, seed=seed, norms=norms)
        if loss.kind.returns_count and runs.returns_a_number():  # as in the engine, one number is a mean
            runs.loss = mean_over_samples(loss.function)
        runs.unsplit_gradient()
        return runs

    try:
        return make_runs(torch.float64), "float64"
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:100]
    runs = make_runs(None)
    return runs, f"{str(runs.dtype).removeprefix('torch.')}, because in float64: {reason}"


def _measure_all(
    runs: GradientRuns, sizes: Sequence[int], tolerance: float, repeaters: Sequence[RepeatedDraws | None]
) -> tuple[SplitResult, ...]:
    """Measure all splits; return the results of the first repeater with equal gradients, or else of the first one."""
    results = []
    for draws in repeaters:
        runs.draws = draws
        results.append((tuple(_measure(runs, size, tolerance) for size in sizes), runs.draws))
        if not any(split.verdict == "not equal" for split in results[-1][0]):
            return results[-1][0]
    splits, runs.draws = results[0]
    return splits


def _measure(runs: GradientRuns, size: int, tolerance: float) -> SplitResult:
    num_samples = runs.num_samples
    sizes = tuple(min(size, num_samples - start) for start in range(0, num_samples, size))
    try:
        found, expected = runs.split(size), runs.unsplit_gradient()
    except (RuntimeError, ValueError) as failure:  # the user's model, or the engine's refusal, on a small micro-batch
        infinite = float("inf")
        return SplitResult(sizes=sizes, error=infinite, errors={}, verdict="not equal", failure=str(failure))
    error = relative_error(found, expected)
    errors = errors_by_parameter(found, expected)
    return SplitResult(sizes=sizes, error=error, errors=errors, verdict=verdict_of(error, tolerance))


def _randomness(runs: GradientRuns, modules: Sequence[str], tolerance: float) -> CheckFinding | None:
    """Return the finding that the gradient depends on random numbers; None if it does not."""
    # If another seed gives the same gradient, random numbers do not matter.
    if relative_error(runs.unsplit_gradient(seed=runs.seed + 1), runs.unsplit_gradient()) <= tolerance:
        return None
    number = f"{len(modules)} module{'s' * (len(modules) > 1)} (first {modules[0]!r})" if modules else "the loss"
    return CheckFinding(
        code="randomness",
        where=modules[0] if modules else "",
        observation=(
            f"random numbers of {number} were fixed for this check: a sample gets the same numbers in any split. "
            "In training, another split draws other numbers from the same distribution, which is not a fault."
        ),
        change="nothing has to be changed; with rng='per_sample' every sample keeps its own numbers in any split.",
    )
