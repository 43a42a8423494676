"""The table of devices, and how sizes and names are parsed."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.units import UNITS, parse_bytes
from anybatch.errors import UserError
from anybatch.planner.devices import DEVICES, find_device, parse_budget

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("a100 80gb", "A100-80"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100-16"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("h100 pcie", "H100 PCIe"),
        ("AMD Instinct MI300X", "MI300X"),
        ("rtx 3080 12gb", "RTX 3080 12GB"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("NVIDIA GH200 480GB", "GH200-96"),
        ("AMD Instinct MI250X", "MI250X"),
        ("Apple M2 Max 64GB", "M2 Max 64"),
    ],
)
def test_devices_are_found_as_people_write_them(text: str, name: str) -> None:
    """Case, spaces, hyphens, the maker and "GB" do not matter; torch's own names are accepted."""
    assert find_device(text).name == name


def test_names_mean_one_device_each() -> None:
    """Every name and alias finds its own device, in any spelling."""
    for device in DEVICES:
        for name in (device.name, *device.also_called):
            for spelt in (name, name.upper(), name.replace(" ", "-"), name.replace("-", " ")):
                assert find_device(spelt) is device


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A100", "'A100' is one of several: A100-40, A100-80"),
        ("3080", "one of several: RTX 3080 10GB, RTX 3080 12GB, RTX 3080 Ti"),
        ("H2", "one of several: H20, H200"),
        ("RTX 4900", "not known. Is it RTX 4090"),
        ("H100X", "Is it H100"),
        ("abacus", "'abacus' is not known. Known are RTX 2060, .* give its memory instead, such as 24GiB"),
        ("", "not known"),
    ],
)
def test_other_names_are_refused(text: str, said: str) -> None:
    """An ambiguous or unknown name raises an error that lists similar names."""
    with pytest.raises(UserError, match=said):
        find_device(text)


def test_the_table_is_plausible() -> None:
    """Every device has rates, memory, bandwidth and a source within plausible ranges."""
    for device in DEVICES:
        assert 5 * GIB < device.memory_bytes < 400 * GIB
        assert 5e12 < device.peak("fp32") <= device.peak("fp16") < 3e15
        assert device.peak("fp32") <= device.peak("tf32") <= device.peak("bf16") <= device.peak("fp16")
        assert 2e11 < device.bytes_per_second < 1e13
        assert 4e9 < device.link_bytes_per_second < device.bytes_per_second
        assert device.source


def test_newer_cards_are_not_slower() -> None:
    """Within a product line, the later device has more memory, compute and bandwidth."""
    line = [find_device(name) for name in ("V100-32", "A100-80", "H100", "B200")]
    for older, newer in itertools.pairwise(line):
        assert older.peak("fp16") < newer.peak("fp16")
        assert older.bytes_per_second < newer.bytes_per_second
        assert older.memory_bytes < newer.memory_bytes


def test_what_a_card_lacks_runs_in_32_bits() -> None:
    """A T4 has no bf16 and no tf32."""
    card = find_device("T4")
    assert card.peak("bf16") == card.peak("tf32") == card.peak("fp32") == 8.1e12


@given(number=st.integers(1, 10**6), unit=st.sampled_from(sorted(UNITS)), space=st.sampled_from(["", " "]))
def test_sizes_are_read_back(number: int, unit: str, space: str) -> None:
    """A number with a unit parses to that many bytes, in upper or lower case."""
    for text in (f"{number}{space}{unit}", f" {number}{space}{unit.lower()} ", f"{number}.0{space}{unit.upper()}"):
        assert parse_bytes(text) == number * UNITS[unit]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("24", "'24' has no unit"),
        ("24G", "the unit 'G' of '24G' is not known. Is it 24GiB or 24GB"),
        ("24 gigs", "the unit 'gigs' .* Is it 24GiB or 24GB"),
        ("GiB", "'GiB' is not a size of memory"),
        ("-3GiB", "not a size of memory"),
        ("0GiB", "not even one byte"),
        ("", "not a size of memory"),
    ],
)
def test_other_sizes_are_refused(text: str, said: str) -> None:
    """Text without a number, a unit or a positive size raises an error that says which is missing."""
    with pytest.raises(UserError, match=said):
        parse_bytes(text)


def test_a_budget_is_a_size_or_a_device() -> None:
    """A budget is a size or a device, and an error about either explains that kind."""
    assert parse_budget("24GiB") == (24 * GIB, None)
    assert parse_budget("h200") == (find_device("H200").memory_bytes, find_device("H200"))
    assert parse_budget("4090") == (find_device("RTX 4090").memory_bytes, find_device("RTX 4090"))
    with pytest.raises(UserError, match="has no unit"):
        parse_budget("24")
    with pytest.raises(UserError, match="Is it 24GiB or 24GB"):
        parse_budget("24G")
    with pytest.raises(UserError, match=r"is not known\. Is it RTX 4090"):
        parse_budget("rtx 4900")
