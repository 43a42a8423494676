"""Devices with memory, peak rates and sources: a table, a search by common names, and files of your own.

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
        bytes_per_second: bandwidth of its memory.
        link_bytes_per_second: bandwidth to another device of the same machine, in one direction.
        source: source of the rates.
        also_called: other names used by drivers and vendors.
        note: a note for plans; may be empty.
    """

    name: str
    memory_bytes: int
    flops_per_second: Mapping[Arithmetic, float]
    bytes_per_second: float
    link_bytes_per_second: float
    source: str
    also_called: tuple[str, ...] = ()
    note: str = ""

    def peak(self, arithmetic: Arithmetic) -> float:
        """Return the peak in floating-point operations per second; the fp32 peak if a format is missing."""
        return self.flops_per_second.get(arithmetic, self.flops_per_second["fp32"])

    @property
    def autocast(self) -> Autocast:
        """The 16-bit format for products: bf16, or fp16 if the device has units for fp16 only."""
        return "fp16" if "fp16" in self.flops_per_second and "bf16" not in self.flops_per_second else "bf16"


_GIB, _TERA, _GIGA = 1 << 30, 1e12, 1e9
_PCIE_3, _PCIE_4, _PCIE_5 = 16.0, 32.0, 64.0
_TURING = "NVIDIA Turing GPU architecture whitepaper"
_GA102 = "NVIDIA Ampere GA102 whitepaper"
_GA104 = "NVIDIA's GeForce RTX 30 specifications; tensor cores as in the GA102 whitepaper"
_ADA = "NVIDIA Ada GPU architecture whitepaper"
_AD10X = "NVIDIA's GeForce RTX 40 specifications; tensor cores as in the Ada whitepaper"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper"
_APPLE = "Apple's technical specifications; arithmetic: cores x 128 units x 2 x clock, which Apple does not publish"
_OF_APPLE = (
    "this chip's allocator and kernels are not modelled: tensors are planned as on CUDA, in the three quarters of the "
    "memory that Metal recommends"
)


def _rates(fp32: float, tf32: float | None, bf16: float | None, fp16: float) -> Mapping[Arithmetic, float]:
    # Devices before Ampere have neither TF32 nor bf16; these rates are missing, and `peak` returns the fp32 rate.
    given: dict[Arithmetic, float | None] = {"fp32": fp32, "tf32": tf32, "bf16": bf16, "fp16": fp16}
    return {name: rate * _TERA for name, rate in given.items() if rate is not None}


def _device(  # noqa: PLR0917 (a row of a table)
    name: str,
    gib: float,
    rates: tuple[float, float | None, float | None, float],
    gigabytes: float,
    link: float,
    source: str,
    also_called: tuple[str, ...] = (),
    note: str = "",
) -> Device:
    """Return a device from GiB, teraflops, and GB/s of its memory and its link."""
    return Device(
        name=name,
        memory_bytes=int(gib * _GIB),
        flops_per_second=_rates(*rates),
        bytes_per_second=gigabytes * _GIGA,
        link_bytes_per_second=link * _GIGA,
        source=source,
        also_called=also_called,
        note=note,
    )


def _geforce(  # noqa: PLR0917 (a row of a table)
    name: str, gib: float, fp32: float, gigabytes: float, link: float, source: str
) -> Device:
    """Return a GeForce RTX of Ampere or later: tensor cores have twice the fp32 rate, TF32 has the fp32 rate."""
    also = (f"GeForce {name}", name.removeprefix("RTX "))
    return _device(name, gib, (fp32, fp32, 2 * fp32, 2 * fp32), gigabytes, link, source, also)


def _turing(name: str, gib: float, fp32: float, fp16: float, gigabytes: float) -> Device:
    also = (f"GeForce {name}", name.removeprefix("RTX "))
    return _device(name, gib, (fp32, None, None, fp16), gigabytes, _PCIE_3, _TURING, also)


def _apple(name: str, advertised: int, fp32: float, gigabytes: float) -> Device:
    also = (f"Apple {name}", f"Apple {name}GB")
    rates = (fp32, fp32, fp32, fp32)
    return _device(name, 0.75 * advertised, rates, gigabytes, 5.0, _APPLE, also, _OF_APPLE)


