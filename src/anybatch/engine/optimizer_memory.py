"""Memory of an update: allocate it before the first step, since an update that fails midway cannot be undone."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core.torch_internals import state_maker
from anybatch.core.units import in_bytes
from anybatch.engine.bf16_weights import Float32Windows
from anybatch.engine.notifier import TensorsByCategory, num_bytes_of
from anybatch.engine.precision import UpdateTarget
from anybatch.engine.schedule import WeightAverage
from anybatch.errors import DoesNotFitError
from anybatch.parallel.gradient_buckets import gradient_bytes
from anybatch.parallel.strategy import Prepared, UpdateSharding
from anybatch.parallel.world import World

if TYPE_CHECKING:
    from anybatch.memory.trace import Category


def resident_tensors(
    modules: nn.Module, prepared: Prepared, target: UpdateTarget, average: WeightAverage | None
) -> TensorsByCategory:
    """Return the engine's current tensors without the batch, by category.

    "weights" includes frozen weights; "optimizer" has the optimizer's state, master weights and averaged weights.
    Tensors may share memory; see `num_bytes_of`.
    """
    local = prepared.layout.local
    weights = list(modules.parameters())
    extra_weights = tuple(target.extra_weights.values())
    states = itertools.chain.from_iterable(state.values() for state in target.optimizer.state.values())
    averaged = () if average is None else average.weights.values()
    gradients = (parameter.grad for parameter in (*weights, *target.updated) if parameter.grad is not None)
    state = (value for value in states if isinstance(value, torch.Tensor))
    by_category: dict[Category, Iterable[torch.Tensor]] = {
        "weights": weights,
        "buffers": modules.buffers(),
        "gradients": (*prepared.gradient_buffers, *gradients),
        "optimizer": (*extra_weights, *state, *averaged),
    }
    return {category: [local(tensor) for tensor in tensors] for category, tensors in by_category.items()}


@dataclass(frozen=True, slots=True)
class ResidentMemory:
    """Bytes of the tensors that stay in memory between steps, computed in each call."""

    tensors: Callable[[], TensorsByCategory]
    target: UpdateTarget
    precision: str

    def num_bytes(self) -> dict[str, int]:
        """Return the bytes of each kind of tensor; for gradients, the bytes that a step will need."""
        tensors = self.tensors()
        num_bytes = {
            "weights": num_bytes_of(tensors["weights"]),
            "gradients": gradient_bytes(self.target.parameters),
            "optimizer state": num_bytes_of(tensors["optimizer"]),
            "buffers": num_bytes_of(tensors["buffers"]),
        }
        return {kind: num for kind, num in num_bytes.items() if num}

    def remedy(self, *, in_update: bool = False) -> str:
        """Return the memory that a step needs in addition to activations, and ways to reduce it, as sentences."""
        num_bytes = self.num_bytes()
        listed = ", ".join(f"{kind} {in_bytes(num)}" for kind, num in num_bytes.items())
        ideas = ["activation checkpointing", "shorter or smaller samples", "a smaller model, or a part of it frozen"]
        if self.precision == "fp32":
            ideas.insert(0, "precision='bf16'")
        state, weights = num_bytes.get("optimizer state", 0), num_bytes.get("weights", 0)
        # The state of SGD with momentum is as large as the weights, Adam's is twice as large.
        if state > 1.5 * weights:
            ideas.append("an optimizer with less state (this one has " + in_bytes(state) + ")")
        if in_update and getattr(self.target.optimizer, "defaults", {}).get("fused") is None:
            ideas.append("fused=True in the optimizer, which needs no copies in its step")
        return f"In addition to activations a step needs: {listed}. To reduce memory: {'; '.join(ideas)}."


def prepare_for_training(optimizer: Optimizer) -> None:
    """Put an optimizer that has modes into its training mode."""
    if _has_modes(optimizer):
        optimizer.train()  # type: ignore[attr-defined]


@contextmanager
def evaluation_weights(optimizer: Optimizer) -> Iterator[None]:
    """Switch an optimizer that has modes to its evaluation weights; a no-op for other optimizers.

    Schedule-Free (Defazio et al., "The Road Less Scheduled", 2024) trains one set of weights and evaluates an average
    of them. Its implementation switches between both with the optimizer's `train()` and `eval()`.
    """
    if not _has_modes(optimizer):
        yield
        return
    optimizer.eval()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        optimizer.train()  # type: ignore[attr-defined]


def _has_modes(optimizer: Optimizer) -> bool:
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


@dataclass(eq=False)
class OptimizerStateMemory:
    """Allocates the optimizer's state and temporary memory once, before the first micro-batch.

    Otherwise the first update would allocate the state, and a micro-batch that fits in the first step might not fit in
    the second. The state is bit for bit the state that the optimizer would create.
    """

    target: UpdateTarget
    world: World
    resident: ResidentMemory
    sharding: UpdateSharding | None
    is_allocated: bool = field(default=False, init=False)
    unused: list[nn.Parameter] = field(default_factory=list, init=False)  # parameters whose state no update has used

    def allocate(self) -> None:
        """Allocate the memory, unless that is already done."""
        if not self.is_allocated:
            self.world.run_on_all_ranks(self._allocate)
            self.is_allocated = True

    def drop_unused(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Drop the state of parameters without a gradient in the first step, for which the optimizer creates none."""
        unused = set(self.unused)
        for parameter, gradient in zip(self.target.updated, gradients, strict=True):
            if gradient is None and parameter in unused:
                del self.target.optimizer.state[parameter]
        self.unused = []

    def undo(self) -> None:
        """Drop state that no update has used yet, after the first step failed."""
        for parameter in self.unused:
            del self.target.optimizer.state[parameter]
            self.is_allocated = False
        self.unused = []

    def _allocate(self) -> None:
        try:
            windows = self.target.windows
            if windows is not None:
                self._allocate_in_pieces(windows)
                return
            with nullcontext() if self.sharding is None else self.sharding.only_own_parameters():
                self.unused = make_state(self.target.optimizer)
                if self.world.device.type != "cpu":  # on CPU, allocations may succeed without enough memory
                    reserve(update_bytes(self.target.optimizer).temporary, self.target.updated)
        except torch.OutOfMemoryError as error:
            self.undo()
            message = (
                "out of memory before the first step, when the optimizer's state and temporary memory were allocated. "
                f"Nothing has changed. {self.resident.remedy(in_update=True)} torch says: {error}"
            )
            raise DoesNotFitError(message, rank=self.world.rank, phase="update") from error

    def _allocate_in_pieces(self, windows: Float32Windows) -> None:
        """Create the state for a few parameters at a time, because it is created in float32 and then made smaller."""
        optimizer, largest = self.target.optimizer, 0
        for piece in windows.pieces(optimizer):
            # With open windows (float32 copies of the weights), so that state has the memory layout of the weights.
            with windows.opened(optimizer, piece):
                self.unused += make_state(optimizer)
                windows.narrow_state(optimizer, piece)
                if self.world.device.type != "cpu":
                    # The windows, random bits, and the state in float32 during the update.
                    largest = max(largest, 4 * windows.num_bytes(piece) + update_bytes(optimizer).temporary)
        reserve(largest, self.target.updated)


