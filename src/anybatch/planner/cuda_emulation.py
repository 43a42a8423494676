"""Make fake CPU tensors allocate memory as CUDA tensors do.

Four things differ between CPU and CUDA: the dtypes that autocast chooses, the mask of dropout, the attention kernel,
and whether optimizers use foreach by default.
"""

import json
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.resources import files
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from anybatch.memory.torch_internals import tree_leaves, tree_map
from anybatch.parallel.dtensors import is_dtensor
from anybatch.planner.torch_internals import kernel_library, registered_operations, schema_of, without_kernels

Profile = Literal["cuda", "cpu"]
"""Device type whose allocations are emulated; "cpu" changes nothing."""

AutocastPolicy = Literal["lower", "float32", "set_dtype", "append_dtype", "widest", "none"]
"""Autocast policies of an operation: cast arguments to the lower dtype, or to float32; compute in float32 unless a
dtype is given; pass float32 as an extra argument; cast to the widest dtype among the arguments; none."""

POLICIES: Mapping[AutocastPolicy, Sequence[str]] = json.loads(
    files("anybatch.planner").joinpath("autocast_policies.json").read_text(encoding="utf-8")
)
"""Operations that AutocastCPU lacks or treats differently (ATen/autocast_mode.h of torch 2.13); a test compares both.

Operations that only AutocastCPU casts ("none" on CUDA) are read from the dispatcher.
"""

# Autocast policies are global to the process: one profile at a time.
_LOCK = threading.RLock()


@contextmanager
def allocating_as(profile: Profile, *, has_data: bool = False) -> Iterator[None]:
    """Make fake CPU tensors allocate as on another device inside the `with` block.

    This changes CPU autocast in the whole process, so a second profile waits for the first to end. In both profiles
    `_grouped_mm` gets a meta kernel for all dtypes that its real kernel accepts, not for bf16 only.
    """
    kernels = (_OF_CUDA if profile == "cuda" else {}) | ({} if has_data else _of_fake_tensors(profile))
    # The order matters on exit: kernels are unregistered before the lock is released.
    autocast = autocast_as_on_cuda() if profile == "cuda" else nullcontext()
    with _LOCK, _registered(_meta_kernels(), "Meta"), _registered(kernels.items(), "AutogradCPU"), autocast:
        yield


@contextmanager
def autocast_as_on_cuda() -> Iterator[None]:
    """Give CPU autocast the policies of CUDA."""
    with _registered(_kernels(), "AutocastCPU"):
        yield


@contextmanager
def _registered(kernels: Iterable[tuple[str, Callable[..., Any]]], key: str) -> Iterator[None]:
    """Register kernels under a dispatch key inside the `with` block."""
    with kernel_library() as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # kernels are replaced on purpose
            for name, kernel in kernels:
                library.impl(name, kernel, key, allow_override=True)
        yield


def choose_foreach(optimizer: Optimizer, profile: Profile) -> None:
    """Resolve an optimizer's `foreach=None` as torch would on the profile's device.

    On CUDA, torch's optimizers use foreach by default, which needs more memory, except for `DTensor`s.
    """
    if profile == "cpu":
        return
    for group in optimizer.param_groups:
        if "foreach" not in group or group["foreach"] is not None or group.get("fused") or group.get("differentiable"):
            continue
        if any(map(is_dtensor, group["params"])):
            continue
        # Like torch: a tensor learning rate disables foreach, unless the optimizer is capturable.
        group["foreach"] = not isinstance(group["lr"], torch.Tensor) or bool(group.get("capturable"))


def _kernels() -> list[tuple[str, Callable[..., Any]]]:
    """Return the kernels to register under AutocastCPU, by operation."""
    on_cpu, on_cuda = registered_operations("AutocastCPU"), registered_operations("AutocastCUDA")
    kernels: list[tuple[str, Callable[..., Any]]] = [
        # Operations that autocast casts only on the CPU must pass through unchanged, as on CUDA.
        (name, torch.library.fallthrough_kernel)
        for name in sorted(on_cpu - on_cuda)
    ]
    for policy, names in POLICIES.items():
        # The table is for one version of torch; skip operations that this version does not cast on CUDA.
        kernels += [(name, _kernel(_operation(name), policy)) for name in names if name in on_cuda]
    return kernels


