"""Private interfaces of torch for recording memory; the planner and other packages above also use them.

All names were verified on the versions in `anybatch.core.torch_internals.SEEN`. No public interface reports every
operation, so if one of these names is missing, this module raises `UnsupportedTorchError` on import. Training needs
this module too, to measure the memory of an optimizer's first step.
"""

from functools import cache
from itertools import dropwhile
from traceback import walk_stack
from typing import Any

import torch

from anybatch.core.torch_internals import needed_for

with needed_for("Watching memory"):
    # A mode that intercepts each operation, wrapper tensors, which it must pass on, and fake tensors.
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

    # Nested arguments and results of operations.
    from torch.utils._pytree import tree_leaves, tree_map, tree_map_only


@cache
def is_view(func: Any) -> bool:  # noqa: ANN401 (torch has no public name for this type)
    """Return whether an operation returns a view of an argument and writes nothing: `OpOverload._schema`."""
    with needed_for("Watching memory"):
        schema = func._schema
    aliases = [result.alias_info for result in schema.returns]
    # `lift_fresh` is declared as a view, but returns memory that no other operation has allocated.
    is_new = func is torch.ops.aten.lift_fresh.default
    return not is_new and any(alias is not None and not alias.is_write for alias in aliases)


_OWNED = (4, 2)
"""How often a mode sees a tensor and its storage used that only autograd's C++ code holds, in torch 2.13."""


def is_overwritten(tensor: torch.Tensor) -> bool:
    """Return whether autograd would overwrite a tensor that it adds to, if no mode watched it.

    It does if it alone holds the tensor, except under a mode (`isTensorSubclassLike`) and in second derivatives.
    """
    node = torch._C._current_autograd_node()
    # The formulas of linalg add their own tensors out of place.
    if torch.is_grad_enabled() or node is None or any(part in node.name() for part in ("BackwardBackward", "Linalg")):
        return False
    # With other counts in another version, a shared tensor of a real step might look like an owned one.
    if not isinstance(tensor, FakeTensor) and not torch.__version__.startswith("2.13."):
        return False
    frames = ((frame.f_globals.get("__name__", ""), frame.f_code.co_name) for frame, _ in walk_stack(None))
    outside = dropwhile(lambda row: row[1] != "__torch_dispatch__", frames)
    callers = (name for module, name in outside if not module.startswith(("torch._dynamo", "torch._compile")))
    next(callers, None)
    uses = tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
    # Autograd runs in the thread that calls `backward`, or in its own threads.
    return next(callers, "_engine_run_backward") == "_engine_run_backward" and uses == _OWNED


__all__ = ["DataDependentOutputException", "FakeTensor", "FakeTensorMode", "TorchDispatchMode", "is_overwritten"]
__all__ += ["is_traceable_wrapper_subclass_type", "is_view", "tree_leaves", "tree_map", "tree_map_only"]
