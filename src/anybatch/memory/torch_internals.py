"""Private interfaces of torch for watching memory; the planner and others above use them too.

All of it was seen to hold on the versions in `anybatch.core.torch_internals.SEEN`. There is nothing in public that sees
each operation, so where one of these names is missing, this module raises `UnsupportedTorchError` when it is imported.
Training needs it too: how much memory an optimizer takes for its first step is seen in this way.
"""

from anybatch.core.torch_internals import needed_for

with needed_for("Watching memory"):
    # Modes that see each operation, and tensors that are made of others, which such a mode must let pass.
    # Tensors without data.
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

    # Nested arguments and results of operations.
    from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = [
    "DataDependentOutputException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "is_traceable_wrapper_subclass_type",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
]
