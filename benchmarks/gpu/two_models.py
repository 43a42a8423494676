"""Two models for the stages about memory and data, a decoder and a CNN, with engines and interleaved timing."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from gpu.stage import Setting
from torch import Tensor, nn
from torch.nn import functional

import anybatch as ab

Batch = dict[str, Tensor]
Key = TypeVar("Key")


class Decoder(nn.Module):
    """A decoder with causal attention; rows of a batch may hold several samples."""

    def __init__(self, *, vocabulary: int, width: int, num_layers: int, longest: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, ends: Tensor | None = None, most: int = 0
    ) -> Tensor:
        """Return logits; `ends` and `most` are the `cu_seqlens` and `max_seqlen` of packed samples."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, ends, most)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention and a perceptron, each on a normalised copy. Heads are 64 wide."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = max(1, width // 64)
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.split, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, ends: Tensor | None, most: int) -> Tensor:
        """Return x plus the outputs of both layers."""
        heads = self.split(self.first_norm(x)).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        mixed = attend(*heads) if ends is None else attend_packed(*heads, ends=ends, most=most)
        x = x + self.merge(mixed.flatten(-2))
        added: Tensor = self.dropout(self.down(functional.gelu(self.up(self.second_norm(x)))))
        return x + added


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention over (batch, time, head, width)."""
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


def attend_packed(query: Tensor, key: Tensor, value: Tensor, *, ends: Tensor, most: int) -> Tensor:
    """Return the same for samples in one row: flash attention on a GPU, sample by sample on a CPU."""
    if query.device.type == "cuda":
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 (absent before torch 2.10)

        mixed = varlen_attn(query[0], key[0], value[0], ends, ends, most, most, window_size=(-1, 0))
        assert isinstance(mixed, Tensor)
        return mixed[None]
    lengths = ends.diff().tolist()
    samples = zip(*(part.split(lengths, dim=1) for part in (query, key, value)), strict=True)
    return torch.cat([attend(*sample) for sample in samples], dim=1)


def convolutions(width: int) -> nn.Module:
    """Return six convolutions with BatchNorm at full resolution, dropout and a linear layer."""
    layers: list[nn.Module] = []
    for before in (3, *[width] * 5):
        layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, Mean(), nn.Dropout(0.1), nn.Linear(width, 10))


class Mean(nn.Module):
    """Averages over pixels; torch's adaptive pooling has no deterministic backward on CUDA."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of each channel."""
        return x.mean((2, 3))


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy over tokens."""
    return functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy over images."""
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def new_model(make: Callable[[], nn.Module], device: str) -> nn.Module:
    """Return the same model each time, made on a device."""
    torch.manual_seed(0)
    with torch.device(device):
        return make()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its loss, and a micro-batch size that will not fit.

    Attributes:
        batch: function (number of samples) -> a batch on the host.
        size: samples of the micro-batch.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    batch: Callable[[int], Batch]
    size: int
    precision: Literal["fp32", "bf16"]

    def new_model(self, device: str) -> nn.Module:
        """Return the same model each time."""
        return new_model(self.model, device)


def cases(setting: Setting) -> tuple[Case, Case]:
    """Return a decoder in bf16 and a CNN with BatchNorm."""
    vocabulary, width, num_layers, tokens, size = setting.pick(
        (32_768, 512, 6, 512, 16), (512, 64, 2, 32, 8), (256, 32, 1, 16, 4)
    )
    channels, side, num_images = setting.pick((256, 32, 256), (8, 16, 16), (4, 8, 8))

    def texts(number: int) -> Batch:
        words = torch.randint(0, vocabulary, (number, tokens), generator=torch.Generator().manual_seed(1))
        return {"x": words, "y": words.roll(-1, 1)}

    def images(number: int) -> Batch:
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(number, 3, side, side, generator=draw)
        return {"x": x, "y": torch.randint(0, 10, (number,), generator=draw)}

    text = Case(
        name=f"decoder, {tokens} tokens, bf16",
        model=lambda: Decoder(vocabulary=vocabulary, width=width, num_layers=num_layers, longest=tokens, dropout=0.1),
        loss=next_token_loss,
        batch=texts,
        size=size,
        precision="bf16",
    )
    image = Case(
        name=f"CNN, {side} x {side}, BatchNorm",
        model=lambda: convolutions(channels),
        loss=class_loss,
        batch=images,
        size=num_images,
        precision="fp32",
    )
    return text, image


def engine_of(model: nn.Module, loss: Any, size: Any, **options: Any) -> ab.Engine:  # noqa: ANN401 (the engine's own)
    """Return an engine that does no more than a plain loop: it checks and measures nothing."""
    loss = ab.mean_over_samples(loss) if callable(loss) else loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    options = {"check_loss": False, "measure_gradient_norm": False, "norms": "keep", **options}
    return ab.Engine(model, optimizer, loss, micro_batch_size=size, **options)


def milliseconds(seconds: Sequence[float]) -> str:
    """Return a median."""
    return f"{statistics.median(seconds) * 1e3:,.1f}"


def seconds_of(
    setting: Setting, steps: Mapping[Key, Callable[[], object]], num_rounds: int, *, warm_up: int = 1
) -> dict[Key, list[float]]:
    """Return the seconds of each step, interleaved; the order changes from round to round."""
    seconds: dict[Key, list[float]] = {key: [] for key in steps}
    for number in range(warm_up + num_rounds):
        for key in list(steps) if number % 2 else reversed(list(steps)):
            setting.synchronize()
            begun = time.perf_counter()
            steps[key]()
            setting.synchronize()
            if number >= warm_up:
                seconds[key].append(time.perf_counter() - begun)
    return seconds


def ratio(values: Sequence[float], reference: Sequence[float]) -> str:
    """Return the median of the ratios of neighbours, with the smallest and largest."""
    ratios = [one / other for one, other in zip(values, reference, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
