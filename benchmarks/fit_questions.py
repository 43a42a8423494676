"""The answers of `anybatch plan ... --fit` to ten common questions, as printed.

    python benchmarks/fit_questions.py [--only WORD] [--out benchmarks/results/NAME.md]

The last three need torchvision, timm and diffusers. Sizes of SDXL's UNet are from its published configuration.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import report
import torch
from plan_unseen import stand_in_for_missing_operations

import anybatch as ab

SDXL = {
    "_class_name": "UNet2DConditionModel",
    "act_fn": "silu",
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "in_channels": 4,
    "layers_per_block": 2,
    "out_channels": 4,
    "projection_class_embeddings_input_dim": 2816,
    "sample_size": 128,
    "transformer_layers_per_block": [1, 2, 10],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "use_linear_projection": True,
}
THIRTEEN = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
"""Llama 2 13B, as published."""
TEXT: dict[str, Any] = {"effective_batch_size": 64, "precision": "bf16"}
QUESTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "1B on 8 GiB": ("llama-3.2-1b", {"device": "RTX 3070", "sequence_length": 1024, **TEXT}),
    "1B on 24 GiB": ("llama-3.2-1b", {"device": "RTX 4090", "sequence_length": 2048, **TEXT}),
    "3B on 12 GiB": ("llama-3.2-3b", {"device": "RTX 3060", "sequence_length": 1024, **TEXT}),
    "8B on 16 GiB": ("llama-3.1-8b", {"device": "RTX 4080", "sequence_length": 1024, **TEXT}),
    "8B on 24 GiB": ("llama-3.1-8b", {"device": "RTX 4090", "sequence_length": 2048, **TEXT}),
    "8B on 8 times 80 GiB": ("llama-3.1-8b", {"device": "H100", "sequence_length": 4096, "world_size": 8, **TEXT}),
    "13B on 48 GiB": (THIRTEEN, {"device": "L40S", "sequence_length": 2048, **TEXT}),
    "ResNet-50 on 8 GiB": ("torchvision:resnet50", {"device": "RTX 3070", "effective_batch_size": 256}),
    "ViT-L on 24 GiB": ("timm:vit_large_patch16_224", {"device": "RTX 4090", "effective_batch_size": 1024}),
    "SDXL's UNet on 24 GiB": (SDXL, {"device": "RTX 4090", "effective_batch_size": 16, "precision": "bf16"}),
}
"""The questions by name."""


def answered(what: Any, options: dict[str, Any]) -> str:  # noqa: ANN401 (a name, or a configuration)
    """Return the printed plan of one question."""
    if isinstance(what, str):
        return str(ab.plan(what, fit=True, **options))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(what), encoding="utf-8")
        return str(ab.plan(str(file), fit=True, **options))


def main() -> None:
    """Ask and print."""
    parser = report.parser(__doc__)
    parser.add_argument("--only", default="", help="ask only what has this word in it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stand_in_for_missing_operations()
    lines: list[str] = []
    for name, (what, asked) in QUESTIONS.items():
        if options.only in name:
            text = answered(what, asked)
            print(f"== {name}\n{text}\n", flush=True)
            lines += [f"## {name}", "", "```text", text, "```", ""]
    report.publish(
        lines,
        title="What fits: ten questions, as answered",
        command="python benchmarks/fit_questions.py" + (f" --only {options.only!r}" if options.only else ""),
        setting="planned without the devices",
        out=options.out,
    )


if __name__ == "__main__":
    main()
