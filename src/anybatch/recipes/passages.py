"""Passages of text: samples of different lengths, and how micro-batches of them are laid out."""

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

from anybatch.data import Packed, Padded, PaddedOrPacked
from anybatch.data.fetch import Collate
from anybatch.errors import DataError

Encode = Callable[[str], list[int]]
Layout = Literal["padded", "packed", "auto"]
"""Padded to the longest of a micro-batch, packed into one row, or the faster one where batches are cut by tokens."""


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


def encode_bytes(text: str) -> list[int]:
    """Return the bytes of a text, as UTF-8."""
    return list(text.encode())


def collate_of(layout: Layout, padded: Padded, *, boundaries: bool = False) -> Collate:
    """Return what makes micro-batches in a layout.

    Args:
        layout: which.
        padded: how they are padded.
        boundaries: whether packed ones say where each sample begins.

    Raises:
        DataError: there is no such layout.
    """
    packed = Packed(shift=padded.shift, longest=padded.longest, boundaries=boundaries)
    layouts: dict[str, Collate] = {
        "padded": padded,
        "packed": packed,
        "auto": PaddedOrPacked(padded=padded, packed=packed),
    }
    if layout not in layouts:
        message = f"{layout=} must be one of {', '.join(map(repr, layouts))}."
        raise DataError(message)
    return layouts[layout]
