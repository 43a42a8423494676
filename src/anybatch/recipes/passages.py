"""Passages of text, which differ in length, and the layouts of their micro-batches."""

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
"""Padded to the longest of a micro-batch, packed into one row, or the faster one under a token budget."""


class Passages(Dataset[dict[str, Tensor]]):
    """Passages of files, which end at blank lines; longer ones than `longest` tokens are split."""

    def __init__(self, files: Sequence[Path], encode: Encode, longest: int) -> None:
        texts = (path.read_text(encoding="utf-8", errors="replace") for path in files)
        passages = itertools.chain.from_iterable(re.split(r"\n\s*\n", text) for text in texts)
        encoded = (encode(passage.strip("\n")) for passage in passages)
        parts = (row[start : start + longest] for row in encoded for start in range(0, len(row), longest))
        # Tensors of the smallest type: a list would need eight times the memory.
        self.tokens: list[Int[Tensor, " token"]] = [torch.tensor(part, dtype=torch.int32) for part in parts if part[1:]]
        if not self.tokens:
            message = f"{len(files)} files contain no passage of at least 2 tokens. Add more text."
            raise DataError(message)

    def __len__(self) -> int:
        """Return the number of passages."""
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the tokens of a passage, and the same as labels: two int64 tensors (token,)."""
        tokens = self.tokens[index].long()
        return {"input_ids": tokens, "labels": tokens}


def encode_bytes(text: str) -> list[int]:
    """Return the bytes of a text, as UTF-8."""
    return list(text.encode())


def collate_of(layout: Layout, padded: Padded, *, boundaries: bool = False) -> Collate:
    """Return the collate function of a layout; `boundaries` adds the starts of packed samples."""
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
