"""Changes that save memory or time in a training step: functions from a step to a changed step, so they combine."""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core.compatibility import PrecisionName
from anybatch.core.loss import declared
from anybatch.core.tensors import is_low_precision, repeated_blocks
from anybatch.core.tree import tensors_of
from anybatch.engine.arguments import TrainSpec
from anybatch.engine.bf16_weights import Bf16Weights
from anybatch.errors import UserError
from anybatch.memory.trace import MemoryEnvelope
from anybatch.parallel.strategy import Strategy, trainable
from anybatch.planner.devices import Autocast
from anybatch.planner.stand_ins import (
    CHUNK_TOKENS,
    UPDATE_IN_BACKWARD,
    AdamW8bit,
    adapted,
    adapter_lines,
    chunked,
    chunked_loss_line,
    four_bit_lines,
    in_16_bits,
    linear_layers,
    updated_in_backward,
    with_head_again,
)
from anybatch.planner.step_spec import StepSpec, as_module, built, checkpoint_blocks
from anybatch.planner.step_time import CostLine
from anybatch.planner.torch_internals import is_checkpointed

DEFAULT_RANK = 16
"""Rank of adapters."""
_MIN_VOCABULARY = 8192
_ADAM = {"Adam", "AdamW"}
_PRODUCTS = {"matmul", "attention", "attention backward"}
_SCALED = {"bf16": "", "fp16": "; losses are scaled, and a step whose gradients overflow is skipped"}
_AGAIN = """\
from functools import partial
from torch.utils.checkpoint import checkpoint
again = partial(checkpoint, use_reentrant=False)"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """A change of a training step."""

    name: str  # name in the table of a plan and in requests
    how: str = ""  # code to add before the engine is created; may be empty
    engine: str = ""  # arguments to add to the engine, as code; may be empty
    costs: str = ""  # drawback of the change, as a clause
    same_step: bool = True  # whether gradient and update stay the same, up to rounding
    apply: Callable[[TrainSpec], TrainSpec] | None = None  # function step -> changed step
    strategy: str | Callable[[], Strategy] | None = None  # another strategy of the step
    reshape: Callable[[MemoryEnvelope], MemoryEnvelope] | None = None  # traced memory -> changed memory
    change_costs: Callable[[CostLine], CostLine] | None = None  # traced costs -> changed costs


def sharded_in_bfloat16() -> Strategy:
    """Return FSDP2 that gathers weights in bf16 and reduces gradients in float32."""
    # Imported here, because FSDP2 takes two seconds to import.
    from anybatch.parallel.fsdp import FSDP  # noqa: PLC0415
    from anybatch.parallel.sharding import Sharding  # noqa: PLC0415

    return FSDP(Sharding(param_dtype=torch.bfloat16))


def strategy_change(name: str, strategy: str | Callable[[], Strategy]) -> Change:
    """Return the change to a strategy."""
    how = "# the optimizer as a function: named_parameters -> optimizer" if strategy == "fsdp" else ""
    if isinstance(strategy, str):
        return Change(name=name, how=how, engine=f'strategy="{strategy}"', strategy=strategy)
    how = "from anybatch.strategies import FSDP, Sharding  # the optimizer as a function"
    return Change(name=name, how=how, engine="strategy=FSDP(Sharding(param_dtype=torch.bfloat16))", strategy=strategy)


def code_of(changes: Sequence[Change]) -> str:
    """Return the code for several changes, each below its name, with one engine at the end."""
    parts = [f"# {change.name}\n{change.how}" for change in changes if change.how]
    of_engine = {change.name: change.engine for change in changes if change.engine}
    if of_engine:
        arguments = ", ".join(dict.fromkeys(of_engine.values()))
        parts.append(f"# {', '.join(of_engine)}\nengine = ab.Engine(..., {arguments})")
    return "\n".join(parts)


def changed(spec: StepSpec, changes: Iterable[Change]) -> StepSpec:
    """Return the step with the changes applied in order, except for the parts that are derived from its trace."""
    for change in changes:
        apply, make = change.apply, spec.train
        spec = spec if change.strategy is None else replace(spec, strategy=change.strategy)
        if apply is not None:
            train = apply(make) if isinstance(make, TrainSpec) else lambda apply=apply, make=make: apply(make())
            spec = replace(spec, train=train, make=None)
    return spec


def all_changes(spec: StepSpec, rank: int = DEFAULT_RANK) -> dict[str, Change]:
    """Return every change that the step does not have yet, by name."""
    return {change.name: change for change in _changes(spec, rank)}


def _changes(spec: StepSpec, rank: int) -> Iterator[Change]:
    has_model, (spec, _) = isinstance(spec.train, TrainSpec), built(spec)
    yield from (*update_changes(spec), *_precision_changes(spec), *_state_changes(spec))
    # Modules are changed in place, so each of these changes needs a new model.
    if not has_model:
        yield from (*_block_changes(spec), *_weight_changes(spec), *_adapter_changes(spec, rank))
        yield from _backward_changes(spec)
    yield from _head_changes(spec)  # last, since it runs the loss


def single_changes(spec: StepSpec) -> list[Change]:
    """Return the changes that keep the step's result, checkpointing, and the formats of products for the device."""
    named = ("checkpointing", "TF32 products", f"{spec.autocast} autocast")
    return [change for change in all_changes(spec).values() if change.same_step or change.name in named]


