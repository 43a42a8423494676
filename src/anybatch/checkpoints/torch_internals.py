"""Private interfaces of torch that checkpoints use. Seen on the versions in `anybatch.core.torch_internals.SEEN`."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any


def layer_versions(state: Mapping[Any, Any]) -> Any:  # noqa: ANN401 (nested dicts, as torch makes them)
    """Return the versions of the layers of a module's state dict, by which it is loaded: `OrderedDict._metadata`.

    None where there are none; then layers load the state as if it were of their first version.
    """
    return getattr(state, "_metadata", None)


def set_layer_versions(state: OrderedDict[Any, Any], versions: object) -> None:
    """Give a state dict the versions of its layers back, where `Module.load_state_dict` looks for them."""
    vars(state)["_metadata"] = versions
