"""Small models of transformers in float64 without dropout, each with samples of different lengths."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from anybatch.integrations.probe import IGNORED

hf = pytest.importorskip("transformers")
VOCABULARY = 64
WIDTH = 16
Sample = dict[str, torch.Tensor]
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 1, "n_head": 2, "n_positions": 64}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
}
T5 |= {"dropout_rate": 0.0, "pad_token_id": 0, "decoder_start_token_id": 0}
MIXTRAL = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
WAV2VEC2 = {
    "vocab_size": 20,
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": (8, 8),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "ctc_zero_infinity": True,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "activation_dropout": 0.0,
}
VIT = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
VIT |= {"image_size": 16, "patch_size": 8, "num_labels": 5}


class Head(NamedTuple):
    """A model, and a function that makes one sample of about `length` tokens."""

    model: Callable[[], nn.Module]
    sample: Callable[[torch.Generator, int], Sample]


def numbers(generator: torch.Generator, *shape: int, low: int = 3, high: int = VOCABULARY) -> torch.Tensor:
    """Return random integers."""
    return torch.randint(low, high, shape, generator=generator)


def causal(generator: torch.Generator, length: int) -> Sample:
    """Return a text with some masked labels, but not at the first position, which is no target."""
    ids = numbers(generator, length)
    labels = torch.where(torch.rand(length, generator=generator) < 0.3, IGNORED, ids)
    labels[0] = ids[0]
    return {"input_ids": ids, "labels": labels}


def token_labels(share: float, num_classes: int = VOCABULARY) -> Callable[[torch.Generator, int], Sample]:
    """Return a function that makes a text with a label for some of its tokens."""

    def make(generator: torch.Generator, length: int) -> Sample:
        labels = numbers(generator, length, low=0, high=num_classes)
        labels = torch.where(torch.rand(length, generator=generator) < share, IGNORED, labels)
        return {"input_ids": numbers(generator, length), "labels": labels}

    return make


def seq2seq(generator: torch.Generator, length: int) -> Sample:
    """Return a text and another one to generate."""
    return {"input_ids": numbers(generator, length), "labels": numbers(generator, 2 + length // 2)}


def classified(generator: torch.Generator, length: int) -> Sample:
    """Return a text and its class."""
    return {"input_ids": numbers(generator, length), "labels": numbers(generator, 1, low=0, high=3)[0]}


def with_several_classes(generator: torch.Generator, length: int) -> Sample:
    """Return a text and three answers of yes or no."""
    return {"input_ids": numbers(generator, length), "labels": torch.rand(3, generator=generator).round().double()}


def with_number(generator: torch.Generator, length: int) -> Sample:
    """Return a text and a number to predict."""
    return {"input_ids": numbers(generator, length), "labels": torch.randn((), generator=generator).double()}


def multiple_choice(generator: torch.Generator, length: int) -> Sample:
    """Return three answers and the right one."""
    del length
    return {"input_ids": numbers(generator, 3, 8), "labels": numbers(generator, 1, low=0, high=3)[0]}


def image(generator: torch.Generator, length: int) -> Sample:
    """Return an image and its class."""
    del length
    pixels = torch.randn(3, 16, 16, generator=generator).double()
    return {"pixel_values": pixels, "labels": numbers(generator, 1, low=0, high=5)[0]}


def speech(generator: torch.Generator, length: int) -> Sample:
    """Return a sound and its letters."""
    sound = torch.randn(1200, generator=generator).double()
    return {"input_values": sound, "labels": numbers(generator, 2 + length % 4, low=1, high=20)}


def question(generator: torch.Generator, length: int) -> Sample:
    """Return a text with the first and last token of an answer, padded to 20 tokens."""
    padded = nn.functional.pad(numbers(generator, length), (0, 20 - length))
    start, end = numbers(generator, 2, low=0, high=length)
    return {"input_ids": padded, "start_positions": start, "end_positions": end}


def ctc(reduction: str) -> nn.Module:
    """Return a speech recognizer whose loss is a sum, or a mean over samples."""
    model: nn.Module = hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**WAV2VEC2, ctc_loss_reduction=reduction))
    return model


HEADS = {
    "Llama": Head(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)), causal),
    "Llama, tied": Head(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, tie_word_embeddings=True)), causal),
    "GPT-2": Head(lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), causal),
    "Mixtral": Head(lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**MIXTRAL)), causal),
    "BERT, masked": Head(lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT)), token_labels(0.7)),
    "BERT, tokens": Head(
        lambda: hf.BertForTokenClassification(hf.BertConfig(**BERT, num_labels=5)), token_labels(0.4, 5)
    ),
    "T5": Head(lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)), seq2seq),
    "BERT, classes": Head(lambda: hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=3)), classified),
    "BERT, several classes": Head(
        lambda: hf.BertForSequenceClassification(
            hf.BertConfig(**BERT, num_labels=3, problem_type="multi_label_classification")
        ),
        with_several_classes,
    ),
    "BERT, regression": Head(
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=1)), with_number
    ),
    "Llama, classes": Head(
        lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**LLAMA, num_labels=3)), classified
    ),
    "BERT, choices": Head(lambda: hf.BertForMultipleChoice(hf.BertConfig(**BERT)), multiple_choice),
    "BERT, questions": Head(lambda: hf.BertForQuestionAnswering(hf.BertConfig(**BERT)), question),
    "ViT": Head(lambda: hf.ViTForImageClassification(hf.ViTConfig(**VIT)), image),
    "wav2vec2, sum": Head(lambda: ctc("sum"), speech),
    "wav2vec2, mean": Head(lambda: ctc("mean"), speech),
}


def samples_of(head: Head, number: int) -> list[Sample]:
    """Return samples of different lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 20, (number,), generator=generator).tolist()
    return [{**head.sample(generator, length), "number": torch.tensor(place)} for place, length in enumerate(lengths)]


def collate(samples: list[Sample], seen: list[int] | None = None) -> Sample:
    """Pad each field to its longest sample; append the samples' numbers to `seen`, unless gradients are disabled."""
    if seen is not None and torch.is_grad_enabled():
        seen += [int(sample["number"]) for sample in samples]
    batch = {}
    for key in samples[0].keys() - {"number"}:
        values = [sample[key] for sample in samples]
        if values[0].dim() == 1 and key in {"input_ids", "labels"} and values[0].dtype == torch.int64:
            batch[key] = pad_sequence(values, batch_first=True, padding_value=IGNORED if key == "labels" else 0)
        else:
            batch[key] = torch.stack(values)
        if key == "input_ids" and values[0].dim() == 1:
            batch["attention_mask"] = pad_sequence([torch.ones_like(ids) for ids in values], batch_first=True)
    return batch
