"""The step to plan, its activation checkpointing, and its fake twin.

A fake twin is a deep copy in which every tensor has a shape and a type, but no data. Tensors that share memory share it
in the twin too, so tied weights stay tied. No data is copied and no user code runs.
"""

import copy
import dataclasses
import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from anybatch.core.loss import declared
from anybatch.core.tensors import repeated_blocks
from anybatch.core.torch_internals import storage_key
from anybatch.core.tree import Batch, count_samples, resize_samples
from anybatch.engine.arguments import TrainSpec
from anybatch.engine.user_code import Model
from anybatch.errors import CannotPlanError
from anybatch.parallel.strategy import Strategy
from anybatch.planner.cuda_emulation import Profile
from anybatch.planner.devices import Autocast, Device
from anybatch.planner.fake_tensor_cache import ResultCache
from anybatch.planner.torch_internals import checkpointed, without_subclasses


def as_module(model: Model) -> nn.Module:
    """Return a model, or a mapping of models, as one module."""
    return nn.ModuleDict(dict(model)) if isinstance(model, Mapping) else model


def checkpoint_blocks(model: Model) -> Model:
    """Wrap the repeated blocks of a model in activation checkpointing; return the model."""
    for blocks in repeated_blocks(as_module(model)):
        for name in blocks.names:
            setattr(blocks.parent, name, checkpointed(blocks.parent.get_submodule(name)))
    return model


ValueT = TypeVar("ValueT")
Mode = AbstractContextManager[object]
"""A `FakeTensorMode`."""


def build(factory: Callable[[], ValueT]) -> tuple[ValueT, str | None]:
    """Return the result of a factory on the meta device, or without it and with the reason if that fails."""
    # Initialisation draws random numbers, and a plan must not advance the user's generators.
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return factory(), None
        except Exception as error:  # noqa: BLE001 (the factory is called again and may raise its own error then)
            reason = f"{type(error).__name__}: {error}"
        return factory(), reason


def fake_twin(value: ValueT, mode: Mode) -> ValueT:
    """Return a deep copy of modules, optimizers or containers in which all tensors are fake CPU tensors.

    Objects passed in one call stay connected: the optimizer in `fake_twin((model, optimizer), mode)` updates the twin's
    parameters.
    """
    replacement = _Replacement(mode)
    try:
        with replacement:
            return copy.deepcopy(value, replacement.known_parameters(value))
    except CannotPlanError:
        raise
    except Exception as error:
        message = f"cannot plan this step: the model cannot be copied ({type(error).__name__}: {error})."
        raise CannotPlanError(message) from error


def fake_batch(sample: Batch, num_samples: int, mode: Mode) -> Batch:
    """Return a batch of `num_samples` fake samples with the shapes of `sample`; no data is read."""

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        shape = (num_samples, *tensor.shape[1:]) if tensor.dim() else ()
        last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)  # noqa: PLR2004 (NCHW)
        # With one channel a tensor has both layouts; treat it as contiguous.
        layout = torch.channels_last if last and not tensor.is_contiguous() else torch.contiguous_format
        with mode:
            return torch.empty(shape, dtype=tensor.dtype, device="cpu", memory_format=layout)

    return resize_samples(sample, num_samples, resize)


