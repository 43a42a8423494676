"""A loaded state is bitwise the saved one."""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from anybatch.checkpoints import load, save
from anybatch.checkpoints.tensors import file_layout
from tests.checkpoints.exactly import exactly
from tests.checkpoints.faulty_disk import FaultyDisk
from tests.faults import sees

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
QUANTIZED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}

shapes = st.lists(st.integers(0, 3), max_size=3)
tensors = st.builds(
    lambda shape, dtype: (torch.rand(shape) * 100).to(dtype),
    shapes,
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]),
)
texts = st.text(st.characters(exclude_categories=[])) | st.sampled_from(
    ["$tensor", "$", "__metadata__", "\ud83d\ude00"]
)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), texts, st.binary(), tensors,
    st.integers(min_value=60, max_value=70).map(lambda exponent: -(1 << exponent)),
)  # fmt: skip
keys = texts | st.integers()
states = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(keys, children, max_size=3),
        st.dictionaries(keys, children, max_size=3).map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=12,
)


def there_and_back(state: dict[Any, Any], folder: Path | str) -> dict[Any, Any]:
    """Save a state, and load it."""
    return load(save(folder, 0, state, disk=FaultyDisk()).path)


@sees(
    "integer keys are restored as text",
    "src/anybatch/checkpoints/structure.py",
    "type(key) is str and _is_unicode(key) and key[:1]",
    "_is_unicode(str(key)) and str(key)[:1]",
    also=["tests/checkpoints/test_round_trip.py::test_an_optimizer_continues_bit_for_bit"],
)
@pytest.mark.slow
@given(states)
@example({"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1), "a.b~2": torch.ones(2), "__metadata__": torch.ones(3)})
@example({"\udcff": torch.ones(1), "\\udcff": torch.zeros(1), "": torch.ones(2)})
@example({"a": -0.0, "b": 5e-324, "c": 1e308, "d": float("-inf"), "e": -float("nan")})
@example({"a": 10**5000, "b": -(10**5000), "c": 2**63 - 1, "d": -(2**63)})
@example({0: "int", "0": "text", -1: ()})
@settings(max_examples=150)
def test_a_state_is_restored_exactly(state: Any) -> None:
    """Any nesting of supported types is restored with its types, order and every bit, including NaN and -0.0."""
    with TemporaryDirectory() as folder:
        assert exactly(there_and_back({"state": state}, folder)) == exactly({"state": state})


@sees(
    "a rare dtype is restored as bytes",
    "src/anybatch/checkpoints/structure.py",
    "if tensor.dtype not in STANDARD_DTYPES:",
    "if tensor.dtype is None:",
)
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in QUANTIZED], ids=str)
@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental:UserWarning")
def test_every_dtype_is_restored(dtype: torch.dtype, tmp_path: Path) -> None:
    """Every dtype of torch that is not quantized keeps its dtype, shape and bits."""
    state = {}
    for shape in [(), (0, 3), (4,), (2, 3)]:
        raw = torch.arange(17, 17 + dtype.itemsize * math.prod(shape), dtype=torch.uint8)
        bits = raw & 1 if dtype is torch.bool else raw
        state[str(shape)] = bits.view(dtype).reshape(shape)

    assert exactly(there_and_back(state, tmp_path)) == exactly(state)


SQUARE = torch.arange(16, dtype=torch.float32).reshape(4, 4)
TURNED = SQUARE.to(torch.complex64).mul(1j)
NANS = torch.tensor([0x7FF8000000001234, -0x7FFFFFFFFEDCC], dtype=torch.int64)
VALUES: Mapping[str, Any] = {
    "transposed": SQUARE.t(),
    "strided": SQUARE[:, ::2],
    "expanded": SQUARE[:1, :1].expand(3, 4),
    "one item with a stride": SQUARE.reshape(-1)[::16],
    "channels last": SQUARE.reshape(1, 4, 2, 2).to(memory_format=torch.channels_last),
    "conjugated": TURNED.conj(),
    "of a rare dtype, conjugated, transposed": TURNED.to(torch.complex128).conj().t(),
    "negative": TURNED.conj().imag,
    "negative and contiguous": torch.complex(SQUARE[0, :1], SQUARE[0, 1:2]).conj().imag,
    "of a rare dtype, transposed": SQUARE.to(torch.float8_e4m3fnuz).t(),
    "detached": nn.Parameter(SQUARE.clone()).detach(),
    "views of one memory": [SQUARE, SQUARE.t(), SQUARE.view(16), SQUARE.view(torch.int32), SQUARE[:2], SQUARE[2:]],
    "signs of one memory": [TURNED, TURNED.conj(), TURNED.imag, TURNED.conj().imag],
    "NaNs": [NANS.view(torch.float64).tolist(), NANS.view(torch.float64), NANS.view(torch.bfloat16)],
}
"""Views, and the signs and payloads of NaN, as numbers and in tensors."""


