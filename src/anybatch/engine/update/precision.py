"""Precision: autocast, the fp16 gradient scaler, and how gradients reach low-precision parameters."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core.dtypes import is_low_precision, widened
from anybatch.engine.update.bf16_weights import Bf16Weights, Float32Windows
from anybatch.errors import CompositionError, NonFiniteError, ParameterError, UserError
from anybatch.parallel.local_parts import local_part

PrecisionName = Literal["fp32", "bf16", "fp16"]
OptimizerFunction = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]
Update = Literal["direct", "master_weights", "cast", "split", "stochastic"]

# GradScaler halves the scale at each overflow: from 65536 it takes 27 in a row to come below this.
_SMALLEST_SCALE = 2.0**-10
_AUTOCAST: Mapping[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: PrecisionName, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Return what makes the autocast context of one forward.

    "fp32" runs the model in the types it has. FP8 is not offered.

    Raises:
        UserError: an unknown precision.
    """
    if precision not in _AUTOCAST:
        message = f"{precision=} must be one of {', '.join(map(repr, _AUTOCAST))} (FP8 is not supported)."
        raise UserError(message)
    dtype = _AUTOCAST[precision]
    if dtype is None:
        nothing = nullcontext()
        return lambda: nothing
    return lambda: torch.autocast(device.type, dtype)


@dataclass(frozen=True, slots=True)
class Target:
    """The parameters an optimizer updates, and how the model's gradients get there.

    Attributes:
        optimizer: the optimizer.
        update: "direct": it holds the parameters and float32 gradients; "master_weights": it holds float32 copies of
            low-precision parameters, copied back after each update; "cast": it holds low-precision parameters, and
            gradients are cast down once, after they have been summed in float32; "split", "stochastic": it holds
            `windows`, in which bf16 parameters are in float32 while they are updated.
        updated: what the optimizer holds, parameter by parameter.
        parameters: the model's parameters, in the same order.
        windows: of the parameters in bf16; None for every other update.
    """

    optimizer: Optimizer
    update: Update
    parameters: tuple[nn.Parameter, ...]
    updated: tuple[nn.Parameter, ...]
    windows: Float32Windows | None = None

    @property
    def beside(self) -> dict[int, torch.Tensor]:
        """What is kept of weights beside those of the model, by number: float32 copies, or their lower bits."""
        if self.windows is not None:
            return self.windows.missing
        pairs = enumerate(zip(self.updated, self.parameters, strict=True))
        return {number: updated for number, (updated, own) in pairs if updated is not own}

    def wide_weights(self) -> list[torch.Tensor]:
        """Return this rank's part of every weight, at its full precision: float32 copies in place of bf16 weights."""
        if self.windows is not None:
            return self.windows.wide_weights()
        return [widened(local_part(weight.detach())) for weight in self.updated]

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Put a state into the optimizer, which takes it in its parameters' type; keep it in bf16 where it was."""
        self.optimizer.load_state_dict(state)
        if self.windows is not None:
            self.windows.narrow_state(self.optimizer)

    def attach(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Give master weights the summed float32 gradients; the memory is shared."""
        if self.update == "master_weights":
            for master, gradient in zip(self.updated, gradients, strict=True):
                master.grad = gradient

    def in_groups(self, gradients: Sequence[torch.Tensor | None]) -> list[list[torch.Tensor]]:
        """Return the gradients that there are by parameter group of the optimizer."""
        known = dict(zip(map(id, self.updated), gradients, strict=True))
        groups = [[known.get(id(parameter)) for parameter in group["params"]] for group in self.optimizer.param_groups]
        return [[gradient for gradient in group if gradient is not None] for group in groups]

    def detach(self) -> None:
        """Free the gradients of master weights; those of the model belong to the strategy."""
        if self.update == "master_weights":
            for parameter, master in zip(self.parameters, self.updated, strict=True):
                if master is not parameter:
                    master.grad = None

    def cast(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Give low-precision parameters their summed (and clipped) gradients, rounded once."""
        if self.update == "cast":
            for parameter, gradient in zip(self.updated, gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.dtype)

    def copy_back(self) -> None:
        """Copy updated master weights into the model."""
        if self.update != "master_weights":
            return
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.updated, strict=True):
                # What was float32 already is updated where it is.
                if master is not parameter:
                    parameter.copy_(master)


