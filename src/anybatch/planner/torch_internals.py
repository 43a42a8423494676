"""Private interfaces of torch that planning uses, each with its fallback or refusal; more are in `memory`.

All of it was seen to hold on the versions in `anybatch.core.torch_internals.SEEN`. Where a name is missing, a function
does without it if the plan stays the same, and raises `UnsupportedTorchError` if not.
The last argument of a function is where the name is looked for, so that a test can pass something that lacks it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import profiler_legacy

from anybatch.core.torch_internals import needed_for
from anybatch.memory.torch_internals import FakeTensor
from anybatch.parallel.torch_internals import Store

Schema = Any
"""The description of an operation, for which torch has no type in public: `is_mutable`, and `arguments` by name."""


def operation(name: str, of: Any = torch.ops.aten) -> Any:  # noqa: ANN401 (torch's type has no name in public)
    """Return one of torch's operations, such as "_local_scalar_dense.default".

    Raises:
        UnsupportedTorchError: there is none of that name, so that a program that calls it could not be followed.
    """
    with needed_for(f"Following the operation {name}"):
        return attrgetter(name)(of)


def known_operations(names: Sequence[str], of: Any = torch.ops.aten) -> frozenset[Any]:  # noqa: ANN401 (torch)
    """Return those of torch's operations that there are: what there is not, no program calls."""
    packets = ((getattr(of, name.partition(".")[0], None), name.partition(".")[2]) for name in names)
    return frozenset(getattr(packet, overload) for packet, overload in packets if hasattr(packet, overload))


def schema_of(func: Any) -> Schema:  # noqa: ANN401 (torch's type has no name in public)
    """Return the description of an operation: `OpOverload._schema`.

    Raises:
        UnsupportedTorchError: it has none, so what it writes to is not known.
    """
    with needed_for("Planning a step"):
        return func._schema


def registered_operations(key: str, of: Any = torch._C) -> set[str]:  # noqa: ANN401 (torch)
    """Return the names of the operations of aten with a kernel under a dispatch key, such as "AutocastCUDA".

    `torch._C._dispatch_get_registrations_for_dispatch_key`.

    Raises:
        UnsupportedTorchError: torch does not list them.
    """
    with needed_for("Planning autocast as on CUDA"):
        found = of._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in found if name.startswith("aten::")}


def without_autocast_kernels(of: Any = torch._C) -> AbstractContextManager[object]:  # noqa: ANN401 (torch)
    """Return a context in which an operation passes by what is registered for autocast on the CPU.

    `torch._C._ExcludeDispatchKeyGuard`; `torch.autocast(enabled=False)` would change more than this operation.

    Raises:
        UnsupportedTorchError: torch has no such context.
    """
    with needed_for("Planning autocast as on CUDA"):
        guard: AbstractContextManager[object] = of._ExcludeDispatchKeyGuard(
            of.DispatchKeySet(of.DispatchKey.AutocastCPU)
        )
    return guard


@contextmanager
def kernel_library(make: Callable[[], Any] = lambda: torch.library.Library("aten", "IMPL")) -> Iterator[Any]:
    """Make a library of kernels, and take back afterwards what was registered in it: `Library._destroy`.

    Raises:
        UnsupportedTorchError: it could not be taken back; nothing has been registered then.
    """
    library = make()
    with needed_for("Planning autocast as on CUDA"):
        # Looked up before anything is registered: what cannot be taken back must not be put there.
        take_back = library._destroy
    try:
        yield library
    finally:
        take_back()


def without_subclasses(of: Any = torch._C) -> AbstractContextManager[object]:  # noqa: ANN401 (torch)
    """Return a context in which tensors are plain ones: no function of torch asks their class.

    `torch._C.DisableTorchFunction`; where missing, `DisableTorchFunctionSubclass`, which leaves modes on.

    Raises:
        UnsupportedTorchError: there is neither.
    """
    kind = getattr(of, "DisableTorchFunction", None)
    with needed_for("Planning a step"):
        guard: AbstractContextManager[object] = (kind or of.DisableTorchFunctionSubclass)()
    return guard