@sees(
    "the bits of NaN are lost",
    "src/anybatch/checkpoints/structure.py",
    """
    (value,) = struct.unpack(">d", bytes.fromhex(text.split()[1]))
""",
    """
    value = text.split()[0]
""",
    cases=["NaNs"],
)
@sees(
    "a transposed tensor is stored in memory order",
    "src/anybatch/checkpoints/tensors.py",
    "return _resolved(tensor).contiguous().as_strided(",
    "return _resolved(tensor).as_strided(",
    cases=["transposed"],
)
@pytest.mark.parametrize("name", VALUES)
def test_views_and_nans_are_restored(name: str, tmp_path: Path) -> None:
    """A view (transposed, strided, expanded, conjugated) has its values, untied from others; a NaN has its bits."""
    state = {"value": VALUES[name]}

    assert exactly(there_and_back(state, tmp_path)) == exactly(state)


@sees(
    "tied tensors are restored separately",
    "src/anybatch/checkpoints/structure.py",
    """
        if memory not in self._names:
""",
    """
        if True:
""",
)
def test_tied_tensors_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    """Tied tensors are stored once and tied again after loading; empty ones, which share an address, are not."""
    weight, empty = torch.rand(1000), torch.empty(0)
    state = {"encoder": {"weight": weight}, "decoder": [weight.detach(), nn.Parameter(weight)], "part": weight[:10]}
    state["empty"] = [empty, torch.empty(0), empty]

    saved = save(tmp_path, 0, state)
    loaded = load(saved.path)

    assert saved.num_bytes < 2 * weight.nbytes
    assert loaded["decoder"][0] is loaded["encoder"]["weight"] is loaded["decoder"][1]
    assert torch.equal(loaded["decoder"][1], weight)
    assert torch.equal(loaded["part"], weight[:10])
    assert loaded["empty"][0] is loaded["empty"][2] is not loaded["empty"][1]


def test_loaded_tensors_are_ordinary_ones(tmp_path: Path) -> None:
    """A loaded tensor owns its memory, can be written and resized, and outlives the checkpoint's file."""
    saved = save(tmp_path, 0, {"a": torch.ones(4), "b": torch.zeros(4)})
    loaded = load(saved.path)
    for file in saved.path.iterdir():
        file.write_bytes(b"")

    loaded["a"].add_(1).resize_(8)

    assert loaded["a"][:4].tolist() == [2.0] * 4
    assert loaded["b"].tolist() == [0.0] * 4


@sees(
    "only the first window of a tensor is written",
    "src/anybatch/checkpoints/tensors.py",
    "_flat_bytes(tensor).split(len(window))",
    "_flat_bytes(tensor).split(len(window))[:1]",
)
def test_a_tensor_larger_than_the_window_is_restored(tmp_path: Path) -> None:
    """A tensor is written in pieces of at most 16 MiB and restored completely."""
    large = torch.arange((1 << 23) + 5, dtype=torch.int32)[1:]  # 32 MiB and 16 bytes
    blocks = [len(block) for block in file_layout({"large": large}).blocks()]
    state = {"large": large, "small": torch.ones(3)}

    assert blocks[1:] == [1 << 24, 1 << 24, 16]
    assert torch.equal(load(save(tmp_path, 0, state, disk=FaultyDisk()).path)["large"], large)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: Adam(p, lr=torch.tensor(1e-3), betas=(0.8, 0.9), amsgrad=True),
        lambda p: AdamW(p, weight_decay=0.1, fused=True),
    ],
)
def test_an_optimizer_continues_bit_for_bit(make: Callable[[list[dict[str, Any]]], Optimizer], tmp_path: Path) -> None:
    """An optimizer's state is restored exactly, and three more steps give bitwise the same result."""
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    groups: list[dict[str, Any]] = [
        {"params": list(layers[0].parameters()), "lr": 0.3},
        {"params": list(layers[1:].parameters())},
    ]
    optimizer = make(groups)
    inputs = torch.rand(7, 5, 3)

    def steps(first: int, last: int) -> None:
        for each in inputs[first:last]:
            optimizer.zero_grad()
            layers(each).square().sum().backward()
            optimizer.step()

    steps(0, 4)
    state = {"model": layers.state_dict(), "optimizer": optimizer.state_dict()}
    before = exactly(state)
    path = save(tmp_path, 4, state).path
    steps(4, 7)
    straight_on = exactly({"model": layers.state_dict(), "optimizer": optimizer.state_dict()})
    loaded = load(path)
    resumed_from = exactly(loaded)
    layers.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    steps(4, 7)

    assert resumed_from == before
    assert exactly({"model": layers.state_dict(), "optimizer": optimizer.state_dict()}) == straight_on


@pytest.mark.gpu(1)
def test_tensors_of_an_accelerator_are_restored_on_the_cpu(tmp_path: Path) -> None:
    """A GPU tensor is saved through a small host buffer, and restored on the CPU with the same bits."""
    large = torch.rand((1 << 22) + 3, device="cuda")
    state = {"large": large, "turned": large[:12].view(3, 4).t(), "tied": large}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loaded = there_and_back(state, tmp_path)

    assert torch.cuda.memory_allocated() == before
    assert torch.equal(loaded["large"], large.cpu())
    assert torch.equal(loaded["turned"], state["turned"].cpu())
    assert loaded["tied"] is loaded["large"]
