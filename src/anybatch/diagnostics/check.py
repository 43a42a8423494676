"""Checks accumulation: runs a batch un-split and cut, compares the gradients, and names the cause of a difference."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from anybatch.core.geometry import checked_int, refuse_unless
from anybatch.core.loss import Loss, declared, mean_over_samples
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.tensors import Gradients, errors_by_parameter, relative_error
from anybatch.core.torch_internals import BatchNormBase
from anybatch.core.tree import Batch, count_samples
from anybatch.diagnostics.check_report import CheckFinding, CheckReport, SplitResult, in_words, verdict_of
from anybatch.diagnostics.gradient_runs import GradientRuns, RepeatedDraws, copied_runs, ways_of_drawing
from anybatch.engine.loss_check.diagnosis import described
from anybatch.engine.user_code import Model
from anybatch.errors import BatchSizeError
from anybatch.norms import Policy, PolicyName

_CODES = {"joint": "joint_loss", "encode": "joint_loss", "inputs": "couples_samples", "module": "couples_samples"}
"""Codes of findings, by the cause of a diagnosis; "loss_declaration" for all others."""


def find_causes(
    runs: GradientRuns, micro_batch_size: int, coupling_modules: Sequence[str], tolerance: float
) -> Iterator[CheckFinding]:
    """Yield every reason why micro-batches of this size do not add up to the gradient of the batch."""
    found = 0
    by_name = dict(runs.modules.named_modules())
    with runs.evaluating([by_name[name] for name in coupling_modules]):
        # Modules that couple samples also in evaluation mode, and modules that do so only in training.
        in_both_modes = [name for name in runs.forward_traits().coupling_modules if name in coupling_modules]
        in_training = [name for name in coupling_modules if name not in in_both_modes]
        if in_training:
            yield _normalisation(runs, micro_batch_size, in_training, by_name)
            found += 1
        # The first kind cannot be disabled, so nothing after them can be judged.
        if in_both_modes:
            yield _coupling(in_both_modes, by_name)
            return  # if the model couples samples, the loss cannot be checked for adding up over samples
        for finding in (_loss(runs), _state(runs, tolerance)):
            if finding is not None:
                yield finding
                found += 1
        if not found:
            yield _groups(runs, tolerance) or _unexplained(runs, micro_batch_size)


def find_obstacle(runs: GradientRuns, tolerance: float) -> CheckFinding | None:
    """Return why a difference between a cut and the un-split batch proves nothing; None if it is a real difference."""
    difference = relative_error(runs.whole(), runs.whole())
    if not difference <= tolerance:
        return _obstacle(
            "unrepeatable",
            f"two runs of the same samples differ by {difference:.1e}: the model or the loss draws from a generator "
            "that no seed reaches, or keeps numbers outside of modules and computes with them.",
            "draw from torch, or from the global generators of Python or numpy; keep numbers in buffers of a module.",
        )
    if runs.draws is not None and runs.draws.unknown:
        return _obstacle(
            "draws_by_sample",
            f"torch draws random numbers that cannot be repeated ({', '.join(sorted(runs.draws.unknown))}).",
            "make the draws a part of the batch, or leave them out, and check again.",
        )
    if runs.draws_by_sample(tolerance):
        return _obstacle(
            "draws_by_sample",
            "Python or numpy draws random numbers for each sample, and micro-batches cannot repeat the numbers of the "
            "whole batch.",
            "draw these numbers from torch, or in the data set, or leave them out, and check again.",
        )
    return None


def no_gradient() -> CheckFinding:
    """Return the finding that the gradient of the un-split batch and of every cut is zero."""
    return _obstacle(
        "no_gradient",
        "the gradient of these samples is zero or missing, so the gradients cannot be compared.",
        "check a batch that has a gradient.",
    )


def _obstacle(code: str, says: str, change: str) -> CheckFinding:
    return CheckFinding(code=code, where="", says=says, change=change, breaks_equality=False, prevents_verdict=True)


def error_of(runs: GradientRuns, micro_batch_size: int) -> float:
    """Return the relative gradient error of a cut; infinite if it cannot be run."""
    try:
        return relative_error(runs.split(micro_batch_size), runs.whole())
    except (RuntimeError, ValueError):
        return float("inf")


def _normalisation(runs: GradientRuns, size: int, names: Sequence[str], by_name: dict[str, nn.Module]) -> CheckFinding:
    """Describe layers that couple samples in training but not in evaluation mode, their mode during this call."""
    kinds = sorted({type(by_name[name]).__name__ for name in names})
    known = all(isinstance(by_name[name], BatchNormBase) for name in names)
    layers = f"{len(names)} layer{'s' * (len(names) > 1)} ({', '.join(kinds)}; first {names[0]!r})"
    verb = "normalise" if len(names) > 1 else "normalises"
    error = error_of(runs, size)
    rest = "nothing else differs" if error < 1e-3 else f"without them the gradient still differs by {error:.1e}"  # noqa: PLR2004 (a word, no limit)
    return CheckFinding(
        code="batch_norm",
        where=names[0],
        says=f"{layers} {verb} each micro-batch by that micro-batch's own statistics, and {rest}.",
        change=(
            "norms='exact' normalises over the whole effective batch, norms=Ghost(group_size=...) over groups that no "
            "cut changes; or use GroupNorm (anybatch.norms.replaced)."
            if known
            else f"let {names[0]!r} compute statistics per sample, like GroupNorm and LayerNorm, or put it into "
            "evaluation mode."
        ),
    )


def _coupling(names: Sequence[str], by_name: dict[str, nn.Module]) -> CheckFinding:
    if all(isinstance(by_name[name], BatchNormBase) for name in names):
        return CheckFinding(
            code="batch_norm",
            where=names[0],
            says=(
                f"{len(names)} BatchNorm layer{'s' * (len(names) > 1)} (first {names[0]!r}) without running statistics "
                "normalise each micro-batch by its own statistics, in evaluation mode too."
            ),
            change="use GroupNorm (anybatch.norms.replaced), or track_running_stats=True and norms='exact'.",
        )
    return CheckFinding(
        code="couples_samples",
        where=names[0],
        says=(
            f"the output of {repr(names[0]) if names[0] else 'the model'} for one sample depends on the other samples "
            f"of the micro-batch, in evaluation mode too{f' (so do {len(names) - 1} others)' * (len(names) > 1)}."
        ),
        change=(
            "let the module process samples independently; or move the part that combines samples out of the model "
            "into ab.joint(encode, fn), where fn receives the outputs of the whole effective batch."
        ),
    )


def _loss(runs: GradientRuns) -> CheckFinding | None:
    """Check the declaration of the loss as the engine's first step does."""
    found = runs.diagnosis()
    if found is None:
        return None
    verdict, diagnosis = found
    inner = _inner_gradients(runs) if diagnosis.cause in ("unknown", "joint") else None
    return inner or CheckFinding(
        code=_CODES.get(diagnosis.cause, "loss_declaration"),
        where=diagnosis.where or diagnosis.term or "",
        says=described(runs.loss, verdict, diagnosis),
        change=diagnosis.remedy,
    )


