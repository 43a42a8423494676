"""Models that `make gpu` plans, measures and times: transformers, convolutions, adapters, losses in chunks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import memory_accuracy
import torch
from gpu.stage import Size
from memory_accuracy import Batch, Language, adamw, next_token, of_class, of_transformers, own, padded
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import anybatch as ab

NUM_CHUNKS = 8
Named = Iterable[tuple[str, nn.Parameter]]


@dataclass(frozen=True, slots=True)
class Scale:
    """How large models and samples are.

    Attributes:
        width: of transformers.
        depth: number of blocks.
        tokens: of a text.
        channels: of convolutions.
        side: height and width of images, in pixels.
        times: factor on all micro-batch sizes.
    """

    width: int
    depth: int
    tokens: int
    channels: int
    side: int
    times: int


SCALES: dict[Size, Scale] = {
    "full": Scale(width=1024, depth=4, tokens=512, channels=64, side=64, times=16),
    "small": Scale(width=128, depth=2, tokens=64, channels=16, side=32, times=4),
    "tiny": Scale(width=64, depth=1, tokens=16, channels=8, side=16, times=4),
}


class ChunkedLoss(nn.Module):
    """A language model that returns its loss, computed for an eighth of the tokens at a time."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.model = Language(scale.depth, scale.width)
        self.head = self.model.head
        self.model.register_module("head", nn.Identity())

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy over tokens."""
        hidden, targets = self.model(ids).flatten(0, 1), labels.flatten()
        pairs = zip(hidden.chunk(NUM_CHUNKS), targets.chunk(NUM_CHUNKS), strict=True)
        sums = [checkpoint(self._sum, *pair, use_reentrant=False) for pair in pairs]
        return torch.stack(sums).sum() / targets.numel()

    def _sum(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(hidden), targets, reduction="sum")


class UNet(nn.Module):
    """A network of convolutions that halves the image twice and doubles it again, with skip connections."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        one, two, four = channels, 2 * channels, 4 * channels
        self.downs = nn.ModuleList([self._block(3, one), self._block(one, two)])
        self.middle = self._block(two, four)
        self.ups = nn.ModuleList([self._block(four + two, two), self._block(two + one, one)])
        self.out = nn.Conv2d(one, 3, 1)

    @staticmethod
    def _block(before: int, after: int) -> nn.Module:
        first = (nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU())
        return nn.Sequential(*first, nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU())

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return an image of the same shape."""
        skips = []
        for down in self.downs:
            image = down(image)
            skips.append(image)
            image = functional.max_pool2d(image, 2)
        image = self.middle(image)
        for up in self.ups:
            wide = functional.interpolate(image, scale_factor=2.0, mode="nearest")
            image = up(torch.cat([wide, skips.pop()], dim=1))
        restored: torch.Tensor = self.out(image)
        return restored


def adapted_llama() -> nn.Module:
    """Return a Llama of transformers with LoRA adapters of peft."""
    import peft  # noqa: PLC0415 (an optional package)

    adapters = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model: nn.Module = peft.get_peft_model(of_transformers("Llama"), adapters)
    return model


def texts(scale: Scale, number: int) -> Batch:
    """Return random tokens and labels."""
    return memory_accuracy.text(scale.tokens)(number)


def short_texts(scale: Scale, number: int) -> Batch:
    """Return random tokens, and labels for an eighth of them."""
    return memory_accuracy.text(scale.tokens // 8)(number)


def images(scale: Scale, number: int) -> Batch:
    """Return random images and classes."""
    return {"image": torch.randn(number, 3, scale.side, scale.side), "label": torch.randint(10, (number,))}


def chunked_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss that the model computes itself."""
    loss: torch.Tensor = model(batch["ids"], batch["labels"])
    return loss


def restored_image(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean squared error of a restored image."""
    return functional.mse_loss(model(batch["image"]), batch["image"])


TOKENS = ab.mean_over_tokens(next_token, shift=False)
OF_TRANSFORMERS = ab.mean_over_tokens(own)


@dataclass(frozen=True)
class Case:
    """A training job to measure, with its micro-batch size.

    Attributes:
        make: function (scale) -> model.
        loss: as `Engine` takes it.
        batch: function (scale, number of samples) -> batch.
        micro_batch_size: samples of a micro-batch, at `Scale.times` 1.
        optimizer: function `named_parameters -> optimizer`.
        options: further arguments of `TrainSpec`.
    """

    make: Callable[[Scale], nn.Module]
    loss: Any
    batch: Callable[[Scale, int], Batch]
    micro_batch_size: int = 1
    optimizer: Callable[[Named], torch.optim.Optimizer] = adamw
    options: dict[str, Any] = field(default_factory=dict)


def decoder(scale: Scale) -> nn.Module:
    """Return a causal language model."""
    return Language(scale.depth, scale.width)


def wide_decoder(scale: Scale) -> nn.Module:
    """Return a model whose optimizer step takes more memory than the activations of short texts."""
    return Language(scale.depth, 2 * scale.width)


def adamw_of(named: Named, **options: Any) -> torch.optim.Optimizer:  # noqa: ANN401 (arguments of AdamW)
    """Return AdamW with a chosen implementation."""
    return torch.optim.AdamW(named, lr=1e-3, **options)


BF16 = {"precision": "bf16"}
CASES: dict[str, Case] = {
    "decoder, bf16 autocast": Case(decoder, TOKENS, texts, options=BF16),
    "decoder, fp32": Case(decoder, TOKENS, texts),
    "CNN with BatchNorm, fp32": Case(
        lambda scale: memory_accuracy.images(scale.channels, nn.BatchNorm2d), ab.mean_over_samples(of_class), images, 16
    ),
    "decoder, checkpointing, bf16 autocast": Case(
        lambda scale: Language(scale.depth, scale.width, checkpointing=True), TOKENS, texts, options=BF16
    ),
    "LoRA on Llama (peft), bf16 autocast": Case(
        lambda _: adapted_llama(), OF_TRANSFORMERS, lambda _, number: padded(number), 8, options=BF16
    ),
    "decoder, bf16 weights": Case(lambda scale: decoder(scale).bfloat16(), TOKENS, texts),
    "U-Net, bf16 autocast": Case(
        lambda scale: UNet(scale.channels), ab.mean_over_samples(restored_image), images, 8, options=BF16
    ),
    "ViT (transformers), bf16 autocast": Case(
        lambda _: of_transformers("ViT"),
        ab.mean_over_samples(own),
        lambda _, number: memory_accuracy.large_pictures(number),
        16,
        options=BF16,
    ),
    "encoder (BERT of transformers), fp32": Case(
        lambda _: of_transformers("Bert"),
        ab.mean_over_tokens(own, shift=False),
        lambda _, number: padded(number),
        8,
    ),
    "decoder, chunked loss, bf16 autocast": Case(
        ChunkedLoss, ab.mean_over_tokens(chunked_loss, shift=False), texts, options=BF16
    ),
    "wide decoder, foreach AdamW, fp32": Case(
        wide_decoder, TOKENS, short_texts, optimizer=partial(adamw_of, foreach=True)
    ),
    "wide decoder, fused AdamW, fp32": Case(wide_decoder, TOKENS, short_texts, optimizer=partial(adamw_of, fused=True)),
}