def make_target(
    optimizer: "Optimizer | OptimizerFunction",
    parameters: Mapping[str, nn.Parameter],
    bf16_weights: Bf16Weights = "copied",
    seed: int = 0,
) -> Target:
    """Pair an optimizer, or a function `named_parameters -> optimizer`, with the trainable parameters.

    A function gets float32 master copies in the place of bf16 and fp16 parameters, or windows in the place of the
    copies.

    Args:
        optimizer: the optimizer, or what makes it.
        parameters: the model's, by name.
        bf16_weights: what there is beside bf16 parameters.
        seed: of random bits, where an update needs some.

    Raises:
        ParameterError: the optimizer holds other parameters than the model's trainable ones.
        CompositionError: the optimizer computes gradients several times in a step.
    """
    own = tuple(parameters.values())
    if isinstance(optimizer, Optimizer):
        _refuse_closures(optimizer)
    low = [parameter for parameter in own if is_low_precision(parameter)]
    if isinstance(optimizer, Optimizer):
        _check_members(optimizer, parameters)
        return Target(optimizer, "cast" if low else "direct", own, own)
    windows = None if bf16_weights == "copied" else Float32Windows(own, way=bf16_weights, seed=seed)
    if windows is None:
        updated = tuple(nn.Parameter(one.detach().float()) if is_low_precision(one) else one for one in own)
    else:
        updated = windows.updated
    named = dict(zip(parameters, updated, strict=True))
    made = optimizer(list(named.items()))
    if not isinstance(made, Optimizer):
        message = (
            f"optimizer={optimizer!r} returned {type(made).__name__}; a function given as optimizer must return a "
            "torch.optim.Optimizer, such as lambda named: torch.optim.AdamW(named, lr=1e-3)."
        )
        raise ParameterError(message)
    _refuse_closures(made)
    _check_members(made, named)
    update: Update = "direct" if not low else "master_weights" if bf16_weights == "copied" else bf16_weights
    return Target(made, update, own, updated, windows)


class LossScaler:
    """fp16's gradient scaler, or nothing. The one place where the loop has to wait for the device.

    Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.2; the machine is `torch.amp.GradScaler`.
    """

    def __init__(self, precision: PrecisionName, target: Target, device: torch.device) -> None:
        self.enabled = precision == "fp16"
        self._optimizer = target.optimizer
        self._stepped = True
        if not self.enabled:
            return
        assert target.update != "cast", "the composition table refuses it"
        self.scaler = torch.amp.GradScaler(device.type)
        self.scaler.scale(torch.zeros((), device=device))  # it is made on first use, and a rank may have no micro-batch
        # GradScaler does not say whether it has skipped the optimizer's step, and the optimizer's own hook does.
        self._hook = target.optimizer.register_step_post_hook(self._note_step)

    @property
    def scale(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Function that scales a loss before its backward; returns it as it is without fp16."""
        return self.scaler.scale if self.enabled else _unchanged

    def unscale(self) -> None:
        """Divide gradients by the scale, looking for overflow."""
        if self.enabled:
            self.scaler.unscale_(self._optimizer)

    def forget_gradients(self) -> None:
        """Forget unscaled gradients after an error, because `GradScaler` refuses to unscale twice; keep the scale."""
        if self.enabled:
            self.scaler.update(self.scaler.get_scale())

    def unscaled(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a copy of a gradient divided by the scale, for looking at; no update follows."""
        return gradient / self.scaler.get_scale() if self.enabled else gradient.clone()

    def step(self) -> bool:
        """Run the optimizer's step unless gradients have overflowed; return whether it ran.

        Gradients have been summed over ranks before they are looked at, so all ranks decide alike.
        """
        if not self.enabled:
            self._optimizer.step()
            return True
        # The optimizer's hook sets it again, if the scaler lets the optimizer step.
        self._stepped = False
        self.scaler.step(self._optimizer)
        self.scaler.update()
        if not self._stepped and self.scaler.get_scale() < _SMALLEST_SCALE:
            message = (
                f"fp16 gradients still overflow at a loss scale of {self.scaler.get_scale():g} (it began at 65536): "
                "the loss or the model itself is not finite. Use precision='bf16' or 'fp32' to see where."
            )
            raise NonFiniteError(message, updated=False)
        return self._stepped

    def close(self) -> None:
        """Remove the hook from the optimizer."""
        if self.enabled:
            self._hook.remove()

    def _note_step(self, *_: object) -> None:
        self._stepped = True


def _unchanged(loss: torch.Tensor) -> torch.Tensor:
    return loss


def _refuse_closures(optimizer: Optimizer) -> None:
    """Refuse what asks for the loss again in the middle of its step: the engine has one gradient per batch."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is closure.empty
    has_two_steps = hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step")  # as SAM's authors have it
    if needs_closure or has_two_steps:
        message = (
            f"{type(optimizer).__name__} computes the gradient several times in one step (a closure, or two steps as "
            "SAM has them), and the engine makes one update of one gradient. Use an optimizer that steps from .grad, "
            "or engine.gradients(batch) in a loop of your own, which gives the exact gradient of a batch at the "
            "present parameters and changes nothing."
        )
        raise CompositionError(message)


def _check_members(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # By identity, because `==` compares the values of tensors.
    given_ids = {id(parameter) for parameter in given}
    own_ids = {id(parameter) for parameter in parameters.values()}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in given_ids]
    if missing:
        message = (
            f"{len(missing)} of {len(parameters)} trainable parameters are in no parameter group of the optimizer: "
            f"{_some(missing)}. Add them, or freeze them with requires_grad_(False). (An optimizer built before the "
            "model's parameters were replaced holds the old ones; pass a function named_parameters -> optimizer then.)"
        )
        raise ParameterError(message)
    foreign = [tuple(p.shape) for p in given if id(p) not in own_ids and p.requires_grad]
    if foreign:
        message = (
            f"the optimizer holds {len(foreign)} trainable parameters that belong to no given module, with shapes "
            f"{_some(map(str, foreign))}. Give the engine their module too (a dict of modules), or build the optimizer "
            "over model.parameters() alone."
        )
        raise ParameterError(message)


def _some(names: Iterable[str], limit: int = 4) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