def checkpointed(module: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    """Return a module that runs another one under activation checkpointing, with the same attributes to the outside.

    `torch.distributed.algorithms._checkpoint.checkpoint_wrapper`, which FSDP's users take too.

    Raises:
        UnsupportedTorchError: it is elsewhere.
    """
    with needed_for("Planning activation checkpointing"):
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # noqa: PLC0415

        wrapped: nn.Module = checkpoint_wrapper(module, **options)
    return wrapped


def is_checkpointed(module: nn.Module) -> bool:
    """Whether a module is one that `checkpointed` returns: it has `_checkpoint_wrapped_module`; where not, no."""
    return hasattr(module, "_checkpoint_wrapped_module")


def imagined_store() -> Store:
    """Return the store of a process group whose other ranks are imagined: backend "fake".

    The import registers the backend, and what its collectives do to tensors without data.

    Raises:
        UnsupportedTorchError: torch has no such backend.
    """
    with needed_for("Planning a step on several ranks"):
        from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

        store: Store = FakeStore()
    return store


def cuda_driver_number(of: Any = torch._C) -> int | None:  # noqa: ANN401 (torch)
    """Return the highest CUDA version that the driver knows, as 12040; None where it cannot be told.

    `torch._C._cuda_getDriverVersion`, which builds of torch without CUDA lack. It does not touch the device.
    """
    ask = getattr(of, "_cuda_getDriverVersion", None)
    return None if torch.version.cuda is None or ask is None else int(ask())


def cpu_allocations(run: Callable[[], object], of: Any = torch._C) -> list[int]:  # noqa: ANN401 (torch)
    """Return by how many bytes what torch's CPU allocator has handed out to this thread moves in a call, each time.

    `torch._C._autograd._enable_profiler_legacy`. The public profiler tells the same, and writes to the terminal.

    Raises:
        UnsupportedTorchError: torch has only the newer profiler.
    """
    with needed_for("Measuring the workspaces of this CPU's kernels"):
        begin, end = of._autograd._enable_profiler_legacy, of._autograd._disable_profiler_legacy
    begin(profiler_legacy.profile(profile_memory=True).config())
    try:
        result = run()
    finally:
        records = end()
    # Freed only after recording has ended, so that the last running sum is the size of the result.
    del result
    # Most events are no allocations, and have 0.
    return [size for record in records for event in record if (size := event.cpu_memory_usage())]


def fake_device_getter(of: type = FakeTensor) -> Callable[[Any], torch.device]:
    """Return a function that reads the device of a tensor without data: two thirds of all calls while planning.

    `FakeTensor._fake_device`, which is twice as fast as the property `fake_device` over it (2.12 and 2.13); where that
    is no property (2.11), the attribute itself.
    """
    is_property = isinstance(vars(of).get("fake_device"), property)
    return attrgetter("_fake_device" if is_property else "fake_device")


def saves_on_host(of: Any = torch._C) -> bool:  # noqa: ANN401 (torch)
    """Whether what is saved for a backward goes to the host now: `torch.autograd.graph.save_on_cpu` is entered.

    `torch._C._autograd._top_saved_tensors_default_hooks`; where it is missing, no.
    """
    top = getattr(of._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = None if top is None else top(False)  # noqa: FBT003 (torch's signature)
    return hooks is not None and "save_on_cpu" in getattr(hooks[0], "__qualname__", "")


# What tensors without data are made of directly, four times as fast as by running the operation. Each is None where
# torch lacks it; then `makes_fake_tensors` says no, and operations are run.
undispatched: Any = getattr(torch._C, "_DisableTorchDispatch", None)
subclass_of: Any = getattr(Tensor, "_make_subclass", None)
warn_of_data: Any = getattr(torch._C, "_set_warn_deprecated_on_mutable_data_ptr", None)
keys_of: Any = getattr(torch._C, "_dispatch_keys", None)
set_conjugate: Any = getattr(torch._C, "_set_conj", None)
set_negative: Any = getattr(torch._C, "_set_neg", None)


def makes_fake_tensors(parts: Sequence[Any] = ()) -> bool:
    """Whether torch has all that tensors without data are made of directly; an empty `parts` stands for all of it."""
    known = (undispatched, subclass_of, warn_of_data, keys_of, set_conjugate, set_negative)
    return all(part is not None for part in parts or known)
