"""Is the advice of `anybatch plan` right? 25 questions of users, each with an expected property of the answer.

The first fifteen are from a review of the planner, whose verdicts are in the issue; the last ten were added with the
corrections. `tests/planner/test_advice.py` compares changes that an answer calls equal in small, from the printed
lines: the chunked loss, checkpointing and the fused update. Library models need transformers, timm, torchvision and
diffusers.

    python benchmarks/fit_questions.py [--only WORD] [--out benchmarks/results/NAME.md]
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
import torch
from plan_unseen import stand_in_for_missing_operations
from torch import Tensor, nn
from torch.nn import functional

import anybatch as ab
from anybatch.errors import UserError
from anybatch.planner.changes import code_of
from anybatch.planner.plan import Plan

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
"""Sizes of the published configuration."""


def decoder(kind: str, sizes: tuple[int, int, int, int, int], **more: object) -> dict[str, Any]:
    """Return the configuration of a decoder of transformers: width, layers, heads, inner width and vocabulary."""
    width, layers, heads, inner, words = sizes
    return {
        "model_type": kind.lower(),
        "architectures": [f"{kind}ForCausalLM"],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": inner,
        "vocab_size": words,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        **more,
    }


LLAMA_2_7B = decoder("Llama", (4096, 32, 32, 11008, 32000))
GEMMA_2_9B = decoder("Gemma2", (3584, 42, 16, 14336, 256000), num_key_value_heads=8, head_dim=256)
GRANITE_8B = decoder("Granite", (4096, 40, 32, 12800, 49155), num_key_value_heads=8, logits_scaling=16.0)
PHI_2 = decoder("Phi", (2560, 32, 32, 10240, 51200))
QWEN_HALF = decoder("Qwen2", (896, 24, 14, 4864, 151936), num_key_value_heads=2, tie_word_embeddings=True)
MIXTRAL = decoder("Mixtral", (4096, 32, 32, 14336, 32000), num_key_value_heads=8)
MAMBA = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 768, "num_hidden_layers": 24}
BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
BERT_LARGE = {
    **BERT,
    "architectures": ["BertForSequenceClassification"],
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
WHISPER = {
    "model_type": "whisper",
    "architectures": ["WhisperForConditionalGeneration"],
    "d_model": 768,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
}
WAV2VEC2 = {"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForSequenceClassification"], "layerdrop": 0.0}
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 768, "num_layers": 12}
T5 |= {"num_heads": 12, "d_ff": 3072, "decoder_start_token_id": 0}


class Smoothed(nn.Module):
    """A small language model whose loss smooths its labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32768, 1024)
        layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.head = nn.Linear(1024, 32768, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.blocks(self.embedding(tokens)))
        return logits


