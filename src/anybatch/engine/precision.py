"""Precision: autocast, the fp16 gradient scaler, and the update of low-precision parameters."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core.compatibility import PrecisionName
from anybatch.core.tensors import is_low_precision, widened
from anybatch.engine.bf16_weights import Bf16Weights, Float32Windows
from anybatch.errors import CompositionError, NonFiniteError, ParameterError
from anybatch.parallel.dtensors import local_part

OptimizerFunction = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]
Update = Literal["direct", "master_weights", "cast", "split", "stochastic"]

# GradScaler halves the scale, initially 65536, at each overflow: it falls below this after 27 overflows in a row.
_MIN_SCALE = 2.0**-10
_AUTOCAST: Mapping[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: PrecisionName, device: torch.device) -> Callable[..., AbstractContextManager[object]]:
    """Return a function that creates the autocast context of one forward; the function ignores its arguments.

    With "fp32" the context is a no-op: the model runs in its parameters' types. FP8 is not supported.
    """
    dtype = _AUTOCAST[precision]
    if dtype is None:
        return nullcontext
    return lambda *_: torch.autocast(device.type, dtype)


@dataclass(frozen=True, slots=True)
class UpdateTarget:
    """The parameters that an optimizer updates, and the model's parameters.

    `updated` are the model's `parameters`, float32 master weights, or (with `windows`) temporary float32 copies, which
    have data only during an update.
    """

    optimizer: Optimizer
    update: Update
    parameters: tuple[nn.Parameter, ...]
    updated: tuple[nn.Parameter, ...]
    windows: Float32Windows | None = None

    @property
    def extra_weights(self) -> dict[int, torch.Tensor]:
        """Float32 copies of the model's weights, or their lower bits, by parameter number; may be empty."""
        if self.windows is not None:
            return self.windows.missing
        pairs = enumerate(zip(self.updated, self.parameters, strict=True))
        return {number: updated for number, (updated, parameter) in pairs if updated is not parameter}

    def wide_weights(self) -> list[torch.Tensor]:
        """Return this rank's part of every weight at full precision, from the float32 copy if there is one."""
        if self.windows is not None:
            return self.windows.wide_weights()
        return [widened(local_part(weight.detach())) for weight in self.updated]

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Load an optimizer state, and restore bf16 state, which `load_state_dict` converts to the parameters' type."""
        self.optimizer.load_state_dict(state)
        if self.windows is not None:
            self.windows.narrow_state(self.optimizer)

    def attach(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Set the gradients of master weights to the summed float32 gradients, without a copy."""
        for master, gradient in zip(self.updated, gradients, strict=True):
            master.grad = gradient

    def detach(self) -> None:
        """Free the gradients of master weights; the strategy frees the model's gradients."""
        for parameter, master in zip(self.parameters, self.updated, strict=True):
            if master is not parameter:
                master.grad = None

    def cast(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Round the summed (and clipped) gradients to the parameters' type, and store them in `.grad`."""
        for parameter, gradient in zip(self.updated, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)

    def copy_back(self) -> None:
        """Copy updated master weights into the model."""
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.updated, strict=True):
                # Parameters that are float32 in the model are updated directly.
                if master is not parameter:
                    parameter.copy_(master)


def make_target(
    optimizer: "Optimizer | OptimizerFunction",
    parameters: Mapping[str, nn.Parameter],
    bf16_weights: Bf16Weights = "copied",
    seed: int = 0,
) -> UpdateTarget:
    """Return the target of an optimizer, or of the result of a function `named_parameters -> optimizer`.

    The function receives float32 master weights instead of bf16 and fp16 parameters. Unless `bf16_weights` is "copied",
    it receives windows (float32 copies that have data only during an update) instead of bf16 parameters.
    """
    originals = tuple(parameters.values())
    if isinstance(optimizer, Optimizer):
        _check_no_closure(optimizer)
    low = [parameter for parameter in originals if is_low_precision(parameter)]
    if isinstance(optimizer, Optimizer):
        _check_members(optimizer, parameters)
        return UpdateTarget(optimizer, "cast" if low else "direct", originals, originals)
    windows = None if bf16_weights == "copied" else Float32Windows(originals, way=bf16_weights, seed=seed)
    if windows is None:
        updated = tuple(nn.Parameter(p.detach().float()) if is_low_precision(p) else p for p in originals)
    else:
        updated = windows.updated
    named = dict(zip(parameters, updated, strict=True))
    created = optimizer(list(named.items()))
    if not isinstance(created, Optimizer):
        message = (
            f"optimizer={optimizer!r} returned {type(created).__name__}; a function given as optimizer must return a "
            "torch.optim.Optimizer, such as lambda named: torch.optim.AdamW(named, lr=1e-3)."
        )
        raise ParameterError(message)
    _check_no_closure(created)
    _check_members(created, named)
    update: Update = "direct" if not low else "master_weights" if bf16_weights == "copied" else bf16_weights
    return UpdateTarget(created, update, originals, updated, windows)


class LossScaler:
    """The gradient scaler for fp16, a no-op without fp16. With fp16 the loop waits for the device in each step.

    Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.2; implemented by `torch.amp.GradScaler`.
    """

    def __init__(self, precision: PrecisionName, target: UpdateTarget, device: torch.device) -> None:
        self.enabled = precision == "fp16"
        self._optimizer = target.optimizer
        self._stepped = True
        if not self.enabled:
            return
        assert target.update != "cast", "the composition table refuses it"
        self.scaler = torch.amp.GradScaler(device.type)
        # The scaler allocates its scale at its first use, and a rank without micro-batches would not use it.
        self.scaler.scale(torch.zeros((), device=device))
        # GradScaler does not report a skipped optimizer step, so a hook on the optimizer detects it.
        self._hook = target.optimizer.register_step_post_hook(self._record_step)

    @property
    def scale(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Function that scales a loss before its backward; the identity without fp16."""
        return self.scaler.scale if self.enabled else _unchanged

    def unscale(self) -> None:
        """Divide gradients by the scale, and check for overflow; called only if enabled."""
        self.scaler.unscale_(self._optimizer)

    def forget_gradients(self) -> None:
        """Reset the scaler after an error, because `GradScaler` refuses to unscale twice; keep the scale."""
        if self.enabled:
            self.scaler.update(self.scaler.get_scale())

    def unscaled(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a copy of a gradient divided by the scale, for inspection."""
        return gradient / self.scaler.get_scale() if self.enabled else gradient.clone()

    def step(self) -> bool:
        """Run the optimizer's step unless gradients have overflowed; return whether it ran; called only if enabled.

        The check is on gradients that are summed over ranks, so all ranks run or skip the step.
        """
        # The hook on the optimizer sets this to True if the scaler does not skip the step.
        self._stepped = False
        self.scaler.step(self._optimizer)
        self.scaler.update()
        if not self._stepped and self.scaler.get_scale() < _MIN_SCALE:
            message = (
                f"fp16 gradients still overflow at a loss scale of {self.scaler.get_scale():g} (initially 65536), so "
                "the loss or the model is not finite. Use precision='bf16' or 'fp32' to find the cause."
            )
            raise NonFiniteError(message, updated=False)
        return self._stepped

    def close(self) -> None:
        """Remove the hook from the optimizer."""
        if self.enabled:
            self._hook.remove()

    def _record_step(self, *_: object) -> None:
        self._stepped = True


def _unchanged(loss: torch.Tensor) -> torch.Tensor:
    return loss


def _check_no_closure(optimizer: Optimizer) -> None:
    """Refuse optimizers that compute the loss again during their step: the engine computes one gradient per batch."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is closure.empty
    has_two_steps = hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step")  # as in SAM
    if needs_closure or has_two_steps:
        message = (
            f"{type(optimizer).__name__} computes the gradient several times per step (by a closure, or two steps as "
            "in SAM). The engine computes one gradient per update. Use an optimizer that only reads .grad, or write "
            "your own loop with engine.gradients(batch), which returns the exact gradient of a batch at the current "
            "parameters without changing them."
        )
        raise CompositionError(message, code="several_gradients")


def _check_members(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # By identity, because `==` compares the values of tensors.
    member_ids = {id(parameter) for parameter in members}
    model_ids = {id(parameter) for parameter in parameters.values()}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in member_ids]
    if missing:
        message = (
            f"{len(missing)} of {len(parameters)} trainable parameters are in no parameter group of the optimizer: "
            f"{_some(missing)}. Add them, or freeze them with requires_grad_(False). If the model's parameters were "
            "replaced after the optimizer was built, pass a function named_parameters -> optimizer."
        )
        raise ParameterError(message)
    foreign = [tuple(p.shape) for p in members if id(p) not in model_ids and p.requires_grad]
    if foreign:
        message = (
            f"the optimizer has {len(foreign)} trainable parameters that are in no module of the engine, with shapes "
            f"{_some(map(str, foreign))}. Pass their module to the engine too (a dict of modules), or build the "
            "optimizer from model.parameters() only."
        )
        raise ParameterError(message)


def _some(names: Iterable[str], limit: int = 4) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
