"""Private interfaces of torch used for planning, each with a fallback or an error; see also `memory`.

Tested with the versions in `anybatch.core.torch_internals.SEEN`. If torch lacks a name, a function works without it if
the plan stays the same, and raises `UnsupportedTorchError` otherwise.
The last argument of a function is the object with the private name, so that tests can pass one that lacks it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler_legacy

from anybatch.core.torch_internals import needed_for
from anybatch.memory.torch_internals import FakeTensor
from anybatch.parallel.torch_internals import Store

Schema = Any
"""The schema of an operation, with `is_mutable` and `arguments`; torch has no public type for it."""


def operation(name: str, of: Any = torch.ops.aten) -> Any:  # noqa: ANN401 (torch has no public name for this type)
    """Return one of torch's operations, such as "_local_scalar_dense.default"."""
    with needed_for(f"Following the operation {name}"):
        return attrgetter(name)(of)


def schema_of(func: Any) -> Schema:  # noqa: ANN401 (torch has no public name for this type)
    """Return the schema of an operation, `OpOverload._schema`."""
    with needed_for("Planning a step"):
        return func._schema


def registered_operations(key: str, of: Any = torch._C) -> set[str]:  # noqa: ANN401 (torch)
    """Return the names of the operations of aten with a kernel under a dispatch key, such as "AutocastCUDA".

    `torch._C._dispatch_get_registrations_for_dispatch_key`.
    """
    with needed_for("Planning autocast as on CUDA"):
        found = of._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in found if name.startswith("aten::")}


def without_kernels(key: str, of: Any = torch._C) -> AbstractContextManager[object]:  # noqa: ANN401 (torch)
    """Return a context in which operations skip kernels of a dispatch key, such as "AutocastCPU".

    `torch._C._ExcludeDispatchKeyGuard`; `torch.autocast(enabled=False)` would affect other operations too.
    """
    with needed_for("Planning a step"):
        guard: AbstractContextManager[object] = of._ExcludeDispatchKeyGuard(
            of.DispatchKeySet(getattr(of.DispatchKey, key))
        )
    return guard


@contextmanager
def kernel_library(make: Callable[[], Any] = lambda: torch.library.Library("aten", "IMPL")) -> Iterator[Any]:
    """Yield a library of kernels and unregister them afterwards with `Library._destroy`."""
    library = make()
    with needed_for("Planning autocast as on CUDA"):
        # Look this up before any kernel is registered.
        unregister = library._destroy
    try:
        yield library
    finally:
        unregister()


def without_subclasses(of: Any = torch._C) -> AbstractContextManager[object]:  # noqa: ANN401 (torch)
    """Return a context in which torch ignores `__torch_function__` of tensor subclasses.

    `torch._C.DisableTorchFunction`, or else `DisableTorchFunctionSubclass`, which leaves modes on.
    """
    kind = getattr(of, "DisableTorchFunction", None)
    with needed_for("Planning a step"):
        guard: AbstractContextManager[object] = (kind or of.DisableTorchFunctionSubclass)()
    return guard


def checkpointed(module: nn.Module) -> nn.Module:
    """Return a module wrapped in activation checkpointing; the wrapper forwards attributes of the module.

    `torch.distributed.algorithms._checkpoint.checkpoint_wrapper`, also used with FSDP.
    """
    with needed_for("Planning activation checkpointing"):
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # noqa: PLC0415

        wrapped: nn.Module = checkpoint_wrapper(module)
    return wrapped


def is_checkpointed(module: nn.Module) -> bool:
    """Whether `checkpointed` has wrapped a module: it has the attribute `_checkpoint_wrapped_module`."""
    return hasattr(module, "_checkpoint_wrapped_module")


def fake_store() -> Store:
    """Return the store of a process group with the backend "fake".

    The import registers the backend and its collectives for fake tensors.
    """
    with needed_for("Planning a step on several ranks"):
        from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

        store: Store = FakeStore()
    return store


def fake_device_getter(of: type = FakeTensor) -> Callable[[Any], torch.device]:
    """Return a function that reads the device of a fake tensor; such reads are two thirds of all calls during planning.

    `FakeTensor._fake_device` is twice as fast as the property `fake_device` (torch 2.12 and 2.13); in torch 2.11
    `fake_device` is a plain attribute.
    """
    is_property = isinstance(vars(of).get("fake_device"), property)
    return attrgetter("_fake_device" if is_property else "fake_device")


def allocated_sizes(run: Callable[[], object], of: Any = torch._C) -> list[int]:  # noqa: ANN401 (torch)
    """Call a function, and return the bytes of each allocation of torch's CPU allocator in it, negative for frees.

    `torch._C._autograd._enable_profiler_legacy`; the public profiler writes to the terminal.
    """
    with needed_for("Measuring a step"):
        begin, end = of._autograd._enable_profiler_legacy, of._autograd._disable_profiler_legacy
    begin(profiler_legacy.profile(profile_memory=True).config())
    try:
        run()
    finally:
        records = end()
    return [size for record in records for event in record if (size := event.cpu_memory_usage())]


def undispatched(of: Any = torch._C) -> AbstractContextManager[object]:  # noqa: ANN401 (torch)
    """Return a context in which fake tensors are plain meta tensors: `torch._C._DisableTorchDispatch`."""
    with needed_for("Planning a step"):
        guard: AbstractContextManager[object] = of._DisableTorchDispatch()
    return guard
