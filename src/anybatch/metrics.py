"""Evaluation metrics that are not means over samples, such as the area under a curve."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from anybatch.core.loss import Loss
from anybatch.core.tree import Batch


@dataclass(frozen=True, slots=True)
class OverWholeSet:
    """A metric that is computed once, from the model's outputs for all samples of an evaluation.

    In plain PyTorch: `compute(concatenate([function(model, batch) for batch in batches]))`.

    ```python
    def scores(model, batch):
        return model(batch["x"])[:, 1], batch["label"]

    area = OverWholeSet(scores, lambda outputs: roc_auc_score(outputs[1], outputs[0]))
    engine.evaluate(held_out, area)                                          # {"metric": 0.93}
    engine.evaluate(held_out, OverWholeSet(scores, lambda outputs: {"auroc": torchmetrics_object(*outputs)}))
    ```

    Args:
        function: function (model, batch) -> outputs: a tensor, or a tuple, list or dict of tensors, each with one row
            for each sample of the batch.
        compute: function (outputs for all samples of all ranks, in the order of the data, on the CPU) -> a number, or a
            dict of numbers; called once on every rank.
    """

    function: Callable[[Any, Any], Any]
    compute: Callable[[Any], "float | torch.Tensor | Mapping[str, float | torch.Tensor]"]


MetricFunction = Callable[[Any, Batch], Any]
Metric = Loss | MetricFunction | OverWholeSet
