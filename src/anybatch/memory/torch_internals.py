"""Private interfaces of torch for watching memory; the planner and others above use them too.

All of it was seen to hold on the versions in `anybatch.core.torch_internals.SEEN`. There is nothing in public that sees
each operation, so where one of these names is missing, this module raises `UnsupportedTorchError` when it is imported.
Training needs it too: how much memory an optimizer takes for its first step is seen in this way.
"""

from typing import Any

import torch

from anybatch.core.torch_internals import needed_for

with needed_for("Watching memory"):
    # Modes that see each operation, and tensors that are made of others, which such a mode must let pass.
    # Tensors without data.
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

    # Nested arguments and results of operations.
    from torch.utils._pytree import tree_leaves, tree_map, tree_map_only


def is_view(func: Any) -> bool:  # noqa: ANN401 (torch's type has no name in public)
    """Return whether an operation returns a view of an argument and writes nothing: `OpOverload._schema`.

    Raises:
        UnsupportedTorchError: it has no description, so that what it allocates is not known.
    """
    with needed_for("Watching memory"):
        schema = func._schema
    aliases = [result.alias_info for result in schema.returns]
    # `lift_fresh` is how memory that no operation has made is announced.
    is_announcement = func is torch.ops.aten.lift_fresh.default
    return not is_announcement and any(one is not None and not one.is_write for one in aliases)


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
