"""anybatch: train at the batch size you choose, on any hardware, with the exact gradient.

A name is imported when it is first used, so that `anybatch --help` does not wait for torch, and the command line can
set environment variables before torch is imported.
"""

__version__ = "0.1.0"

import collections.abc  # modules only: a name imported with `from` would become a public name of anybatch
import importlib
import types
import typing

if typing.TYPE_CHECKING:
    from anybatch.core.loss import (
        LossSum,
        counted,
        joint,
        mean_over,
        mean_over_samples,
        mean_over_tokens,
        samples,
        sum_of,
        sum_over_samples,
        tokens,
    )
    from anybatch.core.records import Observer, StepReport
    from anybatch.core.run_config import RunConfig
    from anybatch.core.splitting import BatchPlan
    from anybatch.core.token_budget import token_budget
    from anybatch.data import Shards, batches
    from anybatch.diagnostics.advise import advise
    from anybatch.diagnostics.check import check
    from anybatch.engine.engine import Engine
    from anybatch.engine.shares import shares
    from anybatch.engine.user_code import in_trial_run
    from anybatch.events.jsonl import JsonlLog, record
    from anybatch.integrations import exact
    from anybatch.integrations.accelerate import windows
    from anybatch.parallel.world import World
    from anybatch.recipes.job import Evaluation, Job
    from anybatch.recipes.planning.plan import plan

__all__ = [
    "BatchPlan",
    "Engine",
    "Evaluation",
    "Job",
    "JsonlLog",
    "LossSum",
    "Observer",
    "RunConfig",
    "Shards",
    "StepReport",
    "World",
    "advise",
    "batches",
    "check",
    "counted",
    "exact",
    "in_trial_run",
    "joint",
    "mean_over",
    "mean_over_samples",
    "mean_over_tokens",
    "plan",
    "record",
    "samples",
    "shares",
    "sum_of",
    "sum_over_samples",
    "token_budget",
    "tokens",
    "windows",
]

_HOMES: collections.abc.Mapping[str, str] = types.MappingProxyType(
    {
        "BatchPlan": "anybatch.core.splitting",
        "Engine": "anybatch.engine.engine",
        "Evaluation": "anybatch.recipes.job",
        "Job": "anybatch.recipes.job",
        "JsonlLog": "anybatch.events.jsonl",
        "Observer": "anybatch.core.records",
        "RunConfig": "anybatch.core.run_config",
        "Shards": "anybatch.data",
        "StepReport": "anybatch.core.records",
        "World": "anybatch.parallel.world",
        "advise": "anybatch.diagnostics.advise",
        "batches": "anybatch.data",
        "check": "anybatch.diagnostics.check",
        "exact": "anybatch.integrations",
        "in_trial_run": "anybatch.engine.user_code",
        "plan": "anybatch.recipes.planning.plan",
        "record": "anybatch.events.jsonl",
        "shares": "anybatch.engine.shares",
        "token_budget": "anybatch.core.token_budget",
        "windows": "anybatch.integrations.accelerate",
    }
)
"""The module that defines each public name; names that are missing here are in `_LOSSES`."""
_LOSSES = "anybatch.core.loss"


def __getattr__(name: str) -> typing.Any:  # noqa: ANN401 (the type of the requested name)
    """Import a public name from the module that defines it, when the name is first used."""
    if name not in __all__:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value = globals()[name] = getattr(importlib.import_module(_HOMES.get(name, _LOSSES)), name)
    return value


def __dir__() -> list[str]:
    """Return all public names, including those that have not been imported yet."""
    return sorted({*globals(), *__all__})
