"""Changes of a training step that let more fit, or run faster: functions of the step, which compose."""

import copy
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core.blocks import repeated_blocks
from anybatch.core.dtypes import is_low_precision
from anybatch.core.loss import declared
from anybatch.core.tree import tensors_of
from anybatch.engine.spec import TrainSpec
from anybatch.engine.update.bf16_weights import Bf16Weights
from anybatch.errors import UserError
from anybatch.memory.trace import MemoryEnvelope
from anybatch.parallel.strategy import trainable
from anybatch.planner.cost.device import Autocast
from anybatch.planner.cost.step_time import CostLine
from anybatch.planner.proposals.chunked_loss import CHUNK_TOKENS, chunked, with_head_again
from anybatch.planner.proposals.how_to_write import (
    adapter_lines,
    checkpointing_lines,
    engine_line,
    four_bit_lines,
    offloading_lines,
)
from anybatch.planner.proposals.stand_ins import (
    AdamW8bit,
    adapted,
    in_bfloat16,
    linear_layers,
    linear_names,
    offloaded,
)
from anybatch.planner.torch_internals import is_checkpointed
from anybatch.planner.trace.checkpointing import Keeping, as_module, checkpoint_blocks
from anybatch.planner.trace.step_spec import StepSpec, built

USUAL_RANK = 16
"""Rank of adapters where none is named."""
_LEAST_VOCABULARY = 8192
_SCALED: Mapping[Autocast, str] = {
    "bf16": "",
    "fp16": "; losses are scaled, and a step whose gradients overflow is skipped",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """A change of a training step.

    Attributes:
        name: a few words for the table of a plan, by which it can be asked for.
        how: the lines to write for it before the engine is made; empty for none.
        engine: the arguments that the engine gets for it, as code; empty for none.
        costs: what it costs, as a clause.
        same_step: the step computes the same gradient and update, up to rounding as the step has it already.
        apply: function step -> the step with it; None where it is worked out from the traces of the step without it.
        reshape: maps the step's memory to that with the change, where the change itself is not traced.
        recost: the same for its costs; None if they stay.
    """

    name: str
    how: str = ""
    engine: str = ""
    costs: str = ""
    same_step: bool = True
    apply: Callable[[TrainSpec], TrainSpec] | None = None
    reshape: Callable[[MemoryEnvelope], MemoryEnvelope] | None = None
    recost: Callable[[CostLine], CostLine] | None = None

    @property
    def code(self) -> str:
        """The lines to write for this change alone."""
        return "\n".join(filter(None, (self.how, engine_line(self.engine))))


def changed(spec: StepSpec, changes: Iterable[Change]) -> StepSpec:
    """Return the step with changes, one after the other; those that are worked out from traces leave it as it is.

    Args:
        spec: the step; a function that makes what is trained stays one.
        changes: of this step.
    """
    for change in changes:
        apply, make = change.apply, spec.train
        if apply is not None:
            train = apply(make) if isinstance(make, TrainSpec) else partial(_applied, apply, make)
            spec = dataclasses.replace(spec, train=train)
    return spec


def _applied(apply: Callable[[TrainSpec], TrainSpec], make: Callable[[], TrainSpec]) -> TrainSpec:
    return apply(make())


def possible_changes(spec: StepSpec, autocast: Autocast = "bf16") -> list[Change]:
    """Return the changes that this spec has not made yet and that compute the same step, or round it to 16 bits.

    Args:
        spec: the step as it is; its model is made if it is a function.
        autocast: the format of 16 bits in which the device multiplies.
    """
    ready, _ = built(spec)
    return [
        *_of_update(ready),
        *_of_precision(ready, autocast),
        *_of_blocks(ready, can_make=_makes(spec)),
        *_of_head(ready),
    ]


def other_steps(spec: StepSpec, *, rank: int = USUAL_RANK) -> list[Change]:
    """Return the changes after which another step is computed: other optimizer state, or other parameters trained.

    In the order of how far they lead from the step as it is.

    Args:
        spec: the step; its model is made if it is a function.
        rank: of adapters.
    """
    return _other_steps(built(spec)[0], rank, can_make=_makes(spec))


def _makes(spec: StepSpec) -> bool:
    """Whether the step's model can be made anew, as changes of its modules have to be."""
    return not isinstance(spec.train, TrainSpec)


def _other_steps(ready: StepSpec, rank: int, *, can_make: bool) -> list[Change]:
    found = []
    if ready.profile != "cpu" and optimizer_name(ready.trained) in {"Adam", "AdamW"}:
        found.append(_eight_bit())
    module = as_module(ready.trained.model)
    has_adapters = any(not parameter.requires_grad for parameter in module.parameters())
    if not can_make or has_adapters or not linear_layers(module):
        return found
    found.append(_adapters(ready, rank, four_bits=False))
    if ready.profile != "cpu":
        found.append(_adapters(ready, rank, four_bits=True))
    return found


def named_change(spec: StepSpec, name: str) -> Change:
    """Return the change of a name.

    Args:
        spec: the step.
        name: as in a plan's table; adapters are "LoRA of rank 8" or any other.

    Raises:
        UserError: the step has no such change.
    """
    rank = re.match(r"LoRA of rank (\d+)", name)
    can_make, (ready, _) = _makes(spec), built(spec)
    known = [*_of_update(ready), *_of_precision(ready, "bf16", "fp16"), *_of_blocks(ready, can_make=can_make)]
    known += [*_of_head(ready), *of_weights(spec), *_of_host(ready, can_make=can_make)]
    known += _other_steps(ready, USUAL_RANK if rank is None else int(rank[1]), can_make=can_make)
    found = next((one for one in known if one.name == name), None)
    if found is None:
        message = f"{name!r} is no change of this step. It has {', '.join(repr(one.name) for one in known)}."
        raise UserError(message)
    return found


def offloading(spec: StepSpec) -> list[Change]:
    """Return the change that keeps activations in the host's memory, where there are repeated blocks on a device."""
    return _of_host(built(spec)[0], can_make=_makes(spec))


def optimizer_name(train: TrainSpec) -> str:
    """Return the class name of an optimizer; of one that is made later over parameters without data."""
    made = _made(train)
    return getattr(train.optimizer, "__name__", "an optimizer") if made is None else type(made).__name__


def _made(train: TrainSpec) -> Optimizer | None:
    """Return the optimizer; None if its function does not work on parameters without data."""
    if isinstance(train.optimizer, Optimizer):
        return train.optimizer
    # Over all parameters: a function may take them apart by name or shape.
    try:
        return train.optimizer([(name, _without_data(one)) for name, one in trainable(modules_of(train)).items()])
    except UserError:
        raise
    except Exception:  # noqa: BLE001 (whatever it is, the engine calls the function again, and raises its own then)
        return None


def modules_of(train: TrainSpec) -> nn.Module:
    """Return everything that trains, with data or without."""
    learned = {n: one for n, one in declared(train.loss).functions.items() if isinstance(one, nn.Module)}
    return nn.ModuleDict({"model": as_module(train.model), **learned}) if learned else as_module(train.model)


def _without_data(parameter: nn.Parameter) -> nn.Parameter:
    kind = torch.float32 if is_low_precision(parameter) else parameter.dtype
    return nn.Parameter(torch.empty(parameter.shape, dtype=kind, device="meta"))


def _of_update(spec: StepSpec) -> list[Change]:
    """Return the update in one kernel, without temporaries, where the optimizer offers one."""
    # An optimizer that is made already cannot be made again with another option.
    made = None if isinstance(spec.trained.optimizer, Optimizer) else _made(spec.trained)
    if made is None or any("fused" not in group or group["fused"] for group in made.param_groups):
        return []
    name = type(made).__name__
    how = f"optimizer = lambda named: torch.optim.{name}([p for _, p in named], fused=True, lr=...)"
    return [Change(name="fused optimizer", how=how, apply=_fused)]


def _fused(train: TrainSpec) -> TrainSpec:
    make = train.optimizer
    assert not isinstance(make, Optimizer), "this change is not offered for one that is made"

    def fused(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        optimizer = make(named)
        for group in optimizer.param_groups:
            # torch refuses an optimizer that is asked for both.
            group["fused"], group["foreach"] = True, False
        return optimizer

    return dataclasses.replace(train, optimizer=fused)


def _of_precision(spec: StepSpec, *formats: Autocast) -> list[Change]:
    if spec.trained.precision != "fp32" or spec.profile == "cpu":
        return []
    return [
        Change(
            name=f"{autocast} autocast",
            engine=f'precision="{autocast}"',
            costs=f"products are rounded to {autocast}, weights and sums stay in float32{_SCALED[autocast]}",
            same_step=False,
            apply=partial(_rounded, autocast),
        )
        for autocast in formats
    ]


def _rounded(autocast: Autocast, train: TrainSpec) -> TrainSpec:
    return dataclasses.replace(train, precision=autocast)


def _of_blocks(ready: StepSpec, *, can_make: bool) -> list[Change]:
    """Return the ways to checkpoint activations of repeated blocks."""
    rows = repeated_blocks(as_module(ready.trained.model))
    # Blocks are wrapped in place, so each change takes a model of its own.
    if not rows or not can_make or _checkpoints_itself(as_module(ready.trained.model)):
        return []
    configs = (getattr(one, "config", None) for one in as_module(ready.trained.model).modules())
    has_cache = any(getattr(config, "use_cache", False) is True for config in configs)
    # What stands for a model of transformers stands for one that fills a cache.
    caching = ["model.config.use_cache = False"] if has_cache or ready.called else []
    ways: tuple[tuple[str, Keeping, int, str], ...] = (
        ("checkpointing", "inputs", 1, "each block's forward runs twice"),
        ("checkpointing every 2nd block", "inputs", 2, "every second block's forward runs twice"),
        ("checkpointing all but products", "products", 1, "each block runs twice, but for its products"),
    )
    return [
        Change(
            name=name,
            how="\n".join([*checkpointing_lines(rows, keeping, every, ready.called), *caching]),
            costs=costs,
            apply=partial(_checkpointed, keeping, every),
        )
        for name, keeping, every, costs in ways
    ]


def _checkpoints_itself(module: nn.Module) -> bool:
    """Whether blocks are checkpointed already, by transformers' own switch or by torch's wrapper around a block."""
    switched = any(getattr(one, "gradient_checkpointing", False) is True for one in module.modules())
    return switched or any(map(is_checkpointed, module.modules()))


def _checkpointed(keeping: Keeping, every: int, train: TrainSpec) -> TrainSpec:
    without_cache(as_module(train.model))
    return dataclasses.replace(train, model=checkpoint_blocks(train.model, keeping, every=every))


def without_cache(module: nn.Module) -> None:
    """Switch off the cache of keys and values, which a block that runs twice would fill twice (transformers).

    Args:
        module: changed in place.
    """
    known: dict[int, Any] = {}
    for one in module.modules():
        config: Any = getattr(one, "config", None)
        if getattr(config, "use_cache", False) is True:
            # A configuration may be the user's, and is left alone.
            other = known.setdefault(id(config), copy.copy(config))
            other.use_cache = False
            one.config = other


def of_weights(spec: StepSpec) -> list[Change]:
    """Return weights in bf16, in three ways to update them, if the model and the optimizer can be made for them.

    Args:
        spec: the step; its model is made if it is a function.
    """
    can_make, (ready, _) = _makes(spec), built(spec)
    if not can_make or isinstance(ready.trained.optimizer, Optimizer):
        return []
    how = "model.to(torch.bfloat16)  # the optimizer as a function: it gets float32 "
    costs = "forward and backward are rounded to bf16; "
    ways: tuple[tuple[str, Bf16Weights, str, str], ...] = (
        ("bf16 weights", "copied", "copies", "updates go to copies in float32"),
        (
            "bf16 weights, split",
            "split",
            "weights",
            "updates go to float32 weights, of which the engine keeps the lower 16 bits",
        ),
        (
            "bf16 weights, rounded stochastically",
            "stochastic",
            "weights",
            "so are weights and optimizer state after each update, stochastically",
        ),
    )
    return [
        Change(
            name=name,
            how=how + what,
            engine="" if way == "copied" else f'bf16_weights="{way}"',
            costs=costs + said,
            same_step=False,
            apply=partial(_in_bfloat16, way),
        )
        for name, way, what, said in ways
    ]


def _in_bfloat16(way: Bf16Weights, train: TrainSpec) -> TrainSpec:
    in_bfloat16(as_module(train.model), trains=True)
    return dataclasses.replace(train, bf16_weights=way)


def _of_host(ready: StepSpec, *, can_make: bool) -> list[Change]:
    """Return activations in the host's memory; on a CPU they are there."""
    rows = repeated_blocks(as_module(ready.trained.model))
    if ready.profile == "cpu" or not can_make or not rows:
        return []
    return [
        Change(
            name="offloading",
            how="\n".join(offloading_lines(rows, ready.called)),
            costs="what blocks save goes to the host and back over PCIe",
            apply=lambda train: dataclasses.replace(train, model=offloaded(train.model)),
        )
    ]


def _eight_bit() -> Change:
    return Change(
        name="8-bit AdamW",
        how="import bitsandbytes as bnb\noptimizer = lambda named: bnb.optim.AdamW8bit([p for _, p in named], lr=...)",
        costs="not the same optimizer: its two averages are rounded to 8 bits, in blocks of 256",
        same_step=False,
        apply=lambda train: dataclasses.replace(train, optimizer=_with_eight_bits),
    )


def _with_eight_bits(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    return AdamW8bit([parameter for _, parameter in named])


def _adapters(ready: StepSpec, rank: int, *, four_bits: bool) -> Change:
    module, called = as_module(ready.trained.model), ready.called
    # Layers in bf16 take no inputs in float32, as tokens are none and images are.
    takes_numbers = any(tensor.is_floating_point() for tensor in tensors_of(ready.sample))
    autocasts = takes_numbers and ready.trained.precision == "fp32"
    loading = four_bit_lines(module, repeated_blocks(module), called) if four_bits else ["model.to(torch.bfloat16)"]
    costs = "other parameters are trained: a product of two narrow matrices beside each linear layer, on a base in bf16"
    return Change(
        name=f"LoRA of rank {rank}{' on a base in 4 bits' if four_bits else ''}",
        how="\n".join((*loading, *adapter_lines(linear_names(module), rank, called))),
        engine='precision="bf16"' if autocasts else "",
        costs=costs + ("; its layers are rounded to 4 bits" if four_bits else ""),
        same_step=False,
        apply=partial(_with_adapters, rank, four_bits, autocasts),
    )


def _with_adapters(rank: int, four_bits: bool, autocasts: bool, train: TrainSpec) -> TrainSpec:  # noqa: FBT001 (`partial`)
    model = adapted(train.model, rank, four_bits=four_bits)
    return dataclasses.replace(train, model=model, precision="bf16" if autocasts else train.precision)


def _of_head(spec: StepSpec) -> list[Change]:
    """Return a loss over a large vocabulary in chunks."""
    heads = [one.out_features for one in as_module(spec.trained.model).modules() if isinstance(one, nn.Linear)]
    # The head is taken to be the widest linear layer: vocabularies are larger than any hidden size in use.
    vocabulary = max(heads, default=0)
    labels = [tensor for tensor in tensors_of(spec.sample) if not tensor.is_floating_point() and tensor.dim() > 1]
    if vocabulary < _LEAST_VOCABULARY or not labels:
        return []
    # Labels have one entry per token; inputs of a model of images, say, are floating-point and are left out.
    num_tokens = max(tensor[0].numel() for tensor in labels)
    # Of short samples a chunk would hold about as many logits as the loss has at once.
    if num_tokens <= CHUNK_TOKENS // 2:
        return []
    return [
        Change(
            name=f"loss in chunks of {CHUNK_TOKENS} tokens",
            how="loss = F.linear_cross_entropy(x, head.weight, targets, options=nn.LinearCrossEntropyOptions())",
            costs="logits are made twice",
            reshape=lambda envelope: chunked(envelope, vocabulary, num_tokens),
            recost=lambda costs: with_head_again(costs, vocabulary),
        )
    ]
