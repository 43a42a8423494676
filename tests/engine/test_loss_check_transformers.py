"""The loss check on losses that transformers models compute in their forward.

The models are small, with random weights; nothing is downloaded.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import anybatch as ab
from anybatch.core.loss import Loss
from anybatch.errors import LossError
from tests.engine.cases import Batch

transformers = pytest.importorskip("transformers")

NUM_SAMPLES, WIDTH, NUM_WORDS, NUM_LABELS = 12, 10, 50, 3
SMALL = {"vocab_size": NUM_WORDS, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def language_model() -> Any:
    """Return a causal language model."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, hidden_size=16, num_key_value_heads=1, attention_dropout=0.1)
    )


def older_language_model() -> Any:
    """Return a causal language model whose head shares its weights with the embedding."""
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=NUM_WORDS, **sizes))


def encoder(model: str, **options: Any) -> Any:
    """Return a BERT encoder with this head."""
    config = transformers.BertConfig(**SMALL, hidden_size=16, max_position_embeddings=16, **options)
    return getattr(transformers, model)(config)


def translator() -> Any:
    """Return a sequence-to-sequence model."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=NUM_WORDS, **sizes, **ids))


def image_model() -> Any:
    """Return a classifier of images, with BatchNorm."""
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=NUM_LABELS, layer_type="basic"
    )
    return transformers.ResNetForImageClassification(config)


def two_encoders() -> Any:
    """Return CLIP: an encoder of texts and one of images, whose loss looks across samples."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": NUM_WORDS, "max_position_embeddings": 16, "eos_token_id": 1, "bos_token_id": 0}
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config={**text, "pad_token_id": 2}, vision_config=vision, projection_dim=8)
    return transformers.CLIPModel(config)


def texts() -> Batch:
    """Return texts of uneven lengths, with masked labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, NUM_WORDS, (NUM_SAMPLES, WIDTH), generator=generator)
    lengths = torch.randint(3, WIDTH + 1, (NUM_SAMPLES, 1), generator=generator)
    mask = torch.arange(WIDTH) < lengths
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def labelled_texts() -> Batch:
    """Return texts with one label each."""
    return {**texts(), "labels": torch.arange(NUM_SAMPLES) % NUM_LABELS}


def labelled_images() -> Batch:
    """Return images with one label each."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(NUM_SAMPLES, 3, 32, 32, generator=generator)
    return {"pixel_values": images, "labels": torch.arange(NUM_SAMPLES) % NUM_LABELS}


def described_images() -> Batch:
    """Return images with texts."""
    pixels = torch.randn(NUM_SAMPLES, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return {**{name: value for name, value in texts().items() if name != "labels"}, "pixel_values": pixels}


def own_loss(model: Any, batch: Batch) -> Any:
    """Return the model's own loss."""
    return model(**batch).loss


def contrastive_loss(model: Any, batch: Batch) -> Any:
    """Return the loss of CLIP."""
    return model(**batch, return_loss=True).loss


def scaled_loss(model: Any, batch: Batch) -> Any:
    """Return the model's own loss times the number of samples."""
    return model(**batch).loss * len(batch["labels"])


SAMPLES, TOKENS = ab.mean_over_samples(own_loss), ab.mean_over_tokens(own_loss)
TARGETS = ab.mean_over_tokens(own_loss, shift=False)
Case = tuple[Callable[[], Any], Callable[[], Batch], Loss | Callable[[Any, Any], Any]]

RIGHT: Mapping[str, Case] = {
    "causal": (language_model, texts, TOKENS),
    "causal, tied": (older_language_model, texts, TOKENS),
    "masked": (lambda: encoder("BertForMaskedLM"), texts, TARGETS),
    "token classification": (lambda: encoder("BertForTokenClassification", num_labels=NUM_WORDS), texts, TARGETS),
    "sequence classification": (
        lambda: encoder("BertForSequenceClassification", num_labels=NUM_LABELS),
        labelled_texts,
        SAMPLES,
    ),
    "sequence classification, undeclared": (
        lambda: encoder("BertForSequenceClassification", num_labels=NUM_LABELS),
        labelled_texts,
        own_loss,
    ),
    "sequence to sequence": (translator, texts, TARGETS),
    "images": (image_model, labelled_images, SAMPLES),
}
AS_TOKENS = "ab.mean_over_tokens(loss, labels='labels', shift=True)"
AS_TARGETS = "ab.mean_over_tokens(loss, labels='labels', shift=False)"
WRONG: Mapping[str, tuple[Case, str]] = {
    "causal as samples": ((language_model, texts, SAMPLES), AS_TOKENS),
    "causal, undeclared": ((older_language_model, texts, own_loss), AS_TOKENS),
    "causal, not shifted": ((older_language_model, texts, TARGETS), AS_TOKENS),
    "masked, shifted": ((lambda: encoder("BertForMaskedLM"), texts, TOKENS), AS_TARGETS),
    "sequence to sequence as samples": ((translator, texts, SAMPLES), AS_TARGETS),
    "a sum": ((image_model, labelled_images, ab.mean_over_samples(scaled_loss)), "ab.LossSum(total, count)"),
    "contrastive": ((two_encoders, described_images, ab.mean_over_samples(contrastive_loss)), "ab.joint(encode"),
}


def step(case: Case, precision: Any) -> str:
    """Make a step; return the decision on the loss."""
    torch.manual_seed(0)
    model, batch, loss = case
    with ab.Engine(
        model().train(),
        lambda named: torch.optim.SGD(named, lr=0.1),
        loss,
        micro_batch_size=8,
        precision=precision,
        norms="keep",
        world=ab.World(),
    ) as engine:
        engine.step(batch())
        return engine.decisions["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", RIGHT)
def test_right_declarations_hold(name: str, precision: str) -> None:
    """Each model's own loss passes the check under its right declaration."""
    assert step(RIGHT[name], precision).endswith(("confirmed by the check of the first step", "it is one"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.slow
def test_wrong_declarations_are_caught(name: str, precision: str) -> None:
    """Each model's own loss, declared wrongly, raises an error with the right declaration."""
    case, declaration = WRONG[name]
    with pytest.raises(LossError) as caught:
        step(case, precision)
    assert declaration in str(caught.value)
