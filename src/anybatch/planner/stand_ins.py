"""Stand-ins for layers and optimizers of bitsandbytes and peft, the code for the real ones, and chunked losses.

A stand-in allocates and keeps the same memory as the library. Adapters compute their result; other stand-ins compute
nothing, and are for fake tensors only.
"""

from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.core.geometry import ceil_div
from anybatch.core.loss import LossSum, declared
from anybatch.core.tensors import repeated_blocks
from anybatch.core.tree import resize_samples, tensors_of
from anybatch.engine.user_code import Model, trial_run
from anybatch.errors import UserError
from anybatch.memory.trace import Lines, MemoryEnvelope
from anybatch.planner.cuda_emulation import allocating_as
from anybatch.planner.fake_tensor_cache import fake_mode
from anybatch.planner.refusals import as_planning_errors
from anybatch.planner.step_spec import StepSpec, as_module, fake_twin
from anybatch.planner.step_time import CostLine, CostTrace, Operation

STATE_BLOCK: Final = 256
"""Numbers of 8-bit state that share a scale. Source: bitsandbytes 0.44 and later, `optimizer.py`, block-wise."""
MIN_8_BIT: Final = 4096
"""Parameters with fewer elements keep their state in 32 bits (`min_8bit_size` of bitsandbytes)."""
WEIGHT_BLOCK: Final = 64
"""Numbers of a 4-bit weight that share a scale. Scales have 8 bits, and share a second scale in blocks of 256.

Source: Dettmers et al. 2023, "QLoRA", section 3: NF4 with double quantization, 4.127 bits a parameter.
"""
_LOAD_IN_4_BITS = ("transformers", "diffusers")
UPDATE_IN_BACKWARD = files("anybatch.planner").joinpath("update_in_backward.txt").read_text(encoding="utf-8")
"""Code that updates each weight in the backward, with float32 copies and stochastic rounding."""


class AdamW8bit(Optimizer):
    """Allocates the memory of bitsandbytes' AdamW8bit, but computes nothing."""

    updates_each_by_itself = True

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ANN401 (never called with a closure)
        """Create the state of each parameter with a gradient, and change the same tensors in place as the kernel."""
        del closure
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.grad is None:
                continue
            state, number = self.state[parameter], parameter.numel()
            kind = torch.float32 if number < MIN_8_BIT else torch.uint8
            for name in () if state else ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=kind, memory_format=torch.preserve_format)
                if kind is torch.uint8:
                    state[f"{name}_scales"] = parameter.new_zeros(ceil_div(number, STATE_BLOCK), dtype=torch.float32)
            parameter.add_(parameter.grad, alpha=0)
            for values in state.values():
                values.mul_(1)


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

    The kernel creates the weight in 16 bits in the forward, and again in the backward.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.dtype = dtype
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
        result: Tensor = _FourBitProduct.apply(x.to(self.dtype), self.codes, self.shape)  # type: ignore[no-untyped-call]
        return result if self.bias is None else result + self.bias


