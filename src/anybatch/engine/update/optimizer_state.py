"""The memory of an update is taken before the first step, because an update that fails half-way cannot be undone."""

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.engine.torch_internals import state_maker
from anybatch.engine.update.bf16_weights import Float32Windows
from anybatch.engine.update.precision import Target
from anybatch.engine.update.resident_tensors import ResidentMemory
from anybatch.errors import DoesNotFitError
from anybatch.memory.ledger import MemoryLedger
from anybatch.parallel.strategy import UpdateSharding
from anybatch.parallel.world import World


class OptimizerStateMemory:
    """Makes the optimizer's state and room for its step, once, before the first micro-batch.

    Otherwise the state appears in the first update, and a micro-batch that fitted in the first step does not in the
    second. What is made is bit for bit what the optimizer would make itself.

    Args:
        target: the optimizer and what it updates.
        world: the ranks, which fail together.
        resident: what stays from step to step, for the error.
        sharding: how the update is shared out over ranks; None if every rank makes all of it.
    """

    def __init__(
        self, target: Target, world: World, resident: ResidentMemory, sharding: UpdateSharding | None = None
    ) -> None:
        self._target = target
        self._sharding = sharding
        self._world = world
        self._resident = resident
        self._is_allocated = False
        self._made: list[nn.Parameter] = []

    def allocate(self) -> None:
        """Make state and room, unless that has been done.

        Raises:
            DoesNotFitError: on a rank without room; nothing has been changed.
            RankFailedError: on the others.
        """
        if not self._is_allocated:
            self._world.run_on_all_ranks(self._allocate)
            self._is_allocated = True

    def drop_unused(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take back the state of parameters that the first step has no gradient for, as the optimizer makes none."""
        if self._made:
            made = set(self._made)
            for parameter, gradient in zip(self._target.updated, gradients, strict=True):
                if gradient is None and parameter in made:
                    del self._target.optimizer.state[parameter]
            self._made = []

    def undo(self) -> None:
        """Take back what was made, if no update has used it yet: the first step has failed."""
        for parameter in self._made:
            del self._target.optimizer.state[parameter]
            self._is_allocated = False
        self._made = []

    def _allocate(self) -> None:
        try:
            windows = self._target.windows
            if windows is not None:
                self._allocate_in_pieces(windows)
                return
            with nullcontext() if self._sharding is None else self._sharding.alone():
                self._made = make_state(self._target.optimizer)
                if self._world.device.type != "cpu":  # a CPU's system promises memory that it may not have
                    reserve(update_bytes(self._target.optimizer).temporary, self._target.updated)
        except torch.OutOfMemoryError as error:
            self.undo()
            message = (
                "out of memory before the first step, when the optimizer's state and the room for its update were "
                f"made; nothing has been changed. {self._resident.remedy(in_update=True)} torch says: {error}"
            )
            raise DoesNotFitError(message, rank=self._world.process, phase="update") from error

    def _allocate_in_pieces(self, windows: Float32Windows) -> None:
        """Make the state of some parameters at a time, which is kept in less than it is made in."""
        optimizer, largest = self._target.optimizer, 0
        for piece in windows.pieces(optimizer):
            # Opened, so that state is laid out in memory as the weights are.
            with windows.opened(optimizer, piece):
                self._made += make_state(optimizer)
                windows.narrow_state(optimizer, piece)
                if self._world.device.type != "cpu":
                    # The windows, random bits, and the state in float32 while it is updated.
                    largest = max(largest, 4 * windows.num_bytes(piece) + update_bytes(optimizer).temporary)
        reserve(largest, self._target.updated)


def make_state(optimizer: Optimizer) -> list[nn.Parameter]:
    """Make the state that the optimizer would make in its first step; return the parameters it was made for.

    Only torch's own optimizers are known to make it in one place, and to leave everything else alone there. SGD makes
    its momentum of the first gradient, so there is nothing to make; others are left to themselves.
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
                parameter.grad = parameter.detach().new_zeros(()).expand_as(parameter)  # of the shape, without memory
        for group in optimizer.param_groups:
            make(group, *([] for _ in range(num_lists)))
    except BaseException:
        # Nothing stays of a state that was made for some parameters only: the error says that nothing has changed.
        for parameter in set(optimizer.state) - before:
            del optimizer.state[parameter]
        raise
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    found = set(optimizer.state) - before
    # Some optimizers look state up in a defaultdict, which leaves an empty entry.
    for parameter in found:
        if not optimizer.state[parameter]:  # it was only looked up
            del optimizer.state[parameter]
    return [parameter for parameter in parameters if parameter in found and parameter in optimizer.state]


@dataclass(frozen=True, slots=True)
class UpdateBytes:
    """Memory of an optimizer's update.

    Attributes:
        state: what stays from step to step.
        temporary: what a step takes and gives back.
    """

    state: int
    temporary: int


def update_bytes(optimizer: Optimizer) -> UpdateBytes:
    """Return the memory of an optimizer's update, from a step on parameters without data.

    An optimizer that cannot be run like that is taken to need two copies of its parameters, and one more in its step,
    as Adam does.
    """
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    groups = [
        {
            **group,
            "foreach": not is_fused and group.get("foreach") is not False,  # what None means on an accelerator
            "fused": False,  # no kernel is there for parameters without data
            "params": [_without_data(p) for p in group["params"] if p.requires_grad],
        }
        for group in optimizer.param_groups
    ]
    parameters = [parameter for group in groups for parameter in group["params"]]
    try:
        twin = type(optimizer)(groups)  # type: ignore[call-arg]
        twin.step()  # makes the state
        ledger = MemoryLedger()
        state = [v for s in twin.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        ledger.hold("optimizer", state)
        ledger.hold("weights", [*parameters, *(p.grad for p in parameters if p.grad is not None)])
        before = ledger.held_bytes
        with ledger:
            twin.step()
        # Fused kernels compute in place.
        return UpdateBytes(sum(tensor.nbytes for tensor in state), 0 if is_fused else ledger.peak_bytes - before)
    except (RuntimeError, TypeError, ValueError, AssertionError):
        copy = sum(parameter.numel() * parameter.itemsize for parameter in parameters)
        return UpdateBytes(2 * copy, 0 if is_fused else copy)


def reserve(num_bytes: int, like: Sequence[torch.Tensor]) -> None:
    """Take so much memory, in pieces such as an update takes, and give it back to torch's allocator.

    Raises:
        torch.OutOfMemoryError: there is not so much.
    """
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
