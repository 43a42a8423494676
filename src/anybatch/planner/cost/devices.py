"""Memory and peak rates of devices by name, each figure with its source.

Rates are peaks of data sheets, dense, with sums in 32 bits; a program reaches 30 to 80% of them.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from anybatch.core.units import parse_bytes
from anybatch.errors import UserError

Arithmetic = Literal["fp32", "tf32", "bf16", "fp16"]
"""Number formats of matrix products."""

_GIB = 1 << 30
_TERA = 1e12
_GIGA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device's memory and peak rates.

    Attributes:
        name: as in `anybatch plan --device`.
        memory_bytes: memory that a program can use (`total_memory` in torch), which is less than advertised.
        flops_per_second: peak of matrix products, by number format; "fp32" is that of everything else, too.
        bytes_per_second: bandwidth of its memory.
        link_bytes_per_second: bandwidth to another device of the same machine, in one direction.
        source: where the rates are from.
        also_called: other names, as drivers and vendors write them.
    """

    name: str
    memory_bytes: int
    flops_per_second: Mapping[Arithmetic, float]
    bytes_per_second: float
    link_bytes_per_second: float
    source: str
    also_called: tuple[str, ...] = ()

    def peak(self, arithmetic: Arithmetic) -> float:
        """Return the peak in floating-point operations per second; where a device lacks one, that of 32 bits."""
        return self.flops_per_second.get(arithmetic, self.flops_per_second["fp32"])


def _rates(fp32: float, tf32: float | None, bf16: float | None, fp16: float) -> Mapping[Arithmetic, float]:
    # Devices before Ampere have neither TF32 nor bf16; they are left out, and `peak` returns that of fp32.
    given: dict[Arithmetic, float | None] = {"fp32": fp32, "tf32": tf32, "bf16": bf16, "fp16": fp16}
    return {name: rate * _TERA for name, rate in given.items() if rate is not None}


_PCIE_3, _PCIE_4, _PCIE_5 = 16 * _GIGA, 32 * _GIGA, 64 * _GIGA

