"""Checks accumulation: runs a batch un-split and cut, compares the gradients, and names the cause of a difference."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from anybatch.core.geometry import checked_int, refuse_unless
from anybatch.core.loss import Loss, declared, mean_over_samples
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.tensors import Gradients, errors_by_parameter, relative_error
from anybatch.core.tree import Batch, count_samples
from anybatch.diagnostics.causes import find_causes, find_obstacle, no_gradient
from anybatch.diagnostics.check_report import CheckFinding, CheckReport, SplitResult, in_words, verdict_of
from anybatch.diagnostics.gradient_runs import GradientRuns, copied_runs
from anybatch.diagnostics.repeated_draws import RepeatedDraws, ways_of_drawing
from anybatch.engine.user_code import Model
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
    """Compare the gradient of a batch with the sum over its micro-batches, on copies of the model.

    The plain loop: `loss(model, batch).backward()` against the engine's accumulation, in float64 on the CPU. A model
    that cannot run in float64 keeps its dtype, with the tolerance of that dtype.

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
        seed: seed of random numbers.

    Returns:
        The errors of all cuts, the reasons for differences or failed comparisons, and the fixes.

    Raises:
        BatchSizeError: the batch is too small to be cut unevenly.
        CompositionError: the model uses reentrant checkpointing.
        Exception: any error of the model or the loss on the un-split batch.
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
    ways: Sequence[Callable[[], RepeatedDraws | None]] = (lambda: None,)
    if (randomness := _randomness(runs, traits.random_modules, tolerance)) is not None:
        finding, ways = randomness
        findings.append(finding)
    # 1 and two ragged cuts: an even cut hides faults that divide by the number of micro-batches.
    sizes = micro_batch_sizes or sorted({1, round(num_samples * 0.4), round(num_samples * 0.6)})
    splits = _measure_all(runs, sizes, tolerance, ways)
    failing = [split for split in splits if split.verdict == "not equal"]
    obstacle = find_obstacle(runs, tolerance) if failing else no_gradient() if _is_zero(runs.whole()) else None
    if obstacle is not None:
        findings.append(obstacle)
        undecided = failing or splits
        splits = tuple(replace(split, verdict="undecided") if split in undecided else split for split in splits)
    elif failing:
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


def _measure_all(
    runs: GradientRuns,
    sizes: Sequence[int],
    tolerance: float,
    ways: Sequence[Callable[[], RepeatedDraws | None]],
) -> tuple[SplitResult, ...]:
    """Measure all cuts with the first way of drawing under which they agree; with the first of all if none does."""
    results = []
    for make_draws in ways:
        runs.draws = make_draws()
        results.append((tuple(_measure(runs, size, tolerance) for size in sizes), runs.draws))
        if not any(split.verdict == "not equal" for split in results[-1][0]):
            return results[-1][0]
    splits, runs.draws = results[0]
    return splits


def _is_zero(gradients: Gradients) -> bool:
    return not any(gradient is not None and bool(gradient.any()) for gradient in gradients.values())


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


def _randomness(
    runs: GradientRuns, modules: Sequence[str], tolerance: float
) -> tuple[CheckFinding, Sequence[Callable[[], RepeatedDraws]]] | None:
    """Return that the gradient depends on random numbers, and the ways to repeat them; None if it does not.

    Args:
        runs: the model, the loss and the batch.
        modules: names of the modules that draw from torch.
        tolerance: relative error that rounding may cause.
    """
    # The same gradient from another seed: the random numbers, if any, do not matter.
    if relative_error(runs.whole(seed=runs.seed + 1), runs.whole()) <= tolerance:
        return None
    where = modules[0] if modules else ""
    number = f"{len(modules)} module{'s' * (len(modules) > 1)} (first {where!r})"
    source = f"{number} draw" if len(modules) > 1 else f"{number} draws" if modules else "the loss function draws"
    # With torch's numbers held, only Python's and numpy's depend on the seed.
    runs.draws = RepeatedDraws()
    by_host = not relative_error(runs.whole(seed=runs.seed + 1), runs.whole()) <= tolerance
    finding = CheckFinding(
        code="randomness",
        where=where,
        says=(
            f"{source} random numbers, which were held: every sample gets the same ones in any cut. Another cut would "
            "draw others from the same distribution, which is not a fault."
        ),
        change="nothing has to be changed; with rng='per_sample' every sample keeps its own numbers in any cut.",
        breaks_equality=False,
    )
    return finding, list(ways_of_drawing(by_host=by_host))


def _cannot_run(split: SplitResult) -> CheckFinding:
    return CheckFinding(
        code="cannot_run",
        where="",
        says=f"micro-batches of {in_words(split.sizes)} cannot be run: {split.failure}",
        change="use larger micro-batches, or a model that runs on few samples.",
    )
