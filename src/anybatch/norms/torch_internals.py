"""Private interfaces of torch for norms, each with its fallback or refusal; shared ones are in `core`.

All names were verified on the versions in `anybatch.core.torch_internals.SEEN`. The last argument of a function is the
module that is searched for the name, so that tests can pass one that lacks it.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

import torch.utils.checkpoint
from torch import nn

from anybatch.core.torch_internals import InstanceNormBase, lacking

Contexts = Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]
"""Makes the contexts of a checkpointed block: for the forward, and for the recomputation in the backward."""


def checkpointed_forward(
    module: nn.Module,
    contexts: Contexts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    of: Any = torch.utils.checkpoint,  # noqa: ANN401 (torch)
) -> Generator[None, None, None]:
    """Return a generator around a checkpointed forward: advance it once, run the forward, and advance it to its end.

    `torch.utils.checkpoint._checkpoint_without_reentrant_generator`, which `checkpoint(use_reentrant=False)` runs; with
    the random state preserved, and `checkpoint`'s defaults for the other options. `module` runs again in the backward.
    """
    # In torch's order: preserve_rng_state, context_fn, determinism_check, debug, early_stop.
    options = (True, contexts, "default", False, True)
    try:
        running: Generator[None, None, None] = of._checkpoint_without_reentrant_generator(
            module, *options, *args, **kwargs
        )
    except (AttributeError, TypeError) as missing:
        purpose = "Exact(method='checkpoint')"
        raise lacking(purpose, missing) from missing
    return running


def num_axes_unbatched(layer: nn.Module) -> int:
    """Return the number of axes of a single sample for an InstanceNorm layer: channels and positions.

    `InstanceNorm._get_no_batch_dim`; if missing, the values of the public classes, and an error for other classes.
    """
    try:
        assert isinstance(layer, InstanceNormBase)
        return int(layer._get_no_batch_dim())
    except AttributeError as missing:
        known = {nn.InstanceNorm1d: 2, nn.InstanceNorm2d: 3, nn.InstanceNorm3d: 4}
        found = next((axes for kind, axes in known.items() if isinstance(layer, kind)), None)
        if found is None:
            purpose = f"Pooling the statistics of a {type(layer).__name__}"
            raise lacking(purpose, missing) from missing
        return found