class _FourBitProduct(torch.autograd.Function):
    """Saves only the 4-bit codes for the backward, which dequantizes the weight again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, shape: tuple[int, int]) -> Tensor:  # noqa: ANN401 (torch's type)
        ctx.save_for_backward(codes)
        ctx.shape = shape
        return x @ codes.new_full(shape, 0, dtype=x.dtype).T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 (torch's type)
        (codes,) = ctx.saved_tensors
        return gradient @ codes.new_full(ctx.shape, 0, dtype=gradient.dtype), None, None


def adapted(model: Model, rank: int, dtype: torch.dtype, *, four_bits: bool) -> Model:
    """Freeze a model in 16 bits and add adapters to the linear layers of its repeated blocks; return the model."""
    in_16_bits(as_module(model), dtype, trains=False)
    with torch.device("meta"):
        for block, path, linear in linear_layers(as_module(model)):
            base: nn.Module = FourBitLinear(linear, dtype) if four_bits else linear
            parent, _, name = path.rpartition(".")
            adapter = LoraLinear(base, rank, (linear.in_features, linear.out_features))
            setattr(block.get_submodule(parent), name, adapter)
    return model


def in_16_bits(module: nn.Module, dtype: torch.dtype, *, trains: bool) -> None:
    """Replace the parameters of a module by parameters in bf16 or fp16 without data."""
    known: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part.named_parameters(recurse=False):
            if id(old) not in known:
                kind = dtype if old.is_floating_point() else old.dtype
                empty = torch.empty_like(old, dtype=kind, device="meta")
                known[id(old)] = nn.Parameter(empty, requires_grad=trains and old.requires_grad)
            part.register_parameter(name, known[id(old)])
        for name, old_buffer in part.named_buffers(recurse=False):
            if old_buffer.is_floating_point():
                setattr(part, name, torch.empty_like(old_buffer, dtype=dtype, device="meta"))


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
    # peft finds the linear layers of transformers models; elsewhere, the code finds them by the class of their blocks.
    kinds = list(dict.fromkeys(blocks.kind.__name__ for blocks in repeated_blocks(model)))
    finding = [
        f"kinds = {kinds}",
        "layers = [f'{path}.{name}' for path, block in model.named_modules() if type(block).__name__ in kinds",
        "          for name, part in block.named_modules() if type(part) is torch.nn.Linear]",
    ]
    targets = "'all-linear'" if called else "layers"
    return [
        "from peft import LoraConfig, get_peft_model",
        *([] if called else finding),
        f"adapters = LoraConfig(r={rank}, lora_alpha={2 * rank}, target_modules={targets})",
        "model = get_peft_model(model, adapters)",
    ]


def four_bit_lines(model: nn.Module, dtype: torch.dtype, called: Mapping[str, str]) -> list[str]:
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
        f"                               bnb_4bit_compute_dtype={dtype})",
        f"model = {loader}.from_pretrained(..., quantization_config=four_bits)",
    ]


CHUNK_TOKENS = 1024
"""Tokens per chunk."""


class _RealHead(nn.Module):
    """Replaces a head of fake tensors: its outputs are the real logits of random inputs, which it keeps."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        # The logits are large, so that a soft cap or a scale after the head changes the loss.
        self.weight = 10.0 * torch.randn(head.out_features, 8)
        self.bias = None if head.bias is None else torch.randn(head.out_features)
        self.inputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of the shape that the model expects."""
        self.inputs.append(torch.randn(*x.shape[:-1], 8))
        return F.linear(self.inputs[-1], self.weight, self.bias)


def chunked_loss_line(spec: StepSpec, head: nn.Linear, num_tokens: int) -> str:
    """Return the line that computes the loss in chunks; empty unless it computes the same number as the step's loss.

    Both run on 2 x 16 random tokens. The model runs on fake tensors up to the head, and on real ones from there on: so
    it may have any size, and every operation between the head and the loss counts.
    """
    module, kind = as_module(spec.trained.model), torch.int64
    path = next(name for name, part in module.named_modules() if part is head)

    def short(tensor: Tensor) -> Tensor:
        shape = (2, *(min(size, 16) if size == num_tokens else size for size in tensor.shape[1:]))
        return torch.randint(head.out_features, shape) if tensor.dtype is kind else tensor.new_ones(shape)

    with torch.random.fork_rng(devices=[]), trial_run(), allocating_as("cpu"), torch.no_grad():
        torch.manual_seed(0)
        model, loss = fake_twin((spec.trained.model, declared(spec.trained.loss)), fake_mode())
        real, batch = _RealHead(head), resize_samples(spec.sample, 2, short)
        as_module(model).set_submodule(path, real)
        try:
            with as_planning_errors(module):
                found = loss.function(model, batch)
        except UserError:
            return ""
        own = found.total / found.count if isinstance(found, LossSum) else found
        # The loss of a fake tensor did not come from the head; older versions of torch have no such function.
        is_real = type(own) is Tensor and len(real.inputs) == 1 and real.inputs[0].numel() % 16 == 0
        if not is_real or not hasattr(F, "linear_cross_entropy"):
            return ""
        hidden, options = real.inputs[0].view(2, -1, 8), nn.LinearCrossEntropyOptions()
        # Some models shift their labels: the output at a token predicts the next one.
        pairs = [(hidden, labels) for labels in tensors_of(batch) if labels.dtype is kind and labels.dim() > 1]
        for x, labels in (*pairs, *((x[:, :-1], labels[:, 1:]) for x, labels in pairs)):
            if x.shape[:-1] == labels.shape:
                given = (x.flatten(0, 1), real.weight, labels.flatten())
                same = F.linear_cross_entropy(*given, linear_bias=real.bias, options=options)
                if torch.isclose(own.mean(), same, rtol=1e-4):
                    bias = "" if real.bias is None else "linear_bias=head.bias, "
                    arguments = f"x, head.weight, targets, {bias}options=nn.LinearCrossEntropyOptions()"
                    return f"loss = F.linear_cross_entropy({arguments})"
    return ""


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

    def again(trace: CostTrace) -> Iterator[Operation]:
        for operation in trace.operations:
            if operation.kind == "matmul" and operation.phase == "forward" and vocabulary in operation.dims:
                yield operation

    low, high = (CostTrace((*trace.operations, *again(trace))) for trace in costs.traces)
    return CostLine((low, high), costs.traced)


def updated_in_backward(envelope: MemoryEnvelope, update_bytes: int) -> MemoryEnvelope:
    """Return the memory of a step with one micro-batch that updates each weight once its gradient is complete.

    It keeps no sums of gradients; `update_bytes`, the temporaries of the largest update, are counted all the time.
    """
    allocated, allocations = envelope.allocated, envelope.trace.allocations
    is_sum = torch.tensor([entry.category == "gradients" for entry in allocations])
    later = torch.tensor([entry.phase == "update" and entry.category != "optimizer" for entry in allocations])
    constant = allocated.constant.masked_fill(is_sum | later, 0)
    constant[int(is_sum.nonzero()[0])] = update_bytes
    return envelope.with_sizes(Lines(constant, allocated.slope.masked_fill(is_sum | later, 0)))
