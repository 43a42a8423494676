"""The strategies by name: the only list of them. A new one is a file beside this and a line in it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from anybatch.errors import UserError
from anybatch.parallel.all_reduce import AllReduce
from anybatch.parallel.ddp import DDP
from anybatch.parallel.single import Single
from anybatch.parallel.strategy import Strategy
from anybatch.parallel.world import World

STRATEGIES: Mapping[str, Callable[[], Strategy]] = MappingProxyType(
    {
        "single": Single,
        "all_reduce": AllReduce,
        "ddp": DDP,
    }
)
"""The classes that `Engine(strategy=name)` instantiates. "auto" is not among them: it is one of these."""


def choose_strategy(strategy: "str | Strategy", world: World) -> Strategy:
    """Return the strategy of that name; "auto" is "single" on one rank and "all_reduce" on several.

    Args:
        strategy: a name, or a strategy, which is returned as it is.
        world: the ranks.

    Raises:
        UserError: an unknown name.
    """
    if not isinstance(strategy, str):
        return strategy
    name = strategy
    if name == "auto":
        name = "single" if world.size == 1 else "all_reduce"
    if name not in STRATEGIES:
        message = f"{strategy=} must be 'auto', {', '.join(map(repr, STRATEGIES))}, or a strategy object."
        raise UserError(message)
    return STRATEGIES[name]()
