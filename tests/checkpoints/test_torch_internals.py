"""Private torch APIs for checkpoints: a state dict carries the versions of its layers."""

from collections import OrderedDict

import torch
from torch import nn

from anybatch.checkpoints.torch_internals import layer_versions, set_layer_versions


def test_versions_of_layers_go_along() -> None:
    """A state dict with versions loads like the original; without them BatchNorm lacks its counter."""
    layer = nn.BatchNorm1d(2)
    layer(torch.rand(3, 2))
    state = layer.state_dict()
    copy = OrderedDict(state)
    assert layer_versions(copy) is None
    set_layer_versions(copy, layer_versions(state))
    del copy["num_batches_tracked"]

    missing = nn.BatchNorm1d(2).load_state_dict(copy, strict=False).missing_keys
    without = nn.BatchNorm1d(2).load_state_dict(OrderedDict(copy), strict=False).missing_keys

    assert missing == ["num_batches_tracked"]
    assert without == []
