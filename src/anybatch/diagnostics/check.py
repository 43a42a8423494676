"""Checks accumulation: runs a batch un-split and cut, compares the gradients, and names the cause of a difference."""

import warnings
from collections.abc import Sequence

import torch

from anybatch.core.comparison import errors_by_parameter, relative_error
from anybatch.core.loss import Loss, declared, mean_over_samples
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.tree import Batch, count_samples
from anybatch.core.whole_numbers import checked_int, refuse_unless
from anybatch.diagnostics.causes import find_causes
from anybatch.diagnostics.check_report import CheckFinding, CheckReport, SplitResult, in_words, verdict_of
from anybatch.diagnostics.gradient_runs import GradientRuns, copied_runs
from anybatch.engine.inputs import Model
from anybatch.engine.loss_check.held import HeldDraws
from anybatch.errors import BatchSizeError
from anybatch.norms import Policy, PolicyName

FEWEST_SAMPLES = 4
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def check(
    model: Model,
    loss: Loss | LossFunction,
    batch: Batch,
    *,
    micro_batch_sizes: Sequence[int] | None = None,
    norms: Policy | PolicyName | None = None,
    seed: int = 0,
) -> CheckReport:
    """Compare the gradient of a batch with what its micro-batches add up to, on copies; nothing of yours is changed.

    The plain loop: `loss(model, batch).backward()` against the engine's accumulation, in float64 on the CPU. Where the
    model does not run in float64 it runs in its own type, and the tolerance is that type's.

    ```python
    report = ab.check(model, ab.mean_over_samples(loss), batch)
    print(report)
    assert report.equal
    ```

    Args:
        model: a module or a dict of named modules, in training mode.
        loss: a declared loss, or a function of (model, batch), as the engine takes it.
        batch: any nested batch of at least 4 samples; a dozen is enough.
        micro_batch_sizes: cuts to try; None for 1 and two that leave a ragged tail.
        norms: the policy about BatchNorm, as `Engine` takes it. The un-split batch is run under the policy too.
        seed: of what the model draws.

    Returns:
        The errors of all cuts, the reasons where they are not equal, and what to change.

    Raises:
        BatchSizeError: the batch is too small to be cut unevenly.
        Exception: what the model or the loss raises on the un-split batch.
    """
    num_samples = count_samples(batch)
    checked_int("seed", seed, least=None)
    refuse_unless(norms is None or isinstance(norms, str | Policy), "norms", norms, "the name of a policy, or a policy")
    is_valid = micro_batch_sizes is None or isinstance(micro_batch_sizes, Sequence)
    refuse_unless(is_valid, "micro_batch_sizes", micro_batch_sizes, "a list of sizes, or None")
    for size in micro_batch_sizes or ():
        checked_int("micro_batch_sizes", size, error=BatchSizeError)
    if num_samples < FEWEST_SAMPLES:
        message = f"the batch has {num_samples} samples; a check needs at least {FEWEST_SAMPLES} to cut it unevenly."
        raise BatchSizeError(message, effective_batch_size=num_samples)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a whole batch would not cause them; a few samples may
        return _check(*_gradient_runs(model, declared(loss), batch, seed=seed, norms=norms), micro_batch_sizes)


def _check(runs: GradientRuns, precision: str, micro_batch_sizes: Sequence[int] | None) -> CheckReport:
    num_samples = runs.num_samples
    traits = runs.forward_traits()
    # Autocast inside of the model may compute in fewer bits than its parameters have.
    narrowest = min((d for d in (runs.dtype, traits.narrowest_dtype) if d), key=lambda dtype: torch.finfo(dtype).bits)
    # A type that is not listed, such as float8, has the widest tolerance.
    tolerance = _TOLERANCES.get(narrowest, max(_TOLERANCES.values()))
    findings = []
    if (randomness := _held_randomness(runs, traits.random_modules, tolerance)) is not None:
        findings.append(randomness)
    # 1 and two ragged cuts: an even cut hides faults that divide by the number of micro-batches.
    sizes = micro_batch_sizes or sorted({1, round(num_samples * 0.4), round(num_samples * 0.6)})
    splits = tuple(_measure(runs, size, tolerance) for size in sizes)
    failing = [split for split in splits if split.verdict == "not equal"]
    if failing and runs.draws is not None:  # samples may be on another axis than the first, or drawn for in a loop
        varied, runs.draws = runs.draws, HeldDraws(constant=True)
        constant = tuple(_measure(runs, size, tolerance) for size in sizes)
        if any(split.verdict == "not equal" for split in constant):
            runs.draws = varied
        else:
            splits, failing = constant, []
    if failing and not any(finding.breaks_equality for finding in findings):
        # A cut that runs explains more than one that raises, and a larger error is easier to attribute.
        worst = max(failing, key=lambda split: (split.failure is None, split.error))
        findings += find_causes(runs, worst.sizes[0], traits.coupling_modules, tolerance)
        findings += [_cannot_run(s) for s in failing if s.failure and all(f.code == "unexplained" for f in findings)]
    return CheckReport(
        num_samples=num_samples, precision=precision, tolerance=tolerance, splits=splits, findings=tuple(findings)
    )


