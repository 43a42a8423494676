"""One batch of sentences, split in data order, after sorting by length, or by a token budget, for several budgets."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import anybatch as ab
from anybatch.core.token_budget import TokenBudget
from anybatch.data import Padded
from anybatch_guide.claims.measuring import new_model, relative, weighted_gradient
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress
from anybatch_guide.tasks.task import IGNORED, PlaygroundTask, cross_entropy, load

SENTENCES, FIXED_TOKENS = 32, 16.0
"""Number of samples in the batch; assumed fixed cost of a micro-batch, in tokens."""
CAPS = (56, 112, 168, 224, 336, 448, 672, 896, 1344, 1792)
Row = dict[str, Tensor]


def run(emit: Emit) -> Data:
    """Run the batch with each split in the engine, and compare its gradients with the unsplit batch."""
    task = load("text")
    rows = [_unpadded(task, number) for number in range(SENTENCES)]
    lengths = [len(row["inputs"]) for row in rows]
    in_order = sorted(range(SENTENCES), key=lengths.__getitem__)
    model = new_model(task).double()
    expected = weighted_gradient(model, [(task.rows.inputs[:SENTENCES], task.rows.targets[:SENTENCES])], [1.0])
    results = []
    for done, cap in enumerate(CAPS):
        emit_progress(emit, done, len(CAPS), f"{cap} tokens per micro-batch")
        # As many samples as fit if all of them have the maximum length.
        size = max(1, min(SENTENCES, cap // max(lengths)))
        ways: dict[str, tuple[Sequence[int], int | TokenBudget]] = {
            "arrival": (range(SENTENCES), size),
            "sorted": (in_order, size),
            "token_budget": (range(SENTENCES), ab.token_budget(cap, fixed_tokens=FIXED_TOKENS)),
        }
        for name, (order, micro_batch_size) in ways.items():
            cuts, gradient = _run(task, [rows[index] for index in order], micro_batch_size)
            results.append({"cap": cap, "way": name, "cuts": cuts, "gradient_error": relative(gradient, expected)})
    return {"lengths": lengths, "caps": list(CAPS), "fixed_tokens": FIXED_TOKENS, "ways": results}


def _unpadded(task: PlaygroundTask, number: int) -> Row:
    """Return a sentence without padding."""
    targets = task.rows.targets[number]
    length = int((targets != IGNORED).sum())
    return {"inputs": task.rows.inputs[number][:length], "targets": targets[:length]}


def _run(task: PlaygroundTask, rows: list[Row], micro_batch_size: int | TokenBudget) -> tuple[list[list[int]], Tensor]:
    """Return the sentence lengths in each micro-batch of the engine, and the gradient of the batch."""
    padded = Padded(padding={"targets": IGNORED}, mask=None, shift=False)
    cuts: list[list[int]] = []

    def collate(samples: list[Any]) -> Any:  # noqa: ANN401 (structured as the samples are)
        cuts.append([len(sample["inputs"]) for sample in samples])
        return padded(samples)

    (batch,) = ab.batches(
        rows,
        effective_batch_size=len(rows),
        epochs=1,
        shuffle=False,
        lengths=[len(row["inputs"]) for row in rows],
        collate=collate,
    )
    model = new_model(task).double()
    loss = ab.mean_over_tokens(
        lambda model, batch: cross_entropy(model(batch["inputs"]), batch["targets"]), labels="targets", shift=False
    )
    with ab.Engine(
        model, torch.optim.SGD(model.parameters()), loss, micro_batch_size=micro_batch_size, check_loss=False
    ) as engine:
        gradients = engine.gradients(batch)
    return cuts, torch.cat([value.flatten() for value in gradients.values() if value is not None])


EXPERIMENT = Experiment(
    name="length_cuts",
    question="How much computation does each split of a batch of sentences waste on padding? Is the gradient the same?",
    run=run,
    seconds=10,
    noisy=("gradient_error",),
)
