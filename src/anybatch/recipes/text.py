"""`text`: a decoder-only transformer learns to write, byte by byte, from a folder of text.

By default it reads the source code of Python's standard library; downloads nothing.
"""

import itertools
import math
import os
import sysconfig
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import anybatch as ab
from anybatch.core.schedules import Cosine, WarmUp, attach_schedule, join_schedules
from anybatch.errors import DataError, UserError

NUM_BYTE_VALUES = 256
_LIBRARY_BYTES = 4_000_000
_NOT_CODE = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})


def text(
    folder: str | Path | None = None,
    *,
    pattern: str | None = None,
    context: int = 128,
    width: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    max_bytes: int | None = None,
) -> ab.Job:
    """Return the job: predict the next byte; evaluated in bits per byte on held-out files.

    Args:
        folder: folder of text files, at any depth; None: the standard library without its tests.
        pattern: file name pattern; None: "*.py" in the standard library, "*" in a folder.
        context: maximum bytes that a prediction depends on.
        width: width of the embeddings.
        num_layers: number of transformer blocks.
        num_heads: attention heads per block; the width of a head must be even.
        max_bytes: stop reading after this many bytes; None: 4 million in the standard library, no limit in a folder.

    Raises:
        UserError: the heads do not divide the width.
        DataError: there are fewer than two files.
    """
    # Rotary positions rotate pairs of numbers, so each head needs an even width.
    if width % (2 * num_heads):
        message = f"{width=} must be a multiple of 2 x {num_heads=}, because each head needs an even width."
        raise UserError(message, code="odd_head_width")
    files = list_files(folder, pattern, max_bytes)
    num_held_out = max(1, len(files) // 40)
    return ab.Job(
        model=partial(Transformer, width=width, num_layers=num_layers, num_heads=num_heads),
        optimizer=adamw,
        # Windows have equal lengths, so a mean over samples would be the same.
        loss=ab.mean_over_tokens(loss, labels="targets", shift=False),
        dataset=lambda: Windows(files[num_held_out:], context),
        evaluate=ab.Evaluation(dataset=lambda: Windows(files[:num_held_out], context), metric=bits_per_byte),
        scheduler=warm_up_and_cosine,
        clip=1.0,
        defaults=ab.RunConfig(effective_batch_size=64, steps=200, learning_rate=3e-3),
    )


class Transformer(nn.Module):
    """A decoder: bytes to next-byte logits."""

    def __init__(self, *, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTE_VALUES, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                # Each block adds two terms to the residual stream; their sum does not grow with the depth (GPT-2).
                num_added = 2 * num_layers if name.endswith(("merge.weight", "down.weight")) else 1
                nn.init.normal_(parameter, std=0.02 / math.sqrt(num_added))

    def forward(
        self, inputs: Int[Tensor, "batch time"], lengths: Sequence[int] | None = None
    ) -> Float[Tensor, "batch time 256"]:
        """Return the logits; position t depends on the bytes up to and including t.

        `lengths` belong to samples packed into a single row; None: each row is one sample, padded on the right.
        """
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x, lengths)
        return F.linear(self.norm(x), self.embedding.weight)  # tied to the input embedding


class Block(nn.Module):
    """Attention, then a gated MLP (SwiGLU), each on a normed copy and added to the residual stream."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        hidden = 8 * width // 3  # three matrices of this size equal two of 4 x width
        self.num_heads = num_heads
        self.attention_norm = nn.RMSNorm(width)
        self.split = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        self.gated_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(
        self, x: Float[Tensor, "batch time width"], lengths: Sequence[int] | None = None
    ) -> Float[Tensor, "batch time width"]:
        """Return x plus the outputs of both layers; for `lengths` see `Transformer.forward`."""
        heads = self.split(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))  # batch time 3 head per_head
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each: batch head time per_head
        mixed = attend(query, key, value, lengths)
        x = x + self.merge(mixed.transpose(1, 2).flatten(-2))
        gate, signal = self.up(self.gated_norm(x)).chunk(2, dim=-1)  # each: batch time hidden
        added: Float[Tensor, "batch time width"] = self.down(F.silu(gate) * signal)
        return x + added


def attend(
    query: Float[Tensor, "*head time head_width"],
    key: Float[Tensor, "*head time head_width"],
    value: Float[Tensor, "*head time head_width"],
    lengths: Sequence[int] | None = None,
) -> Float[Tensor, "*head time head_width"]:
    """Return causal attention, within each packed sample if there are `lengths`."""
    if lengths is None:
        return F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
    # All samples are rotated in one call, because small operations per sample would cost as much as packing saves.
    times = torch.cat([torch.arange(length, device=query.device) for length in lengths])
    parts = (part.split(list(lengths), dim=-2) for part in (rotate(query, times), rotate(key, times), value))
    mixed = [F.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in zip(*parts, strict=True)]
    return torch.cat(mixed, dim=-2)


def rotate(
    x: Float[Tensor, "*head time head_width"], times: Int[Tensor, " time"] | None = None
) -> Float[Tensor, "*head time head_width"]:
    """Rotate each pair (x[i], x[i + head_width / 2]) by time * 10000 ** (-2 i / head_width); times=None counts from 0.

    The product of a rotated query and a rotated key depends only on their distance.

    Source: Su et al. 2021, arXiv 2104.09864, with the two halves of the vector as pairs.
    """
    time, head_width = x.shape[-2:]
    exponents = torch.arange(0, head_width, 2, device=x.device, dtype=torch.float32) / head_width
    if times is None:
        times = torch.arange(time, device=x.device)
    angles = torch.outer(times.to(torch.float32), 10_000.0**-exponents)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Float[Tensor, ""]:
    """Return the mean cross-entropy over all target bytes."""
    return F.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())


def bits_per_byte(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, ab.LossSum]:
    """Return the mean bits per byte under the model's predictions; 8 for uniform predictions."""
    targets = batch["targets"].flatten()
    nats = F.cross_entropy(model(batch["inputs"]).flatten(0, 1), targets, reduction="sum")
    return {"bits_per_byte": ab.LossSum(nats / math.log(2), targets.new_tensor(len(targets)))}


def adamw(named_parameters: Iterable[tuple[str, nn.Parameter]], learning_rate: float) -> Optimizer:
    """Return AdamW with weight decay on matrices only."""
    parameters = [parameter for _, parameter in named_parameters]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def warm_up_and_cosine(optimizer: Optimizer, num_steps: int) -> LambdaLR:
    """Return a scheduler with a warm-up over a tenth of the run and a cosine decay after it."""
    warm_up = num_steps // 10
    return attach_schedule(
        optimizer,
        join_schedules(WarmUp(num_steps=warm_up, start_factor=0.1), Cosine(num_steps=num_steps - warm_up, floor=0.1)),
    )


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The bytes of concatenated files in windows of `context` bytes: every byte but the first is a target once.

    A zero byte marks the end of each file; the incomplete last window is dropped.
    """

    def __init__(self, files: Sequence[Path], context: int) -> None:
        content = bytearray().join(path.read_bytes() + b"\0" for path in files)
        self.bytes: UInt8[Tensor, " byte"] = torch.frombuffer(content, dtype=torch.uint8)
        self.context = context
        if len(self) < 1:
            message = (
                f"{len(files)} files have {len(content)} bytes in total, but one window needs {context + 1}. "
                "Add more text, or use a smaller context."
            )
            raise DataError(message, code="too_little_text")

    def __len__(self) -> int:
        """Return the number of windows."""
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the inputs and the targets, shifted by one byte, of a window: two int64 tensors (context,)."""
        start = index * self.context
        # Converted per window, because the whole text as int64 would need eight times the memory.
        window = self.bytes[start : start + self.context + 1].long()
        return {"inputs": window[:-1], "targets": window[1:]}


def list_files(folder: str | Path | None, pattern: str | None, max_bytes: int | None) -> list[Path]:
    """Return the files to read, in a pseudo-random order that depends only on their names inside the folder.

    Hidden files and folders are skipped.
    """
    root = Path(sysconfig.get_paths()["stdlib"] if folder is None else folder).absolute()
    pattern = pattern or ("*.py" if folder is None else "*")
    limit = max_bytes or (_LIBRARY_BYTES if folder is None else math.inf)
    left_out = _NOT_CODE if folder is None else frozenset()
    found = {}
    for path, folders, names in os.walk(root):
        # Changed in place, because `os.walk` does not enter folders that are removed from its list.
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        for file in (Path(path, name) for name in names if fnmatch(name, pattern) and not name.startswith(".")):
            # Sorting by digest makes the split independent of the file system's order and of the folder's path.
            found[sha256(file.relative_to(root).as_posix().encode()).digest()] = file
    files = [file for _, file in sorted(found.items()) if file.is_file()]
    before = itertools.accumulate((file.stat().st_size for file in files), initial=0)
    files = [file for file, num_bytes in zip(files, before, strict=False) if num_bytes < limit]
    if len(files) <= 1:
        message = (
            f"{str(root)!r} is {'a folder' if root.is_dir() else 'no folder'}, and has {len(files)} files that match "
            f"{pattern!r} within {max_bytes=}. At least 2 are needed: one for training, one for evaluation."
        )
        raise DataError(message, code="too_few_files")
    return files
