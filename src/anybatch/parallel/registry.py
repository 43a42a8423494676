"""The strategies by name: the only list of them. A new strategy is one file in this folder and one line here."""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import cast

from anybatch.errors import UserError
from anybatch.parallel.strategy import Strategy
from anybatch.parallel.world import World

STRATEGIES: Mapping[str, str] = MappingProxyType(
    {
        "single": "anybatch.parallel.single.Single",
        "all_reduce": "anybatch.parallel.all_reduce.AllReduce",
        "ddp": "anybatch.parallel.ddp.DDP",
        "zero1": "anybatch.parallel.zero1.Zero1",
        "fsdp": "anybatch.parallel.fsdp.FSDP",
        "data_parallel": "anybatch.parallel.data_parallel.DataParallel",
    }
)
"""The classes of `Engine(strategy=name)` by full name, because importing FSDP2 takes two seconds.

"auto" is not listed: it resolves to one of these.
"""


def choose_strategy(strategy: "str | Strategy", world: World, *, already_sharded: bool = False) -> Strategy:
    """Return the strategy of that name, or a given strategy; "auto" is "single" on one process, else "all_reduce".

    For a model that the user has sharded, "auto" is "fsdp", the only strategy for it. `engine/strategy_choice.py`
    resolves "auto" if replicas do not fit on a device.

    Raises:
        UserError: an unknown name.
    """
    if not isinstance(strategy, str):
        return strategy
    name = strategy
    if name == "auto":
        name = "single" if world.num_processes == 1 else "all_reduce"
        if already_sharded:
            name = "fsdp"
    if name not in STRATEGIES:
        message = f"{strategy=} must be 'auto', {', '.join(map(repr, STRATEGIES))}, or a strategy object."
        raise UserError(message)
    module, _, class_name = STRATEGIES[name].rpartition(".")
    return cast("Strategy", getattr(import_module(module), class_name)())
