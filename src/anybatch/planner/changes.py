"""Changes that save memory or time in a training step: functions from a step to a changed step, so they combine."""

import copy
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

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
    AdamW8bit,
    adapted,
    adapter_lines,
    chunked,
    four_bit_lines,
    in_bfloat16,
    linear_layers,
    with_head_again,
)
from anybatch.planner.step_spec import StepSpec, as_module, built, checkpoint_blocks
from anybatch.planner.step_time import CostLine
from anybatch.planner.torch_internals import is_checkpointed

DEFAULT_RANK = 16
"""Rank of adapters."""
_MIN_VOCABULARY = 8192
_SCALED: Mapping[Autocast, str] = {
    "bf16": "",
    "fp16": "; losses are scaled, and a step whose gradients overflow is skipped",
}
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
    reshape: Callable[[MemoryEnvelope], MemoryEnvelope] | None = None  # old memory -> new memory; replaces a trace
    change_costs: Callable[[CostLine], CostLine] | None = None  # changes the costs; None if they stay the same

    @property
    def code(self) -> str:
        """The code for this change alone."""
        return "\n".join(filter(None, (self.how, engine_line(self.engine))))


def engine_line(arguments: str) -> str:
    """Return the line that creates the engine with more arguments; empty without arguments."""
    return f"engine = ab.Engine(..., {arguments})" if arguments else ""


def sharded_in_bfloat16() -> Strategy:
    """Return FSDP2 that gathers weights in bf16 and reduces gradients in float32."""
    # Imported here, because FSDP2 takes two seconds to import.
    from anybatch.parallel.fsdp import FSDP  # noqa: PLC0415
    from anybatch.parallel.sharding import Sharding  # noqa: PLC0415

    return FSDP(Sharding(param_dtype=torch.bfloat16))


def fsdp_strategy(train: TrainSpec) -> str | Callable[[], Strategy]:
    """Return the strategy FSDP2; in bf16 training it gathers weights in bf16 too."""
    return sharded_in_bfloat16 if train.precision == "bf16" else "fsdp"


def strategy_lines(strategy: str | Callable[[], Strategy]) -> tuple[list[str], str]:
    """Return the lines to write before an engine with this strategy, and the engine's argument."""
    as_function = "# the optimizer as a function: named_parameters -> optimizer"
    if isinstance(strategy, str):
        return [as_function] if strategy == "fsdp" else [], f'strategy="{strategy}"'
    before = ["from anybatch.strategies import FSDP, Sharding", as_function]
    return before, "strategy=FSDP(Sharding(param_dtype=torch.bfloat16))"


def code_of(changes: Sequence[Change], strategy_name: str = "", strategy: str | Callable[[], Strategy] = "") -> str:
    """Return the code for several changes, each below its name, with one engine at the end."""
    parts = [f"# {change.name}\n{change.how}" for change in changes if change.how]
    of_engine = {change.name: change.engine for change in changes if change.engine}
    if strategy_name:
        before, of_engine[strategy_name] = strategy_lines(strategy)
        parts += before
    if of_engine:
        parts.append(f"# {', '.join(of_engine)}\n{engine_line(', '.join(dict.fromkeys(of_engine.values())))}")
    return "\n".join(parts)


def changed(spec: StepSpec, changes: Iterable[Change]) -> StepSpec:
    """Return the step with the changes applied in order; changes without `apply` are skipped."""
    for change in changes:
        apply, make = change.apply, spec.train
        if apply is not None:
            train = apply(make) if isinstance(make, TrainSpec) else partial(_applied, apply, make)
            spec = dataclasses.replace(spec, train=train)
    return spec


def _applied(apply: Callable[[TrainSpec], TrainSpec], make: Callable[[], TrainSpec]) -> TrainSpec:
    return apply(make())


def all_changes(spec: StepSpec, rank: int = DEFAULT_RANK) -> dict[str, Change]:
    """Return every change that the step does not have yet, by name."""
    has_model, (spec, _) = isinstance(spec.train, TrainSpec), built(spec)
    found = [*_update_changes(spec), *_precision_changes(spec), *_head_changes(spec), *_state_changes(spec)]
    # Modules are changed in place, so each of these changes needs a new model.
    if not has_model:
        found += [*_block_changes(spec), *_weight_changes(spec), *_adapter_changes(spec, rank)]
    return {change.name: change for change in found}