DEVICES: Final = (
    _turing("RTX 2060", 5.79, 6.5, 25.8, 336),
    _turing("RTX 2070", 7.79, 7.5, 29.9, 448),
    _turing("RTX 2080", 7.79, 10.1, 40.3, 448),
    _turing("RTX 2080 Ti", 10.76, 13.4, 53.8, 616),
    _geforce("RTX 3060", 11.76, 12.7, 360, _PCIE_4, _GA104),
    _geforce("RTX 3060 Ti", 7.79, 16.2, 448, _PCIE_4, _GA104),
    _geforce("RTX 3070", 7.79, 20.3, 448, _PCIE_4, _GA104),
    _geforce("RTX 3070 Ti", 7.79, 21.7, 608, _PCIE_4, _GA104),
    _geforce("RTX 3080 10GB", 9.78, 29.8, 760, _PCIE_4, _GA102),
    _geforce("RTX 3080 12GB", 11.76, 30.6, 912, _PCIE_4, _GA102),
    _geforce("RTX 3080 Ti", 11.76, 34.1, 912, _PCIE_4, _GA102),
    _geforce("RTX 3090", 23.6, 35.6, 936, _PCIE_4, _GA102),
    _geforce("RTX 3090 Ti", 23.6, 40.0, 1008, _PCIE_4, _GA102),
    _geforce("RTX 4060", 7.75, 15.1, 272, _PCIE_4 / 2, _AD10X),
    _geforce("RTX 4060 Ti 8GB", 7.75, 22.1, 288, _PCIE_4 / 2, _AD10X),
    _geforce("RTX 4060 Ti 16GB", 15.7, 22.1, 288, _PCIE_4 / 2, _AD10X),
    _geforce("RTX 4070", 11.73, 29.1, 504, _PCIE_4, _AD10X),
    _geforce("RTX 4070 Super", 11.73, 35.5, 504, _PCIE_4, _AD10X),
    _geforce("RTX 4070 Ti", 11.73, 40.1, 504, _PCIE_4, _AD10X),
    _geforce("RTX 4070 Ti Super", 15.7, 44.1, 672, _PCIE_4, _AD10X),
    _geforce("RTX 4080", 15.7, 48.7, 717, _PCIE_4, _ADA),
    _geforce("RTX 4080 Super", 15.7, 52.2, 736, _PCIE_4, _AD10X),
    _geforce("RTX 4090", 23.5, 82.6, 1008, _PCIE_4, _ADA),
    _geforce("RTX 5060 Ti 16GB", 15.5, 23.7, 448, _PCIE_5 / 2, _BLACKWELL),
    _geforce("RTX 5070", 11.6, 30.9, 672, _PCIE_5, _BLACKWELL),
    _geforce("RTX 5070 Ti", 15.5, 43.9, 896, _PCIE_5, _BLACKWELL),
    _geforce("RTX 5080", 15.5, 56.3, 960, _PCIE_5, _BLACKWELL),
    _geforce("RTX 5090", 31.36, 104.8, 1792, _PCIE_5, _BLACKWELL),
    _device("T4", 14.56, (8.1, None, None, 65.0), 320, _PCIE_3, "NVIDIA T4 data sheet"),
    _device("P100", 15.9, (9.3, None, None, 18.7), 732, _PCIE_3, "NVIDIA P100 data sheet, PCIe", ("P100-PCIE-16GB",)),
    _device(
        "V100-16",
        15.77,
        (15.7, None, None, 125.0),
        900,
        150,
        "NVIDIA V100 data sheet, SXM2",
        ("V100-SXM2-16GB", "V100 SXM2 16GB"),
    ),
    _device(
        "V100-32",
        31.73,
        (15.7, None, None, 125.0),
        900,
        150,
        "NVIDIA V100 data sheet, SXM2",
        ("V100-SXM2-32GB", "V100 SXM2 32GB"),
    ),
    _device("A10", 22.06, (31.2, 62.5, 125.0, 125.0), 600, _PCIE_4, "NVIDIA A10 data sheet"),
    _device("A10G", 22.06, (31.5, 35.0, 70.0, 70.0), 600, _PCIE_4, "NVIDIA A10G data sheet"),
    _device("A30", 23.5, (10.3, 82.0, 165.0, 165.0), 933, _PCIE_4, "NVIDIA A30 data sheet"),
    _device("A40", 44.35, (37.4, 74.8, 149.7, 149.7), 696, _PCIE_4, "NVIDIA A40 data sheet"),
    _device(
        "A100-40",
        39.49,
        (19.5, 156.0, 312.0, 312.0),
        1555,
        300,
        "NVIDIA A100 data sheet, 40 GB SXM",
        ("A100-SXM4-40GB", "A100-PCIE-40GB"),
    ),
    _device(
        "A100-80",
        79.15,
        (19.5, 156.0, 312.0, 312.0),
        2039,
        300,
        "NVIDIA A100 data sheet, 80 GB SXM",
        ("A100-SXM4-80GB", "A100 80GB PCIe", "A100-PCIE-80GB"),
    ),
    _device("RTX A4000", 15.7, (19.2, 38.3, 76.7, 76.7), 448, _PCIE_4, "NVIDIA RTX A4000 data sheet", ("A4000",)),
    _device("RTX A5000", 23.7, (27.8, 55.6, 111.1, 111.1), 768, _PCIE_4, "NVIDIA RTX A5000 data sheet", ("A5000",)),
    _device("RTX A6000", 47.4, (38.7, 77.4, 154.8, 154.8), 768, _PCIE_4, "NVIDIA RTX A6000 data sheet", ("A6000",)),
    _device(
        "RTX 6000 Ada",
        47.4,
        (91.1, 182.1, 364.2, 364.2),
        960,
        _PCIE_4,
        "NVIDIA RTX 6000 Ada data sheet",
        ("RTX 6000 Ada Generation", "6000 Ada"),
    ),
    _device("L4", 22.03, (30.3, 60.0, 121.0, 121.0), 300, _PCIE_4, "NVIDIA L4 data sheet"),
    _device("L40", 44.39, (90.5, 90.5, 181.05, 181.05), 864, _PCIE_4, "NVIDIA L40 data sheet"),
    _device("L40S", 44.39, (91.6, 183.0, 362.05, 362.05), 864, _PCIE_4, "NVIDIA L40S data sheet"),
    _device("H20", 95.1, (44.0, 74.0, 148.0, 148.0), 4000, 450, "NVIDIA H20 data sheet", ("H20 96GB", "H20-96")),
    _device(
        "H100",
        79.18,
        (67.0, 494.7, 989.4, 989.4),
        3350,
        450,
        "NVIDIA H100 data sheet, SXM",
        ("H100-80", "H100 SXM", "H100 80GB HBM3"),
    ),
    _device("H100 PCIe", 79.1, (51.0, 378.0, 756.0, 756.0), 2000, _PCIE_5, "NVIDIA H100 data sheet, PCIe"),
    _device("H100 NVL", 93.1, (60.0, 417.5, 835.0, 835.0), 3900, 300, "NVIDIA H100 data sheet, NVL"),
    _device("H200", 139.8, (67.0, 494.7, 989.4, 989.4), 4800, 450, "NVIDIA H200 data sheet, SXM", ("H200 141GB",)),
    _device(
        "GH200-96",
        94.5,
        (67.0, 494.7, 989.4, 989.4),
        4000,
        450,
        "NVIDIA GH200 data sheet, HBM3",
        ("GH200 480GB", "GH200 96GB HBM3"),
    ),
    _device(
        "GH200-144",
        139.8,
        (67.0, 494.7, 989.4, 989.4),
        4900,
        450,
        "NVIDIA GH200 data sheet, HBM3e",
        ("GH200 144G HBM3e",),
    ),
    _device(
        "B200",
        178.35,
        (75.0, 1125.0, 2250.0, 2250.0),
        8000,
        900,
        "NVIDIA HGX B200 data sheet",
        ("B200 180GB", "B200 192GB"),
    ),
    _device("RX 7900 XTX", 23.98, (61.4, None, 122.8, 122.8), 960, _PCIE_4, "AMD Radeon RX 7900 XTX specifications"),
    _device("MI210", 63.98, (45.3, None, 181.0, 181.0), 1638, 100, "AMD Instinct MI210 data sheet"),
    _device(
        "MI250X",
        63.98,
        (47.9, None, 191.5, 191.5),
        1638,
        200,
        "AMD Instinct MI250X data sheet, halved: torch sees each of its two dies as a device",
        note="a MI250X is two devices to torch: this is one of them",
    ),
    _device(
        "MI300X",
        191.69,
        (163.4, 653.7, 1307.4, 1307.4),
        5300,
        448,
        "AMD Instinct MI300X data sheet",
        ("MI300X 192GB", "MI300X OAM"),
    ),
    _device(
        "MI325X",
        255.6,
        (163.4, 653.7, 1307.4, 1307.4),
        6000,
        448,
        "AMD Instinct MI325X data sheet",
        ("MI325X 256GB",),
    ),
    *(_apple(f"M1 Max {size}", size, 10.4, 400) for size in (32, 64)),
    *(_apple(f"M1 Ultra {size}", size, 21.0, 800) for size in (64, 128)),
    *(_apple(f"M2 Max {size}", size, 13.6, 400) for size in (32, 64, 96)),
    *(_apple(f"M2 Ultra {size}", size, 27.2, 800) for size in (64, 128, 192)),
    *(_apple(f"M3 Max {size}", size, 14.2, 400) for size in (48, 64, 128)),
    *(_apple(f"M3 Ultra {size}", size, 28.2, 819) for size in (96, 256, 512)),
    *(_apple(f"M4 Max {size}", size, 18.4, 546) for size in (48, 64, 128)),
)
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
        return tuple(_of_row(row, file) for row in ([rows] if isinstance(rows, dict) else rows))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{str(file)!r} lists no devices ({type(error).__name__}: {error}). It must be a list of {_WANTED}."
        raise UserError(message) from error


