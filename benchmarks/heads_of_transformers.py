"""The heads of transformers under accumulation: the Trainer alone, and after `ab.exact`.

Each figure is the largest relative error of a step's gradient in float64, against the gradient of the step's samples in
one forward and backward: 29 samples of different lengths in micro-batches of 3, 4 micro-batches a step, on 1 rank.
"exact" keeps these steps; "of 13" is `ab.exact(trainer, effective_batch_size=13)`.

    python benchmarks/heads_of_transformers.py [--head NAME ...] [--out benchmarks/results/NAME.md]

Models are small and random. It needs transformers, accelerate, peft (LoRA) and scipy (YOLOS); a head whose package is
not installed is left out.
"""

import contextlib
import importlib.util
import io
import logging
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.errors import AnyBatchError, AnyBatchWarning

sys.path.insert(0, str(Path(__file__).parents[1]))  # the heads and runs come from the tests
from tests.integrations.heads import (
    BERT,
    HEADS,
    LLAMA,
    MIXTRAL,
    T5,
    VIT,
    VOCABULARY,
    WAV2VEC2,
    WIDTH,
    Head,
    Sample,
    causal,
    hf,
    image,
    numbers,
    question,
    seq2seq,
    token_labels,
)
from tests.integrations.trainer_runs import Run

SIZE = 13
EFFECTIVE: dict[str, Any] = {"effective_batch_size": SIZE}
IMAGE_TOKEN = 1
BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
WHISPER = {**BART, "num_mel_bins": 8, "max_source_positions": 30, "max_target_positions": 32}
SPEECH_T5: dict[str, Any] = {
    **{name: value for name, value in WAV2VEC2.items() if name.startswith(("conv", "num_conv"))},
    **{name: value for name, value in BART.items() if name.endswith(("heads", "ffn_dim", "layers", "token_id"))},
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "apply_spec_augment": False,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "positional_dropout": 0.0,
    "feat_proj_dropout": 0.0,
}
ELECTRA = {**BERT, "embedding_size": WIDTH}
MOE: dict[str, Any] = {**LLAMA, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MOE |= {"experts_implementation": "eager"}
TIMES = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1, "d_model": WIDTH}
TIMES |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
TIMES |= {"attention_dropout": 0.0, "activation_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
SEGFORMER = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [1, 1], "hidden_sizes": [8, 16], "num_labels": 5}
SEGFORMER |= {"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
SEGFORMER |= {"decoder_hidden_size": WIDTH, "drop_path_rate": 0.0, "classifier_dropout_prob": 0.0}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 5}
MAE: dict[str, Any] = {
    **VIT,
    "decoder_hidden_size": WIDTH,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
}
MAE |= {"decoder_intermediate_size": 32, "mask_ratio": 0.5}
TEXT = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 1}
TEXT |= {"num_attention_heads": 2, "max_position_embeddings": 32}
LLAVA = {"image_token_id": IMAGE_TOKEN, "image_seq_length": 4, "vision_feature_layer": -1}


