"""One process and a replica of the model on each device: torch's legacy `nn.DataParallel`, for comparison.

Every micro-batch is cut by samples, the model is replicated, each replica runs its part in a thread, outputs are
gathered on the first device, where the loss is computed, and gradients are summed there. New replicas are made in each
call, threads compete for Python's lock, and the first device holds outputs and loss too: `ddp` and `all_reduce`, with a
process for each device, are faster. It exists for users of `nn.DataParallel`, and to be measured.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anybatch.core.compatibility import Feature
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.torch_internals import BatchNormBase, dense_values
from anybatch.core.tree import Batch, count_samples, tensors_of
from anybatch.core.whole_numbers import checked_int
from anybatch.errors import DataError, ParameterError, UserError, warn_user
from anybatch.parallel.replica_calls import SURE, CallCutter, CutCall, Owned, address
from anybatch.parallel.replica_threads import ThreadedReplicas
from anybatch.parallel.single import Single
from anybatch.parallel.strategy import Capabilities, Prepared, ReductionObserver, Turn
from anybatch.parallel.torch_internals import drop_engine_hooks, without_hooks
from anybatch.parallel.world import World

_ON_CPU = 2
"""Default number of replicas on a CPU."""
_SMALL_CALLS = 16
"""Number of micro-batches too small to be cut, as in trial runs, before a warning."""


class DataParallel:
    """Replicas in threads of one process, for comparison: torch's `nn.DataParallel` on CUDA, its scheme on a CPU.

    The loss function is called once for each micro-batch, with a copy of the model that shares everything with it but
    the call: `model(x)` runs in replicas, and the loss sees the outputs of the whole micro-batch. So the gradient
    equals a single device's for any loss. `model.encode(x)` and other methods run on the first replica, unless they
    call the model themselves; if nothing else runs, a warning follows. `nn.DataParallel` does the same with
    `wrapper.module.encode`.

    Args:
        replicas: number of replicas. None: all CUDA devices; 2 on a CPU.

    Raises:
        UserError: `replicas` is not a whole number of at least 1.
    """

    capabilities = Capabilities(
        name="data_parallel", feature=Feature.DATA_PARALLEL, sparse_gradients=True, splits_micro_batches=True
    )

    def __init__(self, *, replicas: int | None = None) -> None:
        self._replicas = None if replicas is None else checked_int("replicas", replicas)
        self._sums = Single()
        self._parameters: list[nn.Parameter] = []
        self._stand_ins: Mapping[str, _StandIn] = {}
        self._is_single = True
        self._calls = _Calls()
        self._quiet_calls = _SMALL_CALLS

    def prepare(
        self, modules: nn.Module, model: object, world: World, on_reduction: ReductionObserver | None
    ) -> Prepared:
        """Register the parameters, and build the stand-in for the model.

        Raises:
            UserError: more replicas than devices, or devices of another kind.
            ParameterError: a module cannot be replicated.
        """
        num_replicas = self._num_replicas(world.device)
        _refuse_scripts(modules)
        prepared = self._sums.prepare(modules, model, world, on_reduction)
        self._parameters = parameters = list(prepared.parameters.values())
        self._is_single = isinstance(model, nn.Module)
        named = {"model": model} if self._is_single else cast("Mapping[str, nn.Module]", model)
        self._stand_ins = {
            name: _StandIn(module, _scheme(module, parameters, world.device, num_replicas), num_replicas, self._calls)
            for name, module in cast("Mapping[str, nn.Module]", named).items()
        }
        where = "in threads on the CPU" if world.device.type == "cpu" else "by nn.DataParallel"
        said = (
            f"{num_replicas}, {where}: for comparison. New ones are made in each call, and outputs, loss and update "
            "are the first one's; strategy='ddp' under torchrun has a process for each device"
        )
        decisions = {"replicas": said}
        if any(isinstance(module, BatchNormBase) and module.training for module in modules.modules()):
            decisions["batch norm"] = (
                "where layers are in training mode (norms='freeze' ends that) each replica normalises its samples of a "
                "micro-batch by their own statistics, and running statistics are of what the first replica has seen"
            )
        return replace(prepared, call=self._call, decisions=decisions)

    def micro_batch(self, turn: Turn) -> AbstractContextManager[object]:
        """Like `Single`: the backward has summed over replicas already."""
        return self._sums.micro_batch(turn)

    def finish_gradients(
        self, numbers: Float[Tensor, " numbers"]
    ) -> tuple[list[torch.Tensor | None], Float[Tensor, " numbers"]]:
        """Return the gradients accumulated in this process."""
        gradients, numbers = self._sums.finish_gradients(numbers)
        schemes = [one.scheme for one in self._stand_ins.values() if isinstance(one.scheme, _OnDevices)]
        if not schemes:
            return gradients, numbers
        used = set().union(*(one.used for one in schemes))
        return [
            # Torch gives unused parameters zeros, which weight decay would move; a single device gives None.
            None if g is not None and id(p) not in used and not dense_values(g).any() else g
            for p, g in zip(self._parameters, gradients, strict=True)
        ], numbers

    def place_gradients(self) -> None:
        """Like `Single`; nothing has been used."""
        for stand_in in self._stand_ins.values():
            if isinstance(stand_in.scheme, _OnDevices):
                stand_in.scheme.used.clear()
        self._sums.place_gradients()

    def clear_gradients(self) -> None:
        """Like `Single`."""
        self._sums.clear_gradients()

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the numbers: one process is its own sum."""
        return numbers

    def close(self) -> None:
        """Drop the stand-in for the model."""
        self._sums.close()
        self._stand_ins = {}

    def _call(self, function: LossFunction, batch: Batch) -> Any:  # noqa: ANN401 (the loss's result)
        self._calls.begin(batch)
        made = {name: stand_in.make() for name, stand_in in self._stand_ins.items()}
        try:
            return function(made["model"] if self._is_single else made, batch)
        finally:
            for name, stand_in in self._stand_ins.items():
                stand_in.take_back(made[name])
            self._calls.owned = frozenset()
            if self._quiet_calls and self._calls.num_samples > 1:
                self._warn_if_replicas_idle()

    def _warn_if_replicas_idle(self) -> None:
        """Warn once if the first calls of the loss function leave all replicas but the first idle."""
        is_in_use = self._calls.num_cut or all(stand_in.scheme is None for stand_in in self._stand_ins.values())
        small = self._calls.num_samples < SURE and self._quiet_calls > 1
        self._quiet_calls = self._quiet_calls - 1 if small and not is_in_use else 0
        if is_in_use or small:
            return
        why = self._calls.why or "the loss function calls methods or parts of the model, and not the model itself"
        warn_user(
            f"strategy 'data_parallel' ran a micro-batch of {self._calls.num_samples} samples on the first replica "
            f"alone: {why}. The gradient is right, and the other replicas are idle. Call model(...) with tensors of "
            "the micro-batch, whose first axis is the sample, or use strategy='ddp' (torchrun), which has methods take "
            "part."
        )

    def _num_replicas(self, device: torch.device) -> int:
        if device.type == "cpu":
            return self._replicas or _ON_CPU
        if device.type != "cuda":
            message = (
                f"strategy 'data_parallel' has replicas on CUDA devices or in threads on a CPU, and the model is on "
                f"{str(device)!r}. Use strategy='single'."
            )
            raise UserError(message)
        there = torch.cuda.device_count() - (device.index or 0)
        if (self._replicas or there) > there:
            message = f"replicas={self._replicas} must be at most {there}, the number of CUDA devices from {device} on."
            raise UserError(message)
        return self._replicas or there


