"""Plans against published GPU figures, with their sources: nothing is measured here.

    python benchmarks/plan_published.py [--out benchmarks/results/NAME.md]

From transformers' guide: bert-large-uncased as a classifier, 512 tokens, on a V100 of 16 GB; memory as printed by
`nvidia-smi`, including the context. The guide gives that machine's context (1343 MB), which replaces the default one.
From torchtune's table: Llama 3.1 8B and 3.2 3B with adapters, compiled, packed sequences, batch 2; active memory.
Plans are of eager execution, with adapters on one more matrix per block (keys). FSDP2 on 8 and 128 H100s is compared
in `plan_sharded`.

The second table splits the memory of a full fine-tuning on the same page into parts that follow from arithmetic and
parts without a published number. That run sums gradients in bf16, and the engine does not.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import report
import torch
from plan_unseen import stand_in_for_missing_operations
from torch import nn

import anybatch as ab
from anybatch.memory.trace import MemoryTrace, Phase
from anybatch.recipes.planning.subjects import own_loss

MEBIBYTE, GIBIBYTE = 2**20, 2**30
GUIDE = "https://huggingface.co/docs/transformers/v4.27.2/en/perf_train_gpu_one"
TORCHTUNE = "https://github.com/pytorch/torchtune (README, 2025)"
CONTEXT = 1343 * MEBIBYTE
"""Bytes of a single number on that V100, as printed by the guide's predecessor."""
Named = Iterable[tuple[str, nn.Parameter]]


def adamw(named: Named) -> torch.optim.Optimizer:
    """Return AdamW without foreach, as transformers' own was."""
    return torch.optim.AdamW([p for _, p in named], lr=5e-5, foreach=False)


def adafactor(named: Named) -> torch.optim.Optimizer:
    """Return Adafactor."""
    return torch.optim.Adafactor([p for _, p in named], lr=1e-3, foreach=False)


CHECKPOINTED = ["checkpointing"]
BERT: tuple[tuple[str, int, dict[str, Any], int], ...] = (
    ("batch 4", 4, {}, 14949),
    ("batch 1, 4 times", 1, {}, 8681),
    ("the same, checkpointing", 1, {"changes": CHECKPOINTED}, 6775),
    ("batch 4, fp16", 4, {"precision": "fp16"}, 13939),
    ("batch 1, 4 times, checkpointing, fp16", 1, {"changes": CHECKPOINTED, "precision": "fp16"}, 7275),
    ("batch 4, Adafactor", 4, {"optimizer": adafactor}, 12295),
    (
        "batch 1, 4 times, checkpointing, fp16, Adafactor",
        1,
        {"changes": CHECKPOINTED, "precision": "fp16", "optimizer": adafactor},
        4847,
    ),
    ("batch 4, 8-bit Adam", 4, {"changes": ["8-bit AdamW"]}, 13085),
    (
        "batch 1, 4 times, checkpointing, fp16, 8-bit Adam",
        1,
        {"changes": ["8-bit AdamW", *CHECKPOINTED], "precision": "fp16"},
        5363,
    ),
)
"""Training job, micro-batch size, options of the plan, and published MB."""
LORA = "LoRA of rank 8"
LLAMA: tuple[tuple[str, str, int, list[str], float], ...] = (
    ("8B, LoRA", "llama-3.1-8b", 2048, [LORA, "checkpointing", "loss in chunks of 1024 tokens"], 16.2),
    (
        "8B, QLoRA",
        "llama-3.1-8b",
        2048,
        [f"{LORA} on a base in 4 bits", "checkpointing", "loss in chunks of 1024 tokens"],
        7.4,
    ),
    ("3B, LoRA", "llama-3.2-3b", 4096, [LORA, "checkpointing", "loss in chunks of 1024 tokens"], 8.5),
    (
        "3B, QLoRA",
        "llama-3.2-3b",
        4096,
        [f"{LORA} on a base in 4 bits", "checkpointing", "loss in chunks of 1024 tokens"],
        4.6,
    ),
)
"""Training job, model, tokens of a sample, changes, and published GiB."""


def bert() -> nn.Module:
    """Return bert-large-uncased as a classifier, with its library's attention at the time."""
    import transformers  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    config = transformers.BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",  # type: ignore[call-arg]
    )
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