def lora() -> nn.Module:
    """Return a language model with frozen weights and adapters that are not zero."""
    import peft  # noqa: PLC0415 (optional)

    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.0)
    model: nn.Module = peft.get_peft_model(HEADS["Llama"].model(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # it begins at 0, and so would the other matrix's gradient
            nn.init.normal_(parameter)
    return model


class Contrastive(nn.Module):
    """CLIP with its in-batch loss."""

    def __init__(self) -> None:
        super().__init__()
        self.clip = hf.CLIPModel(hf.CLIPConfig(text_config={**TEXT, "eos_token_id": 2}, vision_config=VIT))

    def forward(self, **inputs: Any) -> Any:  # noqa: ANN401
        """Return the model's outputs with its loss."""
        return self.clip(**inputs, return_loss=True)


class Detector(nn.Module):
    """YOLOS with boxes in tensors; boxes of class -1 are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.yolos = hf.YolosForObjectDetection(
            hf.YolosConfig(**{**VIT, "image_size": [16, 16]}, num_detection_tokens=5)
        )

    def forward(self, pixel_values: Tensor, classes: Tensor, boxes: Tensor) -> Any:  # noqa: ANN401
        """Return the model's outputs with its loss."""
        targets = [
            {"class_labels": kind[kind >= 0], "boxes": box[kind >= 0]} for kind, box in zip(classes, boxes, strict=True)
        ]
        torch.set_default_dtype(torch.float64)  # the loss makes a tensor of class weights
        try:
            return self.yolos(pixel_values=pixel_values, labels=targets)
        finally:
            torch.set_default_dtype(torch.float32)


def features(generator: torch.Generator, length: int) -> Sample:
    """Return a spectrogram and its text."""
    spectrogram = torch.randn(8, 60, generator=generator).double()
    return {"input_features": spectrogram, "labels": numbers(generator, 2 + length // 2)}


def sound(generator: torch.Generator, length: int) -> Sample:
    """Return a sound and its text."""
    values = torch.randn(1200, generator=generator).double()
    return {"input_values": values, "labels": numbers(generator, 2 + length // 2)}


def sound_class(generator: torch.Generator, length: int) -> Sample:
    """Return a sound and its class."""
    return {**sound(generator, length), "labels": numbers(generator, 1, low=0, high=3)[0]}


def pixels(generator: torch.Generator) -> Tensor:
    """Return an image."""
    return torch.randn(3, 16, 16, generator=generator).double()


def captioned(generator: torch.Generator, length: int) -> Sample:
    """Return an image and its caption."""
    return {"pixel_values": pixels(generator), **causal(generator, length)}


def with_image_tokens(generator: torch.Generator, length: int) -> Sample:
    """Return an image and a text that begins with the tokens of its 4 patches."""
    sample = captioned(generator, length)
    ids, labels = (
        torch.cat([torch.full((4,), value), sample[key]])
        for key, value in (("input_ids", IMAGE_TOKEN), ("labels", -100))
    )
    return {**sample, "input_ids": ids, "labels": labels}


def pair(generator: torch.Generator, length: int) -> Sample:
    """Return an image and a text that ends with the token 2."""
    ids = numbers(generator, length)
    ids[-1] = 2
    return {"pixel_values": pixels(generator), "input_ids": ids}


def with_noise(generator: torch.Generator, length: int) -> Sample:
    """Return an image, and the noise that chooses its masked patches."""
    del length
    return {"pixel_values": pixels(generator), "noise": torch.rand(4, generator=generator).double()}


def segments(generator: torch.Generator, length: int, *, is_partial: bool = False) -> Sample:
    """Return an image and the class of each pixel; `is_partial` leaves out some classes."""
    classes = numbers(generator, 16, 16, low=0, high=5)
    if is_partial:
        classes[:, : length % 16] = 255  # the model ignores it
    return {"pixel_values": pixels(generator), "labels": classes}


def boxed(generator: torch.Generator, length: int) -> Sample:
    """Return an image with up to 4 boxes."""
    classes = numbers(generator, 4, low=0, high=5)
    classes[1 + length % 4 :] = -1
    boxes = 0.2 + 0.3 * torch.rand(4, 4, generator=generator).double()
    return {"pixel_values": pixels(generator), "classes": classes, "boxes": boxes}


def series(generator: torch.Generator, length: int, *, is_partial: bool = False) -> Sample:
    """Return a past and a future; `is_partial` leaves out some values of the future."""
    past, future = torch.randn(10, generator=generator).double(), torch.randn(4, generator=generator).double()
    observed = torch.ones(4, dtype=torch.float64)
    if is_partial:
        observed[1 + length % 4 :] = 0
    return {
        "past_values": past,
        "past_time_features": torch.linspace(0, 1, 10).double()[:, None],
        "past_observed_mask": torch.ones(10, dtype=torch.float64),
        "future_values": future,
        "future_time_features": torch.linspace(1, 2, 4).double()[:, None],
        "future_observed_mask": observed,
    }


def replaced_tokens(generator: torch.Generator, length: int) -> Sample:
    """Return a text, and which of its tokens have been replaced."""
    return {"input_ids": numbers(generator, length), "labels": numbers(generator, length, low=0, high=2)}


def two_sentences(generator: torch.Generator, length: int) -> Sample:
    """Return a text with masked tokens, and whether its sentences follow each other."""
    next_one = numbers(generator, 1, low=0, high=2)[0]
    return {**token_labels(0.7)(generator, length), "next_sentence_label": next_one}


def beyond(generator: torch.Generator, length: int) -> Sample:
    """Return a question whose answer is sometimes beyond the text."""
    sample = question(generator, length)
    return sample if length % 3 else {**sample, "end_positions": torch.tensor(99)}


def of_own_length(generator: torch.Generator, length: int) -> Sample:
    """Return a question without padding."""
    sample = question(generator, length)
    return {**sample, "input_ids": sample["input_ids"][:length]}


@dataclass(frozen=True)
class Case:
    """A head, the trainer's options, its loss on one batch, and the package that it needs."""

    head: Head
    options: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Run], Callable[[nn.Module, Sample], Tensor]] | None = None
    package: str = "transformers"


def of_config(model: str, config: dict[str, Any], sample: Callable[[torch.Generator, int], Sample]) -> Case:
    """Return a case from the prefix and suffix of a model's name, such as "Bart ForConditionalGeneration"."""
    prefix, suffix = model.split()
    return Case(Head(lambda: getattr(hf, prefix + suffix)(getattr(hf, f"{prefix}Config")(**config)), sample))


def with_decoder_inputs(generator: torch.Generator, length: int) -> Sample:
    """Return a text, and another one to generate, as a collate function for label smoothing does."""
    labels = numbers(generator, 12)
    labels[2 + length // 2 :] = -100
    inputs = torch.cat([labels.new_zeros(1), labels[:-1].clamp(min=0)])
    return {"input_ids": numbers(generator, length), "labels": labels, "decoder_input_ids": inputs}


def smoothed(run: Run) -> Callable[[nn.Module, Sample], Tensor]:
    """Return the loss with label smoothing."""

    def loss(model: nn.Module, batch: Sample) -> Tensor:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        found: Tensor = run.trainer.label_smoother(model(**inputs), batch["labels"])
        return found

    return loss


def llava() -> nn.Module:
    """Return a language model that sees images."""
    vision = hf.CLIPVisionConfig(**{name: value for name, value in VIT.items() if name != "num_labels"})
    model: nn.Module = hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(vision_config=vision, text_config=hf.LlamaConfig(**LLAMA), **LLAVA)
    )
    return model


def switch() -> nn.Module:
    """Return a mixture of experts whose routers compute in float64."""
    experts = {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    model: nn.Module = hf.SwitchTransformersForConditionalGeneration(
        hf.SwitchTransformersConfig(**T5, **experts, router_jitter_noise=0.0)
    )
    for module in model.modules():
        if hasattr(module, "jitter_noise"):
            module.dtype = torch.float64
    return model


CASES = {
    **{name: Case(head) for name, head in HEADS.items()},
    "Llama, LoRA": Case(Head(lora, causal), package="peft"),
    "Mixtral, router loss": of_config("Mixtral ForCausalLM", {**MIXTRAL, "output_router_logits": True}, causal),
    "Qwen3-MoE": of_config("Qwen3Moe ForCausalLM", MOE, causal),
    "Qwen3-MoE, router loss": of_config("Qwen3Moe ForCausalLM", {**MOE, "output_router_logits": True}, causal),
    "Mamba": of_config(
        "Mamba ForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 1, "state_size": 4, "pad_token_id": 0},
        causal,
    ),
    "T5, label smoothing": Case(
        Head(HEADS["T5"].model, with_decoder_inputs), {"label_smoothing_factor": 0.1}, smoothed
    ),
    "BART": of_config("Bart ForConditionalGeneration", BART, seq2seq),
    "mBART": of_config("MBart ForConditionalGeneration", BART, seq2seq),
    "Whisper": of_config("Whisper ForConditionalGeneration", WHISPER, features),
    "SpeechT5": of_config("SpeechT5 ForSpeechToText", SPEECH_T5, sound),
    "wav2vec2, classes": of_config(
        "Wav2Vec2 ForSequenceClassification", {**WAV2VEC2, "num_labels": 3, "classifier_proj_size": 8}, sound_class
    ),
    "LLaVA": Case(Head(llava, with_image_tokens)),
    "BLIP": of_config(
        "Blip ForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                "pad_token_id": 0,
                "encoder_hidden_size": WIDTH,
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
            },
            "vision_config": VIT,
        },
        captioned,
    ),
    "GIT": of_config("Git ForCausalLM", {**BERT, "vision_config": VIT, "pad_token_id": 0}, captioned),
    "ELECTRA, masked": of_config("Electra ForMaskedLM", ELECTRA, token_labels(0.7)),
    "ELECTRA, replaced": of_config("Electra ForPreTraining", ELECTRA, replaced_tokens),
    "ViT-MAE": of_config("ViTMAE ForPreTraining", MAE, with_noise),
    "time series": of_config("TimeSeriesTransformer ForPrediction", TIMES, series),
    "time series, missing values": of_config(
        "TimeSeriesTransformer ForPrediction", TIMES, lambda g, n: series(g, n, is_partial=True)
    ),
    "BERT, pre-training": of_config("Bert ForPreTraining", BERT, two_sentences),
    "BERT, questions of own length": Case(Head(HEADS["BERT, questions"].model, of_own_length)),
    "BERT, answers beyond the text": Case(Head(HEADS["BERT, questions"].model, beyond)),
    "Switch": Case(Head(switch, seq2seq)),
    "ResNet": of_config("ResNet ForImageClassification", RESNET, image),
    "SegFormer": of_config("Segformer ForSemanticSegmentation", SEGFORMER, segments),
    "SegFormer, ignored pixels": of_config(
        "Segformer ForSemanticSegmentation", SEGFORMER, lambda g, n: segments(g, n, is_partial=True)
    ),
    "YOLOS": Case(Head(Detector, boxed), package="scipy"),
    "CLIP": Case(Head(Contrastive, pair)),
}


def error_of(case: Case, options: dict[str, Any] | None) -> tuple[str, str]:
    """Return what was found out about the loss, and the largest error of a step or the reason for its absence."""
    printed = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(printed),
        warnings.catch_warnings(record=True, action="always", category=AnyBatchWarning) as warned,
    ):
        run = Run(case.head, Path(folder), **case.options)
        try:
            if options is not None:
                ab.exact(run.trainer, **options)
            run.trainer.train()
        except AnyBatchError as error:
            return "", f"refused: {error.code}"
        batches = run.effective_batches(SIZE) if options else None
        error = run.worst_error(case.loss(run) if case.loss else None, batches)
    found = printed.getvalue().partition("anybatch: the loss is ")[2].partition(".")[0]
    codes = {one.message.code: None for one in warned if isinstance(one.message, AnyBatchWarning)}
    shown = f"{error:.0e}" if math.isfinite(error) else "not finite"
    return found, ", warned: ".join([shown, *codes])


def rows(names: list[str]) -> Iterator[str]:
    """Yield the table."""
    yield "| head | loss | Trainer alone | exact | of 13 |"
    yield "|---|---|--:|--:|--:|"
    for name in names:
        case = CASES[name]
        if importlib.util.find_spec(case.package) is None:
            continue
        results = [error_of(case, options) for options in (None, {}, EFFECTIVE)]
        yield f"| {name} | {results[1][0]} | {' | '.join(error for _, error in results)} |"


def main() -> None:
    """Run the command."""
    parser = report.parser(__doc__)
    parser.add_argument("--head", nargs="+", choices=list(CASES), default=list(CASES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign] # models compute losses in float32
    report.publish(
        list(rows(arguments.head)),
        title="The heads of transformers under accumulation",
        command="python benchmarks/heads_of_transformers.py",
        setting=f"transformers {hf.__version__}, float64, 1 rank",
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