def _gradient_runs(
    model: Model, loss: Loss, batch: Batch, *, seed: int, norms: Policy | PolicyName | None
) -> tuple[GradientRuns, str]:
    """Return gradient runs in float64 if the model runs in it, else in its own type; and the type, in words."""
    runs = copied_runs(model, loss, batch, torch.float64, seed=seed, norms=norms)
    try:
        if loss.kind.brings_count and runs.returns_a_number():  # one number, taken as the engine takes it
            runs.loss = mean_over_samples(loss.function)
        runs.whole()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:100]
    else:
        return runs, "float64"
    runs = copied_runs(model, loss, batch, None, seed=seed, norms=norms)
    if loss.kind.brings_count and runs.returns_a_number():
        runs.loss = mean_over_samples(loss.function)
    runs.whole()
    return runs, f"{str(runs.dtype).removeprefix('torch.')}, because in float64: {reason}"


def _measure(runs: GradientRuns, size: int, tolerance: float) -> SplitResult:
    num_samples = runs.num_samples
    sizes = tuple(min(size, num_samples - start) for start in range(0, num_samples, size))
    try:
        found, expected = runs.split(size), runs.whole()
    except (RuntimeError, ValueError) as failure:  # the user's model, or the engine's refusal, on a small micro-batch
        infinite = float("inf")
        return SplitResult(sizes=sizes, error=infinite, errors={}, verdict="not equal", failure=str(failure))
    error = relative_error(found, expected)
    errors = errors_by_parameter(found, expected)
    return SplitResult(sizes=sizes, error=error, errors=errors, verdict=verdict_of(error, tolerance))


def _held_randomness(runs: GradientRuns, draws: Sequence[str], tolerance: float) -> CheckFinding | None:
    """Hold random numbers, if the gradient depends on them: every sample gets the same, in any cut."""
    # The same gradient from another seed: the random numbers, if any, do not matter.
    if relative_error(runs.whole(seed=runs.seed + 1), runs.whole()) <= tolerance:
        return None
    where = draws[0] if draws else ""
    number = f"{len(draws)} module{'s' * (len(draws) > 1)} (first {where!r})"
    source = f"{number} draw" if len(draws) > 1 else f"{number} draws" if draws else "the loss function draws"
    runs.draws = HeldDraws()
    difference = relative_error(runs.whole(seed=runs.seed + 1), runs.whole())
    if difference > tolerance:
        runs.draws = None
        return CheckFinding(
            code="randomness",
            where=where,
            says=(
                f"{source} random numbers that cannot be held (of numpy or Python), so two runs of the same batch "
                f"differ by {difference:.1e} and cuts cannot be compared."
            ),
            change="make the draws a part of the batch, or leave them out, and check again.",
        )
    return CheckFinding(
        code="randomness",
        where=where,
        says=(
            f"{source} random numbers, which were held: every sample gets the same ones in any cut. Another cut would "
            "draw others from the same distribution, which is not a fault."
        ),
        change="nothing has to be changed; with rng='per_sample' every sample keeps its own numbers in any cut.",
        breaks_equality=False,
    )


def _cannot_run(split: SplitResult) -> CheckFinding:
    return CheckFinding(
        code="cannot_run",
        where="",
        says=f"micro-batches of {in_words(split.sizes)} cannot be run: {split.failure}",
        change="use larger micro-batches, or a model that runs on few samples.",
    )