# Memory: "total capacity" in torch's out-of-memory messages, which vary by some 0.1 GiB between boards and drivers.
DEVICES = (
    Device(
        name="RTX 3090",
        memory_bytes=int(23.6 * _GIB),
        flops_per_second=_rates(35.6, 35.6, 71.0, 71.0),
        bytes_per_second=936 * _GIGA,
        link_bytes_per_second=_PCIE_4,
        source="NVIDIA Ampere GA102 whitepaper",
        also_called=("GeForce RTX 3090", "3090"),
    ),
    Device(
        name="RTX 4090",
        memory_bytes=int(23.5 * _GIB),
        flops_per_second=_rates(82.6, 82.6, 165.2, 165.2),
        bytes_per_second=1008 * _GIGA,
        link_bytes_per_second=_PCIE_4,
        source="NVIDIA Ada GPU architecture whitepaper",
        also_called=("GeForce RTX 4090", "4090"),
    ),
    Device(
        name="RTX 5090",
        memory_bytes=int(31.36 * _GIB),
        flops_per_second=_rates(104.8, 104.8, 209.5, 209.5),
        bytes_per_second=1792 * _GIGA,
        link_bytes_per_second=_PCIE_5,
        source="NVIDIA RTX Blackwell GPU architecture whitepaper",
        also_called=("GeForce RTX 5090", "5090"),
    ),
    Device(
        name="T4",
        memory_bytes=int(14.56 * _GIB),
        flops_per_second=_rates(8.1, None, None, 65.0),
        bytes_per_second=320 * _GIGA,
        link_bytes_per_second=_PCIE_3,
        source="NVIDIA T4 data sheet",
        also_called=("Tesla T4",),
    ),
    Device(
        name="V100-16",
        memory_bytes=int(15.77 * _GIB),
        flops_per_second=_rates(15.7, None, None, 125.0),
        bytes_per_second=900 * _GIGA,
        link_bytes_per_second=150 * _GIGA,
        source="NVIDIA V100 data sheet, SXM2",
        also_called=("Tesla V100-SXM2-16GB", "V100 SXM2 16GB"),
    ),
    Device(
        name="V100-32",
        memory_bytes=int(31.73 * _GIB),
        flops_per_second=_rates(15.7, None, None, 125.0),
        bytes_per_second=900 * _GIGA,
        link_bytes_per_second=150 * _GIGA,
        source="NVIDIA V100 data sheet, SXM2",
        also_called=("Tesla V100-SXM2-32GB", "V100 SXM2 32GB"),
    ),
    Device(
        name="A10",
        memory_bytes=int(22.06 * _GIB),
        flops_per_second=_rates(31.2, 62.5, 125.0, 125.0),
        bytes_per_second=600 * _GIGA,
        link_bytes_per_second=_PCIE_4,
        source="NVIDIA A10 data sheet",
    ),
    Device(
        name="A10G",
        memory_bytes=int(22.06 * _GIB),
        flops_per_second=_rates(31.5, 35.0, 70.0, 70.0),
        bytes_per_second=600 * _GIGA,
        link_bytes_per_second=_PCIE_4,
        source="NVIDIA A10G data sheet",
    ),
    Device(
        name="A100-40",
        memory_bytes=int(39.49 * _GIB),
        flops_per_second=_rates(19.5, 156.0, 312.0, 312.0),
        bytes_per_second=1555 * _GIGA,
        link_bytes_per_second=300 * _GIGA,
        source="NVIDIA A100 data sheet, 40 GB SXM",
        also_called=("A100-SXM4-40GB", "A100-PCIE-40GB"),
    ),
    Device(
        name="A100-80",
        memory_bytes=int(79.15 * _GIB),
        flops_per_second=_rates(19.5, 156.0, 312.0, 312.0),
        bytes_per_second=2039 * _GIGA,
        link_bytes_per_second=300 * _GIGA,
        source="NVIDIA A100 data sheet, 80 GB SXM",
        also_called=("A100-SXM4-80GB", "A100 80GB PCIe", "A100-PCIE-80GB"),
    ),
    Device(
        name="RTX A6000",
        memory_bytes=int(47.4 * _GIB),
        flops_per_second=_rates(38.7, 77.4, 154.8, 154.8),
        bytes_per_second=768 * _GIGA,
        link_bytes_per_second=_PCIE_4,
        source="NVIDIA RTX A6000 data sheet",
        also_called=("A6000",),
    ),
    Device(
        name="L4",
        memory_bytes=int(22.03 * _GIB),
        flops_per_second=_rates(30.3, 60.0, 121.0, 121.0),
        bytes_per_second=300 * _GIGA,
        link_bytes_per_second=_PCIE_4,
        source="NVIDIA L4 data sheet",
    ),
    Device(
        name="L40S",
        memory_bytes=int(44.39 * _GIB),
        flops_per_second=_rates(91.6, 183.0, 362.05, 362.05),
        bytes_per_second=864 * _GIGA,
        link_bytes_per_second=_PCIE_4,
        source="NVIDIA L40S data sheet",
    ),
    Device(
        name="H100",
        memory_bytes=int(79.18 * _GIB),
        flops_per_second=_rates(67.0, 494.7, 989.4, 989.4),
        bytes_per_second=3350 * _GIGA,
        link_bytes_per_second=450 * _GIGA,
        source="NVIDIA H100 data sheet, SXM",
        also_called=("H100-80", "H100 SXM", "H100 80GB HBM3"),
    ),
    Device(
        name="H100 PCIe",
        memory_bytes=int(79.1 * _GIB),
        flops_per_second=_rates(51.0, 378.0, 756.0, 756.0),
        bytes_per_second=2000 * _GIGA,
        link_bytes_per_second=_PCIE_5,
        source="NVIDIA H100 data sheet, PCIe",
    ),
    Device(
        name="H200",
        memory_bytes=int(139.8 * _GIB),
        flops_per_second=_rates(67.0, 494.7, 989.4, 989.4),
        bytes_per_second=4800 * _GIGA,
        link_bytes_per_second=450 * _GIGA,
        source="NVIDIA H200 data sheet, SXM",
        also_called=("H200 141GB",),
    ),
    Device(
        name="B200",
        memory_bytes=int(178.35 * _GIB),
        flops_per_second=_rates(75.0, 1125.0, 2250.0, 2250.0),
        bytes_per_second=8000 * _GIGA,
        link_bytes_per_second=900 * _GIGA,
        source="NVIDIA HGX B200 data sheet",
        also_called=("B200 180GB", "B200 192GB"),
    ),
    Device(
        name="MI300X",
        memory_bytes=int(191.69 * _GIB),
        flops_per_second=_rates(163.4, 653.7, 1307.4, 1307.4),
        bytes_per_second=5300 * _GIGA,
        link_bytes_per_second=448 * _GIGA,
        source="AMD Instinct MI300X data sheet",
        also_called=("AMD Instinct MI300X", "MI300X 192GB", "AMD Instinct MI300X OAM"),
    ),
    Device(
        name="MI325X",
        memory_bytes=int(255.6 * _GIB),
        flops_per_second=_rates(163.4, 653.7, 1307.4, 1307.4),
        bytes_per_second=6000 * _GIGA,
        link_bytes_per_second=448 * _GIGA,
        source="AMD Instinct MI325X data sheet",
        also_called=("AMD Instinct MI325X", "MI325X 256GB"),
    ),
)
"""The devices that are known by name."""


