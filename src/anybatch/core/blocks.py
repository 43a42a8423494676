"""Chapter 20: the repeated blocks of a model, such as the layers of a transformer."""

from dataclasses import dataclass

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Consecutive modules of one class.

    Attributes:
        parent: the module that contains them.
        names: their names in it.
        path: name of the parent in the model; empty if it is the model.
        kind: their class.
    """

    parent: nn.Module
    names: tuple[str, ...]
    path: str
    kind: type[nn.Module]

    @property
    def modules(self) -> list[nn.Module]:
        """Return the block modules, in order."""
        return [self.parent.get_submodule(name) for name in self.names]

    def __str__(self) -> str:
        """Return their location: `blocks.* (12 x Block)`."""
        return f"{self.path}{'.' * bool(self.path)}* ({len(self.names)} x {self.kind.__name__})"


def repeated_blocks(modules: nn.Module) -> tuple[Blocks, ...]:
    """Return the outermost runs of two or more modules of one class, each with child modules and parameters.

    Examples are the layers of a transformer and the stages of a residual network. Runs inside a block are not returned.
    """
    found: list[Blocks] = []
    inside: list[str] = []
    for path, parent in modules.named_modules():
        # Blocks within blocks belong to the outer blocks.
        if any(path == taken or path.startswith(f"{taken}.") for taken in inside):
            continue
        if not isinstance(parent, _CONTAINERS):
            continue
        # Each class once, in the order in which they appear.
        for kind in dict.fromkeys(type(child) for child in parent.children()):
            names = tuple(name for name, child in parent.named_children() if type(child) is kind)
            first = parent.get_submodule(names[0])
            # A single layer is too small to be a block.
            composite = any(True for _ in first.children()) and not isinstance(first, _CONTAINERS)
            if len(names) > 1 and composite and any(True for _ in first.parameters()):
                found.append(Blocks(parent, names, path, kind))
                inside += [f"{path}.{name}" if path else name for name in names]
    return tuple(found)