def _state(runs: GradientRuns, tolerance: float) -> CheckFinding | None:
    """Return a finding if a forward changes the next one, as in spectral norm and codebooks."""
    changed = runs.changed_by_forward(tolerance)
    if changed is None:
        return None
    what = f"{changed[0]!r}{f' and {len(changed) - 1} more' if len(changed) > 1 else ''}" if changed else "something"
    kept = "" if changed else " (in no module: a global variable, or an object of the loss function?)"
    return CheckFinding(
        code="state",
        where=changed[0] if changed else "",
        says=(
            f"a forward changes {what}{kept} that the next forward computes with, so that every micro-batch meets "
            "another model than the one before."
        ),
        change="update it once per optimizer step, outside of the forward; or keep the module in evaluation mode.",
    )


def _inner_gradients(runs: GradientRuns) -> CheckFinding | None:
    """Return the finding that the loss function uses gradients of parameters, which belong to one micro-batch."""
    if not runs.differentiates_parameters():
        return None
    return CheckFinding(
        code="couples_samples",
        where="gradients in the loss",
        says=(
            "the loss function computes with gradients of parameters, which are sums over all its samples: no count "
            "makes micro-batches add up to the same value."
        ),
        change=(
            "take gradients with respect to inputs, or per sample (torch.func.vmap of torch.func.grad); "
            "otherwise the effective batch has to fit into one micro-batch."
        ),
    )


def _groups(runs: GradientRuns, tolerance: float) -> CheckFinding | None:
    """Return the finding that samples belong together in pairs or groups; micro-batches of whole groups are exact."""
    for size in (2, 3, 4, 8):
        if size < runs.num_samples and runs.num_samples % size == 0 and error_of(runs, size) <= tolerance:
            return CheckFinding(
                code="groups",
                where=str(size),
                says=(
                    f"micro-batches of {size} samples add up to the gradient of the batch, and others do not: the loss "
                    f"joins {size} neighbouring samples."
                ),
                change=f"let each group of {size} be one sample, or use micro-batches of a multiple of {size}.",
            )
    return None


def _unexplained(runs: GradientRuns, size: int) -> CheckFinding:
    return CheckFinding(
        code="unexplained",
        where="",
        says=(
            f"micro-batches of {size} give another gradient (relative error {error_of(runs, size):.1e}), and neither "
            "the layers, the random numbers, what modules keep, the model's inputs nor the loss explain it."
        ),
        change="look at the parameter that differs most, and at uses of the batch size in the forward.",
    )


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
        raise BatchSizeError(message, code="too_few_samples", effective_batch_size=num_samples)
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
    """Return that the gradient depends on random numbers, and the ways to repeat them; None if it does not."""
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
