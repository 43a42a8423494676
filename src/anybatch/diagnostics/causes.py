"""Find why a cut changes the gradient, by excluding possible causes one by one until the gradients agree."""

from collections.abc import Iterator, Sequence

from torch import nn

from anybatch.core.tensors import relative_error
from anybatch.core.torch_internals import BatchNormBase
from anybatch.diagnostics.check_report import CheckFinding
from anybatch.diagnostics.gradient_runs import GradientRuns
from anybatch.engine.loss_check.diagnosis import described

_CODES = {"joint": "joint_loss", "encode": "joint_loss", "inputs": "couples_samples", "module": "couples_samples"}
"""Codes of findings, by the cause of a diagnosis; "loss_declaration" for all others."""


def find_causes(
    runs: GradientRuns, micro_batch_size: int, coupling_modules: Sequence[str], tolerance: float
) -> Iterator[CheckFinding]:
    """Yield every reason why micro-batches of this size do not add up to the gradient of the batch.

    Args:
        runs: runs of the model, with repeated random numbers.
        micro_batch_size: size of a cut that failed.
        coupling_modules: names of modules whose output for a sample depends on the others.
        tolerance: relative error that rounding may cause.
    """
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
    """Return why a difference between a cut and the un-split batch proves nothing; None if it is a real difference.

    Args:
        runs: runs of the un-split batch and the cut.
        tolerance: relative error that rounding may cause.
    """
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
