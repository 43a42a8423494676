# mypy: ignore-errors
"""Setups with small models of transformers and peft, with random weights; nothing is downloaded."""

import functools

import torch
from torch.nn import functional as F

import anybatch as ab
from tests.engine.loss_check.collection.setups import Table, mean_over_words

NUM, WIDE, WORDS = 16, 10, 50
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
POSITIONS = {"max_position_embeddings": 16}
VISION = {name: value for name, value in SIZES.items() if name != "vocab_size"}
KEYS = {"num_key_value_heads": 1}


def texts():
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, WORDS, (NUM, WIDE), generator=g)
    mask = torch.arange(WIDE) < torch.randint(3, WIDE + 1, (NUM, 1), generator=g)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def labelled():
    return {**texts(), "labels": torch.arange(NUM) % 3}


def images(size=32):
    return {
        "pixel_values": torch.randn(NUM, 3, size, size, generator=torch.Generator().manual_seed(0)),
        "labels": torch.arange(NUM) % 3,
    }


def segmented():
    return {**images(), "labels": torch.randint(0, 3, (NUM, 32, 32), generator=torch.Generator().manual_seed(1))}


def sounds():
    g = torch.Generator().manual_seed(0)
    return {
        "input_values": torch.randn(NUM, 400, generator=g),
        "labels": torch.randint(1, WORDS, (NUM, 4), generator=g),
    }


def padded():
    return {name: F.pad(value, (0, 6), value=-100 if name == "labels" else 0) for name, value in texts().items()}


def described():
    return {
        **{name: value for name, value in texts().items() if name != "labels"},
        "pixel_values": images(8)["pixel_values"],
    }


def loss(m, b):
    return m(**b).loss


def model(name, config, **options):
    import transformers

    return getattr(transformers, name)(getattr(transformers, config)(**options))


def clip():
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {
        **sizes,
        "vocab_size": WORDS,
        "max_position_embeddings": 16,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "pad_token_id": 2,
    }
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**sizes, "image_size": 8, "patch_size": 4}, projection_dim=8
    )
    return transformers.CLIPModel(config)


SPEECH = {
    **SIZES,
    "conv_dim": [8, 8],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "ctc_loss_reduction": "mean",
}
BART = {
    "d_model": 16,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_layerdrop": 0.2,
}
MAE = {
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 24,
    "image_size": 32,
    "patch_size": 8,
}
T5 = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
REFORMER = {
    "attention_head_size": 8,
    "attn_layers": ["local", "lsh"],
    "axial_pos_embds": False,
    "feed_forward_size": 24,
    "is_decoder": True,
    "local_attn_chunk_length": 8,
    "lsh_attn_chunk_length": 8,
    "num_buckets": 4,
    "hash_seed": None,
}
SWITCH = {
    **T5,
    "num_decoder_layers": 2,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "num_experts": 4,
    "expert_capacity": 4,
}
BERT = {**SIZES, **POSITIONS}
CAUSAL, MASKED, SAMPLES = ab.mean_over_tokens, mean_over_words, ab.mean_over_samples

