"""Private interfaces of torch for recording memory; the planner and other packages above also use them.

All names were verified on the versions in `anybatch.core.torch_internals.SEEN`. No public interface reports every
operation, so if one of these names is missing, this module raises `UnsupportedTorchError` on import. Training needs
this module too, to measure the memory of an optimizer's first step.
"""

from functools import cache
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


__all__ = [
    "DataDependentOutputException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "is_traceable_wrapper_subclass_type",
    "is_view",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
]
