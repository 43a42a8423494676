"""Devices with memory, peak rates and sources: a table (`devices.json`), a search by names, and files of the user.

Memory is the "total capacity" in torch's out-of-memory messages, which varies by about 0.1 GiB between boards and
drivers. Rates are dense peaks from data sheets, with 32-bit sums (on GeForce cards half of the advertised rates);
programs reach 30 to 80% of them.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal, get_args

from anybatch.core.units import parse_bytes
from anybatch.errors import UserError

Arithmetic = Literal["fp32", "tf32", "bf16", "fp16"]
"""Number formats of matrix products."""
Autocast = Literal["bf16", "fp16"]
"""Number formats of 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device's memory and peak rates."""

    name: str  # the name, as in `anybatch plan --device`
    memory_bytes: int  # memory that a program can use (`total_memory` in torch), which is less than advertised
    flops_per_second: Mapping[Arithmetic, float]  # peak of products by format; "fp32" also for all other operations
    bytes_per_second: float  # bandwidth of the memory
    link_bytes_per_second: float  # bandwidth to another device of the same machine, in one direction
    also_called: tuple[str, ...] = ()  # other names used by drivers and vendors

    def peak(self, arithmetic: Arithmetic) -> float:
        """Return the peak in floating-point operations per second; the fp32 peak if a format is missing."""
        return self.flops_per_second.get(arithmetic, self.flops_per_second["fp32"])

    @property
    def autocast(self) -> Autocast:
        """The 16-bit format for products: bf16, or fp16 if the device has units for fp16 only."""
        return "fp16" if "fp16" in self.flops_per_second and "bf16" not in self.flops_per_second else "bf16"


_FORMATS: tuple[Arithmetic, ...] = get_args(Arithmetic)
_WANTED = '{"name": "My card", "memory": "24GiB", "teraflops": {"fp32": 30, "bf16": 120}, "gigabytes_per_second": 900}'


def devices_of(file: Path) -> tuple[Device, ...]:
    """Return the devices of a file: a JSON list of objects with name, memory, teraflops, gigabytes_per_second.

    `teraflops` must have "fp32" and may have "tf32", "bf16" and "fp16"; `link_gigabytes_per_second` is optional.

    Raises:
        UserError: the file cannot be read, or an object lacks a field.
    """
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
        return tuple(_device_from_row(row) for row in ([rows] if isinstance(rows, dict) else rows))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{str(file)!r} is not a list of devices ({type(error).__name__}: {error}). A device is {_WANTED}."
        raise UserError(message) from error


def _device_from_row(row: Any) -> Device:  # noqa: ANN401 (any JSON value)
    rates = {name: float(row["teraflops"][name]) * 1e12 for name in _FORMATS if name in row["teraflops"]}
    return Device(
        name=str(row["name"]),
        memory_bytes=parse_bytes(str(row["memory"])),
        flops_per_second={"fp32": rates.pop("fp32"), **rates},
        bytes_per_second=float(row["gigabytes_per_second"]) * 1e9,
        link_bytes_per_second=float(row.get("link_gigabytes_per_second", 16)) * 1e9,
        also_called=tuple(row.get("also_called", ())),
    )


_TABLE = json.loads(files("anybatch.planner").joinpath("devices.json").read_text(encoding="utf-8"))
DEVICES: Final = tuple(_device_from_row(row) for rows in _TABLE.values() for row in rows)
"""All devices, by product line and age. Devices before Ampere have no TF32 and bf16; GeForce cards compute TF32 at the
fp32 rate; torch sees each of the two dies of a MI250X as a device.
"""


def find_device(name: str, devices: Sequence[Device] = DEVICES) -> Device:
    """Return a device by name, ignoring case, spaces, hyphens and the vendor's name, or refuse with similar names."""
    wanted = _normalized(name)
    for device in devices:
        if wanted in _names(device):
            return device
    # "A100" has two memory sizes, so the name is ambiguous.
    longer = [device.name for device in devices if wanted and any(other.startswith(wanted) for other in _names(device))]
    if len(longer) > 1:
        message = f"device {name!r} is ambiguous. Choose one of {', '.join(longer)}."
        raise UserError(message)
    near = difflib.get_close_matches(wanted, [_normalized(device.name) for device in devices], n=3, cutoff=0.5)
    found = longer or [device.name for close in near for device in devices if _normalized(device.name) == close]
    meant = f" Did you mean {' or '.join(found)}?" if found else ""
    message = (
        f"unknown device {name!r}.{meant} Known devices: {', '.join(device.name for device in devices)}. "
        "For any other device, give its memory instead, such as 24GiB."
    )
    raise UserError(message)


def _names(device: Device) -> list[str]:
    """Return all names of a device, as `_normalized` writes them."""
    return [_normalized(name) for name in (device.name, *device.also_called)]


def _normalized(name: str) -> str:
    """Return a name in lower case, without vendor, product line, spaces, hyphens and unit."""
    words = re.sub(r"[\s_-]+", "", name.lower())
    return re.sub(r"gi?b$", "", re.sub(r"^(nvidia|amd|geforce|rtx|tesla|instinct)+", "", words))


def parse_budget(text: str) -> tuple[int, Device | None]:
    """Return the bytes of a budget given as a size or as a device's name, and the device, if any."""
    # "3090" looks like a number of bytes, but is a device.
    if re.fullmatch(r"[\d.]+\s*[kmgt]?i?b?", text.strip().lower()) and not any(
        _normalized(text) in _names(device) for device in DEVICES
    ):
        return parse_bytes(text), None
    device = find_device(text)
    return device.memory_bytes, device