def single_changes(spec: StepSpec, autocast: Autocast = "bf16") -> list[Change]:
    """Return the changes that keep the step's result, and autocast to 16 bits."""
    return [
        change for change in all_changes(spec).values() if change.same_step or change.name == f"{autocast} autocast"
    ]


def named_change(spec: StepSpec, name: str) -> Change:
    """Return a change by name.

    Raises:
        UserError: the step has no such change.
    """
    rank = re.match(r"LoRA of rank (\d+)", name)
    known = all_changes(spec, DEFAULT_RANK if rank is None else int(rank[1]))
    if name not in known:
        message = f"{name!r} cannot be applied to this step. Possible changes: {', '.join(map(repr, known))}."
        raise UserError(message)
    return known[name]


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


def _update_changes(spec: StepSpec) -> list[Change]:
    """Return the change to a fused update, which needs no temporaries, if the optimizer supports it."""
    # An existing optimizer cannot be created again with another option.
    optimizer = None if isinstance(spec.trained.optimizer, Optimizer) else _build_optimizer(spec.trained)
    if optimizer is None or any("fused" not in group or group["fused"] for group in optimizer.param_groups):
        return []
    name = type(optimizer).__name__
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

    return dataclasses.replace(train, optimizer=fused)


def _precision_changes(spec: StepSpec) -> list[Change]:
    """Return the changes to autocast in bf16 and in fp16, if the step is in float32 and on an accelerator."""
    if spec.trained.precision != "fp32" or spec.profile == "cpu":
        return []
    return [
        Change(
            name=f"{autocast} autocast",
            engine=f'precision="{autocast}"',
            costs=f"products are rounded to {autocast}, weights and sums stay in float32{scaled}",
            same_step=False,
            apply=partial(dataclasses.replace, precision=autocast),
        )
        for autocast, scaled in _SCALED.items()
    ]


def _block_changes(spec: StepSpec) -> list[Change]:
    """Return the change to activation checkpointing of the model's repeated blocks, if it has such blocks."""
    model = as_module(spec.trained.model)
    rows = repeated_blocks(model)
    if not rows or _checkpoints_itself(model):
        return []
    configs = (getattr(module, "config", None) for module in model.modules())
    has_cache = any(getattr(config, "use_cache", False) is True for config in configs)
    # The code finds blocks by class, which also works inside adapters.
    kinds = dict.fromkeys(spec.called.get(blocks.kind.__name__, blocks.kind.__name__) for blocks in rows)
    lines = [
        _AGAIN,
        "for block in model.modules():",
        f"    if type(block).__name__ in {list(kinds)}:",
        "        block.forward = partial(again, block.forward)",
    ]
    # A model planned in place of a transformers model (`called`) has no cache, but the user's model has one.
    if has_cache or spec.called:
        lines.append("model.config.use_cache = False")
    how, costs = "\n".join(lines), "each block's forward runs twice"
    return [Change(name="checkpointing", how=how, costs=costs, apply=_checkpointed)]


def _checkpoints_itself(module: nn.Module) -> bool:
    """Whether blocks are already checkpointed, by transformers' `gradient_checkpointing` or by torch's wrapper."""
    switched = any(getattr(part, "gradient_checkpointing", False) is True for part in module.modules())
    return switched or any(map(is_checkpointed, module.modules()))


def _checkpointed(train: TrainSpec) -> TrainSpec:
    _without_cache(as_module(train.model))
    return dataclasses.replace(train, model=checkpoint_blocks(train.model))


def _without_cache(module: nn.Module) -> None:
    """Disable the key-value cache of transformers, which recomputed blocks would fill twice."""
    known: dict[int, Any] = {}
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        if getattr(config, "use_cache", False) is True:
            # Change a copy, since the configuration may belong to the user.
            other = known.setdefault(id(config), copy.copy(config))
            other.use_cache = False
            part.config = other


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
    in_bfloat16(as_module(train.model), trains=True)
    return dataclasses.replace(train, bf16_weights=way)


