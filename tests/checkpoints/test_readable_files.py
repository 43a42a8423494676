"""A checkpoint can be read without anybatch, and without running code in it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from anybatch.checkpoints import save
from anybatch.checkpoints.tensors import STANDARD_DTYPES, stored_tensors
from tests.checkpoints.exactly import bytes_of, exactly
from tests.checkpoints.faulty_disk import FaultyDisk

TENSORS = {
    str(dtype): torch.arange(24, dtype=torch.uint8).repeat(dtype.itemsize).view(torch.uint8).view(dtype).reshape(2, -1)
    for dtype in STANDARD_DTYPES
    if dtype is not torch.bool
} | {
    "flags": torch.tensor([True, False]),
    "number": torch.tensor(1.5),
    "empty": torch.zeros(0, 3),
    "turned": torch.rand(2, 3).t(),
}


def test_plain_json_and_safetensors_read_it(tmp_path: Path) -> None:
    """A checkpoint consists of JSON and safetensors files that other software can read completely."""
    state = {"tensors": TENSORS, "lr": 0.1, "betas": (0.9, 0.999), "best": float("inf"), "name": "größer"}
    path = save(tmp_path, 12, state, disk=FaultyDisk()).path
    body = json.loads((path / "state.json").read_text(encoding="utf-8"))
    tensors = load_file(path / "tensors.safetensors")

    assert sorted(file.name for file in path.iterdir()) == ["digests.json", "state.json", "tensors.safetensors"]
    assert body["format"] == "anybatch checkpoint"
    assert (body["version"], body["step"]) == (1, 12)
    assert body["state"]["lr"] == 0.1
    assert body["state"]["betas"] == {"$tuple": [0.9, 0.999]}
    assert body["state"]["best"] == {"$float": "inf 7ff0000000000000"}
    assert body["state"]["name"] == "größer"
    assert body["state"]["tensors"]["flags"] == {"$tensor": "tensors.flags"}
    assert exactly(tensors) == exactly({name: tensors[name] for name in tensors})
    assert {name: bytes_of(tensor) for name, tensor in tensors.items()} == {
        f"tensors.{name}": bytes_of(tensor) for name, tensor in TENSORS.items()
    }
    assert {name: (t.dtype, t.shape) for name, t in tensors.items()} == {
        f"tensors.{name}": (t.dtype, t.shape) for name, t in TENSORS.items()
    }


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
    ],
)
def test_an_inconsistent_header_is_refused(entry: dict[str, object], tmp_path: Path) -> None:
    """A header with inconsistent shapes or offsets is rejected before any tensor is created."""
    text = json.dumps({"__metadata__": {"format": "pt"}, "a": entry}).encode()
    path = tmp_path / "lying.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))

    with path.open("rb") as file, pytest.raises(ValueError, match="'a'"):
        stored_tensors([file])
