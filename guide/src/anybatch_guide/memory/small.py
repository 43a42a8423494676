"""Small models for fast measurements on a CPU; each has a different category with the most memory."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from anybatch.recipes.planning.decoder import Decoder, DecoderConfig
from anybatch.recipes.planning.subjects import next_token_loss

Batch = dict[str, Tensor]
_NUM_CLASSES = 10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SmallModel:
    """A model with random data, because memory depends only on shapes."""

    name: str  # its name in recordings and links
    title: str  # its title on the page
    description: str  # its description in a line
    make: Callable[[], nn.Module]  # function () -> model
    batch: Callable[[int], Batch]  # function (samples) -> batch
    loss: Callable[[nn.Module, Batch], Tensor]  # function (model, batch) -> the mean loss of the batch
    # function () -> the same model with each block recomputed in the backward; None without blocks
    checkpointed: Callable[[], nn.Module] | None = None


def _decoder(num_layers: int, width: int, vocabulary: int, num_tokens: int) -> DecoderConfig:
    return DecoderConfig(
        model_type="gpt2",
        num_hidden_layers=num_layers,
        hidden_size=width,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        intermediate_size=4 * width,
        vocab_size=vocabulary,
        max_position_embeddings=num_tokens,
        tie_word_embeddings=True,
    )


def _language(name: str, title: str, config: DecoderConfig) -> SmallModel:
    num_layers, num_tokens = config.num_hidden_layers, config.max_position_embeddings

    def batch(num_samples: int) -> Batch:
        tokens = torch.arange(num_samples * (num_tokens + 1)).remainder(config.vocab_size)
        tokens = tokens.unflatten(0, (num_samples, -1))
        return {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    return SmallModel(
        name=name,
        title=title,
        description=f"GPT-2's form: {num_layers} blocks of width {config.hidden_size}, {num_tokens} tokens a sample",
        make=partial(Decoder, config),
        batch=batch,
        loss=next_token_loss,
        checkpointed=partial(Decoder, config, checkpointed=True),
    )


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after, stride in ((3, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2)):
        layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, _NUM_CLASSES))


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, _NUM_CLASSES))


def _pictures(num_samples: int, *shape: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(num_samples).remainder(_NUM_CLASSES)
    return {"inputs": torch.randn(num_samples, *shape, generator=generator), "targets": labels}


def _class_loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["inputs"]), batch["targets"])


TRANSFORMER = _language("transformer", "Small transformer", _decoder(2, 96, 256, 64))
CONVOLUTIONS = SmallModel(
    name="convolutions",
    title="Small convolutional network",
    description="5 convolutions with BatchNorm on images of 32 x 32",
    make=_convolutions,
    batch=lambda num_samples: _pictures(num_samples, 3, 32, 32),
    loss=_class_loss,
)
PERCEPTRON = SmallModel(
    name="perceptron",
    title="Wide perceptron",
    description="3 layers, 512 wide, on images of 28 x 28",
    make=_perceptron,
    batch=lambda num_samples: _pictures(num_samples, 784),
    loss=_class_loss,
)
SMALL_MODELS: Mapping[str, SmallModel] = {model.name: model for model in (TRANSFORMER, CONVOLUTIONS, PERCEPTRON)}
"""Models that are measured until they run out of memory."""
ACCUMULATED = _language("accumulated", "Transformer", _decoder(2, 256, 512, 32))
"""The model for accumulation; it has many weights, so that a copy of the gradients is visible."""


@contextmanager
def isolated_random_state(seed: int = 0) -> Iterator[None]:
    """Use a random state seeded with `seed`, and restore the global one afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
