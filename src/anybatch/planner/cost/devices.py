"""Find devices by their common names, parse budgets, and read user-defined devices from a file.

Rates are dense peaks from data sheets, with 32-bit sums; programs reach 30 to 80% of them.
"""

import difflib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anybatch.core.units import parse_bytes
from anybatch.errors import UserError
from anybatch.planner.cost.device import Arithmetic, Device
from anybatch.planner.cost.device_table import DEVICES

_ARITHMETIC: tuple[Arithmetic, ...] = ("fp32", "tf32", "bf16", "fp16")
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
    rates = {name: float(row["teraflops"][name]) * 1e12 for name in _ARITHMETIC if name in row["teraflops"]}
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

    Args:
        name: such as "RTX 4090" or "NVIDIA H100 80GB HBM3".
        devices: devices to search.

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
        message = f"device {name!r} is one of several: {', '.join(longer)}. Say which."
        raise UserError(message)
    near = difflib.get_close_matches(wanted, [_plain(one) for one in names], n=3, cutoff=0.5)
    found = longer or [one for close in near for one in names if _plain(one) == close]
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
    """Return the bytes of a budget given as a size or as a device's name, and the device, if any.

    Args:
        text: a size such as "24GiB", or a device's name.

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