def _operation(name: str) -> Any:  # noqa: ANN401 (torch has no public name for this type)
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _kernel(operation: Any, policy: AutocastPolicy) -> Callable[..., Any]:  # noqa: ANN401 (torch's type)
    """Return the kernel that autocast runs instead of an operation."""

    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (any arguments and results)
        # Without this context, calling the operation would recurse into this kernel.
        with without_kernels("AutocastCPU"):
            if policy == "set_dtype":
                names = [argument.name for argument in schema_of(operation).arguments]
                dtype_argument = kwargs.get("dtype", dict(zip(names, args, strict=False)).get("dtype"))
                if _eligible(args[0]) and dtype_argument is None:
                    args, kwargs = args[: names.index("dtype")], {**kwargs, "dtype": torch.float32}
                return operation(*args, **kwargs)
            if policy == "append_dtype":
                return _norm(*args, **kwargs)
            dtype = torch.float32 if policy == "float32" else torch.get_autocast_dtype("cpu")
            if policy == "widest":
                dtype = _widest(dtype, (args, kwargs))
            args, kwargs = tree_map(lambda leaf: leaf.to(dtype) if _eligible(leaf) else leaf, (args, kwargs))
            return operation(*args, **kwargs)

    return run


def _norm(values: torch.Tensor, p: float | None = 2, dim: Iterable[int] = (), keepdim: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002 (torch's signature)
    dtype = torch.float32 if _eligible(values) else values.dtype
    return torch.ops.aten.norm.ScalarOpt_dim_dtype(values, p, list(dim), keepdim, dtype=dtype)


def _eligible(leaf: object) -> bool:
    """Whether autocast may cast this value."""
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype is not torch.float64


def _widest(dtype: torch.dtype, arguments: object) -> torch.dtype:
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            dtype = torch.promote_types(dtype, leaf.dtype)
    return dtype


# These are kernels and not a `TorchFunctionMode`, because torch disables such modes during backward, where
# checkpointed blocks recompute their forward.


def _dropout(values: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: FBT001 (torch's signature)
    """Save a mask of one byte per element."""
    if train and 0 < p < 1:
        return torch.native_dropout(values, p, True)[0]  # noqa: FBT003 (takes no keyword)
    unchanged: torch.Tensor = torch.ops.aten.dropout.default.decompose(values, p, train)
    return unchanged


def _attention(  # noqa: PLR0917 (torch's signature)
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 (torch's signature)
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Save the output and one number per row; a dropout mask is not saved but redrawn in backward."""
    del dropout_p
    options = {"scale": scale, "enable_gqa": enable_gqa}
    plain = torch.ops.aten.scaled_dot_product_attention.default.decompose
    result: torch.Tensor = plain(query, key, value, attn_mask, 0.0, is_causal, **options)
    return result


def _rms_norm(
    values: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """Save the input, the weight and one number per row."""
    del eps
    result: torch.Tensor = _RMSNorm.apply(values, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return result


class _RMSNorm(torch.autograd.Function):
    """Allocates and saves the memory of a fused RMS norm, but computes nothing; for fake tensors only."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor | None, num_axes: int) -> torch.Tensor:  # noqa: ANN401 (torch's type)
        # The fused kernel saves the reciprocal root mean square of each row, in float32.
        rows = values.new_empty((*values.shape[: values.dim() - num_axes], *[1] * num_axes), dtype=torch.float32)
        ctx.save_for_backward(values, weight, rows)
        return torch.empty_like(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401 (torch's type)
        values, weight, _ = ctx.saved_tensors
        return (
            torch.empty_like(gradient, dtype=values.dtype),
            None if weight is None else torch.empty_like(weight),
            None,
        )


class _Product(torch.autograd.Function):
    """A product or the products of all prefixes, with autograd's backward for values without zeros.

    Under a mode, autograd runs a longer formula, which needs no case for zeros but allocates more.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, operation: Any, options: Sequence[Any], dtype: Any) -> torch.Tensor:  # noqa: ANN401 (torch's types)
        ctx.operation, ctx.options = operation, options  # the axis, and whether the result keeps it
        with without_kernels("AutogradCPU"):
            result: torch.Tensor = operation(values, *options, dtype=dtype)
        ctx.save_for_backward(values, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401 (torch's type)
        values, result = ctx.saved_tensors
        values = values.to(gradient.dtype)
        if ctx.options:
            axis, *keeps_axis = ctx.options
            is_zero = values == 0
            if ctx.operation is torch.ops.aten.cumprod.default:
                return _sums_of_suffixes(result * gradient, axis).div(values), None, None, None
            is_zero.sum(axis, keepdim=True)
            if keeps_axis != [True]:
                gradient, result = gradient.unsqueeze(axis), result.unsqueeze(axis)
        return gradient * (result / values), None, None, None


def _sums_of_suffixes(values: torch.Tensor, axis: int) -> torch.Tensor:
    flipped = values.flip(axis)  # freed at the end, as in torch
    sums = flipped.cumsum(axis)
    return sums.flip(axis)


def _of_fake_tensors(profile: Profile) -> dict[str, Callable[..., torch.Tensor]]:
    """Return functions that only compute shapes, or assume values without zeros."""

    def kernel(name: str) -> Callable[..., torch.Tensor]:
        operation = _operation(name)
        return lambda values, *options, dtype=None: _Product.apply(values, operation, options, dtype)  # type: ignore[no-untyped-call]

    products = {name: kernel(name) for name in ("prod", "prod.dim_int", "cumprod")}
    return products | ({"rms_norm": _rms_norm} if profile == "cuda" else {})


def _meta_kernels() -> list[tuple[str, Callable[..., Any]]]:
    """Return meta kernels for operations whose built-in meta kernel rejects dtypes that real kernels accept."""
    return [(name, _grouped_product) for name in ("_grouped_mm",) if hasattr(torch.ops.aten, name)]


def _grouped_product(
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return an empty result of a grouped product, with groups of rows, of columns, or of the contracted axis."""
    del bias
    shape = [*first.shape[:-1], second.shape[-1]]
    if first.dim() == second.dim() == 2:  # noqa: PLR2004 (groups of the contracted axis: a matrix for each)
        assert offs is not None, "two matrices need the ends of their groups"
        shape = [len(offs), *shape]
    elif first.dim() > second.dim():  # groups of columns
        shape = shape[1:]
    return first.new_empty(shape, dtype=out_dtype or first.dtype)


_OF_CUDA: dict[str, Callable[..., torch.Tensor]] = {"dropout": _dropout, "scaled_dot_product_attention": _attention}
"""Functions with a fused CUDA kernel, and CPU implementations that save the same memory."""


def _group_norm_backward(*args: Any) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401 (of any type)
    """Return empty gradients, of the types of the values and of the weight."""
    values, weight, (of_values, *of_weights) = args[1], args[4], args[-1]
    gradients = [None if weight is None or not needed else torch.empty_like(weight) for needed in of_weights]
    return torch.empty_like(values) if of_values else None, *gradients


def _batch_norm(*args: Any) -> tuple[torch.Tensor, ...]:  # noqa: ANN401 (of any type)
    """Return an empty result; only images and volumes keep their memory format."""
    values, is_training = args[0], args[5]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(values.dim())
    keeps = last is not None and values.is_contiguous(memory_format=last)
    kept = values.new_empty(values.shape[1] if is_training else 0, dtype=torch.float32)
    return torch.empty_like(values, memory_format=last if keeps else torch.contiguous_format), kept, kept.clone()


def _folded(values: torch.Tensor, *args: Any) -> torch.Tensor:  # noqa: ANN401 (of any type)
    """Return an empty result in the memory that the kernel first allocates for a copy of the values."""
    result: torch.Tensor = torch.ops.aten.col2im.default(values, *args)
    memory = result.new_empty(max(values.numel(), result.numel()))
    return memory[: result.numel()].view(result.shape)


FAKE_KERNELS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten.native_group_norm_backward.default: _group_norm_backward,
    torch.ops.aten.native_batch_norm.default: _batch_norm,
    torch.ops.aten.col2im.default: _folded,
}
"""Operations whose fake kernels give results of other types or strides than real kernels."""
