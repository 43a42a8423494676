"""What other libraries bring, in the memory it takes: 8-bit optimizer state, adapters, 4-bit weights, offloading.

Adapters compute what they say. The others take, keep and move the memory of the library's own tensors and kernels and
compute nothing, for tensors without data only: their kernels are not on a CPU.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.core.blocks import repeated_blocks
from anybatch.core.geometry import ceil_div
from anybatch.engine.inputs import Model
from anybatch.planner.trace.checkpointing import as_module

STATE_BLOCK: Final = 256
"""Numbers of 8-bit state that share a scale. Source: bitsandbytes 0.44 and later, `optimizer.py`, block-wise."""
LEAST_8_BIT: Final = 4096
"""Parameters with fewer elements keep their state in 32 bits (`min_8bit_size` of bitsandbytes)."""
WEIGHT_BLOCK: Final = 64
"""Numbers of a 4-bit weight that share a scale, which is 8 bits wide itself, in blocks of 256.

Source: Dettmers et al. 2023, "QLoRA", section 3: NF4 with double quantization, 4.127 bits a parameter.
"""


class AdamW8bit(Optimizer):
    """Takes and keeps the memory of bitsandbytes' AdamW8bit, and computes nothing.

    Args:
        params: parameters, or groups of them.
    """

    updates_each_by_itself = True

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 1e-3})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make the state of each parameter that has a gradient, and touch what the kernel touches, in place."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    self._make(state, parameter)
                parameter.add_(parameter.grad, alpha=0)
                for values in state.values():
                    values.mul_(1)
        return None

    @staticmethod
    def _make(state: dict[str, Tensor], parameter: Tensor) -> None:
        number = parameter.numel()
        is_small = number < LEAST_8_BIT
        for name in ("exp_avg", "exp_avg_sq"):
            kind = torch.float32 if is_small else torch.uint8
            state[name] = torch.zeros_like(parameter, dtype=kind, memory_format=torch.preserve_format)
            if not is_small:
                state[f"{name}_scales"] = parameter.new_zeros(ceil_div(number, STATE_BLOCK), dtype=torch.float32)


class LoraLinear(nn.Module):
    """A linear layer that stays as it is, and a product of two narrow matrices that is trained and added: LoRA.

    The added product is computed in the adapter's own type, and the sum has the layer's, as peft does it; without
    dropout.
    Source: Hu et al. 2021, "LoRA", section 4.1, with alpha twice the rank.

    Args:
        base: the layer.
        rank: width of the narrow matrices.
        sizes: (features in, features out) of the layer.
    """

    def __init__(self, base: nn.Module, rank: int, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(sizes[0], rank, bias=False)
        self.up = nn.Linear(rank, sizes[1], bias=False)
        nn.init.zeros_(self.up.weight)  # so that training begins where the base is

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer returns, and the product."""
        result: Tensor = self.base(x)
        kind = result.dtype
        # Under peft's names, too, the input in the adapter's type is there until the end.
        x = x.to(self.down.weight.dtype)
        result = result + self.up(self.down(x)) * 2.0
        return result.to(kind)


class FourBitLinear(nn.Module):
    """Takes and keeps the memory of bitsandbytes' Linear4bit (NF4, double quantization), and computes nothing.

    Its kernel makes the weight anew in bf16, in the forward and in the backward.

    Args:
        linear: the layer in whose place it stands.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        number = linear.weight.numel()
        self.shape = tuple(linear.weight.shape)
        self.bias = linear.bias
        scales = ceil_div(number, WEIGHT_BLOCK)
        # Parameters, as there: of buffers the engine keeps a copy, since a forward might change them.
        self.codes = nn.Parameter(torch.zeros(ceil_div(number, 2), dtype=torch.uint8), requires_grad=False)
        self.scales = nn.Parameter(torch.zeros(scales, dtype=torch.uint8), requires_grad=False)
        blocks = torch.zeros(ceil_div(scales, STATE_BLOCK))
        self.scales_of_scales = nn.Parameter(blocks, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape and type of the product."""
        result: Tensor = _FourBitProduct.apply(x.to(torch.bfloat16), self.codes, self.shape)  # type: ignore[no-untyped-call]
        return result if self.bias is None else result + self.bias


