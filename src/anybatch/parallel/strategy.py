"""The interface of strategies (`Engine(strategy=...)`), and their lookup by name."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from anybatch.core.compatibility import STRATEGY_NAMES, Feature
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.splitting import SplitConstraints
from anybatch.core.torch_internals import dense_values
from anybatch.core.tree import Batch
from anybatch.errors import UserError
from anybatch.parallel.world import World


class ReductionNotifier(Protocol):
    """Sends records of gradient reductions to its observers; strategies do not call it if it has none."""

    @property
    def observers(self) -> Sequence[object]:
        """The observers; a run may add observers between steps."""
        ...

    def reduction(self, bucket: int, num_bytes: int, dtype: torch.dtype, collective: str = "all_reduce") -> None:
        """Report the start of a reduction: the bucket, the bytes that this rank sends, their dtype, the collective."""
        ...


@dataclass(frozen=True, slots=True)
class Turn:
    """The position of a micro-batch among all micro-batches of its rank in a step.

    `backward_only`: its forward ran earlier, and other backwards may have run since.
    """

    first: bool
    last: bool
    backward_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Abilities and requirements of a strategy; the engine reads these and never checks the strategy's type.

    Attributes:
        name: the strategy's name in reports.
        feature: its row in the table of combinations (docs/composition.md); None if it has no row there.
        lockstep: every rank must run the same number of micro-batches.
        replaces_parameters: `prepare` replaces parameters, so a function must build the optimizer afterwards.
        float32_accumulation: gradients of bf16 and fp16 parameters can be accumulated and reduced in float32.
        sparse_gradients: parameters may have sparse gradients.
        replicas: every rank holds all weights, and makes the same updates.
        moves_modules: `prepare` moves modules to the device, piece by piece: the whole model may not fit there.
        prepares_in_forward: the forward of the last micro-batch prepares the reduction. So this forward must run
            immediately before its backward, and use every parameter that its backward will reach.
        compresses: gradients are rounded to bf16 when sent to other ranks.
        splits_micro_batches: a forward sees only some of a micro-batch's samples, in a copy of the model.
    """

    name: str
    feature: Feature | None = None
    lockstep: bool = False
    replaces_parameters: bool = False
    float32_accumulation: bool = True
    sparse_gradients: bool = False
    replicas: bool = False
    moves_modules: bool = False
    prepares_in_forward: bool = False
    compresses: bool = False
    splits_micro_batches: bool = False

    @property
    def constraints(self) -> SplitConstraints:
        """The strategy's requirements for splitting an effective batch into micro-batches."""
        return SplitConstraints(lockstep=self.lockstep, allows_empty_ranks=self.lockstep)


def total_norm(gradients: Sequence[torch.Tensor]) -> Float[Tensor, ""]:
    """Return the 2-norm over all gradients together, on the device, in the gradients' own precision."""
    # A sparse gradient has the norm of its stored values if no index is repeated, which `Single` ensures.
    return get_total_norm([dense_values(gradient) if gradient.is_sparse else gradient for gradient in gradients])


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """The layout of parameters, gradients and optimizer state over ranks. The default is for replicas.

    A checkpoint of whole tensors is written with `gather` and read with `scatter`; a checkpoint in parts is written
    with `local` and `offset`, and read with `with_local`. So checkpoints do not depend on the strategy.

    Attributes:
        in_parts: this rank has only a part of some tensors.
        local: the part of a tensor on this rank, sharing its memory.
        gather: the whole tensor, on every rank; a collective for sharded tensors.
        scatter: (whole tensor, sharded tensor) -> the first, sharded like the second; no collective.
        offset: start of the local part in the whole tensor, along each axis; None if this rank has the whole tensor.
        with_local: (local part, sharded tensor) -> a tensor with that local part, sharded like the second.
        norm: the 2-norm of all gradients of this layout, over all ranks, as a plain scalar (0-dim) tensor.
    """

    in_parts: bool = False
    local: Callable[[Tensor], Tensor] = lambda tensor: tensor
    gather: Callable[[Tensor], Tensor] = lambda tensor: tensor
    scatter: Callable[[Tensor, Tensor], Tensor] = lambda whole, _: whole
    offset: Callable[[Tensor], tuple[int, ...] | None] = lambda _: None
    with_local: Callable[[Tensor, Tensor], Tensor] = lambda part, _: part
    norm: Callable[[Sequence[Tensor]], Float[Tensor, ""]] = total_norm


