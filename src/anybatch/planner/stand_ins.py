"""Stand-ins for layers and optimizers of bitsandbytes and peft, and the code for the real ones.

A stand-in allocates and keeps the same memory as the library. Adapters compute their result; other stand-ins compute
nothing, and are for fake tensors only.
"""

from collections.abc import Callable, Iterable, Mapping
from textwrap import wrap
from typing import Any, Final, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.core.geometry import ceil_div
from anybatch.core.tensors import repeated_blocks
from anybatch.engine.user_code import Model
from anybatch.memory.trace import Lines, MemoryEnvelope
from anybatch.planner.step_spec import as_module
from anybatch.planner.step_time import CostLine, CostTrace

STATE_BLOCK: Final = 256
"""Numbers of 8-bit state that share a scale. Source: bitsandbytes 0.44 and later, `optimizer.py`, block-wise."""
MIN_8_BIT: Final = 4096
"""Parameters with fewer elements keep their state in 32 bits (`min_8bit_size` of bitsandbytes)."""
WEIGHT_BLOCK: Final = 64
"""Numbers of a 4-bit weight that share a scale. Scales have 8 bits, and share a second scale in blocks of 256.

Source: Dettmers et al. 2023, "QLoRA", section 3: NF4 with double quantization, 4.127 bits a parameter.
"""
_LOAD_IN_4_BITS = ("transformers", "diffusers")


