"""anybatch: name the effective batch size; any hardware trains it, exactly.

A name is imported when it is first used: `anybatch --help` need not wait for torch, and what has to be settled before
torch is imported can be.
"""

__version__ = "0.1.0"

import collections.abc  # modules only: what is imported by name would be one of the public names
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
    from anybatch.events.jsonl import JsonlLog
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
    "in_trial_run",
    "joint",
    "mean_over",
    "mean_over_samples",
    "mean_over_tokens",
    "plan",
    "samples",
    "shares",
    "sum_of",
    "sum_over_samples",
    "token_budget",
    "tokens",
]

_HOMES: collections.abc.Mapping[str, str] = types.MappingProxyType(
    {
        "BatchPlan": "anybatch.core.splitting",
        "Engine": "anybatch.engine.engine",
        "Evaluation": "anybatch.recipes.job",
        "Job": "anybatch.recipes.job",
        "JsonlLog": "anybatch.events.jsonl",
        "LossSum": "anybatch.core.loss",
        "Observer": "anybatch.core.records",
        "RunConfig": "anybatch.core.run_config",
        "Shards": "anybatch.data",
        "StepReport": "anybatch.core.records",
        "World": "anybatch.parallel.world",
        "advise": "anybatch.diagnostics.advise",
        "batches": "anybatch.data",
        "check": "anybatch.diagnostics.check",
        "counted": "anybatch.core.loss",
        "in_trial_run": "anybatch.engine.user_code",
        "joint": "anybatch.core.loss",
        "mean_over": "anybatch.core.loss",
        "mean_over_samples": "anybatch.core.loss",
        "mean_over_tokens": "anybatch.core.loss",
        "plan": "anybatch.recipes.planning.plan",
        "samples": "anybatch.core.loss",
        "shares": "anybatch.engine.shares",
        "sum_of": "anybatch.core.loss",
        "sum_over_samples": "anybatch.core.loss",
        "token_budget": "anybatch.core.token_budget",
        "tokens": "anybatch.core.loss",
    }
)


def __getattr__(name: str) -> typing.Any:  # noqa: ANN401 (of whatever type the name is)
    """Return a public name, from where it is defined."""
    if name not in _HOMES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    """Return the public names, those that have not been used yet included."""
    return sorted({*globals(), *__all__})
