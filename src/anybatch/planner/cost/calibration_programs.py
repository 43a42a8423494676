"""Small programs to calibrate a device: common layers in various sizes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

_LEARNING_RATE = 1e-9  # weights stay what they are, so that nothing underflows, which is slow on CPUs

_LINEARS = (
    *((24, 96, 40), (24, 700, 300), (48, 1500, 1500)),
    *((200, 80, 10), (200, 320, 320), (200, 1300, 320), (200, 320, 1300), (1500, 192, 192), (1500, 192, 700)),
    *((700, 450, 900), (250, 900, 2200)),
)
"""(rows, inputs, outputs)."""
_CONVOLUTIONS = (
    *((12, 3, 24, 3, 1, 28, 1), (12, 24, 24, 3, 1, 28, 1), (12, 24, 48, 3, 2, 28, 1), (12, 24, 48, 1, 2, 28, 1)),
    *((24, 48, 48, 3, 1, 14, 1), (24, 96, 96, 3, 1, 12, 1), (48, 12, 12, 3, 1, 24, 1), (48, 3, 48, 3, 1, 30, 1)),
    *((20, 3, 48, 7, 2, 56, 1), (8, 96, 192, 3, 1, 12, 1), (8, 128, 256, 1, 1, 14, 1), (8, 48, 48, 3, 1, 28, 48)),
    *((6, 36, 36, 3, 1, 56, 36), (6, 160, 160, 3, 2, 28, 160), (6, 280, 280, 5, 1, 12, 280)),
    *((5, 200, 200, 7, 1, 14, 200), (5, 640, 640, 3, 1, 7, 640), (6, 60, 60, 3, 1, 28, 5), (6, 192, 192, 3, 1, 14, 8)),
)
"""(images, channels in, channels out, kernel, stride, height and width, groups)."""
_ATTENTIONS = ((3, 96, 192, 4), (2, 160, 320, 5), (8, 48, 96, 4), (40, 72, 96, 3))
"""(sequences, length, width, heads)."""
_HEADS = ((60, 96, 700), (250, 160, 3000), (1500, 96, 900), (600, 200, 6000), (1300, 32, 9000))
"""(tokens, width, vocabulary)."""
_COLUMNS = 1000
_POINTWISE_ROWS = (4, 64, 1000, 3000)
"""Sizes of the elementwise programs, in thousands of elements."""
_LARGE_ROWS = 10_000
"""Too large for the allocator's cache: every new tensor of 40 MB is new memory."""
_PARAMETERS = ((2, 64), (2, 3000), (16, 100_000), (3, 1_200_000))
"""(tensors, numbers in each) to update; too many for a CPU cache, as in a real network."""


@dataclass(frozen=True, slots=True)
class Program:
    """A step of a small program: forward, backward, update."""

    loss: Callable[[], Tensor]
    parameters: tuple[Tensor, ...] = ()
    optimizer: torch.optim.Optimizer | None = None

    def compute(self) -> None:
        """Run forward and backward."""
        self.loss().backward()

    def update(self) -> None:
        """Run the update."""
        if self.optimizer is not None:
            self.optimizer.step()

    def clear(self) -> None:
        """Set all gradients to None."""
        for parameter in self.parameters:
            parameter.grad = None


def programs(times: int = 1) -> list[Callable[[], Program]]:
    """Return functions that create the programs on torch's default device.

    Args:
        times: factor for rows, widths, images and channels; an accelerator needs larger programs than a CPU thread.
    """
    linears = [(rows * times**2, inputs * times, outputs * times) for rows, inputs, outputs in _LINEARS]
    convolutions = [_enlarged(sizes, times) for sizes in _CONVOLUTIONS]
    attentions = [tuple(times * length for length in sizes) for sizes in _ATTENTIONS]
    heads = [tuple(times * length for length in sizes) for sizes in _HEADS]
    rows = [times**2 * num for num in _POINTWISE_ROWS]
    return [
        *(partial(_linear, *sizes) for sizes in linears),
        *(partial(_convolution, *sizes) for sizes in convolutions),
        *(partial(_attention, *sizes) for sizes in attentions),
        *(partial(_head, *sizes) for sizes in heads),
        *(partial(_pointwise, num) for num in rows),
        *(partial(_autocast, partial(_linear, *sizes)) for sizes in linears[1::3]),
        *(partial(_autocast, partial(_convolution, *sizes)) for sizes in convolutions[1::2]),
        *(partial(_autocast, partial(_attention, *sizes)) for sizes in attentions[::2]),
        *(partial(_autocast, partial(_head, *sizes)) for sizes in heads[1:3]),
        *(partial(_pointwise, num, torch.bfloat16) for num in rows[1:3]),
        partial(_large, times),
        partial(_pairs, 12 * times, 60 * times, 40 * times),
        partial(_pairs, 4 * times, 200 * times, 64 * times),
        *(partial(_update, make, num, times**2 * length) for make in _OPTIMIZERS for num, length in _PARAMETERS),
    ]