class UpdateSharding(Protocol):
    """An optimizer step that is sharded over ranks."""

    def only_own_parameters(self) -> AbstractContextManager[None]:
        """Return the context in which the optimizer sees, and creates state for, only this rank's parameters."""
        ...

    def exchange(self) -> None:
        """Send the parameters that each rank has updated to all other ranks."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's whole state, at least on rank 0. All ranks call it."""
        ...

    def state_dict_in_parts(self) -> dict[str, Any]:
        """Return the optimizer's state, with meta tensors (no data) for other ranks' tensors. All ranks call it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A model that a strategy has prepared.

    Attributes:
        parameters: the trainable parameters by name; the optimizer is built over these.
        call: runs `function(model, batch)` with the user's own model, inside the strategy's wrapper, if any.
        backward_inputs: the leaves in which a backward accumulates gradients; None: all leaves that it reaches.
        gradient_leaves: function () -> for each parameter the leaf that receives its whole gradient in a backward; None
            if these are the parameters themselves.
        differed: names of tensors that differed between ranks and are equal now.
        gradient_buffers: memory in which gradients accumulate, apart from `.grad`.
        layout: layout of the parameters over ranks, for saving, loading, norms and averages.
        shard_update: function (optimizer, its parameters) -> the sharding of its step over ranks; None: every rank
            updates all parameters.
        decisions: the strategy's decisions by topic, each as a clause with its reason.
        abort: function (the sums that `finish_gradients` will get) -> function that a rank calls if it runs out of
            memory. It takes part in every collective that the other ranks have started or will start for this
            effective batch, in their order, so that `finish_gradients` raises `StepAbortedError` there. If it is too
            late, it raises `CannotRedoError`, whose message is a clause. None: the strategy cannot abort a step.
    """

    parameters: Mapping[str, nn.Parameter]
    call: Callable[[LossFunction, Batch], Any]
    backward_inputs: tuple[torch.Tensor, ...] | None = None
    gradient_leaves: Callable[[], Sequence[torch.Tensor]] | None = None
    differed: tuple[str, ...] = ()
    gradient_buffers: tuple[torch.Tensor, ...] = ()
    layout: ParameterLayout = ParameterLayout()
    shard_update: Callable[[Optimizer, Sequence[nn.Parameter]], UpdateSharding] | None = None
    decisions: Mapping[str, str] = field(default_factory=dict)
    abort: "Callable[[Float[Tensor, ' sums']], Callable[[], None]] | None" = None

    @property
    def leaves(self) -> Sequence[Tensor]:
        """For each parameter the leaf of the autograd graph: the parameter itself, or its gathered form."""
        return list(self.parameters.values()) if self.gradient_leaves is None else self.gradient_leaves()


class Strategy(Protocol):
    """Sums gradients over micro-batches and ranks. It never divides: the engine does, once."""

    @property
    def capabilities(self) -> Capabilities:
        """The strategy's abilities and requirements."""
        ...

    def prepare(self, modules: nn.Module, model: object, world: World, notifier: ReductionNotifier) -> Prepared:
        """Register the trainable parameters, and ensure that they are equal on all ranks.

        `modules` is everything that trains, on this rank's device; `model` is the user's object, the argument of loss
        functions. Raise a `ReplicaError` if parameters differ between ranks and the strategy's `initial` is "verify".
        """
        ...

    def micro_batch(self, turn: Turn) -> AbstractContextManager[object]:
        """Return the context of one forward and backward. A reduction may only start in the last micro-batch."""
        ...

    def finish_gradients(
        self, report_sums: Float[Tensor, " sums"]
    ) -> tuple[list[torch.Tensor | None], Float[Tensor, " sums"]]:
        """Wait, once, for all sums over ranks at the end of an effective batch.

        `report_sums` is a small tensor on the device: this rank's sums for the report (losses, counts). Return each
        parameter's gradient summed over all ranks, None if no rank used the parameter; and the report's sums.

        Raises:
            StepAbortedError: a rank has aborted the step, see `Prepared.abort`. No collective is pending.
            StepsDifferError: ranks disagree about the step. No collective is pending.
        """
        ...

    def place_gradients(self) -> None:
        """Prepare for the first micro-batch of an effective batch; existing contents of `.grad` do not count."""
        ...

    def clear_gradients(self) -> None:
        """Clear all gradients, also partial sums, and set every `.grad` to None."""
        ...

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of a small tensor on the device, without waiting for the device."""
        ...

    def close(self) -> None:
        """Remove every hook from the model."""
        ...


def caller_of(model: object) -> Callable[[LossFunction, Batch], Any]:
    """Return a function that runs a loss function with the user's own model, without a wrapper."""

    def call_model(function: LossFunction, batch: Batch) -> Any:  # noqa: ANN401 (the loss's result)
        return function(model, batch)

    return call_model


def trainable(modules: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients by name; tied parameters once, under their first name."""
    return {name: parameter for name, parameter in modules.named_parameters() if parameter.requires_grad}


def choose_strategy(strategy: "str | Strategy", world: World, *, already_sharded: bool = False) -> Strategy:
    """Return the strategy of that name, or a given strategy; "auto" is "single" on one process, else "all_reduce".

    For a model that the user has sharded, "auto" is "fsdp", the only strategy for it. This function ignores memory:
    `engine/strategy_choice.py` does not pass "auto" if replicas may not fit on a device.
    """
    if not isinstance(strategy, str):
        return strategy
    name = strategy
    if name == "auto":
        name = "single" if world.size == 1 else "all_reduce"
        if already_sharded:
            name = "fsdp"
    if name not in STRATEGY_NAMES:
        message = f"{strategy=} must be 'auto', {', '.join(map(repr, STRATEGY_NAMES))}, or a strategy object."
        raise UserError(message)
    # Each strategy has a file with its name, imported when it is used: importing FSDP2 takes two seconds.
    kinds = vars(import_module(f"anybatch.parallel.{name}")).values()
    named = (kind for kind in kinds if getattr(getattr(kind, "capabilities", None), "name", None) == name)
    return cast("Callable[[], Strategy]", next(named))()


class LossCaller(nn.Module):
    """A module around everything that trains, whose forward runs any function of the user's model.

    All calls in the function, `model(x)` or `model.encode(x)`, take part in the wrapper's forward and backward. If the
    function received the wrapper, `wrapper.module.encode` would train with unreduced gradients.
    """

    def __init__(self, modules: nn.Module, model: object) -> None:
        super().__init__()
        self.modules_to_train = modules
        self._model = (model,)  # in a tuple, so that a module is not registered twice

    def forward(self, function: Callable[[object], Any]) -> Any:  # noqa: ANN401 (the loss's result)
        """Return the function's result. The function has its batch already, so wrappers do not move the tensors."""
        return function(self._model[0])
