"""Why a cut changes the gradient: what can cause it is set aside, one by one, until the gradients agree."""

from collections.abc import Iterator, Sequence

from torch import nn

from anybatch.core.comparison import relative_error
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
        runs: the model, whose random numbers have been set aside already.
        micro_batch_size: of a cut that failed.
        coupling_modules: names of modules whose output for a sample depends on the others.
        tolerance: relative error that rounding may cause.
    """
    found = 0
    by_name = dict(runs.modules.named_modules())
    with runs.evaluating([by_name[name] for name in coupling_modules]):
        # Modules that couple samples in evaluation mode, too, and those that do so in training alone.
        in_both_modes = [name for name in runs.forward_traits().coupling_modules if name in coupling_modules]
        in_training = [name for name in coupling_modules if name not in in_both_modes]
        if in_training:
            yield _normalisation(runs, micro_batch_size, in_training, by_name)
            found += 1
        # Those of the first kind cannot be set aside, so nothing behind them can be judged.
        if in_both_modes:
            yield _coupling(in_both_modes)
            return  # whether the loss adds up over samples cannot be decided behind a model that joins them
        for finding in (_loss(runs), _state(runs, tolerance)):
            if finding is not None:
                yield finding
                found += 1
        if not found:
            yield _unexplained(runs, micro_batch_size)


def error_of(runs: GradientRuns, micro_batch_size: int) -> float:
    """Return the relative gradient error of a cut; infinite if it cannot be run."""
    try:
        return relative_error(runs.split(micro_batch_size), runs.whole())
    except (RuntimeError, ValueError):
        return float("inf")


def _normalisation(runs: GradientRuns, size: int, names: Sequence[str], by_name: dict[str, nn.Module]) -> CheckFinding:
    """Describe layers that couple samples in training and do not in evaluation mode, in which they are meanwhile."""
    kinds = sorted({type(by_name[name]).__name__ for name in names})
    known = all(isinstance(by_name[name], BatchNormBase) for name in names)
    layers = f"{len(names)} layer{'s' * (len(names) > 1)} ({', '.join(kinds)}; first {names[0]!r})"
    verb = "normalise" if len(names) > 1 else "normalises"
    error = error_of(runs, size)
    behind = "nothing else differs" if error < 1e-3 else f"without them the gradient still differs by {error:.1e}"  # noqa: PLR2004 (a word, no limit)
    return CheckFinding(
        code="batch_norm",
        where=names[0],
        says=f"{layers} {verb} each micro-batch by that micro-batch's own statistics, and {behind}.",
        change=(
            "norms='exact' normalises over the whole effective batch, norms=Ghost(group_size=...) over groups that no "
            "cut changes; or use GroupNorm (anybatch.norms.replaced)."
            if known
            else f"give {names[0]!r} statistics of each sample by itself, as GroupNorm and LayerNorm have, or put it "
            "into evaluation mode."
        ),
    )


def _coupling(names: Sequence[str]) -> CheckFinding:
    return CheckFinding(
        code="couples_samples",
        where=names[0],
        says=(
            f"the output of {repr(names[0]) if names[0] else 'the model'} for one sample depends on the other samples "
            f"of the micro-batch, in evaluation mode too{f' (so do {len(names) - 1} others)' * (len(names) > 1)}."
        ),
        change=(
            "let the module work on each sample by itself; or move what joins samples out of the model into "
            "ab.joint(encode, fn), which gives it the outputs of the whole effective batch."
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
    """Return that a forward changes what the next one computes, as spectral norm and codebooks do."""
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
    """Return that the loss function computes with gradients of parameters, which belong to its micro-batch."""
    if not runs.differentiates_parameters():
        return None
    return CheckFinding(
        code="couples_samples",
        where="gradients in the loss",
        says=(
            "the loss function takes gradients with respect to parameters, which are sums over all samples that it is "
            "given, and computes with them: no count makes micro-batches add up to that."
        ),
        change=(
            "take gradients with respect to inputs, or of each sample by itself (torch.func.vmap of torch.func.grad); "
            "otherwise the effective batch has to fit into one micro-batch."
        ),
    )


def _unexplained(runs: GradientRuns, size: int) -> CheckFinding:
    return CheckFinding(
        code="unexplained",
        where="",
        says=(
            f"micro-batches of {size} give another gradient (relative error {error_of(runs, size):.1e}), and neither "
            "the layers, the random numbers, what modules keep, the model's inputs nor the loss explain it."
        ),
        change="look at the parameter that differs most, and at what the forward does with the size of its batch.",
    )