class _Replacement(TorchFunctionMode):
    """While entered, deep copies of tensors are fake twins."""

    def __init__(self, mode: Mode) -> None:
        super().__init__()
        self._mode = mode
        # Keep each storage alive, so that its key is not reused.
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 (torch's protocol)
        """Replace the functions that copy tensors and parameters."""
        del types
        if func is torch.Tensor.__deepcopy__:
            return self.copy_of(args[0])
        if func is torch.Tensor.clone:  # a parameter outside of any module clones its data
            return self.copy_of(args[0])
        return func(*args, **(kwargs or {}))

    def known_parameters(self, value: object) -> dict[int, Any]:
        """Return the twins of all module parameters in a structure, with their attributes, by id."""
        memo: dict[int, Any] = {}
        for module in _modules_in(value):
            for parameter in module.parameters():
                if id(parameter) not in memo:
                    twin = nn.Parameter(self.copy_of(parameter), requires_grad=parameter.requires_grad)
                    # `nn.Parameter` does not copy attributes set by the user.
                    twin.__dict__.update(parameter.__dict__)
                    memo[id(parameter)] = twin
        return memo

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the twin of a tensor, in new memory or in the twin of shared memory."""
        plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
        if not plain or tensor.is_quantized:
            message = (
                f"cannot plan this step: tensors of type {type(tensor).__name__} with layout {tensor.layout} are not "
                "supported."
            )
            raise CannotPlanError(message)
        size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype
        storage = tensor.untyped_storage()
        with without_subclasses(), self._mode, torch.no_grad():
            known = self._storages.get(storage_key(storage))
            if known is None:
                new = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
                # The usual case: the tensor fills its storage. A view of a larger storage needs that storage first.
                if new.untyped_storage().nbytes() == storage.nbytes() and not tensor.storage_offset():
                    self._storages[storage_key(storage)] = storage, new
                    return new
                new = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
                self._storages[storage_key(storage)] = known = storage, new
            shared = known[1].untyped_storage()
            empty = torch.empty(0, dtype=dtype, device="cpu")
            return empty.set_(shared, tensor.storage_offset(), size, stride)


def _modules_in(value: object) -> list[nn.Module]:
    """Return the modules in nested tuples, lists and mappings, and in attributes of other objects."""
    if isinstance(value, nn.Module):
        return [value]
    if isinstance(value, Mapping):
        return [module for item in value.values() for module in _modules_in(item)]
    if isinstance(value, tuple | list):
        return [module for item in value for module in _modules_in(item)]
    return [item for item in getattr(value, "__dict__", {}).values() if isinstance(item, nn.Module)]


def repeated(sample: Batch, num_samples: int) -> Batch:
    """Return a batch with the samples repeated in order."""

    def repeat(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim():
            return tensor
        return tensor[torch.arange(num_samples) % len(tensor)].contiguous()

    return resize_samples(sample, num_samples, repeat)


MAX_RUN_BYTES = 2**32
"""Maximum bytes of weights, times samples, of a step that runs with data while it is planned."""
NUM_MICRO_BATCHES = 2
"""Two micro-batches are enough: from the second on, gradients are already allocated."""
MakeTrainSpec = Callable[[], TrainSpec]
"""Each call creates a new model, and a new optimizer unless that is a function."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSpec:
    """A training step to plan."""

    train: TrainSpec | MakeTrainSpec  # the scheduler and the check of the loss are ignored
    sample: Batch  # a batch of at least one sample, as the model receives it; only shapes and types are used
    strategy: str | Callable[[], Strategy] = "auto"  # name of a strategy of `Engine`, or a function () -> strategy
    world_size: int = 1
    device_bytes: int | None = None  # memory of each rank's device
    device: Device | None = None  # the device, if it is known
    num_micro_batches: int = NUM_MICRO_BATCHES  # micro-batches of a rank in the traced steps
    input_samples: int | None = None  # number of samples whose inputs are in memory on a CPU
    called: Mapping[str, str] = field(default_factory=dict)  # name in this model -> name in the user's code, for hints
    profile: Profile = "cuda"  # device type whose allocations are planned, "cuda" or "cpu"
    cache: ResultCache = field(default_factory=ResultCache)  # results of operations on fake tensors
    workspaces: tuple[int, int] | None = None  # a micro-batch size, and bytes of workspaces that were measured for it
    make: MakeTrainSpec | None = None  # makes the step with data, to run it here if tensors without data do not suffice

    @property
    def autocast(self) -> Autocast:
        """The 16-bit format to propose: the device's, or bf16 for an unknown device."""
        return "bf16" if self.device is None else self.device.autocast

    @property
    def trained(self) -> TrainSpec:
        """The `TrainSpec` of a step that `built` has returned."""
        assert isinstance(self.train, TrainSpec), "the step has been built"
        return self.train

    def with_train(self, **changes: object) -> "StepSpec":
        """Return the step, which must be built, with changed fields of its `TrainSpec`."""
        train = dataclasses.replace(self.trained, **changes)  # type: ignore[arg-type]  # mypy does not know the fields
        return dataclasses.replace(self, train=train, make=None)


def samples_in_memory(spec: StepSpec, share: int | None) -> int | None:
    """Return the number of samples whose inputs are in memory simultaneously; None: only the traced micro-batches.

    If a loss counts items in the data, a CPU rank loads its whole share before the first micro-batch, since the divisor
    depends on it. An accelerator still receives one micro-batch at a time.
    """
    if spec.profile != "cpu":
        return None
    counts_data = declared(spec.trained.loss).needs_data_to_count
    return share if spec.input_samples is None and counts_data else spec.input_samples


def built(spec: StepSpec) -> tuple[StepSpec, str | None]:
    """Return the step with a model that has no data if possible, and the reason if the model needed real memory."""
    if isinstance(spec.train, TrainSpec):
        return spec, None
    # On the meta device a model of any size needs no memory, unless its code reads numbers.
    train, reason = build(spec.train)
    parameters = list(as_module(train.model).parameters())
    is_small = sum(parameter.nbytes for parameter in parameters) * count_samples(spec.sample) <= MAX_RUN_BYTES
    if not is_small or spec.world_size > 1:
        return dataclasses.replace(spec, train=train), reason
    new, has_data = spec.train, not all(parameter.is_meta for parameter in parameters)
    # A plan must not train the user's own weights.
    is_shared = has_data and any(map(operator.is_, parameters, as_module(new().model).parameters()))
    make = (lambda: copy.deepcopy(new())) if is_shared else new
    return dataclasses.replace(spec, train=train, make=make), reason
