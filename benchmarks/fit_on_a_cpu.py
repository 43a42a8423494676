"""Changes proposed by `--fit`, made with the printed lines and run on a CPU in the planned amount of memory.

Three models: a small Llama of transformers, ResNet-18 and a vision transformer of torchvision. For each change that
runs on a CPU, and for the changes that `--fit` joins, `ab.plan` predicts the memory of a step of two micro-batches. The
printed lines are then executed unchanged (only `lr=...` becomes a number), and two steps of the engine run with every
tensor counted (`anybatch.testing.memory_budget`): once with as much memory as planned, and once with 3% less. With less
they run out, unless convolution kernels use that much internally, which no tensor shows. 8-bit state and 4-bit weights
have no kernels on a CPU, and are left out.

    python benchmarks/fit_on_a_cpu.py [--out benchmarks/results/NAME.md]

It needs torchvision and peft.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import report
import torch
import transformers
from plan_unseen import stand_in_for_missing_operations
from torch import nn

import anybatch as ab
from anybatch.core.loss import Loss
from anybatch.errors import MemoryExhaustedError, UserError
from anybatch.planner.changes import code_of
from anybatch.recipes.planning.subjects import adamw, class_loss, own_loss
from anybatch.testing import memory_budget

CHANGES = (
    (),
    ("fused optimizer",),
    ("checkpointing",),
    ("fused optimizer", "checkpointing"),
    ("LoRA of rank 4",),
    ("LoRA of rank 4", "fused optimizer", "checkpointing"),
)
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model, its loss, one sample, and the size of a micro-batch."""

    make: Callable[[], nn.Module]
    loss: Loss
    sample: Batch
    size: int


def cases() -> dict[str, Case]:
    """Return the models by name."""
    import torchvision  # noqa: PLC0415 (after the stand-ins)

    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=2000,
        max_position_embeddings=128,
    )
    tokens = torch.zeros(1, 128, dtype=torch.int64)
    image = {"image": torch.zeros(1, 3, 64, 64), "label": torch.zeros(1, dtype=torch.int64)}
    of_classes = ab.mean_over_samples(class_loss)
    vit = partial(torchvision.models.VisionTransformer, 64, 8, 4, 4, 128, 256, num_classes=10)
    llama = partial(transformers.LlamaForCausalLM, config)
    text = {"input_ids": tokens, "labels": tokens}
    return {
        "Llama": Case(llama, ab.mean_over_tokens(own_loss), text, 4),
        "ResNet-18": Case(torchvision.models.resnet18, of_classes, image, 16),
        "ViT": Case(vit, of_classes, image, 16),
    }


def runs(case: Case, code: str, num_bytes: int) -> bool:
    """Execute the printed lines; return whether two steps of two micro-batches then run in `num_bytes`.

    Args:
        case: the model.
        code: the lines, of which the last may create the engine.
        num_bytes: memory for tensors.
    """
    made: dict[str, Any] = {"model": case.make().train(), "torch": torch, "optimizer": adamw}

    def engine_of(*_: object, **given: Any) -> ab.Engine:  # noqa: ANN401 (the arguments of the lines)
        fixed = {"micro_batch_size": case.size, "norms": "keep", "check_loss": False}
        return ab.Engine(made["model"], made["optimizer"], case.loss, **fixed, **given)

    made["ab"] = SimpleNamespace(Engine=engine_of)
    exec(code.replace("lr=...", "lr=1e-3"), made)  # noqa: S102 (the code that a user would write)
    batch = {name: value.expand(2 * case.size, *value.shape[1:]).clone() for name, value in case.sample.items()}
    engine: ab.Engine = made.get("engine") or engine_of()
    with engine, memory_budget(num_bytes, made["model"], engine.optimizer):
        try:
            return not any(engine.step(batch).too_large for _ in range(2))
        except (torch.OutOfMemoryError, MemoryExhaustedError):
            return False


def rows() -> Iterator[str]:
    """Yield a row for each model and changes."""
    for name, case in cases().items():
        for changes in CHANGES:
            try:
                plan = ab.plan(
                    case.make,
                    adamw,
                    case.loss,
                    case.sample,
                    device="cpu:16GiB",
                    effective_batch_size=2 * case.size,
                    micro_batch_size=case.size,
                    changes=changes,
                    headroom=0.0,
                    proposals=False,
                )
            except UserError as error:
                yield f"| {name} | {' + '.join(changes)} | - | - | {str(error).partition('. ')[0]} |"
                continue
            planned = plan.baseline.peak.num_bytes
            within, below = (runs(case, code_of(plan.requested), int(part * planned)) for part in (1.0, 0.97))
            said = ("yes" if within else "NO", "runs" if below else "runs out")
            yield f"| {name} | {' + '.join(changes) or 'as it is'} | {planned / 2**20:.1f} | {' | '.join(said)} |"


def main() -> None:
    """Plan, run and print."""
    options = report.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    stand_in_for_missing_operations()
    columns = ("model", "changes", "planned, MiB", "runs in it", "in 97% of it")
    report.publish(
        [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows()],
        title="Proposed changes by their printed lines, under an enforced budget on a CPU",
        command="python benchmarks/fit_on_a_cpu.py",
        setting="two micro-batches, 1 thread",
        out=options.out,
    )


if __name__ == "__main__":
    main()