@dataclass(slots=True)
class _Calls:
    """The model calls within one call of the loss function.

    Attributes:
        num_samples: of the micro-batch; 0 if they cannot be counted.
        owned: its tensors.
        num_cut: calls of the model that were cut.
        why: why one was not, a clause; empty if none was made.
    """

    num_samples: int = 0
    owned: Owned = frozenset()
    num_cut: int = 0
    why: str = ""

    def begin(self, batch: Batch) -> None:
        """Record a new micro-batch."""
        self.num_cut, self.why = 0, ""
        self.owned = frozenset(address(tensor) for tensor in tensors_of(batch) if tensor.layout is torch.strided)
        try:
            self.num_samples = count_samples(batch)
        except DataError:  # such as for a loss across samples, whose batch is not cut
            self.num_samples = 0


class _StandIn:
    """Builds the stand-in for a module while the loss function runs: only its call differs."""

    def __init__(
        self, module: nn.Module, scheme: Callable[[CutCall], Any] | None, num_replicas: int, calls: _Calls
    ) -> None:
        self._module = module
        self.scheme = scheme
        self._cutter = CallCutter(num_replicas)
        self._calls = calls

    def make(self) -> nn.Module:
        """Return the stand-in, with the module's class, parts, parameters and attributes."""
        if self.scheme is None:
            return self._module
        stand_in = without_hooks(self._module)
        vars(stand_in)["forward"] = self._forward
        return stand_in

    def take_back(self, stand_in: nn.Module) -> None:
        """Copy attributes that the loss function has set back to the module."""
        if stand_in is self._module:
            return
        own = vars(self._module)
        for name, value in vars(stand_in).items():
            if name != "forward" and "_hooks" not in name and value is not own.get(name, self):
                own[name] = value

    def _forward(self, *positional: Any, **named: Any) -> Any:  # noqa: ANN401 (the model's)
        calls = self._calls
        if calls.num_samples <= 1:
            return self._module(*positional, **named)
        kind = (self._module.training, torch.is_grad_enabled())
        cut = self._cutter.cut((positional, named), kind, calls.num_samples, calls.owned)
        if isinstance(cut, str):
            calls.why = cut
            return self._module(*positional, **named)
        calls.num_cut += 1
        assert self.scheme is not None
        return self.scheme(cut)