def find_device(name: str) -> Device:
    """Return the device of that name; case, spaces, hyphens and the maker's name do not matter.

    Args:
        name: such as "RTX 4090" or "NVIDIA H100 80GB HBM3".

    Raises:
        UserError: none has it, or several do; says which are near.
    """
    wanted = _plain(name)
    for device in DEVICES:
        if wanted in {_plain(one) for one in (device.name, *device.also_called)}:
            return device
    names = [device.name for device in DEVICES]
    # "A100" comes in two memory sizes, so it is refused rather than guessed.
    longer = [one for one in names if wanted and _plain(one).startswith(wanted)]
    if longer:
        message = f"device {name!r} is one of several: {', '.join(longer)}. Say which."
        raise UserError(message)
    near = difflib.get_close_matches(wanted, [_plain(one) for one in names], n=3, cutoff=0.5)
    found = [one for close in near for one in names if _plain(one) == close]
    meant = f" Is it {' or '.join(found)}?" if found else ""
    message = (
        f"device {name!r} is not known.{meant} Known are {', '.join(names)}. "
        "Of any other, give its memory instead, such as 24GiB."
    )
    raise UserError(message)


def _plain(name: str) -> str:
    """Return a name in lower case, without vendor, product line, spaces, hyphens and unit."""
    words = re.sub(r"\b(nvidia|amd|geforce|tesla|instinct)\b", "", name.lower())
    return re.sub(r"gi?b$", "", re.sub(r"[\s_-]+", "", words))


def parse_budget(text: str) -> tuple[int, Device | None]:
    """Return the bytes of a budget given as a size or as a device's name, and the device if it was one.

    Args:
        text: a size such as "24GiB", or a device's name.

    Raises:
        UserError: it is neither.
    """
    # "3090" reads as a number of bytes, and is a device.
    if re.fullmatch(r"[\d.]+\s*[kmgt]?i?b?", text.strip().lower()) and not any(
        _plain(text) == _plain(one) for device in DEVICES for one in device.also_called
    ):
        return parse_bytes(text), None
    device = find_device(text)
    return device.memory_bytes, device