def make_state(optimizer: Optimizer) -> list[nn.Parameter]:
    """Create the state that the optimizer would create in its first step, and return the parameters that have state.

    Only torch's optimizers have a function for this that changes nothing else; for other optimizers, nothing is
    created. SGD computes its momentum from the first gradient, so it has no state yet.
    """
    make = state_maker(optimizer)
    if make is None:
        return []
    num_lists = len(inspect.signature(make).parameters) - 1
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before, gradients = set(optimizer.state), [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = parameter.detach().new_zeros(()).expand_as(parameter)  # the shape without its memory
        for group in optimizer.param_groups:
            make(group, *([] for _ in range(num_lists)))
    except BaseException:
        # Drop a partial state: the error promises that nothing has changed.
        for parameter in set(optimizer.state) - before:
            del optimizer.state[parameter]
        raise
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    added = set(optimizer.state) - before
    # Some optimizers look up a parameter in the defaultdict, which adds an empty entry.
    for parameter in added:
        if not optimizer.state[parameter]:
            del optimizer.state[parameter]
    return [parameter for parameter in parameters if parameter in added and parameter in optimizer.state]


@dataclass(frozen=True, slots=True)
class UpdateBytes:
    """Bytes of an optimizer's state, and of the temporary tensors of its step."""

    state: int
    temporary: int


def update_bytes(optimizer: Optimizer) -> UpdateBytes:
    """Return the memory of an optimizer's update, measured by a step on meta tensors.

    An optimizer that cannot run on meta tensors is assumed to need as much as Adam: state of twice the size of its
    parameters, and temporary tensors of their size.
    """
    from anybatch.memory.ledger import MemoryLedger  # noqa: PLC0415 (nothing is reserved on a CPU)

    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    groups = [
        {
            **group,
            "foreach": not is_fused and group.get("foreach") is not False,  # on an accelerator, None means True
            "fused": False,  # meta tensors have no fused kernel
            "params": [_without_data(p) for p in group["params"] if p.requires_grad],
        }
        for group in optimizer.param_groups
    ]
    parameters = [parameter for group in groups for parameter in group["params"]]
    try:
        twin = type(optimizer)(groups)  # type: ignore[call-arg]
        twin.step()  # creates the state
        ledger = MemoryLedger()
        state = [v for s in twin.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        ledger.categorize("optimizer", state)
        ledger.categorize("weights", [*parameters, *(p.grad for p in parameters if p.grad is not None)])
        before = ledger.held_bytes
        with ledger:
            twin.step()
        # Fused kernels compute in place.
        return UpdateBytes(sum(tensor.nbytes for tensor in state), 0 if is_fused else ledger.peak_bytes - before)
    except (RuntimeError, TypeError, ValueError, AssertionError):
        copy = sum(parameter.numel() * parameter.itemsize for parameter in parameters)
        return UpdateBytes(2 * copy, 0 if is_fused else copy)


def reserve(num_bytes: int, like: Sequence[torch.Tensor]) -> None:
    """Allocate `num_bytes` in tensors of the sizes of `like`, and free them, so that torch's allocator caches them."""
    pieces: list[torch.Tensor] = []
    while num_bytes > 0 and like:
        for tensor in like:
            pieces.append(torch.empty_like(tensor, requires_grad=False))
            num_bytes -= tensor.numel() * tensor.itemsize
            if num_bytes <= 0:
                break


def _without_data(parameter: nn.Parameter) -> nn.Parameter:
    twin = nn.Parameter(torch.empty_like(parameter, device="meta"))
    twin.grad = torch.empty_like(twin)
    return twin