def _scheme(
    module: nn.Module, parameters: Sequence[nn.Parameter], device: torch.device, num_replicas: int
) -> Callable[[CutCall], Any] | None:
    """Return the function that runs a call in parts; None for one replica."""
    if num_replicas == 1:
        return None
    if device.type == "cpu":
        return ThreadedReplicas(module, parameters)
    first = device.index or 0
    return _OnDevices(module, range(first, first + num_replicas)).run


class _OnDevices(nn.DataParallel[nn.Module]):
    """Torch's `nn.DataParallel`, which here cuts by samples and joins like the replicas on a CPU."""

    def __init__(self, module: nn.Module, devices: Sequence[int]) -> None:
        super().__init__(module, list(devices))
        self.used: set[int] = set()
        self._call: CutCall | None = None

    def run(self, call: CutCall) -> Any:  # noqa: ANN401 (the model's)
        """Return the result of the whole call."""
        own, *others = [torch.cuda.default_generators[device] for device in self.device_ids]
        for number, generator in enumerate(others, 1):
            # Each device has a generator, and the engine seeds only the first device's.
            generator.manual_seed((own.initial_seed() + number * _ODD) % 2**63)
            generator.set_offset(own.get_offset())
        self._call = call
        call.form.draws = False
        try:
            return self(*call.arguments[0], **call.arguments[1])
        finally:
            self._call = None

    def replicate(self, module: nn.Module, device_ids: Sequence[int | torch.device]) -> list[nn.Module]:
        """Record the parameters that replicas use: torch gives unused ones a gradient of zeros."""
        replicas = super().replicate(module, device_ids)
        for replica in replicas[1:]:
            drop_engine_hooks(replica)
        for replica in replicas:
            for original, copy in zip(module.modules(), replica.modules(), strict=True):
                for name, parameter in original.named_parameters(recurse=False, remove_duplicate=False):
                    if (tensor := getattr(copy, name)).requires_grad:
                        tensor.register_hook(partial(self._note, id(parameter)))
        return replicas

    def _note(self, parameter: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self.used.add(parameter)

    def scatter(self, inputs: object, kwargs: object, device_ids: Sequence[int | torch.device]) -> Any:  # noqa: ANN401 (torch's own)
        del inputs, kwargs
        assert self._call is not None
        numbers = range(len(self._call.ranges))
        parts = [self._call.part(n, _mover(device)) for n, device in zip(numbers, device_ids, strict=False)]
        return tuple(part[0] for part in parts), tuple(part[1] for part in parts)

    def gather(self, outputs: Sequence[Any], output_device: int | torch.device) -> Any:  # noqa: ANN401 (torch's own)
        assert self._call is not None
        return self._call.join(outputs, lambda rows: torch.cat([one.to(output_device) for one in rows]))


def _mover(device: int | torch.device) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda own, _: own.to(device, non_blocking=True)


_ODD = 0x9E3779B97F4A7C15
"""Spreads consecutive seeds: 2**64 divided by the golden ratio."""


def _refuse_scripts(modules: nn.Module) -> None:
    for name, module in modules.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            message = (
                f"module {name!r} is a ScriptModule, of which strategy 'data_parallel' cannot make replicas. Give the "
                "module that was scripted, or use strategy='single'."
            )
            raise ParameterError(message)
