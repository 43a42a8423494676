"""What the user is told where BatchNorm makes the gradient depend on the cut, and nobody has chosen that."""

from collections.abc import Mapping

from anybatch.core.splitting import BatchPlan
from anybatch.core.torch_internals import BatchNormBase
from anybatch.engine.telemetry.notifier import Notifier


class CutNotice:
    """Warns once, in the first step that is cut, that each micro-batch is normalised by its own statistics.

    Args:
        layers: the BatchNorm layers, by name.
        is_chosen: whether the user has named the policy; then nothing is said.
        notifier: gives the warning.
    """

    def __init__(self, layers: Mapping[str, BatchNormBase], notifier: Notifier, *, is_chosen: bool) -> None:
        self._layers = {} if is_chosen else dict(layers)
        self._notifier = notifier

    def after_step(self, plan: BatchPlan) -> None:
        """Look at a step that was run by a plan."""
        if not self._layers or (num_micro_batches := len(plan.units)) == 1:
            return
        training = [name for name, layer in self._layers.items() if layer.training]
        if not training:  # a frozen layer may train later
            return
        self._layers = {}
        which = f"{len(training)} BatchNorm layer{'s' * (len(training) > 1)} (first {training[0]!r})"
        self._notifier.warn(
            "batch_norm_by_micro_batch",
            f"{which} normalised each of {num_micro_batches} micro-batches by its own statistics, so the gradient is "
            "not that of the un-split batch, and depends on the cut. norms='exact' normalises over the whole effective "
            "batch, norms=anybatch.norms.Ghost(group_size=32) over groups that no cut changes, norms='freeze' by "
            "running statistics, norms='sync' over ranks; Engine(norms='keep') says that this is meant.",
        )