def smoothed_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean over tokens, with smoothed labels."""
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), label_smoothing=0.1)


class UNet3D(nn.Module):
    """A 3-D U-Net of four levels."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(4)]
        inputs = [1, *widths[:-1]]
        self.down = nn.ModuleList(self._block(a, b) for a, b in zip(inputs, widths, strict=True))
        self.up = nn.ModuleList(self._block(3 * a, a) for a in widths[:-1])
        self.out = nn.Conv3d(width, 2, 1)

    @staticmethod
    def _block(a: int, b: int) -> nn.Module:
        layers = [nn.Conv3d(a, b, 3, padding=1), nn.InstanceNorm3d(b), nn.ReLU()]
        return nn.Sequential(*layers, nn.Conv3d(b, b, 3, padding=1), nn.InstanceNorm3d(b), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of two classes."""
        kept = []
        for number, block in enumerate(self.down):
            x = block(x if number == 0 else functional.max_pool3d(x, 2))
            kept.append(x)
        for level in (2, 1, 0):
            x = functional.interpolate(x, scale_factor=2)
            x = self.up[level](torch.cat([x, kept[level]], 1))
        result: Tensor = self.out(x)
        return result


def voxel_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over voxels."""
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def volumes(**options: Any) -> Plan:  # noqa: ANN401 (options of `ab.plan`)
    """Plan the 3-D U-Net."""
    sample = {"x": torch.zeros(1, 1, 128, 128, 128), "y": torch.zeros(1, 128, 128, 128, dtype=torch.int64)}
    return ab.plan(UNet3D, _adamw, ab.mean_over_samples(voxel_loss), sample, **options)


def smoothing(**options: Any) -> Plan:  # noqa: ANN401 (options of `ab.plan`)
    """Plan the model with smoothed labels."""
    sample = torch.zeros(1, 2048, dtype=torch.int64)
    return ab.plan(Smoothed, _adamw, ab.mean_over_samples(smoothed_loss), sample, **options)


def clip(**options: Any) -> Plan:  # noqa: ANN401 (options of `ab.plan`)
    """Plan CLIP B/32 with its contrastive loss over the whole effective batch."""
    from transformers import CLIPConfig, CLIPModel  # noqa: PLC0415 (only this question needs it)

    def encode(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:  # noqa: ANN401 (a module)
        found = model(**batch)
        return {"image": found.image_embeds, "text": found.text_embeds}

    def contrast(model: Any, outputs: dict[str, Tensor]) -> Tensor:  # noqa: ANN401 (a module)
        logits = model.logit_scale.exp() * outputs["image"] @ outputs["text"].T
        return functional.cross_entropy(logits, torch.arange(len(logits), device=logits.device))

    sample = {"input_ids": torch.zeros(1, 77, dtype=torch.int64), "pixel_values": torch.zeros(1, 3, 224, 224)}
    return ab.plan(lambda: CLIPModel(CLIPConfig()), _adamw, ab.joint(encode, contrast), sample, **options)


def _adamw(named: Any) -> torch.optim.Optimizer:  # noqa: ANN401 (pairs of names and parameters)
    return torch.optim.AdamW([parameter for _, parameter in named])


@dataclass(frozen=True)
class Found:
    """An answer: a plan, or a refusal."""

    plan: Plan | None
    text: str

    @property
    def code(self) -> str:
        """The names and the code of the answer and of its alternative."""
        answer = None if self.plan is None else self.plan.answer
        both = [] if answer is None else [answer.best, answer.alternative]
        return "\n".join(f"{one.name}\n{code_of(one.changes)}" for one in both if one is not None)

    @property
    def speed(self) -> float:
        """Time of the answer, as a multiple of the fastest combination that was tried and fits."""
        answer = None if self.plan is None else self.plan.answer
        if answer is None or answer.best is None or answer.best.seconds is None:
            return float("inf")
        return answer.best.seconds / min(one.seconds for one in answer.tried if one.seconds is not None)


def uses(*words: str, without: tuple[str, ...] = (), speed: float = float("inf")) -> Callable[[Found], bool]:
    """Return a rule: the answer has all of these words, and none of the others, and is nearly the fastest."""

    def rule(found: Found) -> bool:
        has_all = all(word in found.code for word in words) and bool(found.code)
        return has_all and not any(word in found.code for word in without) and found.speed <= speed

    return rule


def equal(found: Found) -> bool:
    """Whether the answer is the same step."""
    answer = None if found.plan is None else found.plan.answer
    return answer is not None and answer.best is not None and answer.best.same_step


def first_gains(found: Found) -> bool:
    """Whether 256 samples fit, and the first change of the list saves at least 3%, or none does."""
    if found.plan is None or found.plan.micro_batch_size != 256:
        return False
    times = [found.plan.baseline.seconds, *(change.seconds for change in found.plan.changes if change.fits)]
    base, *others = [one.total for one in times if one is not None]
    return not others or others[0] * 1.03 < base or min(others) * 1.03 >= base


TEXT: dict[str, Any] = {"precision": "bf16", "fit": True}
ANY: dict[str, Any] = {"fit": True}
NO_BF16 = ("bf16", "bfloat16")
QUESTIONS: tuple[tuple[str, Any, dict[str, Any], str, Callable[[Found], bool]], ...] = (
    (
        "1 Llama 3.2 3B, full, RTX 4090, 64 x 2,048",
        "llama-3.2-3b",
        {"device": "RTX 4090", "effective_batch_size": 64, "sequence_length": 2048, **TEXT},
        "LoRA, and next to it all parameters by an update in the backward",
        uses("LoRA", "in the backward"),
    ),
    (
        "2 Llama 2 7B, T4, 16 x 512",
        LLAMA_2_7B,
        {"device": "T4", "effective_batch_size": 16, "sequence_length": 512, **ANY},
        "adapters, all in fp16",
        uses("LoRA", "float16", without=NO_BF16),
    ),
    (
        "3 ViT-L, 8 x A100-40, 4,096",
        "timm:vit_large_patch16_224",
        {"device": "A100-40", "world_size": 8, "effective_batch_size": 4096, **ANY},
        "bf16, not float32",
        uses("bf16 autocast", speed=1.03),
    ),
    (
        "4 ResNet-50, SGD, 4 x V100, fp16, 1,024",
        "torchvision:resnet50",
        {
            "device": "V100-16",
            "world_size": 4,
            "effective_batch_size": 1024,
            "precision": "fp16",
            "optimizer": "sgd",
        },
        "256 on each rank; no change of less than 3% first",
        first_gains,
    ),
    (
        "5 GPT-2, RTX 4090, 512 x 1,024",
        "gpt2",
        {"device": "RTX 4090", "effective_batch_size": 512, **ANY},
        "bf16, not float32",
        uses("bf16 autocast", speed=1.03),
    ),
    (
        "6 Whisper small, RTX 3060, 32",
        WHISPER,
        {"device": "RTX 3060", "effective_batch_size": 32, "precision": "bf16", "proposals": False},
        "a plan",
        lambda found: found.plan is not None and found.plan.fits,
    ),
    (
        "7 SDXL, RTX 3060, 4",
        SDXL,
        {"device": "RTX 3060", "effective_batch_size": 4, **ANY},
        "LoRA; blocks inside of checkpointed blocks are left out",
        lambda found: uses("LoRA")(found) and ("checkpointing" not in found.code or "- inner" in found.code),
    ),
    (
        "8 Mixtral 8x7B, 8 x H100, FSDP, 64 x 4,096",
        MIXTRAL,
        {
            "device": "H100",
            "world_size": 8,
            "effective_batch_size": 64,
            "sequence_length": 4096,
            "precision": "bf16",
            "strategy": "fsdp",
            "proposals": False,
        },
        "does not fit, because of weights, gradients and state",
        lambda found: (
            found.plan is not None
            and not found.plan.fits
            and "activations alone" not in found.plan.summary()["because"]
        ),
    ),
    (
        "9 Gemma 2 9B, A100-80, 32 x 2,048",
        GEMMA_2_9B,
        {"device": "A100-80", "effective_batch_size": 32, "sequence_length": 2048, **TEXT},
        "adapters, no chunked loss: the logits have a soft cap",
        uses("LoRA", without=("linear_cross_entropy",)),
    ),
    (
        "10 Qwen 2.5 0.5B, RTX 4060, 32 x 1,024",
        QWEN_HALF,
        {"device": "RTX 4060", "effective_batch_size": 32, "sequence_length": 1024, **TEXT},
        "trains all parameters",
        lambda found: bool(found.code) and "LoRA" not in found.code,
    ),
    (
        "11 BERT base, 8 x T4, 2,048 x 128",
        BERT,
        {"device": "T4", "world_size": 8, "effective_batch_size": 2048, "sequence_length": 128, **ANY},
        "fp16, not float32",
        uses("fp16 autocast", without=NO_BF16, speed=1.03),
    ),
    (
        "12 wav2vec2 base, RTX 3090, 32",
        WAV2VEC2,
        {
            "device": "RTX 3090",
            "effective_batch_size": 32,
            "precision": "bf16",
            "proposals": False,
            "sequence_length": 160_000,  # 10 seconds
        },
        "a plan",
        lambda found: found.plan is not None and found.plan.fits,
    ),
    (
        "13 3-D U-Net, RTX 3090, 8 x 128^3",
        volumes,
        {"device": "RTX 3090", "effective_batch_size": 8, **ANY},
        "bf16, not float32",
        uses("bf16 autocast", speed=1.03),
    ),
    (
        "14 Mamba 130M, RTX 4090, 64 x 1,024",
        MAMBA,
        {
            "device": "RTX 4090",
            "effective_batch_size": 64,
            "sequence_length": 1024,
            "precision": "bf16",
            "proposals": False,
        },
        "names the reference path without kernels",
        lambda found: "Mamba without" in found.text or "reference" in found.text,
    ),
    (
        "15 CLIP B/32, 8 x A100-80, 32,768",
        clip,
        {
            "device": "A100-80",
            "world_size": 8,
            "effective_batch_size": 32768,
            "precision": "bf16",
            "proposals": False,
        },
        "a plan that fits",
        lambda found: found.plan is not None and found.plan.fits,
    ),
    (
        "16 Phi-2, A100-80, 32 x 2,048",
        PHI_2,
        {"device": "A100-80", "effective_batch_size": 32, "sequence_length": 2048, **TEXT},
        "trains all parameters; a chunked loss includes the bias of the head",
        lambda found: (
            "LoRA" not in found.code
            and ("linear_cross_entropy" not in found.code or "linear_bias=head.bias" in found.code)
        ),
    ),
    (
        "17 Granite 8B, L40S, 16 x 4,096",
        GRANITE_8B,
        {"device": "L40S", "effective_batch_size": 16, "sequence_length": 4096, **ANY},
        "adapters, no chunked loss: the logits are scaled",
        uses("LoRA", without=("linear_cross_entropy",)),
    ),
    (
        "18 T5 base, V100-16, 64 x 512",
        T5,
        {"device": "V100-16", "effective_batch_size": 64, "sequence_length": 512, **ANY},
        "fp16, no bf16",
        uses("fp16 autocast", without=NO_BF16),
    ),
    (
        "19 BERT large, RTX 2080 Ti, 256 x 512",
        BERT_LARGE,
        {"device": "RTX 2080 Ti", "effective_batch_size": 256, "sequence_length": 512, **ANY},
        "fp16, no bf16",
        uses("fp16 autocast", without=NO_BF16),
    ),
    (
        "20 GPT-2 XL, RTX 3090, 32 x 1,024",
        "gpt2-xl",
        {"device": "RTX 3090", "effective_batch_size": 32, **ANY},
        "trains all parameters with the batch size of the question",
        lambda found: bool(found.code) and "LoRA" not in found.code and "in the backward" not in found.code,
    ),
    (
        "21 Qwen 2.5 7B, full, L40S, 64 x 2,048",
        "qwen2.5-7b",
        {"device": "L40S", "effective_batch_size": 64, "sequence_length": 2048, **TEXT},
        "LoRA, and next to it all parameters by an update in the backward",
        uses("LoRA", "in the backward"),
    ),
    (
        "22 Llama 3.1 8B, P100, 8 x 1,024",
        "llama-3.1-8b",
        {"device": "P100", "effective_batch_size": 8, "sequence_length": 1024, **ANY},
        "adapters on a 4-bit base, all in fp16",
        uses("4 bits", "float16", without=NO_BF16),
    ),
    (
        "23 ResNet-152, RTX 3060, 1,024",
        "torchvision:resnet152",
        {"device": "RTX 3060", "effective_batch_size": 1024, **ANY},
        "16 bits; checkpointing of BatchNorm is not called equal",
        lambda found: uses("bf16 autocast")(found) and ("checkpointing" not in found.code or not equal(found)),
    ),
    (
        "24 ViT-B, H100, 4,096, float32 requested",
        "timm:vit_base_patch16_224",
        {"device": "H100", "effective_batch_size": 4096, "precision": "fp32", "fit": True},
        "the same step, in float32",
        equal,
    ),
    (
        "25 Own model with label smoothing, RTX 4060, 64 x 2,048",
        smoothing,
        {"device": "RTX 4060", "effective_batch_size": 64, **TEXT},
        "no chunked loss: its labels are smoothed",
        lambda found: bool(found.code) and "linear_cross_entropy" not in found.code,
    ),
)
"""Name, subject, options, expected answer, and a rule for it."""


def ask(what: Any, options: dict[str, Any]) -> Found:  # noqa: ANN401 (a name, a configuration, or a function)
    """Return the answer to a question."""
    try:
        if callable(what):
            plan = what(**options)
        elif isinstance(what, str):
            plan = ab.plan(what, **options)
        else:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "config.json"
                file.write_text(json.dumps(what), encoding="utf-8")
                plan = ab.plan(str(file), **options)
    except UserError as error:
        return Found(None, str(error))
    return Found(plan, str(plan))


def main() -> None:
    """Ask and print."""
    parser = report.parser(__doc__)
    parser.add_argument("--only", default="", help="ask only questions with one of these words, separated by commas")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stand_in_for_missing_operations()
    rows = ["| question | expected | answer | verdict | CPU s |", "|---|---|---|---|--:|"]
    texts: list[str] = []
    for name, what, asked, expected, rule in QUESTIONS:
        if not any(word in name for word in options.only.split(",")):
            continue
        start = time.process_time()
        found = ask(what, asked)
        seconds = time.process_time() - start
        plan, verdict = found.plan, "right" if rule(found) else "WRONG"
        if plan is None:
            short = found.text.split(". ")[0]
        elif plan.answer is None:
            short = f"micro-batches of {plan.micro_batch_size}" if plan.fits else plan.summary()["because"]
        else:
            both = [one for one in (plan.answer.best, plan.answer.alternative) if one is not None]
            short = "; or ".join(f"{one.name}, {one.seconds or 0.0:.3g} s" for one in both) or "nothing fits"
        rows.append(f"| {name} | {expected} | {short} | {verdict} | {seconds:.0f} |")
        print(f"== {name}\n{found.text}\n{rows[-1]}\n", flush=True)
        texts += ["", f"## {name}", "", "```text", found.text, "```"]
    report.publish(
        [*rows, *texts],
        title="Advice: 25 questions",
        command="python benchmarks/fit_questions.py" + (f" --only {options.only!r}" if options.only else ""),
        setting="planned without the devices",
        out=options.out,
    )


if __name__ == "__main__":
    main()
