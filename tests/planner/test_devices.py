"""The table of devices, and how sizes and names are parsed."""

from collections.abc import Callable

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
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("h100 pcie", "H100 PCIe"),
        ("rtx 3080 12gb", "RTX 3080 12GB"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("AMD Instinct MI250X", "MI250X"),
        ("rtx_3090", "RTX 3090"),
    ],
)
def test_devices_are_found_in_any_spelling(text: str, name: str) -> None:
    """Case, spaces, hyphens, the maker and "GB" do not matter; torch's own names are accepted."""
    assert find_device(text).name == name


def test_names_mean_one_device_each() -> None:
    """Every name and alias finds its own device, in any spelling."""
    for device in DEVICES:
        for name in (device.name, *device.also_called):
            for spelt in (name, name.upper(), name.replace(" ", "-"), name.replace("-", " ")):
                assert find_device(spelt) is device


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (find_device, "3080", "Choose one of RTX 3080 10GB, RTX 3080 12GB, RTX 3080 Ti"),
        (find_device, "H100X", "Did you mean H100"),
        (find_device, "abacus", "Known devices: RTX 2060, .* give its memory instead, such as 24GiB"),
        (find_device, "", "unknown device"),
        (parse_bytes, "24 gigs", "unknown unit 'gigs' .* Is it 24GiB or 24GB"),
        (parse_bytes, "GiB", "'GiB' is not a memory size"),
        (parse_bytes, "-3GiB", "not a memory size"),
        (parse_bytes, "0GiB", "less than one byte"),
        (parse_budget, "24", "has no unit"),
        (parse_budget, "24G", "Is it 24GiB or 24GB"),
        (parse_budget, "rtx 4900", r"unknown device .rtx 4900.\. Did you mean RTX 4090"),
    ],
)
def test_others_are_refused(parse: Callable[[str], object], text: str, said: str) -> None:
    """An ambiguous or unknown name raises with similar names; a size without number or unit names the missing part."""
    with pytest.raises(UserError, match=said):
        parse(text)


def test_the_table_is_plausible() -> None:
    """Every device has rates, memory, and bandwidth within plausible ranges."""
    for device in DEVICES:
        assert 5 * GIB < device.memory_bytes < 400 * GIB
        assert 5e12 < device.peak("fp32") <= device.peak("fp16") < 3e15
        assert device.peak("fp32") <= device.peak("tf32") <= device.peak("bf16") <= device.peak("fp16")
        assert 2e11 < device.bytes_per_second < 1e13
        assert 4e9 < device.link_bytes_per_second < device.bytes_per_second


def test_missing_formats_run_in_float32() -> None:
    """A T4 has neither bf16 nor TF32."""
    card = find_device("T4")
    assert card.peak("bf16") == card.peak("tf32") == card.peak("fp32") == 8.1e12


@given(number=st.integers(1, 10**6), unit=st.sampled_from(sorted(UNITS)), space=st.sampled_from(["", " "]))
def test_sizes_round_trip(number: int, unit: str, space: str) -> None:
    """A number with a unit parses to that many bytes, in upper or lower case."""
    for text in (f"{number}{space}{unit}", f" {number}{space}{unit.lower()} ", f"{number}.0{space}{unit.upper()}"):
        assert parse_bytes(text) == number * UNITS[unit]


def test_a_budget_is_a_size_or_a_device() -> None:
    """A budget is a size or a device; "4090" is a device."""
    assert parse_budget("24GiB") == (24 * GIB, None)
    assert parse_budget("h200") == (find_device("H200").memory_bytes, find_device("H200"))
    assert parse_budget("4090") == (find_device("RTX 4090").memory_bytes, find_device("RTX 4090"))