def _enlarged(sizes: tuple[int, ...], times: int) -> tuple[int, ...]:
    images, inputs, outputs, kernel, stride, side, groups = sizes
    # A convolution with a group for each channel keeps that.
    groups = groups * times if groups == inputs else groups
    return images * times, inputs * times, outputs * times, kernel, stride, side, groups


def small_program() -> Program:
    """Return a program of tiny operations, dominated by launch overhead."""
    layers = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    return replace(_of_module(model, torch.randn(4, 16)), optimizer=optimizer)


def _of_module(module: nn.Module, x: Tensor) -> Program:
    x = x.requires_grad_()  # as in the middle of a network

    def loss() -> Tensor:
        out: Tensor = module(x)
        return out.sum()

    return Program(loss, (x, *module.parameters()))


def _linear(rows: int, inputs: int, outputs: int) -> Program:
    there, back = nn.Linear(inputs, outputs), nn.Linear(outputs, inputs, bias=False)
    return _of_module(nn.Sequential(there, nn.GELU(), back, nn.ReLU()), torch.randn(rows, inputs))


def _convolution(*sizes: int) -> Program:
    images, inputs, outputs, kernel, stride, side, groups = sizes
    convolution = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=groups > 1)
    module = nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))
    return _of_module(module, torch.randn(images, inputs, side, side))


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inwards = nn.Linear(width, 3 * width)
        self.outwards = nn.Linear(width, width)
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inwards(self.norm(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = x + self.outwards(mixed.transpose(1, 2).flatten(2))
        return out


def _attention(num_sequences: int, length: int, width: int, num_heads: int) -> Program:
    return _of_module(_Attention(width, num_heads), torch.randn(num_sequences, length, width))


def _head(num_tokens: int, width: int, vocabulary: int) -> Program:
    table, head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
    tokens = torch.randint(0, vocabulary, (num_tokens,))
    both = nn.Sequential(table, head)
    return Program(lambda: functional.cross_entropy(both(tokens), tokens), tuple(both.parameters()))


def _pointwise(rows: int, dtype: torch.dtype = torch.float32) -> Program:
    smooth = (nn.GELU(), nn.Tanh(), nn.SiLU(), nn.Sigmoid())
    module = nn.Sequential(*smooth, nn.Dropout(0.1), nn.LayerNorm(_COLUMNS, dtype=dtype), nn.ReLU())
    return _of_module(module, torch.randn(rows, _COLUMNS, dtype=dtype))


def _autocast(make: Callable[[], Program]) -> Program:
    """Return a program with its forward under bf16 autocast, like the engine's."""
    program, device = make(), torch.get_default_device().type

    def loss() -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return program.loss()

    return replace(program, loss=loss)


def _large(times: int) -> Program:
    return _of_module(nn.Sequential(nn.GELU(), nn.ReLU()), torch.randn(times * _LARGE_ROWS, _COLUMNS))


def _pairs(batch: int, length: int, width: int) -> Program:
    x = torch.randn(batch, length, width, requires_grad=True)

    def loss() -> Tensor:
        scores = (x @ x.transpose(1, 2)).softmax(-1)
        return (scores @ x).square().mean()

    return Program(loss, (x,))


_OPTIMIZERS: tuple[Callable[[list[Tensor]], torch.optim.Optimizer], ...] = (
    partial(torch.optim.AdamW, lr=_LEARNING_RATE, foreach=False),
    partial(torch.optim.AdamW, lr=_LEARNING_RATE, foreach=True),
    partial(torch.optim.AdamW, lr=_LEARNING_RATE, fused=True),
    partial(torch.optim.SGD, lr=_LEARNING_RATE, momentum=0.9),
)


def _update(make: Callable[[list[Tensor]], torch.optim.Optimizer], num_tensors: int, num: int) -> Program:
    tensors = [torch.randn(num).requires_grad_() for _ in range(num_tensors)]
    return Program(lambda: torch.stack([one.sum() for one in tensors]).sum(), tuple(tensors), make(tensors))
