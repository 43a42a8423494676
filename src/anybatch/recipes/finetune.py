"""`finetune`: a causal language model of Hugging Face goes on learning from passages of text, padded or packed.

Passages differ in length by a factor of hundreds, so it is the recipe to cut by tokens: `--micro-batch-tokens 2048`.
By default a small Llama with random weights reads the source code of Python's standard library, byte by byte; given a
folder with a saved model and its tokeniser, these are taken. Nothing is downloaded.
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
from anybatch.data import Packed, Padded
from anybatch.errors import DataError
from anybatch.recipes.text import NUM_BYTE_VALUES, adamw, list_files, warm_up_and_cosine

_LIBRARY_BYTES = 1_000_000
Encode = Callable[[str], list[int]]


def finetune(
    model: str | Path | None = None,
    folder: str | Path | None = None,
    *,
    pattern: str | None = None,
    layout: Literal["padded", "packed"] = "padded",
    longest: int = 512,
    max_bytes: int | None = None,
) -> ab.Job:
    """Return the job: predict each token of a passage from those before it; a passage ends at a blank line.

    Args:
        model: folder of a saved model and its tokeniser, as `save_pretrained` writes them; None for a small Llama with
            random weights that reads bytes.
        folder: the text, in files at any depth; None for the standard library without its tests.
        pattern: which files; None for "*.py" in the standard library and "*" in a folder.
        layout: "padded" to the longest of a micro-batch, or "packed" into one row without padding.
        longest: tokens; passages that have more are taken as several.
        max_bytes: no more files are read after this many bytes; None for 1 million in the standard library, and no
            limit in a folder.

    Raises:
        DataError: there are fewer than two files, or transformers is not installed.
    """
    transformers = _transformers()
    files = list_files(folder, pattern, max_bytes or (_LIBRARY_BYTES if folder is None else None))
    num_held_out = max(1, len(files) // 10)
    encode: Encode = _encode_bytes
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
        collate=Packed() if layout == "packed" else Padded(padding={"input_ids": padding}),
        evaluate=ab.Evaluation(dataset=lambda: Passages(files[:num_held_out], encode, longest)),
        scheduler=warm_up_and_cosine,
        clip=1.0,
        defaults=ab.Defaults(effective_batch_size=64, steps=100, learning_rate=2e-3 if model is None else 2e-5),
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Float[Tensor, ""]:
    """Return the mean over the tokens that count, as the model itself computes it."""
    value: Float[Tensor, ""] = model(**batch, use_cache=False).loss
    return value


class Passages(Dataset[dict[str, Tensor]]):
    """Passages of some files, of different lengths.

    Args:
        files: what to read, as UTF-8; passages end at blank lines.
        encode: from text to tokens.
        longest: most tokens of a passage; longer ones are taken as several.

    Attributes:
        tokens: of each passage, at least two: one to predict from and one to predict.
    """

    def __init__(self, files: Sequence[Path], encode: Encode, longest: int) -> None:
        texts = (path.read_text(encoding="utf-8", errors="replace") for path in files)
        passages = itertools.chain.from_iterable(re.split(r"\n\s*\n", text) for text in texts)
        encoded = (encode(passage.strip("\n")) for passage in passages)
        parts = (row[start : start + longest] for row in encoded for start in range(0, len(row), longest))
        # As tensors of the smallest type: a list would take eight times the memory.
        self.tokens: list[Int[Tensor, " token"]] = [torch.tensor(part, dtype=torch.int32) for part in parts if part[1:]]
        if not self.tokens:
            message = f"{len(files)} files hold no passage of at least 2 tokens. Give more text."
            raise DataError(message)

    def __len__(self) -> int:
        """Return the number of passages."""
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the tokens of a passage, and the same as labels: two tensors (token,) of int64."""
        tokens = self.tokens[index].long()
        return {"input_ids": tokens, "labels": tokens}


def _encode_bytes(text: str) -> list[int]:
    return list(text.encode())


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
    """Return transformers, which is not a dependency of the library.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        message = "the recipe finetune trains models of transformers, which is not installed: pip install transformers"
        raise DataError(message) from error