def rows() -> Iterator[tuple[str, float, float, str]]:
    """Yield the training job, GiB as planned and as published, and the source."""
    sample = {"input_ids": torch.zeros(1, 512, dtype=torch.int64), "labels": torch.zeros(1, dtype=torch.int64)}
    for name, size, options, published in BERT:
        optimizer: Callable[[Named], torch.optim.Optimizer] = options.get("optimizer", adamw)
        rest = {key: value for key, value in options.items() if key != "optimizer"}
        plan = ab.plan(
            bert,
            optimizer,
            ab.mean_over_samples(own_loss),
            sample,
            device="V100-16",
            # Gradients were zeroed and kept, so a step had the memory of its second micro-batch.
            effective_batch_size=max(4, 2 * size),
            micro_batch_size=size,
            proposals=False,
            **rest,
        )
        reserved = plan.baseline.reserved_bytes_without_limit
        taken = reserved + CONTEXT + plan.budget.workspace_bytes
        yield f"bert-large, {name}", taken / GIBIBYTE, published * MEBIBYTE / GIBIBYTE, GUIDE
    for name, model, length, changes, gib in LLAMA:
        plan = ab.plan(
            model,
            device="80GiB",
            effective_batch_size=2,
            micro_batch_size=2,
            sequence_length=length,
            precision="bf16",
            changes=changes,
            proposals=False,
        )
        yield f"Llama {name}, {length} tokens", plan.baseline.peak.num_bytes / GIBIBYTE, gib, TORCHTUNE


FULL = ["fused optimizer", "checkpointing", "loss in chunks of 1024 tokens"]
PUBLISHED_FULL = 24.9
"""GiB of Llama 3.2 3B in bf16, all weights trained: 2 samples of 4,096 tokens, one micro-batch, compiled."""


def parts() -> Iterator[str]:
    """Yield the table of that recipe's memory, part by part: as published, by arithmetic, and as planned.

    The published run has weights, gradients and both averages of Adam in bf16, whose bytes are known.
    """
    plan = ab.plan(
        "llama-3.2-3b",
        device="80GiB",
        effective_batch_size=2,
        micro_batch_size=2,
        sequence_length=4096,
        precision="bf16",
        changes=["bf16 weights, rounded stochastically", *FULL],
        proposals=False,
    )
    half = 2 * plan.num_parameters / GIBIBYTE
    trace = plan.baseline.envelope.at(plan.baseline.micro_batch_size)
    held = {phase: highest(trace, phase) for phase in ("backward", "update")}
    at = {name: size / GIBIBYTE for name, size in held["backward"].items()}
    total, widened = sum(at.values()), sum(held["update"].values()) / GIBIBYTE
    yield "| GiB, at the peak of the backward | published | planned |"
    yield "|---|--:|--:|"
    yield f"| weights, in bf16 | {half:.2f} | {at['weights']:.2f} |"
    yield f"| gradients: in bf16; the engine sums them in float32 | {half:.2f} | {at['gradients']:.2f} |"
    yield f"| AdamW's two averages, in bf16 | {2 * half:.2f} | {at['optimizer']:.2f} |"
    yield f"| inputs of blocks; gradients of autograd's own come as these go | - | {at['activations']:.2f} |"
    left = PUBLISHED_FULL - 4 * half
    yield f"| one block run again and its backward: compiled, or not | {left:.2f} | {at['temporaries']:.2f} |"
    yield f"| in all | {PUBLISHED_FULL:.2f} | {total:.2f} |"
    yield f"| in the update, whose largest weight is in float32 then | - | {widened:.2f} |"


def highest(trace: MemoryTrace, phase: Phase) -> dict[str, int]:
    """Return the bytes by category at a phase's peak."""
    held: Counter[str] = Counter()
    most: dict[str, int] = {}
    for event in trace.events:
        one = trace.allocations[abs(event) - 1]
        held[one.category] += one.num_bytes if event > 0 else -one.num_bytes
        if event > 0 and one.phase == phase and held.total() > sum(most.values()):
            most = dict(held)
    return most


def main() -> None:
    """Plan and print."""
    options = report.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    stand_in_for_missing_operations()
    lines = ["| trained | planned, GiB | published, GiB | error | source |", "|---|--:|--:|--:|---|"]
    errors = []
    for name, planned, published, source in rows():
        errors.append(100 * (planned / published - 1))
        lines.append(f"| {name} | {planned:.2f} | {published:.2f} | {errors[-1]:+.1f}% | {source} |")
        print(lines[-1], flush=True)
    sizes = sorted(map(abs, errors))
    report.publish(
        [
            f"{len(sizes)} figures: off by {sizes[len(sizes) // 2]:.1f}% in the middle, {sizes[-1]:.1f}% at most.",
            "",
            *lines,
            "",
            "A recipe that sums gradients in bf16, and the engine's nearest:",
            "",
            *parts(),
        ],
        title="Plans against published figures of GPUs",
        command="python benchmarks/plan_published.py",
        setting="planned without the devices",
        out=options.out,
    )


if __name__ == "__main__":
    main()
