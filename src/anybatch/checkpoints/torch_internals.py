"""Private interfaces of torch used by checkpoints. Tested on the versions in `anybatch.core.torch_internals.SEEN`."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any


def layer_versions(state: Mapping[Any, Any]) -> Any:  # noqa: ANN401 (nested dicts, as torch makes them)
    """Return the layer versions in a module's state dict, `OrderedDict._metadata`; None if missing.

    Without versions, layers load the state as their first version.
    """
    return getattr(state, "_metadata", None)


def set_layer_versions(state: OrderedDict[Any, Any], versions: object) -> None:
    """Restore the layer versions of a state dict for `Module.load_state_dict`."""
    vars(state)["_metadata"] = versions
