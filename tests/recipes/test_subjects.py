"""The subjects of a plan: known models, configurations and recipes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from anybatch.errors import UserError
from anybatch.recipes.planning.decoder import KNOWN_MODELS, Decoder, DecoderBlock, DecoderConfig
from anybatch.recipes.planning.subjects import PlanSubject, load_subject, subject_of_config
from tests.extras import skip_without

skip_without("sklearn", "anybatch[recipes]")

PUBLISHED_PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
}
SMALL = DecoderConfig(
    num_hidden_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=20,
    max_position_embeddings=8,
    tie_word_embeddings=False,
)


def loss_of(subject: PlanSubject) -> float:
    """Return the loss of a subject's sample, repeated twice."""
    torch.manual_seed(0)
    train = subject.train()
    batch = {name: torch.cat([value, value]) for name, value in subject.sample.items()}
    function = train.loss if callable(train.loss) else train.loss.function
    return float(function(train.model, batch).detach())


def test_published_models_have_their_published_size() -> None:
    """Each known model has exactly the published number of parameters, and is built without data."""
    with torch.device("meta"):
        models = {name: Decoder(config) for name, config in KNOWN_MODELS.items()}

    sizes = {name: sum(parameter.numel() for parameter in model.parameters()) for name, model in models.items()}
    assert sizes == PUBLISHED_PARAMETERS


@pytest.mark.parametrize(("name", "most"), [("gpt2", 1_024), ("llama-3.1-8b", 131_072)])
def test_sequences_may_be_as_long_as_published(name: str, most: int) -> None:
    """A model supports its published sequence length; the default is at most 8,192 tokens, with a note."""
    longest, usual = load_subject(name, sequence_length=most), load_subject(name)

    assert longest.sample["inputs"].shape == (1, most)
    assert usual.sample["inputs"].shape == (1, min(most, 8_192))
    assert len(usual.notes) == (most > 8_192)
    with pytest.raises(UserError):
        load_subject(name, sequence_length=most + 1)


@pytest.mark.parametrize("name", ["gpt2", "llama-3.2-1b", "mistral-7b", "qwen2.5-7b"])
def test_blocks_are_called_as_in_transformers(name: str) -> None:
    """The printed lines use the class and module names of transformers."""
    config = KNOWN_MODELS[name]
    made = transformers.AutoConfig.for_model(config.model_type, num_hidden_layers=1)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)  # type: ignore[no-untyped-call]

    blocks = model.get_submodule(config.called["blocks"])
    assert [type(block).__name__ for block in blocks.children()] == [config.called["DecoderBlock"]]


def test_shared_keys_are_repeated_keys() -> None:
    """Attention with fewer key heads equals attention with these heads repeated for their groups of queries."""
    torch.manual_seed(0)
    block = DecoderBlock(dataclasses.replace(SMALL, model_type="gpt2"))
    x = torch.randn(2, 5, 32)
    normed = block.attention_norm(x)
    query = block.query(normed).reshape(2, 5, 4, 8).transpose(1, 2)
    key, value = (
        part.reshape(2, 5, 2, 8).transpose(1, 2).repeat_interleave(2, dim=1)
        for part in block.key_value(normed).chunk(2, dim=-1)
    )
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).reshape(2, 5, 32)
    plain = x + block.merge(mixed)
    plain = plain + block.down(F.gelu(block.up(block.hidden_norm(plain)), approximate="tanh"))

    torch.testing.assert_close(block(x), plain)


def test_checkpointed_blocks_give_the_same_gradient() -> None:
    """Checkpointing the blocks does not change the gradient."""
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = Decoder(SMALL, checkpointed=checkpointed)
        tokens = torch.arange(16).reshape(2, 8) % 20
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])

    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        (None, (1, 16)),
        ("LlamaForCausalLM", (1, 16)),
        ("LlamaForSequenceClassification", (1,)),
    ],
)
def test_configurations_make_models_that_run(kind: str | None, labels: tuple[int, ...]) -> None:
    """A transformers configuration becomes a model whose loss runs on the generated sample."""
    config = transformers.LlamaConfig(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        pad_token_id=0,
        architectures=None if kind is None else [kind],
    )

    subject = subject_of_config(config)

    assert subject.sample["labels"].shape == labels
    assert loss_of(subject) > 0