def named_change(spec: StepSpec, name: str) -> Change:
    """Return a change by name, or refuse a name that the step has no change for."""
    rank = re.match(r"LoRA of rank (\d+)", name)
    known = []
    for change in _changes(spec, DEFAULT_RANK if rank is None else int(rank[1])):
        if change.name == name:
            return change
        known.append(change.name)
    message = f"{name!r} cannot be applied to this step. Possible changes: {', '.join(map(repr, known))}."
    raise UserError(message)


def optimizer_name(train: TrainSpec) -> str:
    """Return the class name of a step's optimizer; an optimizer function is called with meta parameters."""
    optimizer = _build_optimizer(train)
    return getattr(train.optimizer, "__name__", "an optimizer") if optimizer is None else type(optimizer).__name__


def _build_optimizer(train: TrainSpec) -> Optimizer | None:
    """Return the optimizer; None if its function does not work on meta parameters."""
    if isinstance(train.optimizer, Optimizer):
        return train.optimizer
    # Pass all parameters, since a function may select some by name or shape.
    try:
        return train.optimizer([(name, _without_data(p)) for name, p in trainable(modules_of(train)).items()])
    except UserError:
        raise
    except Exception:  # noqa: BLE001 (the engine calls the function again and raises its error)
        return None


def modules_of(train: TrainSpec) -> nn.Module:
    """Return all trained modules: the model, and modules in the loss."""
    learned = {n: part for n, part in declared(train.loss).functions.items() if isinstance(part, nn.Module)}
    return nn.ModuleDict({"model": as_module(train.model), **learned}) if learned else as_module(train.model)


def _without_data(parameter: nn.Parameter) -> nn.Parameter:
    kind = torch.float32 if is_low_precision(parameter) else parameter.dtype
    return nn.Parameter(torch.empty(parameter.shape, dtype=kind, device="meta"))


def update_changes(spec: StepSpec) -> list[Change]:
    """Return the change to a fused update, which needs no temporaries, if the optimizer is one of torch with it."""
    # An existing optimizer cannot be created again with another option.
    optimizer = None if isinstance(spec.trained.optimizer, Optimizer) else _build_optimizer(spec.trained)
    if optimizer is None or any("fused" not in group or group["fused"] for group in optimizer.param_groups):
        return []
    name = type(optimizer).__name__
    if type(optimizer) is not getattr(torch.optim, name, None):  # a subclass may update in another way
        return []
    how = f"optimizer = lambda named: torch.optim.{name}([p for _, p in named], fused=True, lr=...)"
    return [Change(name="fused optimizer", how=how, apply=_fused)]