MODELS = {
    "LlamaForCausalLM": ("LlamaConfig", {**SIZES, **KEYS, "attention_dropout": 0.1}, texts, CAUSAL),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": WORDS, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2},
        texts,
        CAUSAL,
    ),
    "Qwen2ForCausalLM": ("Qwen2Config", {**SIZES, **KEYS, "attention_dropout": 0.1}, texts, CAUSAL),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", {**SIZES, "hidden_dropout": 0.1, "attention_dropout": 0.1}, texts, CAUSAL),
    "OPTForCausalLM": ("OPTConfig", {**SIZES, **POSITIONS, "ffn_dim": 24, "word_embed_proj_dim": 16}, texts, CAUSAL),
    "BloomForCausalLM": (
        "BloomConfig",
        {
            "vocab_size": WORDS,
            "hidden_size": 16,
            "n_layer": 2,
            "n_head": 2,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
        },
        texts,
        CAUSAL,
    ),
    "MixtralForCausalLM": ("MixtralConfig", {**SIZES, **KEYS, "num_local_experts": 4}, texts, CAUSAL),
    "MambaForCausalLM": (
        "MambaConfig",
        {"vocab_size": WORDS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2},
        texts,
        CAUSAL,
    ),
    "Gemma2ForCausalLM": ("Gemma2Config", {**SIZES, **KEYS, "head_dim": 8}, texts, CAUSAL),
    "BertForMaskedLM": ("BertConfig", BERT, texts, MASKED),
    "BertForTokenClassification": ("BertConfig", {**BERT, "num_labels": WORDS}, texts, MASKED),
    "BertForSequenceClassification": ("BertConfig", {**BERT, "num_labels": 3}, labelled, SAMPLES),
    "RobertaForMaskedLM": ("RobertaConfig", {**SIZES, "max_position_embeddings": 20}, texts, MASKED),
    "DistilBertForMaskedLM": (
        "DistilBertConfig",
        {"vocab_size": WORDS, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, **POSITIONS},
        texts,
        MASKED,
    ),
    "AlbertForMaskedLM": ("AlbertConfig", {**BERT, "embedding_size": 8}, texts, MASKED),
    "ElectraForTokenClassification": (
        "ElectraConfig",
        {**BERT, "embedding_size": 8, "num_labels": WORDS},
        texts,
        MASKED,
    ),
    "DebertaV2ForMaskedLM": ("DebertaV2Config", BERT, texts, MASKED),
    "T5ForConditionalGeneration": ("T5Config", {"vocab_size": WORDS, **T5}, texts, MASKED),
    "BartForConditionalGeneration": ("BartConfig", {"vocab_size": WORDS, **BART, **POSITIONS}, texts, MASKED),
    "ViTForImageClassification": (
        "ViTConfig",
        {**VISION, "image_size": 32, "patch_size": 16, "num_labels": 3, "hidden_dropout_prob": 0.1},
        images,
        SAMPLES,
    ),
    "ResNetForImageClassification": (
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3, "layer_type": "basic"},
        images,
        SAMPLES,
    ),
    "SwinForImageClassification": (
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 4,
            "drop_path_rate": 0.3,
            "num_labels": 3,
        },
        images,
        SAMPLES,
    ),
    "ConvNextForImageClassification": (
        "ConvNextConfig",
        {"hidden_sizes": [8] * 4, "depths": [1] * 4, "drop_path_rate": 0.3, "num_labels": 3},
        images,
        SAMPLES,
    ),
    "MobileNetV2ForImageClassification": (
        "MobileNetV2Config",
        {"depth_multiplier": 0.1, "num_labels": 3, "min_depth": 4, "depth_divisible_by": 4},
        images,
        SAMPLES,
    ),
    "SegformerForSemanticSegmentation": (
        "SegformerConfig",
        {
            "hidden_sizes": [8] * 4,
            "depths": [1] * 4,
            "num_attention_heads": [1] * 4,
            "decoder_hidden_size": 8,
            "num_labels": 3,
        },
        segmented,
        SAMPLES,
    ),
    "Wav2Vec2ForCTC": ("Wav2Vec2Config", {**SPEECH, "mask_time_prob": 0.0, "layerdrop": 0.2}, sounds, SAMPLES),
    "ViTMAEForPreTraining": (
        "ViTMAEConfig",
        {**VISION, "num_hidden_layers": 1, **MAE},
        lambda: {"pixel_values": images()["pixel_values"]},
        SAMPLES,
    ),
}
PACKAGE = "transformers"
RIGHT, WRONG = Table(), Table()
NARROW = {"dtypes": ("bfloat16",), "needs": PACKAGE}
AUTOCAST = {"dtypes": ("float32",), "autocast": lambda: torch.autocast("cpu", torch.bfloat16), "needs": PACKAGE}


def maker(name):
    config, options, *_ = MODELS[name]
    return functools.partial(model, name, config, **options)


for name, (_, _, batch, declare) in MODELS.items():
    # Mixtral's experts run in float32 only.
    dtypes = {"dtypes": ("float32",)} if "Mixtral" in name else {}
    RIGHT.add(f"transformers: {name}", loss, declare, model=maker(name), batch=batch, needs=PACKAGE, **dtypes)