class AdamW8bit(Optimizer):
    """Allocates the memory of bitsandbytes' AdamW8bit, but computes nothing."""

    updates_each_by_itself = True

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 1e-3})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Create the state of each parameter with a gradient, and change the same tensors in place as the kernel."""
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
        is_small = number < MIN_8_BIT
        for name in ("exp_avg", "exp_avg_sq"):
            kind = torch.float32 if is_small else torch.uint8
            state[name] = torch.zeros_like(parameter, dtype=kind, memory_format=torch.preserve_format)
            if not is_small:
                state[f"{name}_scales"] = parameter.new_zeros(ceil_div(number, STATE_BLOCK), dtype=torch.float32)


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trained product of two narrow matrices: LoRA without dropout.

    As in peft, the product has the adapter's dtype, and the sum has the layer's dtype.
    Source: Hu et al. 2021, "LoRA", section 4.1, with alpha twice the rank.
    """

    def __init__(self, base: nn.Module, rank: int, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(sizes[0], rank, bias=False)
        self.up = nn.Linear(rank, sizes[1], bias=False)
        nn.init.zeros_(self.up.weight)  # training starts at the base model

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output plus the product."""
        result: Tensor = self.base(x)
        kind = result.dtype
        # As in peft, the input in the adapter's dtype lives until the end of the forward.
        x = x.to(self.down.weight.dtype)
        result = result + self.up(self.down(x)) * 2.0
        return result.to(kind)


class FourBitLinear(nn.Module):
    """Allocates the memory of bitsandbytes' Linear4bit (NF4, double quantization), but computes nothing.

    The kernel creates the weight in bf16 in the forward, and again in the backward.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        number = linear.weight.numel()
        self.shape = tuple(linear.weight.shape)
        self.bias = linear.bias
        scales = ceil_div(number, WEIGHT_BLOCK)
        # Parameters, as in bitsandbytes; buffers would be copied by the engine, since a forward might change them.
        self.codes = nn.Parameter(torch.zeros(ceil_div(number, 2), dtype=torch.uint8), requires_grad=False)
        self.scales = nn.Parameter(torch.zeros(scales, dtype=torch.uint8), requires_grad=False)
        blocks = torch.zeros(ceil_div(scales, STATE_BLOCK))
        self.scales_of_scales = nn.Parameter(blocks, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor with the shape and type of the product."""
        result: Tensor = _FourBitProduct.apply(x.to(torch.bfloat16), self.codes, self.shape)  # type: ignore[no-untyped-call]
        return result if self.bias is None else result + self.bias


class _FourBitProduct(torch.autograd.Function):
    """Saves only the 4-bit codes for the backward, which dequantizes the weight again."""

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
    """Freeze a model in bf16 and add adapters to the linear layers of its repeated blocks; return the model."""
    in_bfloat16(as_module(model), trains=False)
    with torch.device("meta"):
        for block, path, linear in linear_layers(as_module(model)):
            base: nn.Module = FourBitLinear(linear) if four_bits else linear
            parent, _, name = path.rpartition(".")
            adapter = LoraLinear(base, rank, (linear.in_features, linear.out_features))
            setattr(block.get_submodule(parent), name, adapter)
    return model


def in_bfloat16(module: nn.Module, *, trains: bool) -> None:
    """Replace the parameters of a module by bf16 parameters without data."""
    known: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part.named_parameters(recurse=False):
            if id(old) not in known:
                kind = torch.bfloat16 if old.is_floating_point() else old.dtype
                empty = torch.empty_like(old, dtype=kind, device="meta")
                known[id(old)] = nn.Parameter(empty, requires_grad=trains and old.requires_grad)
            part.register_parameter(name, known[id(old)])
        for name, old_buffer in part.named_buffers(recurse=False):
            if old_buffer.is_floating_point():
                setattr(part, name, torch.empty_like(old_buffer, dtype=torch.bfloat16, device="meta"))


def linear_layers(modules: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Return the linear layers in repeated blocks, each with its block and its path in the block.

    Skip subclasses of `nn.Linear`: `nn.MultiheadAttention` reads the weight without calling the layer, so an adapter
    would never run.
    """
    return [
        (block, path, layer)
        for blocks in repeated_blocks(modules)
        for block in blocks.modules
        for path, layer in block.named_modules()
        if type(layer) is nn.Linear
    ]


def adapter_lines(model: nn.Module, rank: int, called: Mapping[str, str]) -> list[str]:
    """Return the code that adds peft's adapters to `linear_layers`."""
    shown = wrap(repr(_shared_endings(model)), 88, break_long_words=False, break_on_hyphens=False)
    # peft finds the linear layers of transformers models.
    targets, layers = "'all-linear'", []
    if not called:
        targets, layers = "layers", ["layers = " + ("\n" + 11 * " ").join(shown)]
    return [
        "from peft import LoraConfig, get_peft_model",
        *layers,
        f"adapters = LoraConfig(r={rank}, lora_alpha={2 * rank}, target_modules={targets})",
        "model = get_peft_model(model, adapters)",
    ]


def _shared_endings(model: nn.Module) -> list[str]:
    """Return the shortest endings of the names of `linear_layers` that no other module has, since peft matches ends."""
    chosen = {id(layer) for _, _, layer in linear_layers(model)}
    endings = {
        name: [name.split(".", n)[-1] for n in range(name.count("."), -1, -1)] for name, _ in model.named_modules()
    }
    others = {ending for name, module in model.named_modules() if id(module) not in chosen for ending in endings[name]}
    names = [name for name, module in model.named_modules() if id(module) in chosen]
    return list(dict.fromkeys(next((e for e in endings[name] if e not in others), name) for name in names))


def four_bit_lines(model: nn.Module, called: Mapping[str, str]) -> list[str]:
    """Return the code that loads a model in 4 bits; empty if no library can."""
    library, _, _ = type(model).__module__.partition(".")
    loader = type(model).__name__
    if called:  # a stand-in for a model of transformers that predicts the next token
        library, loader = "transformers", "AutoModelForCausalLM"
    if library not in _LOAD_IN_4_BITS:
        return []
    return [
        f"from {library} import BitsAndBytesConfig, {loader}",
        "four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4',",
        "                               bnb_4bit_use_double_quant=True,",
        "                               bnb_4bit_compute_dtype=torch.bfloat16)",
        f"model = {loader}.from_pretrained(..., quantization_config=four_bits)",
    ]


CHUNK_TOKENS = 1024
"""Tokens per chunk."""


def chunked(envelope: MemoryEnvelope, vocabulary: int, num_tokens: int) -> MemoryEnvelope:
    """Return the envelope of a step that keeps the logits of one chunk of tokens at a time.

    Allocations that grow by `num_tokens` x `vocabulary` values per sample (one token less if labels are shifted) are
    assumed to be logits, their logarithms or their gradients, and are reduced to one chunk.
    """
    # Logits are recognised by their growth per sample, in 16 or in 32 bits.
    widths = {tokens * vocabulary * width: width for tokens in (num_tokens, num_tokens - 1) for width in (2, 4)}
    allocated = envelope.allocated
    chunk = torch.tensor(
        [CHUNK_TOKENS * vocabulary * widths.get(slope, 0) for slope in allocated.slope.tolist()], dtype=torch.int64
    )
    return envelope.with_sizes(
        Lines(torch.where(chunk > 0, chunk, allocated.constant), torch.where(chunk > 0, 0, allocated.slope))
    )


def with_head_again(costs: CostLine, vocabulary: int) -> CostLine:
    """Return the costs of a step that recomputes its logits in the backward."""

    def twice(trace: CostTrace) -> CostTrace:
        again = (
            operation
            for operation in trace.operations
            if operation.kind == "matmul" and operation.phase == "forward" and vocabulary in operation.dims
        )
        return CostTrace((*trace.operations, *again))

    return CostLine((twice(costs.traces[0]), twice(costs.traces[1])), costs.traced)
