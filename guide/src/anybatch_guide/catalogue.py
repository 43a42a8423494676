"""All experiments by name: from the files in `experiments`, and one for each claim."""

import importlib
import pkgutil
from operator import attrgetter

from anybatch_guide import experiments as folder
from anybatch_guide.claims.catalogue import CLAIMS
from anybatch_guide.claims.claim import experiment_of
from anybatch_guide.experiment import Experiment


def experiments() -> dict[str, Experiment]:
    """Return all experiments by name, sorted."""
    modules = [
        importlib.import_module(f"{folder.__name__}.{module.name}") for module in pkgutil.iter_modules(folder.__path__)
    ]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Experiment)]
    all_experiments = [*found, *map(experiment_of, CLAIMS.values())]
    return {experiment.name: experiment for experiment in sorted(all_experiments, key=attrgetter("name"))}