LLAMA, GPT2 = maker("LlamaForCausalLM"), maker("GPT2LMHeadModel")


def checkpointed():
    made = LLAMA()
    made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return made


def adapted():
    import peft

    return peft.get_peft_model(LLAMA(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


def masked_speech():
    return model("Wav2Vec2ForCTC", "Wav2Vec2Config", **SPEECH, mask_time_prob=0.3, mask_time_length=3)


def summed_speech():
    return model("Wav2Vec2ForCTC", "Wav2Vec2Config", **{**SPEECH, "ctc_loss_reduction": "sum"}, mask_time_prob=0.0)


RIGHT.add("peft: LoRA of Llama", loss, CAUSAL, model=adapted, batch=texts, needs="peft")
RIGHT.add("transformers: checkpointed Llama", loss, CAUSAL, model=checkpointed, batch=texts, needs=PACKAGE)
RIGHT.add("transformers: Llama in bf16", loss, CAUSAL, model=lambda: LLAMA().bfloat16(), batch=texts, **NARROW)
RIGHT.add(
    "transformers: BERT under bf16 autocast", loss, MASKED, model=maker("BertForMaskedLM"), batch=texts, **AUTOCAST
)
RIGHT.add("transformers: GPT-2 under bf16 autocast", loss, CAUSAL, model=GPT2, batch=texts, **AUTOCAST)
RIGHT.add("transformers: Wav2Vec2 with masks of numpy", loss, SAMPLES, model=masked_speech, batch=sounds, needs=PACKAGE)
RIGHT.add(
    "transformers: Reformer",
    loss,
    CAUSAL,
    model=lambda: model("ReformerModelWithLMHead", "ReformerConfig", **SIZES, max_position_embeddings=64, **REFORMER),
    batch=padded,
    dtypes=("float32",),
    needs=PACKAGE,
)

ROUTED = {"batch": texts, "dtypes": ("float32",), "needs": PACKAGE}
WRONG.add(
    "transformers: balance of Switch",
    lambda m, b: m(**b, output_router_logits=True).loss,
    MASKED,
    model=lambda: model(
        "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", vocab_size=WORDS, **SWITCH
    ),
    **ROUTED,
)
WRONG.add(
    "transformers: balance of Mixtral",
    loss,
    CAUSAL,
    model=lambda: model(
        "MixtralForCausalLM", "MixtralConfig", **SIZES, **KEYS, num_local_experts=4, output_router_logits=True
    ),
    **ROUTED,
)
WRONG.add("transformers: Llama, tokens as samples", loss, SAMPLES, model=LLAMA, batch=texts, needs=PACKAGE)
WRONG.add("transformers: Llama, shift forgotten", loss, MASKED, model=LLAMA, batch=texts, needs=PACKAGE)
WRONG.add(
    "transformers: BERT, shift that is not needed",
    loss,
    CAUSAL,
    model=maker("BertForMaskedLM"),
    batch=texts,
    needs=PACKAGE,
)
WRONG.add(
    "transformers: T5, tokens as samples",
    loss,
    SAMPLES,
    model=maker("T5ForConditionalGeneration"),
    batch=texts,
    needs=PACKAGE,
)
WRONG.add("transformers: Wav2Vec2, summed", loss, SAMPLES, model=summed_speech, batch=sounds, needs=PACKAGE)
WRONG.add(
    "transformers: CLIP as samples",
    lambda m, b: m(**b, return_loss=True).loss,
    SAMPLES,
    model=clip,
    batch=described,
    needs=PACKAGE,
)
WRONG.add(
    "transformers: Llama in bf16, tokens as samples",
    loss,
    SAMPLES,
    model=lambda: LLAMA().bfloat16(),
    batch=texts,
    **NARROW,
)
WRONG.add(
    "transformers: GPT-2 under bf16 autocast, tokens as samples", loss, SAMPLES, model=GPT2, batch=texts, **AUTOCAST
)
