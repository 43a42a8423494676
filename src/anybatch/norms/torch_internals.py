"""Private interfaces of torch that norms use, each with its fallback or refusal; shared ones are in `core`.

All of it was seen to hold on the versions in `anybatch.core.torch_internals.SEEN`.
The last argument of a function is where the name is looked for, so that a test can pass something that lacks it.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

import torch.utils.checkpoint
from torch import nn

from anybatch.core.torch_internals import InstanceNormBase, lacking

Contexts = Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]
"""Makes the contexts in which a checkpointed block runs: in the forward, and again in the backward."""


def checkpointed_forward(
    module: nn.Module,
    contexts: Contexts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    of: Any = torch.utils.checkpoint,  # noqa: ANN401 (torch)
) -> Generator[None, None, None]:
    """Return a generator around a checkpointed forward: advance it once, run the forward, and advance it to its end.

    `torch.utils.checkpoint._checkpoint_without_reentrant_generator`, which `checkpoint(use_reentrant=False)` runs; with
    the random state kept, and the other options as `checkpoint` has them by default.

    Args:
        module: what is run, and run again in the backward.
        contexts: the contexts for both.
        args: of the forward.
        kwargs: of the forward.
        of: has the function.

    Raises:
        UnsupportedTorchError: there is no such function, or it takes other arguments.
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
    """Return the axes of a single sample as an InstanceNorm layer takes it: channels and positions.

    `InstanceNorm._get_no_batch_dim`; where missing, what the public classes say.

    Raises:
        UnsupportedTorchError: it is missing, and the layer is none of torch's own.
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