class _FourBitProduct(torch.autograd.Function):
    """Keeps the codes alone: the weight is made again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, shape: tuple[int, int]) -> Tensor:  # noqa: ANN401 (torch's type)
        ctx.save_for_backward(codes)
        ctx.shape = shape
        return x @ codes.new_full(shape, 0, dtype=torch.bfloat16).T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 (torch's type)
        (codes,) = ctx.saved_tensors
        return gradient @ codes.new_full(ctx.shape, 0, dtype=torch.bfloat16), None, None


def adapted(model: Model, rank: int, *, four_bits: bool) -> Model:
    """Freeze a model, in bf16, and put adapters on the linear layers of its repeated blocks; return the model.

    Its tensors are left alone: those in their place, and the adapters', have no data.

    Args:
        model: its modules are changed in place.
        rank: width of the adapters.
        four_bits: keep the weights of these layers in 4 bits.
    """
    in_bfloat16(as_module(model), trains=False)
    with torch.device("meta"):
        for parent, name, linear in linear_layers(as_module(model)):
            base: nn.Module = FourBitLinear(linear) if four_bits else linear
            setattr(parent, name, LoraLinear(base, rank, (linear.in_features, linear.out_features)))
    return model


def in_bfloat16(module: nn.Module, *, trains: bool) -> None:
    """Put parameters in bf16, and without data, in the place of a module's; its own are left alone.

    Args:
        module: it and those below are changed.
        trains: those that train go on doing so; else none does.
    """
    known: dict[int, nn.Parameter] = {}
    for one in module.modules():
        for name, old in one.named_parameters(recurse=False):
            if id(old) not in known:
                kind = torch.bfloat16 if old.is_floating_point() else old.dtype
                empty = torch.empty_like(old, dtype=kind, device="meta")
                known[id(old)] = nn.Parameter(empty, requires_grad=trains and old.requires_grad)
            one.register_parameter(name, known[id(old)])
        for name, old_buffer in one.named_buffers(recurse=False):
            if old_buffer.is_floating_point():
                setattr(one, name, torch.empty_like(old_buffer, dtype=torch.bfloat16, device="meta"))


def linear_names(modules: nn.Module) -> list[str]:
    """Return what `linear_layers` are called within their blocks, each once; peft goes by how a name ends.

    A name that ends in another is left out, which means it too: of blocks in blocks there would be hundreds.

    Args:
        modules: with data or without.
    """
    found = {
        name: None
        for blocks in repeated_blocks(modules)
        for block in blocks.modules
        for name, child in block.named_modules()
        if type(child) is nn.Linear and name
    }
    parts = {name: name.split(".") for name in found}
    return [name for name in found if not any(".".join(parts[name][at:]) in found for at in range(1, len(parts[name])))]


def linear_layers(modules: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Return the linear layers inside of repeated blocks, each with its parent and its name there.

    Classes made from `nn.Linear` are none: `nn.MultiheadAttention` reads the weight of its own without calling it, so
    that an adapter there is never run.

    Args:
        modules: with data or without.
    """
    return [
        (parent, name, child)
        for blocks in repeated_blocks(modules)
        for block in blocks.modules
        for parent in block.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]


class Offloaded(nn.Module):
    """Runs a block and keeps nothing of it on the device: what is saved for the backward is there again when needed.

    It is `torch.autograd.graph.save_on_cpu` around the block in the memory that it takes, and copies nothing.

    Args:
        block: what is run.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (whatever the block takes and returns)
        """Return what the block returns."""
        with torch.autograd.graph.saved_tensors_hooks(_shape_of, _made_again):
            return self.block(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (whatever the block has)
        """Return what the block has of that name, where this has none."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)


def offloaded(model: Model) -> Model:
    """Let the repeated blocks of a model keep nothing on the device; return the model.

    Args:
        model: changed in place.
    """
    for blocks in repeated_blocks(as_module(model)):
        for name in blocks.names:
            setattr(blocks.parent, name, Offloaded(blocks.parent.get_submodule(name)))
    return model


def _shape_of(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.size(), tensor.stride(), tensor.dtype


def _made_again(shape: tuple[torch.Size, tuple[int, ...], torch.dtype]) -> Tensor:
    size, stride, dtype = shape
    return torch.empty_strided(size, stride, dtype=dtype)
