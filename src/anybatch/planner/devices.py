"""Devices with memory, peak rates and sources: a table, a search by common names, and files of the user.

Memory is the "total capacity" in torch's out-of-memory messages, which varies by about 0.1 GiB between boards and
drivers. Rates are dense peaks from data sheets, with 32-bit sums (on GeForce cards half of the advertised rates);
programs reach 30 to 80% of them.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """A device's memory and peak rates.

    Attributes:
        name: the device's name, as in `anybatch plan --device`.
        memory_bytes: memory that a program can use (`total_memory` in torch), which is less than advertised.
        flops_per_second: peak of matrix products by number format; "fp32" also applies to all other operations.
        bytes_per_second: bandwidth of the device's memory.
        link_bytes_per_second: bandwidth to another device of the same machine, in one direction.
        also_called: other names used by drivers and vendors.
    """

    name: str
    memory_bytes: int
    flops_per_second: Mapping[Arithmetic, float]
    bytes_per_second: float
    link_bytes_per_second: float
    also_called: tuple[str, ...] = ()

    def peak(self, arithmetic: Arithmetic) -> float:
        """Return the peak in floating-point operations per second; the fp32 peak if a format is missing."""
        return self.flops_per_second.get(arithmetic, self.flops_per_second["fp32"])

    @property
    def autocast(self) -> Autocast:
        """The 16-bit format for products: bf16, or fp16 if the device has units for fp16 only."""
        return "fp16" if "fp16" in self.flops_per_second and "bf16" not in self.flops_per_second else "bf16"


# Columns: name; GiB of memory; teraflops in fp32, tf32, bf16 and fp16; GB/s of its memory, and of its link to another
# device; other names. Devices before Ampere have neither TF32 nor bf16; GeForce cards compute TF32 at the fp32 rate.
_TABLE = """
# NVIDIA's Turing architecture whitepaper
RTX 2060          |   5.79 |   6.5 |     - |      - |   25.8 |  336 |  16 |
RTX 2070          |   7.79 |   7.5 |     - |      - |   29.9 |  448 |  16 |
RTX 2080          |   7.79 |  10.1 |     - |      - |   40.3 |  448 |  16 |
RTX 2080 Ti       |  10.76 |  13.4 |     - |      - |   53.8 |  616 |  16 |
# NVIDIA's Ampere GA102 whitepaper and GeForce RTX 30 specifications
RTX 3060          |  11.76 |  12.7 |  12.7 |   25.4 |   25.4 |  360 |  32 |
RTX 3060 Ti       |   7.79 |  16.2 |  16.2 |   32.4 |   32.4 |  448 |  32 |
RTX 3070          |   7.79 |  20.3 |  20.3 |   40.6 |   40.6 |  448 |  32 |
RTX 3070 Ti       |   7.79 |  21.7 |  21.7 |   43.4 |   43.4 |  608 |  32 |
RTX 3080 10GB     |   9.78 |  29.8 |  29.8 |   59.6 |   59.6 |  760 |  32 |
RTX 3080 12GB     |  11.76 |  30.6 |  30.6 |   61.2 |   61.2 |  912 |  32 |
RTX 3080 Ti       |  11.76 |  34.1 |  34.1 |   68.2 |   68.2 |  912 |  32 |
RTX 3090          |   23.6 |  35.6 |  35.6 |   71.2 |   71.2 |  936 |  32 |
RTX 3090 Ti       |   23.6 |    40 |    40 |     80 |     80 | 1008 |  32 |
# NVIDIA's Ada architecture whitepaper and GeForce RTX 40 specifications
RTX 4060          |   7.75 |  15.1 |  15.1 |   30.2 |   30.2 |  272 |  16 |
RTX 4060 Ti 8GB   |   7.75 |  22.1 |  22.1 |   44.2 |   44.2 |  288 |  16 |
RTX 4060 Ti 16GB  |   15.7 |  22.1 |  22.1 |   44.2 |   44.2 |  288 |  16 |
RTX 4070          |  11.73 |  29.1 |  29.1 |   58.2 |   58.2 |  504 |  32 |
RTX 4070 Super    |  11.73 |  35.5 |  35.5 |     71 |     71 |  504 |  32 |
RTX 4070 Ti       |  11.73 |  40.1 |  40.1 |   80.2 |   80.2 |  504 |  32 |
RTX 4070 Ti Super |   15.7 |  44.1 |  44.1 |   88.2 |   88.2 |  672 |  32 |
RTX 4080          |   15.7 |  48.7 |  48.7 |   97.4 |   97.4 |  717 |  32 |
RTX 4080 Super    |   15.7 |  52.2 |  52.2 |  104.4 |  104.4 |  736 |  32 |
RTX 4090          |   23.5 |  82.6 |  82.6 |  165.2 |  165.2 | 1008 |  32 |
# NVIDIA's RTX Blackwell architecture whitepaper
RTX 5060 Ti 16GB  |   15.5 |  23.7 |  23.7 |   47.4 |   47.4 |  448 |  32 |
RTX 5070          |   11.6 |  30.9 |  30.9 |   61.8 |   61.8 |  672 |  64 |
RTX 5070 Ti       |   15.5 |  43.9 |  43.9 |   87.8 |   87.8 |  896 |  64 |
RTX 5080          |   15.5 |  56.3 |  56.3 |  112.6 |  112.6 |  960 |  64 |
RTX 5090          |  31.36 | 104.8 | 104.8 |  209.6 |  209.6 | 1792 |  64 |
# NVIDIA's data sheets, of the SXM version where there are several
T4                |  14.56 |   8.1 |     - |      - |     65 |  320 |  16 |
P100              |   15.9 |   9.3 |     - |      - |   18.7 |  732 |  16 | P100-PCIE-16GB
V100-16           |  15.77 |  15.7 |     - |      - |    125 |  900 | 150 | V100-SXM2-16GB
V100-32           |  31.73 |  15.7 |     - |      - |    125 |  900 | 150 | V100-SXM2-32GB
A10               |  22.06 |  31.2 |  62.5 |    125 |    125 |  600 |  32 |
A10G              |  22.06 |  31.5 |    35 |     70 |     70 |  600 |  32 |
A30               |   23.5 |  10.3 |    82 |    165 |    165 |  933 |  32 |
A40               |  44.35 |  37.4 |  74.8 |  149.7 |  149.7 |  696 |  32 |
A100-40           |  39.49 |  19.5 |   156 |    312 |    312 | 1555 | 300 | A100-SXM4-40GB,A100-PCIE-40GB
A100-80           |  79.15 |  19.5 |   156 |    312 |    312 | 2039 | 300 | A100-SXM4-80GB,A100 80GB PCIe,A100-PCIE-80GB
RTX A4000         |   15.7 |  19.2 |  38.3 |   76.7 |   76.7 |  448 |  32 |
RTX A5000         |   23.7 |  27.8 |  55.6 |  111.1 |  111.1 |  768 |  32 |
RTX A6000         |   47.4 |  38.7 |  77.4 |  154.8 |  154.8 |  768 |  32 |
RTX 6000 Ada      |   47.4 |  91.1 | 182.1 |  364.2 |  364.2 |  960 |  32 | RTX 6000 Ada Generation
L4                |  22.03 |  30.3 |    60 |    121 |    121 |  300 |  32 |
L40               |  44.39 |  90.5 |  90.5 | 181.05 | 181.05 |  864 |  32 |
L40S              |  44.39 |  91.6 |   183 | 362.05 | 362.05 |  864 |  32 |
H20               |   95.1 |    44 |    74 |    148 |    148 | 4000 | 450 | H20 96GB
H100              |  79.18 |    67 | 494.7 |  989.4 |  989.4 | 3350 | 450 | H100-80,H100 SXM,H100 80GB HBM3
H100 PCIe         |   79.1 |    51 |   378 |    756 |    756 | 2000 |  64 |
H100 NVL          |   93.1 |    60 | 417.5 |    835 |    835 | 3900 | 300 |
H200              |  139.8 |    67 | 494.7 |  989.4 |  989.4 | 4800 | 450 | H200 141GB
GH200-96          |   94.5 |    67 | 494.7 |  989.4 |  989.4 | 4000 | 450 | GH200 480GB,GH200 96GB HBM3
GH200-144         |  139.8 |    67 | 494.7 |  989.4 |  989.4 | 4900 | 450 | GH200 144G HBM3e
B200              | 178.35 |    75 |  1125 |   2250 |   2250 | 8000 | 900 | B200 180GB,B200 192GB
# AMD's specifications and data sheets; torch sees each of the two dies of a MI250X as a device
RX 7900 XTX       |  23.98 |  61.4 |     - |  122.8 |  122.8 |  960 |  32 |
MI210             |  63.98 |  45.3 |     - |    181 |    181 | 1638 | 100 |
MI250X            |  63.98 |  47.9 |     - |  191.5 |  191.5 | 1638 | 200 |
MI300X            | 191.69 | 163.4 | 653.7 | 1307.4 | 1307.4 | 5300 | 448 | MI300X 192GB,MI300X OAM
MI325X            |  255.6 | 163.4 | 653.7 | 1307.4 | 1307.4 | 6000 | 448 | MI325X 256GB
"""
_FORMATS: tuple[Arithmetic, ...] = get_args(Arithmetic)


def _device(row: str) -> Device:
    """Return the device of a row of the table."""
    name, gibibytes, *rates, memory_rate, link_rate, others = (cell.strip() for cell in row.split("|"))
    return Device(
        name=name,
        memory_bytes=int(float(gibibytes) * (1 << 30)),
        flops_per_second={kind: float(rate) * 1e12 for kind, rate in zip(_FORMATS, rates, strict=True) if rate != "-"},
        bytes_per_second=float(memory_rate) * 1e9,
        link_bytes_per_second=float(link_rate) * 1e9,
        also_called=tuple(others.split(",")) if others else (),
    )


DEVICES: Final = tuple(_device(row) for row in _TABLE.strip().splitlines() if not row.startswith("#"))
"""All devices, by product line and age."""


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
    )


def find_device(name: str, devices: Sequence[Device] = DEVICES) -> Device:
    """Return a device by name, ignoring case, spaces, hyphens and the vendor's name.

    Raises:
        UserError: no device matches, or several do; the message lists similar names.
    """
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
    """Return the bytes of a budget given as a size or as a device's name, and the device, if any.

    Raises:
        UserError: the text is neither a size nor the name of a device.
    """
    # "3090" looks like a number of bytes, but is a device.
    if re.fullmatch(r"[\d.]+\s*[kmgt]?i?b?", text.strip().lower()) and not any(
        _normalized(text) in _names(device) for device in DEVICES
    ):
        return parse_bytes(text), None
    device = find_device(text)
    return device.memory_bytes, device