@pytest.mark.slow
def test_configurations_of_audio_models() -> None:
    """Whisper gets its spectrogram and labels, wav2vec2 a waveform of the given length; both losses run."""
    heads: dict[str, Any] = {
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
    }
    special: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    whisper = transformers.WhisperConfig(
        vocab_size=30, d_model=16, encoder_layers=1, decoder_layers=1, max_source_positions=20, max_target_positions=8,
        architectures=["WhisperForConditionalGeneration"], **heads, **special
    )  # fmt: skip
    waveforms = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, conv_dim=(8,) * 7,
        num_conv_pos_embedding_groups=2, num_conv_pos_embeddings=4, architectures=["Wav2Vec2ForSequenceClassification"]
    )  # fmt: skip

    spoken, classified = subject_of_config(whisper), subject_of_config(waveforms, sequence_length=8_000)

    assert {name: tensor.shape for name, tensor in spoken.sample.items()} == {
        "input_features": (1, 80, 40),
        "labels": (1, 8),
    }
    assert classified.sample["input_values"].shape == (1, 8_000)
    assert min(loss_of(spoken), loss_of(classified)) > 0
    with pytest.raises(UserError, match="set sequence_length"):
        subject_of_config(waveforms)


@pytest.mark.slow
def test_configuration_of_a_model_that_compares_pairs() -> None:
    """CLIP gets a text and an image; its loss, which has no labels, compares the samples of a micro-batch: a note."""
    small = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.CLIPConfig(
        projection_dim=8, text_config=small | {"vocab_size": 40, "max_position_embeddings": 12},
        vision_config=small | {"image_size": 32, "patch_size": 16}, architectures=["CLIPModel"]
    )  # fmt: skip

    subject = subject_of_config(config)
    subject.sample.update({name: torch.cat([tensor] * 2) for name, tensor in subject.sample.items()})

    assert {name: tensor.shape for name, tensor in subject.sample.items()} == {
        "input_ids": (2, 12),
        "pixel_values": (2, 3, 32, 32),
    }
    assert loss_of(subject) > 0
    assert any("compares the samples" in note for note in subject.notes)


def test_configuration_in_a_file(tmp_path: Path) -> None:
    """A config.json works like its configuration object; a sequence may be shorter than the maximum."""
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=32, vocab_size=40)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")

    subject = load_subject(str(tmp_path / "config.json"), sequence_length=8)

    assert subject.sample["input_ids"].shape == (1, 8)
    long = transformers.LlamaConfig(max_position_embeddings=131_072, num_hidden_layers=1, hidden_size=32)
    assert subject_of_config(long).sample["input_ids"].shape == (1, 8_192)
    assert loss_of(subject) > 0


def test_recipes_bring_their_data() -> None:
    """A recipe is planned with a sample of its data, its optimizer and its batch size."""
    subject = load_subject("digits")

    assert subject.settings is not None
    assert subject.settings.effective_batch_size == 256
    assert loss_of(subject) > 0
    named = nn.Linear(2, 2).named_parameters()
    make = subject.train().optimizer
    assert callable(make)
    assert isinstance(make(named), torch.optim.Optimizer)


@pytest.mark.parametrize(
    ("name", "length"), [("lama-3.1-8b", None), ("nothing", None), ("digits", 128), ("missing.json", None)]
)
def test_invalid_subjects(name: str, length: int | None) -> None:
    """An unknown name and an invalid length raise."""
    with pytest.raises(UserError):
        load_subject(name, sequence_length=length)
