"""`finetune`: fine-tune a causal language model of Hugging Face on passages of text, padded or packed.

Passages differ in length by a factor of hundreds, so this is the recipe for token budgets: `--micro-batch-tokens 2048`.
By default a small Llama with random weights reads the source code of Python's standard library, byte by byte; to train
another model, pass a folder with the saved model and its tokeniser. Downloads nothing.
"""

import importlib
import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.data import Dataset

import anybatch as ab
from anybatch.data import Packed, Padded, PaddedOrPacked
from anybatch.data.collate import Collate
from anybatch.errors import DataError
from anybatch.recipes.text import NUM_BYTE_VALUES, adamw, list_files, warm_up_and_cosine

_LIBRARY_BYTES = 1_000_000
Encode = Callable[[str], list[int]]
Layout = Literal["padded", "packed", "auto"]
"""Padded to the longest sample of a micro-batch, packed into one row, or the faster of both under a token budget."""


class Passages(Dataset[dict[str, Tensor]]):
    """The passages of text files, separated by blank lines; passages longer than `longest` tokens are split."""

    def __init__(self, files: Sequence[Path], encode: Encode, longest: int) -> None:
        texts = (path.read_text(encoding="utf-8", errors="replace") for path in files)
        passages = itertools.chain.from_iterable(re.split(r"\n\s*\n", text) for text in texts)
        encoded = (encode(passage.strip("\n")) for passage in passages)
        parts = (row[start : start + longest] for row in encoded for start in range(0, len(row), longest))
        # int32 tensors, because lists would need eight times the memory.
        self.tokens: list[Int[Tensor, " token"]] = [torch.tensor(part, dtype=torch.int32) for part in parts if part[1:]]
        if not self.tokens:
            message = f"{len(files)} files contain no passage of at least 2 tokens. Add more text."
            raise DataError(message, code="too_little_text")

    def __len__(self) -> int:
        """Return the number of passages."""
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the tokens of a passage as inputs and as labels: int64 of shape (token,)."""
        tokens = self.tokens[index].long()
        return {"input_ids": tokens, "labels": tokens}


def encode_bytes(text: str) -> list[int]:
    """Return the UTF-8 bytes of a text."""
    return list(text.encode())


def collate_of(layout: Layout, padded: Padded) -> Collate:
    """Return the collate function of a layout."""
    packed = Packed(shift=padded.shift, longest=padded.longest)
    layouts: dict[str, Collate] = {
        "padded": padded,
        "packed": packed,
        "auto": PaddedOrPacked(padded=padded, packed=packed),
    }
    if layout not in layouts:
        message = f"{layout=} must be one of {', '.join(map(repr, layouts))}."
        raise DataError(message)
    return layouts[layout]


def finetune(
    model: str | Path | None = None,
    folder: str | Path | None = None,
    *,
    pattern: str | None = None,
    layout: Layout = "auto",
    longest: int = 512,
    max_bytes: int | None = None,
) -> ab.Job:
    """Return the job: predict the next token of passages, which end at blank lines.

    Args:
        model: folder of a saved model and its tokeniser, as `save_pretrained` writes them; None: a small Llama with
            random weights that reads bytes.
        folder: folder of text files, at any depth; None: the standard library without its tests.
        pattern: file name pattern; None: "*.py" in the standard library, "*" in a folder.
        layout: "padded" to the longest sample of a micro-batch, "packed" into one row without padding, or "auto": the
            faster one under a token budget, otherwise padded.
        longest: maximum tokens of a passage; longer ones are split.
        max_bytes: stop reading after this many bytes; None: 1 million in the standard library, no limit in a folder.

    Raises:
        DataError: there are fewer than two files, or transformers is not installed.
    """
    transformers = _transformers()
    files = list_files(folder, pattern, max_bytes or (_LIBRARY_BYTES if folder is None else None))
    num_held_out = max(1, len(files) // 10)
    encode: Encode = encode_bytes
    padding = 0
    if model is not None:
        tokeniser = transformers.AutoTokenizer.from_pretrained(str(model), local_files_only=True)
        encode = partial(_encode_with, tokeniser)
        padding = tokeniser.pad_token_id or 0
    return ab.Job(
        model=partial(_small_llama, transformers) if model is None else partial(_saved_model, transformers, str(model)),
        optimizer=adamw,
        loss=ab.mean_over_tokens(loss, labels="labels", ignore_index=-100, shift=True),
        dataset=lambda: Passages(files[num_held_out:], encode, longest),
        lengths="input_ids",
        collate=collate_of(layout, Padded(padding={"input_ids": padding})),
        evaluate=ab.Evaluation(dataset=lambda: Passages(files[:num_held_out], encode, longest)),
        scheduler=warm_up_and_cosine,
        clip=1.0,
        defaults=ab.RunConfig(effective_batch_size=64, steps=100, learning_rate=2e-3 if model is None else 2e-5),
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Float[Tensor, ""]:
    """Return the loss computed by the model, a mean over the unmasked tokens."""
    value: Float[Tensor, ""] = model(**batch, use_cache=False).loss
    return value


def _encode_with(tokeniser: Any, text: str) -> list[int]:  # noqa: ANN401 (transformers')
    tokens: list[int] = tokeniser(text)["input_ids"]
    return tokens


def _small_llama(transformers: ModuleType) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=NUM_BYTE_VALUES,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def _saved_model(transformers: ModuleType, folder: str) -> nn.Module:
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return model.train()


def _transformers() -> ModuleType:
    """Import transformers, an optional dependency."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        message = "the recipe finetune needs transformers, which is not installed: pip install transformers"
        raise DataError(message) from error