def _state_changes(spec: StepSpec) -> list[Change]:
    """Return the change to 8-bit optimizer state, for Adam on an accelerator."""
    if spec.profile == "cpu" or optimizer_name(spec.trained) not in {"Adam", "AdamW"}:
        return []
    how = "import bitsandbytes as bnb\noptimizer = lambda named: bnb.optim.AdamW8bit([p for _, p in named], lr=...)"
    return [
        Change(
            name="8-bit AdamW",
            how=how,
            costs="not the same optimizer: its two averages are rounded to 8 bits, in blocks of 256",
            same_step=False,
            apply=partial(dataclasses.replace, optimizer=_with_eight_bits),
        )
    ]


def _with_eight_bits(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    return AdamW8bit([parameter for _, parameter in named])


def _adapter_changes(spec: StepSpec, rank: int) -> list[Change]:
    """Return the changes that train adapters on a bf16 base, and on a 4-bit base if a library can load one."""
    module, called = as_module(spec.trained.model), spec.called
    has_adapters = any(not parameter.requires_grad for parameter in module.parameters())
    if has_adapters or not linear_layers(module):
        return []
    # Layers in bf16 accept no float32 inputs, such as images.
    takes_numbers = any(tensor.is_floating_point() for tensor in tensors_of(spec.sample))
    autocasts = takes_numbers and spec.trained.precision == "fp32"
    costs = "trains other parameters: a product of two narrow matrices added to each linear layer, on a base in bf16"
    lora = Change(
        name=f"LoRA of rank {rank}",
        how="\n".join(("model.to(torch.bfloat16)", *adapter_lines(module, rank, called))),
        engine='precision="bf16"' if autocasts else "",
        costs=costs,
        same_step=False,
        apply=partial(_with_adapters, rank, False, autocasts),  # noqa: FBT003 (`partial`)
    )
    loading = four_bit_lines(module, called)
    if spec.profile == "cpu" or not loading:
        return [lora]
    in_four_bits = dataclasses.replace(
        lora,
        name=f"LoRA of rank {rank} on a base in 4 bits",
        how="\n".join((*loading, *adapter_lines(module, rank, called))),
        costs=f"{costs}; layers of the base are rounded to 4 bits",
        apply=partial(_with_adapters, rank, True, autocasts),  # noqa: FBT003 (`partial`)
    )
    return [lora, in_four_bits]


def _with_adapters(rank: int, four_bits: bool, autocasts: bool, train: TrainSpec) -> TrainSpec:  # noqa: FBT001 (`partial`)
    model = adapted(train.model, rank, four_bits=four_bits)
    return dataclasses.replace(train, model=model, precision="bf16" if autocasts else train.precision)


def _head_changes(spec: StepSpec) -> list[Change]:
    """Return the change to a chunked loss, if the vocabulary is large."""
    heads = [layer.out_features for layer in as_module(spec.trained.model).modules() if isinstance(layer, nn.Linear)]
    # The widest linear layer is the head: vocabularies are larger than any hidden size in use.
    vocabulary = max(heads, default=0)
    labels = [tensor for tensor in tensors_of(spec.sample) if not tensor.is_floating_point() and tensor.dim() > 1]
    if vocabulary < _MIN_VOCABULARY or not labels:
        return []
    # Labels have one entry per token; skip floating-point inputs, such as images.
    num_tokens = max(tensor[0].numel() for tensor in labels)
    # For short samples a chunk would hold nearly all logits.
    if num_tokens <= CHUNK_TOKENS // 2:
        return []
    return [
        Change(
            name=f"loss in chunks of {CHUNK_TOKENS} tokens",
            how="loss = F.linear_cross_entropy(x, head.weight, targets, options=nn.LinearCrossEntropyOptions())",
            costs="logits are computed twice",
            reshape=lambda envelope: chunked(envelope, vocabulary, num_tokens),
            change_costs=lambda costs: with_head_again(costs, vocabulary),
        )
    ]