def _fused(train: TrainSpec) -> TrainSpec:
    make = train.optimizer
    assert not isinstance(make, Optimizer), "this change is offered for functions only"

    def fused(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        optimizer = make(named)
        for group in optimizer.param_groups:
            # torch rejects an optimizer with both options.
            group["fused"], group["foreach"] = True, False
        return optimizer

    return replace(train, optimizer=fused)


def _precision_changes(spec: StepSpec) -> list[Change]:
    """Return the changes to autocast and to TF32, if the step is in float32 and on an accelerator."""
    if spec.trained.precision != "fp32" or spec.profile == "cpu":
        return []
    tf32 = Change(
        name="TF32 products",
        how='torch.set_float32_matmul_precision("high")',
        costs="factors of products are rounded to TF32 (10 bits after the point)",
        same_step=False,
        change_costs=lambda costs: costs.mapped(
            lambda one: replace(one, dtype="tf32") if one.dtype == "fp32" and one.kind in _PRODUCTS else one
        ),
    )
    has_tf32 = spec.device is not None and spec.device.peak("tf32") > spec.device.peak("fp32")
    return [tf32] * has_tf32 + [
        Change(
            name=f"{autocast} autocast",
            engine=f'precision="{autocast}"',
            costs=f"products are rounded to {autocast}, weights and sums stay in float32{scaled}",
            same_step=False,
            apply=partial(replace, precision=autocast),
        )
        for autocast, scaled in _SCALED.items()
    ]


def _block_changes(spec: StepSpec) -> list[Change]:
    """Return the change to activation checkpointing of the model's repeated blocks, if it has such blocks."""
    model = as_module(spec.trained.model)
    rows = repeated_blocks(model)
    # Blocks may be checkpointed already, by transformers' `gradient_checkpointing` or by torch's wrapper.
    if not rows or any(
        getattr(part, "gradient_checkpointing", False) is True or is_checkpointed(part) for part in model.modules()
    ):
        return []
    configs = (getattr(module, "config", None) for module in model.modules())
    has_cache = any(getattr(config, "use_cache", False) is True for config in configs)
    # The code finds blocks by class, which also works inside adapters.
    kinds = dict.fromkeys(spec.called.get(blocks.kind.__name__, blocks.kind.__name__) for blocks in rows)
    parts = [part for blocks in rows for block in blocks.modules for part in block.modules() if part is not block]
    nested = any(type(part).__name__ in kinds for part in parts)
    lines = [
        _AGAIN,
        f"blocks = [part for part in model.modules() if type(part).__name__ in {list(kinds)}]",
        *(["inner = {part for block in blocks for part in block.modules() if part is not block}"] if nested else []),
        f"for block in {'set(blocks) - inner' if nested else 'blocks'}:",
        "    block.forward = partial(again, block.forward)",
    ]
    # A model planned in place of a transformers model (`called`) has no cache, but the user's model has one.
    if has_cache or spec.called:
        lines.append("model.config.use_cache = False")
    has_statistics = any(getattr(part, "track_running_stats", False) is True for part in parts)
    costs = "each block's forward runs twice" + "; so BatchNorm's running statistics change twice" * has_statistics
    return [
        Change(
            name="checkpointing", how="\n".join(lines), costs=costs, same_step=not has_statistics, apply=_checkpointed
        )
    ]


def _checkpointed(train: TrainSpec) -> TrainSpec:
    known: dict[int, Any] = {}
    for part in as_module(train.model).modules():
        config: Any = getattr(part, "config", None)
        # Recomputed blocks would fill the cache of transformers twice. Change a copy, since the user may own it.
        if getattr(config, "use_cache", False) is True:
            other = known.setdefault(id(config), copy.copy(config))
            other.use_cache = False
            part.config = other
    return replace(train, model=checkpoint_blocks(train.model))


def _weight_changes(spec: StepSpec) -> list[Change]:
    """Return the changes to bf16 weights, with three ways to update them, if the optimizer is a function."""
    if isinstance(spec.trained.optimizer, Optimizer):
        return []
    how = "model.to(torch.bfloat16)  # the optimizer as a function: it gets float32 "
    lower_bits = "updates go to float32 weights, of which the engine keeps the lower 16 bits"
    rounded = "so are weights and optimizer state after each update, stochastically"
    ways: tuple[tuple[str, Bf16Weights, str, str], ...] = (
        ("bf16 weights", "copied", "copies", "updates go to copies in float32"),
        ("bf16 weights, split", "split", "weights", lower_bits),
        ("bf16 weights, rounded stochastically", "stochastic", "weights", rounded),
    )
    return [
        Change(
            name=name,
            how=how + updated,
            engine="" if way == "copied" else f'bf16_weights="{way}"',
            costs=f"forward and backward are rounded to bf16; {costs}",
            same_step=False,
            apply=partial(_in_bfloat16, way),
        )
        for name, way, updated, costs in ways
    ]


def _in_bfloat16(way: Bf16Weights, train: TrainSpec) -> TrainSpec:
    in_16_bits(as_module(train.model), torch.bfloat16, trains=True)
    return replace(train, bf16_weights=way)


def _state_changes(spec: StepSpec) -> list[Change]:
    """Return the changes to smaller optimizer state, for Adam on an accelerator: in 8 bits, or of Adafactor."""
    if spec.profile == "cpu" or optimizer_name(spec.trained) not in _ADAM:
        return []
    how = "import bitsandbytes as bnb\noptimizer = lambda named: bnb.optim.AdamW8bit([p for _, p in named], lr=...)"
    eight_bits = Change(
        name="8-bit AdamW",
        how=how,
        costs="not the same optimizer: its two averages are rounded to 8 bits, in blocks of 256",
        same_step=False,
        apply=partial(replace, optimizer=partial(_with_optimizer, AdamW8bit)),
    )
    adafactor = replace(
        eight_bits,
        name="Adafactor",
        how="optimizer = lambda named: torch.optim.Adafactor([p for _, p in named], lr=...)",
        costs="another optimizer: of each matrix it keeps averages of rows and columns",
        apply=partial(replace, optimizer=partial(_with_optimizer, torch.optim.Adafactor)),
    )
    return [eight_bits, adafactor]


def _backward_changes(spec: StepSpec) -> list[Change]:
    """Return the changes to an update of each weight in the backward, in bf16 without sums of gradients."""
    model, train = as_module(spec.trained.model), spec.trained
    takes_numbers = any(tensor.is_floating_point() for tensor in tensors_of(spec.sample))
    is_possible = spec.profile != "cpu" and spec.world_size == 1 and spec.autocast == "bf16" and not takes_numbers
    if not is_possible or isinstance(train.optimizer, Optimizer) or optimizer_name(train) not in _ADAM:
        return []
    largest = max((weight.numel() for weight in model.parameters() if weight.requires_grad), default=0)
    # Of the largest weight: a float32 copy, its gradient, and one temporary of Adafactor.
    return [
        Change(
            name=f"{name} in the backward",
            how=UPDATE_IN_BACKWARD.replace("OPTIMIZER", name).rstrip(),
            costs="each micro-batch updates the weights (small batches need smaller learning rates: arXiv 2507.07101); "
            "another optimizer, bf16 weights rounded stochastically, no clipping by the norm of all gradients",
            same_step=False,
            apply=partial(_updated_in_backward, name),
            reshape=partial(updated_in_backward, update_bytes=num_bytes * largest),
            change_costs=lambda costs: costs.mapped(
                lambda one: replace(one, phase="backward") if one.phase == "update" else one
            ),
        )
        for name, num_bytes in (("Adafactor", 12), ("SGD", 8))
    ]


def _updated_in_backward(name: str, train: TrainSpec) -> TrainSpec:
    train = _in_bfloat16("stochastic", train)
    return replace(train, precision="fp32", clip=None, optimizer=partial(_with_optimizer, getattr(torch.optim, name)))


def _with_optimizer(kind: Callable[..., Optimizer], named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    return kind([parameter for _, parameter in named], lr=1e-3)


def _adapter_changes(spec: StepSpec, rank: int) -> list[Change]:
    """Return the changes that train adapters on a bf16 base, and on a 4-bit base if a library can load one."""
    module, called = as_module(spec.trained.model), spec.called
    has_adapters = any(not parameter.requires_grad for parameter in module.parameters())
    if has_adapters or not linear_layers(module):
        return []
    # Layers in 16 bits accept no float32 inputs, such as images, and in fp16 the loss must be scaled.
    precision = spec.trained.precision
    is_half = precision == "fp16" or (precision == "fp32" and spec.autocast == "fp16")
    dtype = torch.float16 if is_half else torch.bfloat16
    name: Autocast = "fp16" if is_half else "bf16"
    takes_numbers = any(tensor.is_floating_point() for tensor in tensors_of(spec.sample))
    autocasts = precision == "fp32" and (is_half or takes_numbers)
    apply = partial(_with_adapters, rank, dtype, name if autocasts else precision)
    costs = f"trains other parameters: a product of two narrow matrices added to each linear layer, on a base in {name}"
    lora = Change(
        name=f"LoRA of rank {rank}",
        how="\n".join((f"model.to({dtype})", *adapter_lines(module, rank, called))),
        engine=f'precision="{name}"' if autocasts else "",
        costs=costs,
        same_step=False,
        apply=apply,
    )
    loading = four_bit_lines(module, dtype, called)
    if spec.profile == "cpu" or not loading:
        return [lora]
    in_four_bits = replace(
        lora,
        name=f"LoRA of rank {rank} on a base in 4 bits",
        how="\n".join((*loading, *adapter_lines(module, rank, called))),
        costs=f"{costs}; layers of the base are rounded to 4 bits",
        apply=partial(apply, four_bits=True),
    )
    return [lora, in_four_bits]


def _with_adapters(
    rank: int, dtype: torch.dtype, precision: PrecisionName, train: TrainSpec, *, four_bits: bool = False
) -> TrainSpec:
    model = adapted(train.model, rank, dtype, four_bits=four_bits)
    return replace(train, model=model, precision=precision)


def _head_changes(spec: StepSpec) -> list[Change]:
    """Return the change to a chunked loss, if the vocabulary is large and the loss is the same number."""
    # The widest linear layer is the head: vocabularies are larger than any hidden size in use.
    layers = (layer for layer in as_module(spec.trained.model).modules() if isinstance(layer, nn.Linear))
    head = max(layers, key=lambda layer: layer.out_features, default=None)
    labels = [tensor for tensor in tensors_of(spec.sample) if not tensor.is_floating_point() and tensor.dim() > 1]
    # Labels have one entry per token; skip floating-point inputs, such as images.
    num_tokens = max((tensor[0].numel() for tensor in labels), default=0)
    # For short samples a chunk would hold nearly all logits.
    if head is None or head.out_features < _MIN_VOCABULARY or num_tokens <= CHUNK_TOKENS // 2:
        return []
    line, vocabulary = chunked_loss_line(spec, head, num_tokens), head.out_features
    change = Change(
        name=f"loss in chunks of {CHUNK_TOKENS} tokens",
        how=line,
        costs="logits are computed twice",
        reshape=lambda envelope: chunked(envelope, vocabulary, num_tokens),
        change_costs=lambda costs: with_head_again(costs, vocabulary),
    )
    return [change] if line else []
