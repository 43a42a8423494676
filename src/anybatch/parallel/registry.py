"""The strategies by name: the only list of them. A new one is a file beside this and a line in it."""

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
"""The classes that `Engine(strategy=name)` instantiates, by their full names: what FSDP2 needs of torch takes two
seconds to import, for which nobody else should wait. "auto" is not among them: it is one of these."""


def choose_strategy(strategy: "str | Strategy", world: World, *, comes_sharded: bool = False) -> Strategy:
    """Return the strategy of that name; "auto" is "single" on one process and "all_reduce" on several.

    For a model that its user has sharded, "auto" is "fsdp": nothing else takes it. What "auto" is where replicas do not
    fit into a device, `engine/strategy_choice.py` says.

    Args:
        strategy: a name, or a strategy, which is returned as it is.
        world: the ranks.
        comes_sharded: the user has called `fully_shard` on the model.

    Raises:
        UserError: an unknown name.
    """
    if not isinstance(strategy, str):
        return strategy
    name = strategy
    if name == "auto":
        name = "single" if world.num_processes == 1 else "all_reduce"
        if comes_sharded:
            name = "fsdp"
    if name not in STRATEGIES:
        message = f"{strategy=} must be 'auto', {', '.join(map(repr, STRATEGIES))}, or a strategy object."
        raise UserError(message)
    module, _, class_name = STRATEGIES[name].rpartition(".")
    return cast("Strategy", getattr(import_module(module), class_name)())