def _of_row(row: Any, file: Path) -> Device:  # noqa: ANN401 (any JSON value)
    rates = {name: float(row["teraflops"][name]) * 1e12 for name in get_args(Arithmetic) if name in row["teraflops"]}
    return Device(
        name=str(row["name"]),
        memory_bytes=parse_bytes(str(row["memory"])),
        flops_per_second={"fp32": rates.pop("fp32"), **rates},
        bytes_per_second=float(row["gigabytes_per_second"]) * 1e9,
        link_bytes_per_second=float(row.get("link_gigabytes_per_second", 16)) * 1e9,
        source=str(file),
    )


def find_device(name: str, devices: Sequence[Device] = DEVICES) -> Device:
    """Return a device by name, ignoring case, spaces, hyphens and the vendor's name.

    Raises:
        UserError: no device matches, or several do; the message lists similar names.
    """
    wanted = _plain(name)
    for device in devices:
        if wanted in {_plain(one) for one in (device.name, *device.also_called)}:
            return device
    names = [device.name for device in devices]
    # "A100" has two memory sizes, so the name is ambiguous.
    longer = [
        device.name
        for device in devices
        if wanted and any(_plain(one).startswith(wanted) for one in (device.name, *device.also_called))
    ]
    if len(longer) > 1:
        message = f"device {name!r} is one of several: {', '.join(longer)}. Choose one."
        raise UserError(message)
    near = difflib.get_close_matches(wanted, [_plain(one) for one in names], n=3, cutoff=0.5)
    found = longer or [one for close in near for one in names if _plain(one) == close]
    meant = f" Is it {' or '.join(found)}?" if found else ""
    message = (
        f"device {name!r} is not known.{meant} Known are {', '.join(names)}. "
        "For any other, give its memory instead, such as 24GiB."
    )
    raise UserError(message)


def _plain(name: str) -> str:
    """Return a name in lower case, without vendor, product line, spaces, hyphens and unit."""
    words = re.sub(r"\b(nvidia|amd|geforce|tesla|instinct)\b", "", name.lower())
    return re.sub(r"gi?b$", "", re.sub(r"[\s_-]+", "", words))


def parse_budget(text: str) -> tuple[int, Device | None]:
    """Return the bytes of a budget given as a size or as a device's name, and the device, if any.

    Raises:
        UserError: the text is neither.
    """
    # "3090" looks like a number of bytes, but is a device.
    if re.fullmatch(r"[\d.]+\s*[kmgt]?i?b?", text.strip().lower()) and not any(
        _plain(text) == _plain(one) for device in DEVICES for one in device.also_called
    ):
        return parse_bytes(text), None
    device = find_device(text)
    return device.memory_bytes, device
