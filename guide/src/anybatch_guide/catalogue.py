"""Every experiment there is, by name: one for each file of `experiments`."""

import importlib
import pkgutil
from typing import TYPE_CHECKING

from anybatch_guide import experiments as folder

if TYPE_CHECKING:  # it brings torch, which takes seconds, and the names of experiments do not need it
    from anybatch_guide.experiment import Experiment


def names() -> tuple[str, ...]:
    """Return the names of all experiments, sorted, without importing any."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(folder.__path__)))


def experiments() -> "dict[str, Experiment]":
    """Return all experiments, by their names, sorted."""
    return {name: importlib.import_module(f"{folder.__name__}.{name}").EXPERIMENT for name in names()}
